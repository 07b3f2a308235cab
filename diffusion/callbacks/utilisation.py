"""How busy the machines are while training: logged at an interval, read in the training thread.

A reading takes about as long as logging a few numbers, so it needs no thread. See `operations.utilisation`.
"""

from dataclasses import dataclass, replace

import torch
from composer import Callback, Logger, State
from composer.utils import dist

from diffusion.datasets.tiers import TierCounts, TierMeter
from diffusion.errors import ConfigurationError
from diffusion.operations.checks.gpu import GpuMeter
from diffusion.operations.utilisation import Counters, Usage, read_counters, usage_between

_NODE = {
    "utilisation/cpu": "cpu",
    "utilisation/cpu_waiting_for_disk": "cpu_waiting",
    "utilisation/memory": "memory",
    "throughput/network_received_bytes_per_sec": "received",
    "throughput/network_sent_bytes_per_sec": "sent",
    "throughput/disk_read_bytes_per_sec": "disk_read",
}
"""Metrics that are means over the nodes, and the field of `Usage` that each comes from."""


@dataclass(frozen=True, kw_only=True)
class JobUsage:
    """How busy the machines of a job were over an interval."""

    busiest: Usage
    """The largest of each over the ranks."""

    downloaded: float
    """Bytes per second that all nodes downloaded for the data set."""


class Utilisation(Callback):
    """Log how busy the machines are, every so many steps; to be called by all ranks.

    - `utilisation/cpu`, `utilisation/memory` ...: shares from 0 to 1, means over the nodes
    - `utilisation/loader_workers`: share of a core that a loader worker uses, mean over the ranks
    - `utilisation/gpu`, `utilisation/gpu_memory`: shares, means over the GPUs; where NVML answers
    - `memory/job_rss`: GB of all processes of the job
    - `throughput/..._bytes_per_sec`: of a node, mean over the nodes
    - `storage/fetched_bytes`, `storage/fetched_shards`: from the store, by all nodes; where data has a remote
    - `storage/read_bytes`: of samples, from the disks of all nodes
    - `storage/cache_hit_rate`: share of the samples whose shard lay on the node's disk when the loader looked for it
    - `storage/total_...`: the same since the start

    Args:
        interval: steps between two readings.
        num_workers: loader workers of a rank.
        tiers: counts what this rank reads of data that has a remote; None for other data.

    Raises:
        ConfigurationError: the interval is not a number of steps.
    """

    def __init__(
        self,
        interval: int,
        *,
        num_workers: int,
        tiers: TierMeter | None = None,
    ) -> None:
        if interval < 1:
            raise ConfigurationError(f"loggers.utilisation_interval is {interval}, but must be at least 1")
        self.interval, self.num_workers = interval, num_workers
        self.latest: JobUsage | None = None
        """Of the last interval; the same on all ranks."""

        self._tiers, self._counts, self._total = tiers, TierCounts(), TierCounts()
        self._is_leader = dist.get_local_rank() == 0
        self._gpus = GpuMeter() if self._is_leader and torch.cuda.is_available() else None
        self._before: Counters | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        """Take the first reading."""
        self._before = read_counters()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Read and log at the end of each interval."""
        if state.timestamp.batch.value % self.interval or self._before is None:
            return
        before, self._before = self._before, read_counters()
        seconds = max(self._before.clock - before.clock, 1e-9)
        usage = usage_between(before, self._before, self.num_workers)
        rows = self._gather(state, usage)
        counts = TierCounts(*(int(number) for number in rows[:, -len(TierCounts._fields) :].sum(dim=0).tolist()))
        largest = dict(zip(_FIELDS, rows[:, : len(_FIELDS)].nan_to_num(-1.0).amax(dim=0).tolist(), strict=True))
        workers = largest["workers"] if largest["workers"] >= 0 else None
        self.latest = JobUsage(
            busiest=replace(usage, **(largest | {"workers": workers})), downloaded=counts.fetched_bytes / seconds
        )
        logger.log_metrics(self._metrics(rows))
        if self._tiers is not None:
            self._total = self._total.plus(counts)
            logger.log_metrics(_tier_metrics("storage/", counts) | _tier_metrics("storage/total_", self._total))

    def _gather(self, state: State, usage: Usage) -> torch.Tensor:
        """One row of float64 for each rank: the fields of `Usage`, GPUs, tiers; NaN where there is nothing."""
        nothing = float("nan")
        values = [getattr(usage, name) for name in _FIELDS]
        gpus = (self._gpus.read() if self._gpus is not None else None) or (nothing, nothing)
        before, self._counts = self._counts, self._tiers.read() if self._tiers is not None else TierCounts()
        values += [*gpus, *self._counts.since(before)]
        row = [nothing if value is None else float(value) for value in values]
        tensor = state.device.tensor_to_device(torch.tensor([row], dtype=torch.float64))
        return torch.cat(list(dist.all_gather(tensor))).cpu()

    def _metrics(self, rows: torch.Tensor) -> dict[str, float]:
        """What is logged of the machines in an interval."""
        nodes = rows[:: dist.get_local_world_size()]
        of = {name: number for number, name in enumerate(_FIELDS)}
        metrics = {key: nodes[:, of[name]].mean().item() for key, name in _NODE.items()}
        metrics["memory/job_rss"] = rows[:, of["job_bytes"]].sum().item() / 1e9
        optional = {
            "utilisation/loader_workers": rows[:, of["workers"]].nanmean().item(),
            "utilisation/gpu": rows[:, len(_FIELDS)].nanmean().item(),
            "utilisation/gpu_memory": rows[:, len(_FIELDS) + 1].nanmean().item(),
        }
        return metrics | {key: value for key, value in optional.items() if value == value}


def _tier_metrics(prefix: str, counts: TierCounts) -> dict[str, float]:
    metrics = {f"{prefix}{name}": float(getattr(counts, name)) for name in _AMOUNTS}
    return metrics | ({f"{prefix}cache_hit_rate": counts.hits / counts.samples} if counts.samples else {})


_AMOUNTS = ("fetched_bytes", "fetched_shards", "read_bytes")
_FIELDS = ("cpu", "cpu_waiting", "workers", "received", "sent", "disk_read", "memory", "job_bytes")
