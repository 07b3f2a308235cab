"""Commands of `scripts/` in real processes that can be killed, forked from one that has imported what they need."""

import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from pathlib import Path

from tests.training_runs import ROOT

LIMIT = 600.0
"""Seconds after which a command that should have ended is a failure."""

_PRELOADED = ["diffusion.models", "diffusion.preparation.encoding.encode", "diffusion.preparation.prepare"]


def forks() -> ForkServerContext:
    """What the processes are forked by; it imports on the first start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


class ForkedCommand:
    """A command that runs, on one process or several ranks, each with its own children in a process group of its own.

    Args:
        log: file that takes what they print.
        program: a script, such as `scripts/prepare.py`.
        arguments: its arguments.
        num_ranks: processes; with several, each finds in its environment what a launcher tells ranks.
    """

    def __init__(self, log: Path, program: str, arguments: list[str], num_ranks: int = 1) -> None:
        self._log = log
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._ranks = []
        for rank in range(num_ranks):
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment = {name: str(value) for name, value in {**ranks, **address}.items()} if num_ranks > 1 else {}
            self._ranks.append(forks().Process(target=_run, args=(log, program, arguments, environment)))
            self._ranks[-1].start()

    def kill_when(self, ready: Callable[[], bool]) -> bool:
        """Kill all of it as soon as something is so; return whether it was still running."""
        deadline = time.monotonic() + LIMIT
        while all(rank.is_alive() for rank in self._ranks) and not ready():
            assert time.monotonic() < deadline, self._log.read_text()[-4000:]
            wait([rank.sentinel for rank in self._ranks], 0.005)
        running = all(rank.is_alive() for rank in self._ranks)
        for rank in self._ranks:
            if rank.is_alive():
                _kill(rank.pid or 0)
        for rank in self._ranks:
            rank.join(LIMIT)
        return running

    def finish(self) -> tuple[list[int | None], str]:
        """Wait for the end, of all ranks as soon as one has failed; return exit codes, and what was printed."""
        for rank in self._ranks:
            rank.join(LIMIT)
            if rank.exitcode:
                for other in self._ranks:
                    other.terminate()
        for rank in self._ranks:
            rank.join(LIMIT)
        return [rank.exitcode for rank in self._ranks], self._log.read_text()


def _kill(pid: int) -> None:
    """Kill a process with its group, or alone, as long as it has made none."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)


def _run(log: Path, program: str, arguments: list[str], environment: dict[str, str]) -> None:
    import torch

    os.setpgid(0, 0)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv = [program, *arguments]
    runpy.run_path(str(ROOT / program), run_name="__main__")
