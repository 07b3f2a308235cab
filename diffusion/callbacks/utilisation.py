"""How busy the machines are while training: logged at an interval, read in the training thread.

A reading takes about as long as logging a few numbers, so it needs no thread. See `diffusion.health.counters`.
"""

from dataclasses import dataclass, replace

import torch
from composer import Callback, Logger, State
from composer.utils import dist

from diffusion.errors import ConfigurationError
from diffusion.health.counters import Counters, Usage, read_counters, usage_between
from diffusion.health.downloads import DownloadMeter
from diffusion.health.gpus import GpuMeter

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
    - `throughput/..._bytes_per_sec`: of a node, mean over the nodes; `downloaded` is of all nodes together
    - `throughput/downloaded_bytes`: since the start
    - `throughput/cache_hit_rate`: share of the bytes read that need not be downloaded; below 0 it is cut off, since
      shards are downloaded before they are read

    Args:
        interval: steps between two readings.
        num_workers: loader workers of a rank.
        downloads: counts what the data set downloads to this node; None for data that is not downloaded.
        bytes_per_sample: of the data set, for the cache hit rate.

    Raises:
        ConfigurationError: the interval is not a number of steps.
    """

    def __init__(
        self,
        interval: int,
        *,
        num_workers: int,
        downloads: DownloadMeter | None = None,
        bytes_per_sample: float = 0.0,
    ) -> None:
        if interval < 1:
            raise ConfigurationError(f"loggers.utilisation_interval is {interval}, but must be at least 1")
        self.interval, self.num_workers = interval, num_workers
        self.latest: JobUsage | None = None
        """Of the last interval; the same on all ranks."""

        self._downloads, self._bytes_per_sample = downloads, bytes_per_sample
        self._is_leader = dist.get_local_rank() == 0
        self._gpus = GpuMeter() if self._is_leader and torch.cuda.is_available() else None
        self._before: Counters | None = None
        self._samples = self._downloaded = 0

    def fit_start(self, state: State, logger: Logger) -> None:
        """Take the first reading."""
        self._read(state)

    def _read(self, state: State) -> None:
        self._before, self._samples = read_counters(), state.timestamp.sample.value

    def batch_end(self, state: State, logger: Logger) -> None:
        """Read and log at the end of each interval."""
        if state.timestamp.batch.value % self.interval or self._before is None:
            return
        before, first = self._before, self._samples
        self._read(state)
        seconds = max(self._before.clock - before.clock, 1e-9)
        usage = usage_between(before, self._before, self.num_workers)
        downloaded = self._downloads.bytes_since() if self._downloads is not None and self._is_leader else 0
        rows = self._gather(state, usage, downloaded)
        self._downloaded += int(rows[:, -1].sum())
        largest = dict(zip(_FIELDS, rows[:, : len(_FIELDS)].nan_to_num(-1.0).amax(dim=0).tolist(), strict=True))
        workers = largest["workers"] if largest["workers"] >= 0 else None
        self.latest = JobUsage(
            busiest=replace(usage, **(largest | {"workers": workers})), downloaded=rows[:, -1].sum().item() / seconds
        )
        logger.log_metrics(self._metrics(rows, state.timestamp.sample.value - first, seconds))

    def _gather(self, state: State, usage: Usage, downloaded: int) -> torch.Tensor:
        """One row of float64 for each rank: the fields of `Usage`, GPUs, downloads; NaN where there is nothing."""
        nothing = float("nan")
        values = [getattr(usage, name) for name in _FIELDS]
        gpus = (self._gpus.read() if self._gpus is not None else None) or (nothing, nothing)
        row = [nothing if value is None else float(value) for value in (*values, *gpus, downloaded)]
        tensor = state.device.tensor_to_device(torch.tensor([row], dtype=torch.float64))
        return torch.cat(list(dist.all_gather(tensor))).cpu()

    def _metrics(self, rows: torch.Tensor, num_samples: int, seconds: float) -> dict[str, float]:
        """What is logged of an interval."""
        nodes = rows[:: dist.get_local_world_size()]
        of = {name: number for number, name in enumerate(_FIELDS)}
        metrics = {key: nodes[:, of[name]].mean().item() for key, name in _NODE.items()}
        metrics["memory/job_rss"] = rows[:, of["job_bytes"]].sum().item() / 1e9
        optional = {
            "utilisation/loader_workers": rows[:, of["workers"]].nanmean().item(),
            "utilisation/gpu": rows[:, -3].nanmean().item(),
            "utilisation/gpu_memory": rows[:, -2].nanmean().item(),
        }
        metrics |= {key: value for key, value in optional.items() if value == value}
        if self._downloads is not None and self._downloads.has_remote:
            downloaded = rows[:, -1].sum().item()
            metrics["throughput/downloaded_bytes"] = self._downloaded
            metrics["throughput/downloaded_bytes_per_sec"] = downloaded / seconds
            if read := num_samples * self._bytes_per_sample:
                metrics["throughput/cache_hit_rate"] = max(0.0, 1 - downloaded / read)
        return metrics


_FIELDS = ("cpu", "cpu_waiting", "workers", "received", "sent", "disk_read", "memory", "job_bytes")
