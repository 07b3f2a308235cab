"""Processes of a job: identify, terminate and kill them."""

import functools
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import psutil

from diffusion.operations import timeouts


@dataclass(frozen=True, kw_only=True)
class ProcessRecord:
    """Identity of a process in a file that it has written, such as a heartbeat."""

    pid: int
    host: str
    time: float
    """Time of the record in seconds since 1970, by the clock of the host."""

    start: str | None = None
    """Start of the process, whatever the clock of the host: its boot, and ticks since then. None: not known."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Make a record of JSON, without what later versions have added; a TypeError if something is missing."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


def own_record() -> dict[str, Any]:
    """Return the fields of a record of this process."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "time": time.time(), "start": _start_of(os.getpid())}


def _start_of(pid: int) -> str | None:
    try:
        ticks = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19]  # Field 22 of proc_pid_stat(5).
    except OSError:
        return None
    return f"{_boot()} {int(ticks)}"


@functools.cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def status(record: ProcessRecord) -> str | None:
    """Return psutil's status of the process that wrote a record.

    None if it does not run on this machine, or if another process has its ID now.
    """
    if record.host != socket.gethostname():
        return None
    try:
        process = psutil.Process(record.pid)
        # The time at which psutil dates a process moves with the clock.
        is_same = (
            process.create_time() < record.time + 1 if record.start is None else _start_of(record.pid) == record.start
        )
        found = process.status()
    except psutil.NoSuchProcess:
        return None
    return found if is_same and found != psutil.STATUS_ZOMBIE else None


def is_alive(record: ProcessRecord) -> bool:
    """Return whether the process that wrote a record runs on this machine."""
    return status(record) is not None


def tree(pids: Sequence[int]) -> list[psutil.Process]:
    """Return the running ones of some processes and of all of their descendants."""
    found: dict[int, psutil.Process] = {}
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            top = psutil.Process(pid)
            found |= {process.pid: process for process in [top, *top.children(recursive=True)]}
    return list(found.values())


def session(leader: int) -> list[psutil.Process]:
    """Return the running processes of the session that a process began, which may have ended."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def terminate(pids: Sequence[int]) -> None:
    """Send SIGTERM to processes."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def kill(processes: Sequence[psutil.Process]) -> None:
    """Send SIGKILL to processes and wait for their ends."""
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.kill()
    psutil.wait_procs(list(processes), timeout=timeouts.KILL)
