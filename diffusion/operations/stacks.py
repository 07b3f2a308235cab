"""Stack traces of ranks that hang: each writes its own when it gets a signal."""

import contextlib
import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import psutil

from diffusion.operations.beats import Beat, stacks_file

STACKS_SIGNAL = signal.SIGUSR2

_PATIENCE = 10.0
"""Seconds within which a rank must have written."""

_PAUSE = 0.05
"""Seconds between two looks at whether it has."""


class Trace(Protocol):
    """What a process has left of itself, such as a sign of life."""

    @property
    def pid(self) -> int:
        """Its number."""
        ...

    @property
    def host(self) -> str:
        """Where it ran."""
        ...

    @property
    def time(self) -> float:
        """When it ran, in seconds since 1970 by the clock of the host."""
        ...


def collect_stacks(folder: Path, beats: Sequence[Beat]) -> str:
    """Let the ranks on this machine write their stack traces, and return them.

    A rank that was stopped goes on: a stopped process writes nothing. Its main thread is asked, and before that:
    the system would give the signal to any thread that wakes, which could not write what the main one does meanwhile
    without half a trace or the end of the process.

    Args:
        folder: where the ranks give signs of life.
        beats: of the ranks.

    Returns:
        A text with a part for each rank; of one that did not answer, or is on another machine, it says so.
    """
    here = [beat for beat in beats if is_alive(beat) and stacks_file(folder, beat.rank).exists()]
    sizes = {beat.rank: stacks_file(folder, beat.rank).stat().st_size for beat in here}
    for beat in here:
        with contextlib.suppress(ProcessLookupError):
            _ask(beat.pid)
            os.kill(beat.pid, signal.SIGCONT)
    deadline, pause = time.monotonic() + _PATIENCE, threading.Event()
    while time.monotonic() < deadline and not all(_has_written(folder, beat, sizes[beat.rank]) for beat in here):
        pause.wait(_PAUSE)
    parts = []
    for beat in beats:
        text = stacks_file(folder, beat.rank).read_text(errors="replace") if beat in here else ""
        if not text:
            text = (
                f"no answer from process {beat.pid} on {beat.host}: it has ended, hangs in the kernel, or is elsewhere"
            )
        parts.append(f"rank {beat.rank}, in phase {beat.phase.value} of step {beat.step}:\n{text.rstrip()}\n")
    return "\n".join(parts)


def is_alive(trace: Trace) -> bool:
    """Whether a process runs on this machine, and is not another one that got its number."""
    return process_of(trace) is not None


def process_of(trace: Trace) -> psutil.Process | None:
    """The process that has left a trace, if it runs on this machine."""
    if trace.host != socket.gethostname():
        return None
    try:
        process = psutil.Process(trace.pid)
        is_it = process.create_time() < trace.time + 1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return process if is_it else None


def _ask(pid: int) -> None:
    """Send the signal to the main thread of a process; to any, which may write less, before glibc 2.30."""
    send = getattr(ctypes.CDLL(None), "tgkill", None)
    if send is None or send(pid, pid, int(STACKS_SIGNAL)):
        os.kill(pid, STACKS_SIGNAL)


def _has_written(folder: Path, beat: Beat, size: int) -> bool:
    """Whether a rank has written all, since its file had a size; or is gone."""
    if not is_alive(beat):
        return True
    if stacks_file(folder, beat.rank).stat().st_size == size:
        return False
    try:
        status = Path(f"/proc/{beat.pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    fields = dict(line.split(":", 1) for line in status.splitlines())
    # The signal is pending until the handler runs, which blocks it.
    signals = (int(fields[name], 16) for name in ("SigPnd", "ShdPnd", "SigBlk"))
    return not any(each >> STACKS_SIGNAL - 1 & 1 for each in signals)
