"""Processes of a job: identify, terminate and kill them."""

import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from diffusion.operations import timeouts


@dataclass(frozen=True, kw_only=True)
class ProcessRecord:
    """Identity of a process in a file that it has written, such as a heartbeat."""

    pid: int
    host: str
    time: float
    """Time of the record in seconds since 1970, by the clock of the host."""


def status(record: ProcessRecord) -> str | None:
    """Return psutil's status of the process that wrote a record.

    None if it does not run on this machine, or if another process has its ID now.
    """
    if record.host != socket.gethostname():
        return None
    try:
        process = psutil.Process(record.pid)
        is_same, found = process.create_time() < record.time + 1, process.status()
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
