"""Run the points of a sweep, each once: one after the other in forked processes, or several at a time by a launcher.

A point that runs holds a lock on its folder, and its process inherits that: after the sweep was killed, the point goes
on, and a sweep that is started again waits for it.
"""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import NoReturn

from diffusion.files import open_lock
from diffusion.launch import PREEMPTED_EXIT_CODE, be_forked
from diffusion.operations import jobs
from diffusion.sweeps.points import Point

log = logging.getLogger(__name__)

LOG = "sweep.log"
"""In the folder of a point: what its process printed."""

_LOCK = "sweep.lock"
_OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")


def run_points(
    points: Sequence[Point], *, num_jobs: int, train: Callable[[Sequence[str]], int] | None
) -> dict[str, str]:
    """Run the points that are not finished.

    Args:
        points: all points.
        num_jobs: how many run at a time.
        train: trains as a command says, in a process forked from this one; None starts the command itself.

    Returns:
        Names of the points that did not finish, and why.
    """
    failed: dict[str, str] = {}
    running: dict[int, tuple[Point, int]] = {}  # By the process's descriptor: the point, and the process's id.
    locks: dict[str, int] = {}
    try:
        for is_patient in (False, True):
            for point in points:
                while len(running) >= num_jobs:
                    failed |= _finish(running, locks)
                if point.name not in failed and _begin(point, locks, is_patient):
                    pid = _fork(point, locks, train)
                    running[os.pidfd_open(pid)] = (point, pid)
            while running:
                failed |= _finish(running, locks)
    finally:
        jobs.tell([pid for _, pid in running.values()])
        while running:
            _finish(running, locks)
    return failed


def _begin(point: Point, locks: dict[str, int], is_patient: bool) -> bool:
    """Lock a point; False if it is finished or (without patience) runs elsewhere."""
    if point.is_finished:
        return False
    point.folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = open_lock(point.folder / _LOCK, timeout=None if is_patient else 0)
    except TimeoutError:
        log.info("point %s runs already", point.name)
        return False
    if point.is_finished:
        os.close(lock)
        return False
    locks[point.name] = lock
    return True


def _fork(point: Point, locks: dict[str, int], train: Callable[[Sequence[str]], int] | None) -> int:
    log.info("point %s begins: %s", point.name, dict(point.values))
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        be_forked(lambda: _run(point, locks, train))
    return pid


def _run(point: Point, locks: dict[str, int], train: Callable[[Sequence[str]], int] | None) -> int:
    for name, lock in locks.items():
        if name != point.name:
            os.close(lock)
    os.setsid()
    output = os.open(point.folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    for variable in _OF_LAUNCHERS:
        os.environ.pop(variable, None)
    return train(point.command) if train is not None else _execute(point.command, locks[point.name])


def _execute(command: Sequence[str], lock: int) -> NoReturn:
    os.set_inheritable(lock, True)
    os.execvp(command[0], list(command))


def _finish(running: dict[int, tuple[Point, int]], locks: dict[str, int]) -> dict[str, str]:
    """Wait until a point ends; say what was wrong with those that did."""
    failed: dict[str, str] = {}
    for descriptor in wait(list(running)):
        assert isinstance(descriptor, int)
        point, pid = running.pop(descriptor)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(descriptor)
        os.close(locks.pop(point.name))
        if code or not point.is_finished:
            failed[point.name] = _reason(code)
        log.info("point %s: %s", point.name, failed.get(point.name, "finished"))
    return failed


def _reason(code: int) -> str:
    if code == PREEMPTED_EXIT_CODE:
        return "saved after a signal"
    if code:
        return f"exit code {code}" if code > 0 else f"ended by signal {-code}"
    return "its command has returned, but the run is not finished"
