"""Whether the ranks of a job are alike and can talk to each other."""

import hashlib
import platform
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

import torch
from composer.utils import dist

from diffusion.operations.checks.verdicts import Verdict, ok, problem, size_text, warning

PACKAGES = ("torch", "mosaicml", "mosaicml-streaming", "numpy", "diffusion")
CLOCK_DIFFERENCE = 5.0
"""Seconds by which the clocks of machines may differ."""

REDUCED_NUMBERS = 2**20
"""fp32 numbers that are added up over the ranks."""

NUM_REDUCTIONS = 5


@dataclass(frozen=True, kw_only=True)
class RankReading:
    """One rank."""

    rank: int
    host: str
    versions: Mapping[str, str]
    data: Mapping[str, str]
    """Hash of the index of each stream; empty where they could not be read."""

    config: str
    """Hash of the resolved configuration."""

    clock: float
    """Seconds since 1970, read by all ranks as nearly at once as they can."""


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """An all-reduce that was tried."""

    backend: str
    num_wrong: int
    """Numbers of the result that are not the sum."""

    num_bytes: int
    seconds: float
    """Fastest of several."""


def read_rank(data: Mapping[str, str], config: str) -> RankReading:
    """Read this rank; to be called by all ranks.

    Args:
        data: hash of the index of each stream.
        config: the resolved configuration, as text.
    """
    if dist.is_initialized():
        dist.barrier()
    return RankReading(
        rank=dist.get_global_rank(),
        host=socket.gethostname(),
        versions={"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        data=dict(data),
        config=hashlib.sha256(config.encode()).hexdigest(),
        clock=time.time(),
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def measure_reduction(device: torch.device) -> Reduction:
    """Add numbers up over the ranks and check every one; to be called by all ranks."""
    rank, world = dist.get_global_rank(), dist.get_world_size()
    places = torch.arange(REDUCED_NUMBERS, device=device) % 97
    expected = (world * places + world * (world - 1) // 2).float()
    fastest, num_wrong = float("inf"), 0
    for _ in range(NUM_REDUCTIONS):
        numbers = (places + rank).float()
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(numbers)
        num_wrong = max(num_wrong, int((numbers != expected).sum()))
        fastest = min(fastest, time.perf_counter() - began)
    backend = torch.distributed.get_backend() if dist.is_initialized() else "none"
    return Reduction(backend=backend, num_wrong=num_wrong, num_bytes=4 * REDUCED_NUMBERS, seconds=fastest)


def check_reduction(reduction: Reduction) -> Verdict:
    """Is the sum over the ranks right?"""
    if reduction.num_wrong:
        wrong, total = f"{reduction.num_wrong:,}", f"{reduction.num_bytes // 4:,}"
        what = f"{wrong} of {total} sums over all ranks ({reduction.backend}) are wrong"
        return problem("all-reduce", what, "exchange the machines (or GPUs) one by one until it is right")
    speed = reduction.num_bytes / reduction.seconds
    return ok(
        "all-reduce",
        f"{size_text(reduction.num_bytes)} over {reduction.backend} in {1e3 * reduction.seconds:.1f} ms "
        f"({size_text(speed)}/s), the sum is right",
    )


def check_ranks(readings: Sequence[RankReading]) -> list[Verdict]:
    """Are all ranks alike?"""
    return [check_versions(readings), check_config(readings), check_data(readings), check_clocks(readings)]


def check_versions(readings: Sequence[RankReading]) -> Verdict:
    """Have all ranks the same versions?"""
    names = [name for name in readings[0].versions if len({reading.versions.get(name) for reading in readings}) > 1]
    if names:
        found = "; ".join(f"{name} {_by_value(readings, lambda r, n=name: r.versions.get(n, ''))}" for name in names)
        return problem("versions", f"the ranks differ in {found}", "install the same environment on all machines")
    return ok("versions", ", ".join(f"{name} {version}" for name, version in readings[0].versions.items()))


def check_config(readings: Sequence[RankReading]) -> Verdict:
    """Have all ranks the same configuration?"""
    if len({reading.config for reading in readings}) > 1:
        what = f"the resolved configuration differs: {_by_value(readings, lambda reading: reading.config[:8])}"
        return problem("configuration", what, "start all ranks with the same file and the same overrides")
    return ok("configuration", "the same on all ranks")


def check_data(readings: Sequence[RankReading]) -> Verdict:
    """Do all ranks see the same data?"""
    names = sorted({name for reading in readings for name in reading.data})
    for name in names:
        if len({reading.data.get(name) for reading in readings}) > 1:
            seen = _by_value(readings, lambda reading, name=name: reading.data.get(name, "unreadable")[:10])
            what = f"the ranks see different data in the stream {name} (hash of its index {seen})"
            return problem("same data", what, "copy the same data set to all machines")
    return ok("same data", f"the indexes of {len(names)} streams are the same on all ranks")


def check_clocks(readings: Sequence[RankReading]) -> Verdict:
    """Do the clocks agree?"""
    clocks = [reading.clock for reading in readings]
    difference = max(clocks) - min(clocks)
    if difference > CLOCK_DIFFERENCE:
        early, late = readings[clocks.index(min(clocks))].host, readings[clocks.index(max(clocks))].host
        what = f"the clock of {early} is {difference:,.0f} s behind that of {late}"
        return warning("clocks", what, "set them (chronyc makestep)")
    return ok("clocks", f"within {max(difference, 0.1):.1f} s")


def _by_value(readings: Sequence[RankReading], value: Callable[[RankReading], str]) -> str:
    """Which ranks have which value, in words."""
    ranks: dict[str, list[int]] = {}
    for reading in readings:
        ranks.setdefault(value(reading), []).append(reading.rank)
    return ", ".join(f"{text} on {_ranks(numbers)}" for text, numbers in ranks.items())


def _ranks(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (" ..." if len(numbers) > 8 else "")
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {shown}"
