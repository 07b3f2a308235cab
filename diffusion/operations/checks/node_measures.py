"""Measure what nodes are compared by, with all ranks at the same time; and notice ranks that do not answer."""

import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
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

from diffusion.errors import MachineError
from diffusion.operations.checks.device import measure_machine
from diffusion.operations.checks.nodes import NodeReading, pairings
from diffusion.operations.checks.readings import measure_write_speed

LINK_BYTES = 2**24
"""What two nodes send each other at the same time."""

_NUM_ROUNDS = 3
"""The best counts: the first opens connections, and others may disturb one of them."""


class NoAnswerError(MachineError):
    """Ranks do not answer.

    Args:
        message: for people.
        nodes: numbers of their nodes.
    """

    def __init__(self, message: str, nodes: list[int]) -> None:
        super().__init__(message)
        self.nodes = nodes


def introduce() -> None:
    """Tell the other ranks on which host this one is; to be called by all ranks, once."""
    _store().set(f"doctor/host/{dist.get_global_rank()}", socket.gethostname())


def hosts_of_nodes() -> list[str]:
    """Host of each node, as its first rank has told it. No rank has to answer for this."""
    if not dist.is_initialized():
        return [socket.gethostname()]
    ranks = range(0, dist.get_world_size(), dist.get_local_world_size())
    return [_store().get(f"doctor/host/{rank}").decode() for rank in ranks]


def await_answers(place: str, patience: float) -> None:
    """Wait until all ranks have come here; to be called by all ranks.

    Args:
        place: a name that is used once.
        patience: seconds.

    Raises:
        NoAnswerError: on the ranks that have come: others have not.
    """
    if not dist.is_initialized():
        return
    store, prefix = _store(), f"doctor/{place}"
    store.set(f"{prefix}/{dist.get_global_rank()}", "")
    if dist.get_global_rank() == 0:
        deadline = time.monotonic() + patience
        silent = [rank for rank in range(dist.get_world_size()) if not _comes(store, f"{prefix}/{rank}", deadline)]
        store.set(f"{prefix}/silent", ",".join(map(str, silent)))
    try:
        store.wait([f"{prefix}/silent"], timedelta(seconds=2 * patience))
    except DistStoreError:  # Who is to say it has not come.
        raise _no_answer([0], 2 * patience) from None
    if text := store.get(f"{prefix}/silent").decode():
        raise _no_answer([int(rank) for rank in text.split(",")], patience)


def _no_answer(ranks: Sequence[int], seconds: float) -> NoAnswerError:
    per_node, hosts = dist.get_local_world_size(), hosts_of_nodes()
    named = ", ".join(f"{rank} on {hosts[rank // per_node]}" for rank in ranks)
    return NoAnswerError(
        f"these ranks have not answered for {seconds:.0f} s: {named}. See what they wait for (disk, GPU), "
        "and leave these machines out",
        sorted({rank // per_node for rank in ranks}),
    )


def _comes(store: Any, key: str, deadline: float) -> bool:
    try:
        store.wait([key], timedelta(seconds=max(0.001, deadline - time.monotonic())))
    except (DistStoreError, DistNetworkError):
        return store.check([key])  # After a silent rank no time is left to wait for the next, which may be there.
    return True


def _store() -> Any:
    return distributed_c10d._get_default_store()


def measure_nodes(device: torch.device, num_gpus: int, folder: Path, patience: float) -> list[NodeReading]:
    """Measure all nodes; to be called by all ranks.

    Args:
        device: of this rank.
        num_gpus: that this node sees.
        folder: for checkpoints.
        patience: seconds within which all must have measured their own.

    Raises:
        NoAnswerError: some have not.
    """
    machine = measure_machine(device)
    written = _written(folder) if dist.get_local_rank() == 0 else None
    await_answers("measured", patience)
    own = NodeReading(
        name=f"node {dist.get_node_rank()}",
        host=socket.gethostname(),
        num_gpus=num_gpus,
        flops=machine.matmul_flops,
        copied=machine.copy_bytes_per_second,
        written=written,
        link=_measure_link(device),
    )
    rows: list[NodeReading] = dist.all_gather_object(own)
    per_node = dist.get_local_world_size()
    return [_slowest(rows[first : first + per_node]) for first in range(0, len(rows), per_node)]


def _slowest(ranks: Sequence[NodeReading]) -> NodeReading:
    """The node of some ranks, which is as slow as the slowest of them."""
    return replace(
        ranks[0],
        flops=_least(rank.flops for rank in ranks),
        copied=_least(rank.copied for rank in ranks),
        written=_least(rank.written for rank in ranks),
    )


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _written(folder: Path) -> float:
    try:
        return measure_write_speed(folder)
    except OSError:
        return 0.0


def _measure_link(device: torch.device) -> float | None:
    """The better of the links of this rank's node, measured by the first ranks of nodes; bytes per second."""
    per_node = dist.get_local_world_size()
    node, best = dist.get_node_rank(), None
    for _ in range(_NUM_ROUNDS):
        for pairs in pairings(dist.get_world_size() // per_node):
            dist.barrier()
            partner = next((a + b - node for a, b in pairs if node in (a, b)), None)
            if partner is not None and dist.get_local_rank() == 0:
                speed = _exchange(device, partner * per_node)
                best = speed if best is None else max(best, speed)
    return best


def _exchange(device: torch.device, partner: int) -> float:
    sent = torch.zeros(LINK_BYTES, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    began = time.perf_counter()
    for work in batch_isend_irecv([P2POp(isend, sent, partner), P2POp(irecv, received, partner)]):
        work.wait()
    received[0].item()  # Waits for the GPU.
    return 2 * LINK_BYTES / (time.perf_counter() - began)
