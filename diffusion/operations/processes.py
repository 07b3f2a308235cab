"""Processes of a job: start, identify, terminate and kill them."""

import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Protocol

import psutil

from diffusion.errors import ConfigurationError

_KILL_SECONDS = 30.0


class Command:
    """One start of a job by a command, such as a launcher, in a session of its own.

    Args:
        command: program and arguments.
        keep_open: descriptor that the command inherits, so that a lock on it lasts as long as the command.
        environment: None is this process's.

    Raises:
        ConfigurationError: the program does not exist.
    """

    def __init__(
        self, command: Sequence[str], *, keep_open: int | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        inherited = () if keep_open is None else (keep_open,)
        try:
            self._process = subprocess.Popen(command, start_new_session=True, pass_fds=inherited, env=environment)
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            raise ConfigurationError(
                f"the command cannot be started: {command[0]}: {error.strerror}. Name an existing program, as in "
                "composer run.py yamls/phase1.yaml"
            ) from error

    @property
    def pid(self) -> int:
        """Process ID of the command."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, 128 plus the number for a signal; None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code


class ProcessRecord(Protocol):
    """Identity of a process in a file that it has written, such as a heartbeat."""

    @property
    def pid(self) -> int:
        """Process ID."""
        ...

    @property
    def host(self) -> str:
        """Name of its host."""
        ...

    @property
    def time(self) -> float:
        """Time of the record in seconds since 1970, by the clock of the host."""
        ...


def find_process(record: ProcessRecord) -> psutil.Process | None:
    """Return the running process on this machine that wrote a record; None for another one with the same ID."""
    if record.host != socket.gethostname():
        return None
    try:
        process = psutil.Process(record.pid)
        is_same = process.create_time() < record.time + 1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return process if is_same else None


def is_alive(record: ProcessRecord) -> bool:
    """Return whether the process that wrote a record runs on this machine."""
    return find_process(record) is not None


def is_stopped(record: ProcessRecord) -> bool:
    """Return whether the process that wrote a record is stopped (SIGSTOP) on this machine."""
    try:
        process = find_process(record)
        return process is not None and process.status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def tree(pids: Sequence[int]) -> list[psutil.Process]:
    """Return the running ones of some processes and of all of their descendants."""
    found: dict[int, psutil.Process] = {}
    for pid in pids:
        try:
            top = psutil.Process(pid)
            found |= {process.pid: process for process in [top, *top.children(recursive=True)]}
        except psutil.NoSuchProcess:
            continue
    return list(found.values())


def terminate(pids: Sequence[int]) -> None:
    """Send SIGTERM to processes."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            continue


def kill(processes: Sequence[psutil.Process]) -> None:
    """Send SIGKILL to processes and wait for their ends."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(list(processes), timeout=_KILL_SECONDS)
