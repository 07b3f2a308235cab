"""All checks of a job, with all of its ranks: machines, data, the speed of nodes, and what is equal on all ranks.

All ranks call everything here, unless said otherwise.
"""

import hashlib
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
from composer.utils import dist as composer_dist
from torch.distributed import (
    DistNetworkError,
    DistStoreError,
    P2POp,
    batch_isend_irecv,
    distributed_c10d,
    irecv,
    isend,
)

from diffusion.config.checks import check as check_config
from diffusion.config.checks import check_device
from diffusion.config.locations import common_settings
from diffusion.config.schema import Config
from diffusion.config.training import Device
from diffusion.distributed import (
    all_gather,
    barrier,
    first_ranks,
    has_process_group,
    is_first_rank,
    local_rank,
    local_world_size,
    rank,
    world_size,
)
from diffusion.errors import ConfigurationError, MachineError
from diffusion.launch import package_versions
from diffusion.models.architectures import image_side_factor, num_text_tokens
from diffusion.operations import timeouts
from diffusion.operations.checks.data import check_data, index_hashes
from diffusion.operations.checks.gpu import computes_bf16
from diffusion.operations.checks.machine import check_machine
from diffusion.operations.checks.nodes import NodeSpeed, compare_nodes, measure_device
from diffusion.operations.checks.verdicts import Verdict, ok, on_each_machine, problem
from diffusion.plugins import check_plugins

LINK_BYTES = 2**24
"""Bytes that two nodes send each other at the same time."""

NUM_LINK_ROUNDS = 3
"""Measurements of a link, of which the best counts: the first opens connections."""


def diagnose(config: Config, timeout: float = 120.0, *, deep: bool = False) -> list[Verdict]:
    """Run all checks; called by all ranks of the job, or by one process.

    Ranks wait for each other for `timeout` seconds. A deep check hashes all shards that this machine can read in a
    folder.

    Returns:
        Verdicts on all machines; the same on all ranks.

    Raises:
        ConfigurationError: the configuration is impossible.
        NoAnswerError: some ranks do not answer.
    """
    model = config.model
    check_config(
        config, world_size=world_size(), side_factor=image_side_factor(config), num_text_tokens=num_text_tokens(model)
    )
    num_gpus = torch.cuda.device_count()
    device = config.trainer.device.resolve(num_gpus) if num_gpus else Device.cpu
    if device is Device.gpu and local_world_size() > num_gpus:  # A rank without a GPU cannot join the others.
        _check_device(config)
    verdicts = []
    if world_size() > 1:
        if not has_process_group():
            limit = timeouts.HASHING if deep else max(2 * timeout, timeouts.JOINING)
            composer_dist.initialize_dist(device.value, timeout=limit)
            _store().set(f"doctor/host/{rank()}", socket.gethostname())
        of_rank = torch.device("cuda", torch.cuda.current_device()) if device is Device.gpu else torch.device("cpu")
        verdicts += compare_nodes(measure_nodes(of_rank, timeout))  # This names ranks that do not answer.
    verdicts += on_each_machine(lambda: _check_this_machine(config, device))
    if config.plugins.train_dataset is None:
        verdicts += on_each_machine(lambda: check_data(config, deep=deep))
    if world_size() > 1:
        verdicts += check_equality(all_gather(probe_rank(config)))
    return verdicts


def _check_this_machine(config: Config, device: Device) -> Iterator[Verdict]:
    try:
        _check_device(config)
        num_gpus = torch.cuda.device_count()
        yield ok("device", f"{device.value}, {num_gpus} GPUs are visible, {config.trainer.precision.value}")
    except MachineError as error:
        yield problem("device", str(error))
    try:
        check_plugins(config)
    except ConfigurationError as error:
        yield problem("plugins", str(error))
    yield from check_machine(config, device)


def _check_device(config: Config) -> None:
    num_gpus = torch.cuda.device_count()
    check_device(config, num_gpus=num_gpus, bf16_supported=computes_bf16(), local_world_size=local_world_size())


# Ranks without an answer


class NoAnswerError(MachineError):
    """Ranks do not answer; the message names them."""


def await_ranks(name: str, timeout: float) -> None:
    """Wait until all ranks have called this with a name, unique to the call, up to a timeout in seconds.

    Raises:
        NoAnswerError: on the ranks that called it, if others did not.
    """
    store, prefix = _store(), f"doctor/{name}"
    store.set(f"{prefix}/{rank()}", "")
    if is_first_rank():
        deadline = time.monotonic() + timeout
        silent = [number for number in range(world_size()) if not _arrives(store, f"{prefix}/{number}", deadline)]
        store.set(f"{prefix}/silent", ",".join(map(str, silent)))
    try:
        store.wait([f"{prefix}/silent"], timedelta(seconds=2 * timeout))
    except DistStoreError:  # Rank 0 is silent itself.
        raise _no_answer([0], 2 * timeout) from None
    if text := store.get(f"{prefix}/silent").decode():
        raise _no_answer([int(number) for number in text.split(",")], timeout)


def _no_answer(ranks: Sequence[int], seconds: float) -> NoAnswerError:
    named = ", ".join(f"{number} on {_store().get(f'doctor/host/{number}').decode()}" for number in ranks)
    return NoAnswerError(
        f"these ranks have not answered for {seconds:.0f} s: {named}. Find out what they wait for (disk, GPU), and "
        "remove these machines from the job"
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


def measure_nodes(device: torch.device, timeout: float) -> list[NodeSpeed]:
    """Measure all nodes at the same time; a NoAnswerError if some ranks have not within the timeout, in seconds."""
    speed = measure_device(device)
    await_ranks("measured", timeout)
    firsts = first_ranks()
    node = firsts.index(rank() - local_rank())
    own = NodeSpeed(
        name=f"node {node}",
        host=socket.gethostname(),
        num_gpus=torch.cuda.device_count() if device.type == "cuda" else 0,
        flops=speed.matmul_flops,
        copied=speed.copy_bytes_per_second,
        link=_measure_link(device, node, firsts),
    )
    rows: list[NodeSpeed] = all_gather(own)
    return [_slowest(rows[begin:end]) for begin, end in pairwise([*firsts, len(rows)])]


def _slowest(ranks: Sequence[NodeSpeed]) -> NodeSpeed:
    """Combine the ranks of a node: the rates of the slowest, and the link, which the first rank measures."""

    def minimum(values: Iterable[float | None]) -> float | None:
        return min((value for value in values if value is not None), default=None)

    return replace(ranks[0], flops=minimum(rank.flops for rank in ranks), copied=minimum(rank.copied for rank in ranks))


def _measure_link(device: torch.device, node: int, firsts: Sequence[int]) -> float | None:
    """Return bytes per second of the better link of this rank's node, measured by the first ranks of nodes."""
    best = None
    for _ in range(NUM_LINK_ROUNDS):
        for pairs in pairings(len(firsts)):
            barrier()
            partner = next((a + b - node for a, b in pairs if node in (a, b)), None)
            if partner is not None and local_rank() == 0:
                best = max(best or 0.0, _exchange(device, firsts[partner]))
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
    for size in (LINK_BYTES, 1):  # The byte confirms that all has arrived: gloo's send ends in the kernel's buffer.
        for work in batch_isend_irecv([P2POp(isend, sent[:size], partner), P2POp(irecv, received[:size], partner)]):
            work.wait()
        received[0].item()  # Waits for the GPU.
    return 2 * LINK_BYTES / (time.perf_counter() - began)


# Equal ranks


def probe_rank(config: Config) -> dict[str, str]:
    """Return what must be equal on all ranks, by the names of the checks."""
    hashes = index_hashes(config) if config.plugins.train_dataset is None else {}
    return {
        "versions": ", ".join(f"{name} {version}" for name, version in package_versions().items()),
        "configuration": hashlib.sha256(str(common_settings(config)).encode()).hexdigest()[:10],
        "same data": hashlib.sha256(str(hashes).encode()).hexdigest()[:10],
    }


def check_equality(ranks: Sequence[Mapping[str, str]]) -> Iterator[Verdict]:
    """Check that all ranks have the same versions, configuration and data, as `probe_rank` returns them."""
    for check in ranks[0]:
        by_value: dict[str, list[int]] = {}
        for number, one in enumerate(ranks):
            by_value.setdefault(one[check], []).append(number)
        if len(by_value) == 1:
            yield ok(check, f"{ranks[0][check]} on all ranks")
            continue
        found = [f"{text} on rank {', '.join(map(str, numbers[:8]))}" for text, numbers in by_value.items()]
        remedy = "start the same command with the same environment and the same copy of the data on all machines"
        yield problem(check, f"the ranks differ: {'; '.join(found)}", remedy)
