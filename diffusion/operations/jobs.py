"""Processes of a job: started, told to end, and ended."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Protocol

import psutil

from diffusion.errors import ConfigurationError

_END_SECONDS = 30.0


class Job(Protocol):
    """One start of a job."""

    @property
    def pids(self) -> list[int]:
        """Processes that were started, without what they have started themselves."""
        ...

    def poll(self) -> int | None:
        """Exit code; None while it runs."""
        ...


class Command:
    """A job that is started by a command, such as a launcher, in a session of its own.

    Args:
        command: program and arguments.
        keep_open: a file that the command inherits, so that a lock on it lasts as long as the command.
        environment: None is this process's.

    Raises:
        ConfigurationError: there is no such program.
    """

    def __init__(
        self, command: Sequence[str], *, keep_open: int | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        inherited = () if keep_open is None else (keep_open,)
        try:
            self._process = subprocess.Popen(command, start_new_session=True, pass_fds=inherited, env=environment)
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            raise ConfigurationError(
                f"the command cannot be started: {command[0]}: {error.strerror}. Give a program that is there, as in "
                "composer run.py yamls/phase1.yaml"
            ) from error

    @property
    def pids(self) -> list[int]:
        """The command's process."""
        return [self._process.pid]

    def poll(self) -> int | None:
        """Exit code, for a signal 128 and its number; None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code


def tree(pids: Sequence[int]) -> list[psutil.Process]:
    """Processes and everything below them that runs."""
    found: dict[int, psutil.Process] = {}
    for pid in pids:
        try:
            top = psutil.Process(pid)
            found |= {process.pid: process for process in [top, *top.children(recursive=True)]}
        except psutil.NoSuchProcess:
            continue
    return list(found.values())


def tell(pids: Sequence[int]) -> None:
    """Ask processes to end (SIGTERM)."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            continue


def kill(processes: Sequence[psutil.Process]) -> None:
    """End processes at once, and wait until they are gone."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(list(processes), timeout=_END_SECONDS)
