"""How busy this machine and this process are between two moments."""

import multiprocessing
import os
import time
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Counts that only grow, and what is in use at the moment. Times are seconds, the others bytes."""

    clock: float
    cpu_busy: float
    """Seconds that the cores of this process have computed, for whomever, added up."""

    cpu_waiting: float
    """... have waited for a disk."""

    cpu_total: float
    received: int
    """Over all network interfaces but the loopback."""

    sent: int
    disk_read: int
    memory_total: int
    memory_available: int
    worker_seconds: dict[int, float]
    """CPU time of each loader worker, by process id."""

    job_bytes: int
    """Resident memory of this process and of its loader workers; what they share counts several times."""


def read_counters() -> Counters:
    """Read them; takes about a millisecond."""
    allowed = os.sched_getaffinity(0)
    cores = [times for core, times in enumerate(psutil.cpu_times(percpu=True)) if core in allowed]
    waiting = sum(getattr(core, "iowait", 0.0) for core in cores)
    idle = sum(core.idle for core in cores) + waiting
    # Time of guests is part of that of users.
    total = sum(sum(core) - getattr(core, "guest", 0.0) - getattr(core, "guest_nice", 0.0) for core in cores)
    interfaces = [count for name, count in psutil.net_io_counters(pernic=True).items() if name != "lo"]
    disks, memory = psutil.disk_io_counters(), psutil.virtual_memory()
    workers, job_bytes = _read_processes()
    return Counters(
        clock=time.monotonic(),
        cpu_busy=total - idle,
        cpu_waiting=waiting,
        cpu_total=total,
        received=sum(interface.bytes_recv for interface in interfaces),
        sent=sum(interface.bytes_sent for interface in interfaces),
        disk_read=disks.read_bytes if disks is not None else 0,
        memory_total=memory.total,
        memory_available=memory.available,
        worker_seconds=workers,
        job_bytes=job_bytes,
    )


def _read_processes() -> tuple[dict[int, float], int]:
    """CPU time of the loader workers, and memory of them and of this process."""
    workers: dict[int, float] = {}
    job_bytes = psutil.Process().memory_info().rss
    for child in multiprocessing.active_children():
        if child.pid is None:
            continue
        try:
            process = psutil.Process(child.pid)
            with process.oneshot():
                times = process.cpu_times()
                workers[child.pid] = times.user + times.system
                job_bytes += process.memory_info().rss
        except psutil.Error:  # It has just ended.
            continue
    return workers, job_bytes


@dataclass(frozen=True, kw_only=True)
class Usage:
    """How busy a rank and its machine were. Shares lie between 0 and 1, rates are bytes per second."""

    cpu: float
    """Share of the time in which the cores computed."""

    cpu_waiting: float
    """... in which they waited for a disk."""

    workers: float | None
    """Share of a core that a loader worker used; None without workers."""

    received: float
    sent: float
    disk_read: float
    memory: float
    """Share of the machine's memory that is in use."""

    job_bytes: float


def usage_between(before: Counters, after: Counters, num_workers: int) -> Usage:
    """What happened between two readings.

    Args:
        before: the first.
        after: the second.
        num_workers: loader workers that give batches: the busiest so many of those that there are.
    """
    seconds = max(after.clock - before.clock, 1e-9)
    core_seconds = max(after.cpu_total - before.cpu_total, 1e-9)
    shared = before.worker_seconds.keys() & after.worker_seconds.keys()
    busy = sorted((after.worker_seconds[pid] - before.worker_seconds[pid]) / seconds for pid in shared)
    busiest = busy[-num_workers:] if num_workers else []
    return Usage(
        cpu=_share((after.cpu_busy - before.cpu_busy) / core_seconds),
        cpu_waiting=_share((after.cpu_waiting - before.cpu_waiting) / core_seconds),
        workers=_share(sum(busiest) / len(busiest)) if busiest else None,
        received=(after.received - before.received) / seconds,
        sent=(after.sent - before.sent) / seconds,
        disk_read=(after.disk_read - before.disk_read) / seconds,
        memory=1 - after.memory_available / after.memory_total,
        job_bytes=after.job_bytes,
    )


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))
