"""Utilisation of a machine between two moments, and why training waits for data."""

import contextlib
import multiprocessing
import os
import time
from dataclasses import dataclass

import psutil

from diffusion.config.fields import size_text
from diffusion.distributed import CGROUP, num_cores

_ALL_CORES_BUSY = 0.9
"""CPU utilisation from which the cores are the bottleneck."""

_WORKER_BUSY = 0.75
"""Share of a core from which a loader worker is the bottleneck."""

_DISK_WAITING = 0.1
"""Share of the cores' time in I/O wait from which the disk is the bottleneck."""


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Counters of this machine and process: times in seconds, the others in bytes."""

    clock: float
    cpu_busy: float
    """Seconds of all cores that this process may use: time spent computing, waiting for I/O, and in total."""

    cpu_waiting: float
    cpu_total: float
    disk_read: int
    memory_total: int
    memory_available: int
    worker_seconds: dict[int, float]
    """CPU time of each loader worker by process ID."""


def read_counters() -> Counters:
    """Read the counters, in about a millisecond."""
    allowed = os.sched_getaffinity(0)
    cores = [times for core, times in enumerate(psutil.cpu_times(percpu=True)) if core in allowed]
    waiting = sum(getattr(core, "iowait", 0.0) for core in cores)
    idle = sum(core.idle for core in cores) + waiting
    # The time of guests is included in that of users.
    total = sum(sum(core) - getattr(core, "guest", 0.0) - getattr(core, "guest_nice", 0.0) for core in cores)
    busy = total - idle
    if num_cores() < len(allowed):  # By its quota a container may use fewer cores at a time than are busy for others.
        usage = dict(line.split() for line in (CGROUP / "cpu.stat").read_text().splitlines())
        busy, total = int(usage["usage_usec"]) / 1e6, num_cores() * time.monotonic()
    disks, memory = psutil.disk_io_counters(), psutil.virtual_memory()
    return Counters(
        clock=time.monotonic(),
        cpu_busy=busy,
        cpu_waiting=waiting,
        cpu_total=total,
        disk_read=disks.read_bytes if disks is not None else 0,
        memory_total=memory.total,
        memory_available=memory.available,
        worker_seconds=_read_workers(),
    )


def _read_workers() -> dict[int, float]:
    """Return the CPU time of each loader worker."""
    workers: dict[int, float] = {}
    for child in multiprocessing.active_children():
        with contextlib.suppress(psutil.Error):  # It has just ended.
            times = psutil.Process(child.pid).cpu_times()
            workers[child.pid or 0] = times.user + times.system
    return workers


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Utilisation of a rank and its machine: shares from 0 to 1, rates in bytes per second."""

    cpu: float
    """Share of the time in which the cores computed, and in which they waited for a disk."""

    cpu_waiting: float

    workers: float | None
    """Share of a core used by a loader worker; None without workers."""

    disk_read: float
    memory: float
    """Used share of the machine's memory."""


def usage_between(before: Counters, after: Counters, num_workers: int) -> Usage:
    """Compute the utilisation between two readings; of the loader workers, that of the busiest `num_workers`."""
    seconds = max(after.clock - before.clock, 1e-9)
    core_seconds = max(after.cpu_total - before.cpu_total, 1e-9)
    common = before.worker_seconds.keys() & after.worker_seconds.keys()
    busy = sorted((after.worker_seconds[pid] - before.worker_seconds[pid]) / seconds for pid in common)
    busiest = busy[-num_workers:] if num_workers else []
    return Usage(
        cpu=_share((after.cpu_busy - before.cpu_busy) / core_seconds),
        cpu_waiting=_share((after.cpu_waiting - before.cpu_waiting) / core_seconds),
        workers=_share(sum(busiest) / len(busiest)) if busiest else None,
        disk_read=(after.disk_read - before.disk_read) / seconds,
        memory=1 - after.memory_available / after.memory_total,
    )


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """Settings of the loader that matter for its bottleneck."""

    num_workers: int
    """Loader workers of a rank."""

    num_cores: int
    """Cores of the machine."""

    decodes: bool
    """True if images are decoded during training."""

    has_cache_limit: bool = False


def explain_waiting(usage: Usage, downloaded: float, settings: LoaderSettings) -> str:
    """Explain the bottleneck of the loader, and what to do.

    The utilisation is that of the busiest machine; all nodes downloaded so many bytes per second.
    """
    if settings.num_workers == 0:
        return "batches are loaded in the training process: set data.num_workers (8 on a large machine)"
    workers = usage.workers or 0.0
    if usage.cpu >= _ALL_CORES_BUSY:
        remedy = "encode the images beforehand (scripts/encode.py)" if settings.decodes else "use fewer processes"
        return f"all {settings.num_cores} cores are busy ({usage.cpu:.0%}): {remedy}, or take machines with more cores"
    if workers >= _WORKER_BUSY:
        return (
            f"each of the {settings.num_workers} loader workers of a rank computes all the time ({workers:.0%}), and "
            f"cores are free ({usage.cpu:.0%} of {settings.num_cores} busy): raise data.num_workers"
        )
    if downloaded > 0:
        remedy = "raise data.cache_limit so that shards stay, " if settings.has_cache_limit else ""
        return (
            f"shards are downloaded at {size_text(downloaded)}/s while the loader workers idle ({workers:.0%} busy): "
            f"{remedy}raise data.predownload, or move the data closer"
        )
    if usage.cpu_waiting >= _DISK_WAITING:
        return (
            f"the disk reads {size_text(usage.disk_read)}/s and cores wait for it ({usage.cpu_waiting:.0%} of their "
            "time): put data.local on a faster disk"
        )
    return (
        f"the loader workers idle ({workers:.0%} busy) without downloads: the data set itself waits; raise "
        "data.num_workers so that more samples are read at the same time"
    )
