"""How busy the machines are, how long training waits for data, and a warning with the cause if it waits too long."""

import logging
import math
import time
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any

import torch
from composer import Callback, Logger, State
from composer.utils import dist

from diffusion.datasets.cache import TierCounts, TierMeter
from diffusion.operations.checks.gpu import GpuMeter
from diffusion.operations.utilisation import (
    Counters,
    LoaderSettings,
    Usage,
    explain_waiting,
    read_counters,
    usage_between,
)

log = logging.getLogger(__name__)

WARNING_SHARE = 0.1
"""Share of an interval's step time above which waiting for data is worth a warning."""

QUIET_INTERVALS = 20
"""Intervals without another warning after one."""

_NODE = {
    "utilisation/cpu": "cpu",
    "utilisation/cpu_waiting_for_disk": "cpu_waiting",
    "utilisation/memory": "memory",
    "throughput/network_received_bytes_per_sec": "received",
    "throughput/network_sent_bytes_per_sec": "sent",
    "throughput/disk_read_bytes_per_sec": "disk_read",
}
"""Metrics that are means over the nodes, with the field of `Usage` of each."""


@dataclass(frozen=True, kw_only=True)
class _RankUsage:
    """What a rank measured in an interval."""

    usage: Usage
    waiting: float
    """Share of the step time that it waited for data."""

    gpu: tuple[float, float] | None
    """Mean utilisation and memory of the node's GPUs, from its first rank."""

    storage: TierCounts


class Utilisation(Callback):
    """Log at an interval how busy the machines are and how long the ranks wait for data; on all ranks.

    - `utilisation/cpu`, `utilisation/memory` ...: shares from 0 to 1, means over the nodes
    - `utilisation/loader_workers`: share of a core that a loader worker uses, mean over the ranks
    - `utilisation/gpu`, `utilisation/gpu_memory`: shares, means over the GPUs; where NVML answers
    - `memory/job_rss`: GB of all processes of the job
    - `throughput/..._bytes_per_sec`: of a node, mean over the nodes
    - `time/data_waiting`: in each step, seconds from the request for a batch until this rank has it
    - `time/data_waiting_share`: share of the step time of the interval, without evaluation and checkpoints, of the rank
      that waits longest: the others wait for it in the step
    - `storage/fetched_bytes`, `storage/fetched_shards`: from the store, by all nodes; for data with a remote
    - `storage/read_bytes`: of samples, from the disks of all nodes
    - `storage/cache_hit_rate`: share of the samples whose shard was on the node's disk when the loader asked for it
    - `storage/total_...`: the same since the start

    A warning names the cause when the waiting share is above `WARNING_SHARE`; not in the first interval, in which
    workers start and caches are empty.

    Args:
        interval: steps between two logs.
        loader: settings of the loader, for the explanation.
        tiers: counts what this rank reads of data with a remote; None for other data.
    """

    def __init__(self, interval: int, loader: LoaderSettings, tiers: TierMeter | None = None) -> None:
        self.interval, self.loader, self.tiers = interval, loader, tiers
        is_leader = dist.get_local_rank() == 0
        self._gpus = GpuMeter() if is_leader and torch.cuda.is_available() else None
        self._before: Counters | None = None
        self._storage, self._total = TierCounts(), TierCounts()
        self._requested = self._received = 0.0
        self._waited = self._computed = 0.0
        self._num_quiet = 1

    def fit_start(self, state: State, logger: Logger) -> None:
        """Read the counters for the first time."""
        self._before = read_counters()

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """Start the clock of the wait."""
        self._requested = time.perf_counter()

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """Stop it."""
        self._received = time.perf_counter()
        waited = self._received - self._requested
        self._waited += waited
        logger.log_metrics({"time/data_waiting": waited})

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log at the end of each interval."""
        self._computed += time.perf_counter() - self._received
        if state.timestamp.batch.value % self.interval or self._before is None:
            return
        before, self._before = self._before, read_counters()
        ranks: list[_RankUsage] = dist.all_gather_object(self._measure(before, self._before))
        storage = TierCounts(*(sum(counts) for counts in zip(*(rank.storage for rank in ranks), strict=True)))
        waiting = max(rank.waiting for rank in ranks)
        logger.log_metrics(_machine_metrics(ranks) | {"time/data_waiting_share": waiting})
        if self.tiers is not None:
            self._total = self._total.plus(storage)
            logger.log_metrics(_storage_metrics("storage/", storage) | _storage_metrics("storage/total_", self._total))
        downloaded = storage.fetched_bytes / max(self._before.clock - before.clock, 1e-9)
        self._warn(waiting, _largest([rank.usage for rank in ranks]), downloaded)

    def _measure(self, before: Counters, after: Counters) -> _RankUsage:
        storage = self.tiers.read() if self.tiers is not None else TierCounts()
        measured = _RankUsage(
            usage=usage_between(before, after, self.loader.num_workers),
            waiting=self._waited / max(self._waited + self._computed, 1e-9),
            gpu=self._gpus.read() if self._gpus is not None else None,
            storage=storage.since(self._storage),
        )
        self._storage, self._waited, self._computed = storage, 0.0, 0.0
        return measured

    def _warn(self, waiting: float, usage: Usage, downloaded: float) -> None:
        if self._num_quiet:
            self._num_quiet -= 1
        elif waiting > WARNING_SHARE:
            self._num_quiet = QUIET_INTERVALS
            if dist.get_global_rank() == 0:
                cause = explain_waiting(usage, downloaded, self.loader)
                log.warning("training waits for data %.0f %% of the time: %s", 100 * waiting, cause)


def _largest(usages: list[Usage]) -> Usage:
    """Take the largest value of each field."""
    largest: dict[str, Any] = {}
    for field in fields(Usage):
        known = [value for usage in usages if (value := getattr(usage, field.name)) is not None]
        largest[field.name] = max(known, default=None)
    return Usage(**largest)


def _machine_metrics(ranks: list[_RankUsage]) -> dict[str, float]:
    nodes = ranks[:: dist.get_local_world_size()]
    metrics = {key: fmean(getattr(node.usage, name) for node in nodes) for key, name in _NODE.items()}
    metrics["memory/job_rss"] = sum(rank.usage.job_bytes for rank in ranks) / 1e9
    if workers := [rank.usage.workers for rank in ranks if rank.usage.workers is not None]:
        metrics["utilisation/loader_workers"] = fmean(workers)
    if gpus := [rank.gpu for rank in ranks if rank.gpu is not None]:
        metrics["utilisation/gpu"] = fmean(busy for busy, _ in gpus)
        if known := [memory for _, memory in gpus if not math.isnan(memory)]:
            metrics["utilisation/gpu_memory"] = fmean(known)
    return metrics


def _storage_metrics(prefix: str, counts: TierCounts) -> dict[str, float]:
    metrics = {
        f"{prefix}{name}": float(getattr(counts, name)) for name in ("fetched_bytes", "fetched_shards", "read_bytes")
    }
    return metrics | ({f"{prefix}cache_hit_rate": counts.hits / counts.samples} if counts.samples else {})
