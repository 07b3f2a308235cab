"""Checks of the ranks together: nodes of the same speed, the same versions, configuration and data, a right all-reduce.

All ranks call everything here, unless said otherwise.
"""

import hashlib
import platform
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from composer.utils import dist
from torch.distributed import (
    DistNetworkError,
    DistStoreError,
    P2POp,
    batch_isend_irecv,
    distributed_c10d,
    irecv,
    isend,
)

from diffusion.config.loading import to_yaml
from diffusion.config.training import Device
from diffusion.errors import MachineError
from diffusion.operations.checks.check import Check, Job
from diffusion.operations.checks.data import StreamProbe, probe_streams
from diffusion.operations.checks.device import measure_device
from diffusion.operations.checks.machine import checkpoint_folder, measure_write_speed
from diffusion.operations.checks.nodes import NodeSpeed, compare_nodes
from diffusion.operations.checks.verdicts import Verdict, ok, problem, size_text

LINK_BYTES = 2**24
"""Bytes that two nodes send each other at the same time."""

NUM_LINK_ROUNDS = 3
"""Measurements of a link, of which the best counts: the first opens connections."""

PACKAGES = ("torch", "mosaicml", "mosaicml-streaming", "numpy", "diffusion")

REDUCED_NUMBERS = 2**20
"""fp32 numbers of the all-reduce."""

NUM_REDUCTIONS = 5


def training_device(job: Job) -> torch.device:
    """Return the device of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if job.device is Device.gpu else torch.device("cpu")


# Ranks without an answer


class NoAnswerError(MachineError):
    """Ranks do not answer.

    Args:
        message: explanation.
        nodes: numbers of their nodes.
    """

    def __init__(self, message: str, nodes: list[int]) -> None:
        super().__init__(message)
        self.nodes = nodes


def announce_host() -> None:
    """Announce the host of this rank to the others, once."""
    _store().set(f"doctor/host/{dist.get_global_rank()}", socket.gethostname())


def hosts_of_nodes() -> list[str]:
    """Return the host of each node, as its first rank announced it; needs no other rank."""
    if not dist.is_initialized():
        return [socket.gethostname()]
    ranks = range(0, dist.get_world_size(), dist.get_local_world_size())
    return [_store().get(f"doctor/host/{rank}").decode() for rank in ranks]


def await_ranks(name: str, timeout: float) -> None:
    """Wait until all ranks have called this.

    Args:
        name: unique name of the call.
        timeout: seconds.

    Raises:
        NoAnswerError: on the ranks that called it, if others did not.
    """
    if not dist.is_initialized():
        return
    store, prefix = _store(), f"doctor/{name}"
    store.set(f"{prefix}/{dist.get_global_rank()}", "")
    if dist.get_global_rank() == 0:
        deadline = time.monotonic() + timeout
        silent = [rank for rank in range(dist.get_world_size()) if not _arrives(store, f"{prefix}/{rank}", deadline)]
        store.set(f"{prefix}/silent", ",".join(map(str, silent)))
    try:
        store.wait([f"{prefix}/silent"], timedelta(seconds=2 * timeout))
    except DistStoreError:  # Rank 0 is silent itself.
        raise _no_answer([0], 2 * timeout) from None
    if text := store.get(f"{prefix}/silent").decode():
        raise _no_answer([int(rank) for rank in text.split(",")], timeout)


def _no_answer(ranks: Sequence[int], seconds: float) -> NoAnswerError:
    per_node, hosts = dist.get_local_world_size(), hosts_of_nodes()
    named = ", ".join(f"{rank} on {hosts[rank // per_node]}" for rank in ranks)
    return NoAnswerError(
        f"these ranks have not answered for {seconds:.0f} s: {named}. Find out what they wait for (disk, GPU), and "
        "remove these machines from the job",
        sorted({rank // per_node for rank in ranks}),
    )


def _arrives(store: Any, key: str, deadline: float) -> bool:
    try:
        store.wait([key], timedelta(seconds=max(0.001, deadline - time.monotonic())))
    except (DistStoreError, DistNetworkError):
        return store.check([key])  # A silent rank leaves no time for the next one, which may have arrived.
    return True


def _store() -> Any:
    return distributed_c10d._get_default_store()


# Speed of nodes


def probe_node_speeds(job: Job) -> list[NodeSpeed]:
    """Measure all nodes at the same time.

    Raises:
        NoAnswerError: some ranks have not measured within the time-out.
    """
    device = training_device(job)
    speed = measure_device(device)
    written = _write_speed(checkpoint_folder(job.config)) if dist.get_local_rank() == 0 else None
    await_ranks("measured", job.timeout)
    own = NodeSpeed(
        name=f"node {dist.get_node_rank()}",
        host=socket.gethostname(),
        num_gpus=torch.cuda.device_count(),
        flops=speed.matmul_flops,
        copied=speed.copy_bytes_per_second,
        written=written,
        link=_measure_link(device),
    )
    rows: list[NodeSpeed] = dist.all_gather_object(own)
    per_node = dist.get_local_world_size()
    return [_slowest(rows[first : first + per_node]) for first in range(0, len(rows), per_node)]


def _slowest(ranks: Sequence[NodeSpeed]) -> NodeSpeed:
    """Return the speed of the node of some ranks, by the slowest of them."""
    return replace(
        ranks[0],
        flops=_least(rank.flops for rank in ranks),
        copied=_least(rank.copied for rank in ranks),
        written=_least(rank.written for rank in ranks),
    )


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _write_speed(folder: Path) -> float:
    try:
        return measure_write_speed(folder)
    except OSError:
        return 0.0


def _measure_link(device: torch.device) -> float | None:
    """Return bytes per second of the better link of this rank's node, measured by the first ranks of nodes."""
    per_node = dist.get_local_world_size()
    node, best = dist.get_node_rank(), None
    for _ in range(NUM_LINK_ROUNDS):
        for pairs in pairings(dist.get_world_size() // per_node):
            dist.barrier()
            partner = next((a + b - node for a, b in pairs if node in (a, b)), None)
            if partner is not None and dist.get_local_rank() == 0:
                speed = _exchange(device, partner * per_node)
                best = speed if best is None else max(best, speed)
    return best


def pairings(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Pair nodes with their neighbours in a circle in two ways, so that each has two partners if possible.

    The better of its links counts, so that a node is not blamed for its neighbour.
    """
    first = [(node, node + 1) for node in range(0, num_nodes - 1, 2)]
    second = [(node, (node + 1) % num_nodes) for node in range(1, num_nodes - num_nodes % 2, 2)]
    return [first, second] if num_nodes > 2 else [first] if num_nodes == 2 else []


def _exchange(device: torch.device, partner: int) -> float:
    sent = torch.zeros(LINK_BYTES, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    began = time.perf_counter()
    for work in batch_isend_irecv([P2POp(isend, sent, partner), P2POp(irecv, received, partner)]):
        work.wait()
    received[0].item()  # Waits for the GPU.
    return 2 * LINK_BYTES / (time.perf_counter() - began)


# Equal ranks


@dataclass(frozen=True, kw_only=True)
class RankProbe:
    """What must be equal on all ranks."""

    rank: int
    versions: Mapping[str, str]
    data: Mapping[str, str]
    """Hash of the index of each readable stream."""

    config: str
    """Hash of the resolved configuration."""


def probe_ranks(job: Job) -> list[RankProbe]:
    """Gather what must be equal on all ranks."""
    streams = job.probe(probe_streams) if job.config.plugins.train_dataset is None else {}
    own = RankProbe(
        rank=dist.get_global_rank(),
        versions={"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        data={name: stream.sha256 for name, stream in streams.items() if isinstance(stream, StreamProbe)},
        config=hashlib.sha256(to_yaml(job.config).encode()).hexdigest(),
    )
    return dist.all_gather_object(own)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def check_versions(ranks: Sequence[RankProbe]) -> Verdict:
    """Check that all ranks have the same versions."""
    versions = ranks[0].versions
    names = [name for name in versions if len({rank.versions.get(name) for rank in ranks}) > 1]
    if names:
        found = "; ".join(f"{name} {_by_value(ranks, lambda r, n=name: r.versions.get(n, ''))}" for name in names)
        return problem(f"the ranks differ in {found}", "install the same environment on all machines")
    return ok(", ".join(f"{name} {version}" for name, version in versions.items()))


def check_config(ranks: Sequence[RankProbe]) -> Verdict:
    """Check that all ranks have the same configuration."""
    if len({rank.config for rank in ranks}) > 1:
        what = f"the resolved configuration differs: {_by_value(ranks, lambda rank: rank.config[:8])}"
        return problem(what, "start all ranks with the same file and the same overrides")
    return ok("the same on all ranks")


def check_same_data(ranks: Sequence[RankProbe]) -> Verdict:
    """Check that all ranks see the same data."""
    names = sorted({name for rank in ranks for name in rank.data})
    for name in names:
        if len({rank.data.get(name) for rank in ranks}) > 1:
            seen = _by_value(ranks, lambda rank, name=name: rank.data.get(name, "unreadable")[:10])
            what = f"the ranks see different data in the {name} (hash of its index {seen})"
            return problem(what, "copy the same data set to all machines")
    return ok(f"the indexes of {len(names)} streams are the same on all ranks")


def _by_value(ranks: Sequence[RankProbe], value: Callable[[RankProbe], str]) -> str:
    """Return the ranks with each value, in words."""
    numbers: dict[str, list[int]] = {}
    for rank in ranks:
        numbers.setdefault(value(rank), []).append(rank.rank)
    return ", ".join(f"{text} on {_rank_list(with_it)}" for text, with_it in numbers.items())


def _rank_list(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"


# All-reduce


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """Result of an all-reduce."""

    backend: str
    num_wrong: int
    """Wrong sums, of the rank with the most of them."""

    num_bytes: int
    seconds: float
    """Fastest of several."""


def probe_reduction(job: Job) -> Reduction:
    """Sum numbers over the ranks and compare every sum with its known value."""
    device, rank, world = training_device(job), dist.get_global_rank(), dist.get_world_size()
    numbers = torch.arange(REDUCED_NUMBERS, device=device) % 97
    expected = (world * numbers + world * (world - 1) // 2).float()
    fastest, num_wrong = float("inf"), 0
    for _ in range(NUM_REDUCTIONS):
        sums = (numbers + rank).float()
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(sums)
        num_wrong = max(num_wrong, int((sums != expected).sum()))
        fastest = min(fastest, time.perf_counter() - began)
    return Reduction(
        backend=torch.distributed.get_backend() if dist.is_initialized() else "none",
        num_wrong=max(dist.all_gather_object(num_wrong)),
        num_bytes=4 * REDUCED_NUMBERS,
        seconds=fastest,
    )


def check_reduction(reduction: Reduction) -> Verdict:
    """Check that the sums over the ranks are right."""
    if reduction.num_wrong:
        num = f"{reduction.num_wrong:,} of {reduction.num_bytes // 4:,}"
        what = f"{num} sums over all ranks ({reduction.backend}) are wrong"
        return problem(what, "exchange the machines (or GPUs) one by one until they are right")
    return ok(
        f"{size_text(reduction.num_bytes)} over {reduction.backend} in {1e3 * reduction.seconds:.1f} ms "
        f"({size_text(reduction.num_bytes / reduction.seconds)}/s), the sum is right"
    )


NODE_CHECKS = [Check(name="nodes", needs=(probe_node_speeds,), function=compare_nodes)]
RANK_CHECKS = [
    Check(name="versions", needs=(probe_ranks,), function=check_versions),
    Check(name="configuration", needs=(probe_ranks,), function=check_config),
    Check(name="same data", needs=(probe_ranks,), function=check_same_data),
    Check(name="all-reduce", needs=(probe_reduction,), function=check_reduction),
]
