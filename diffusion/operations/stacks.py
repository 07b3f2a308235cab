"""Stack traces of ranks that hang: each writes its own when it gets a signal."""

import contextlib
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

_QUIET = 0.3
"""Seconds without another line after which a rank is taken to have written all."""

_WAKING = 0.3
"""Seconds after which all threads of a process that was stopped run."""


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

    A rank that was stopped goes on: a stopped process writes nothing. It does so before it is asked, because the
    system gives the signal to any thread of a process that still wakes; to write what another thread does, which
    meanwhile runs on, leaves half a trace or ends the process.

    Args:
        folder: where the ranks give signs of life.
        beats: of the ranks.

    Returns:
        A text with a part for each rank; of one that did not answer, or is on another machine, it says so.
    """
    here = [beat for beat in beats if is_alive(beat) and stacks_file(folder, beat.rank).exists()]
    if any(map(_is_stopped, here)):
        _send(here, signal.SIGCONT)
        threading.Event().wait(_WAKING)
    _send(here, STACKS_SIGNAL)
    _wait(folder, here)
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


def _is_stopped(trace: Trace) -> bool:
    process = process_of(trace)
    try:
        return process is not None and process.status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def _send(beats: Sequence[Beat], number: signal.Signals) -> None:
    """Send a signal to those that are still there."""
    for beat in beats:
        with contextlib.suppress(ProcessLookupError):
            os.kill(beat.pid, number)


def _wait(folder: Path, beats: Sequence[Beat]) -> None:
    """Wait until each rank has written to the end of a line or is gone, or for too long."""
    deadline, pause = time.monotonic() + _PATIENCE, threading.Event()
    texts: list[bytes] = []
    while time.monotonic() < deadline:
        before, texts = texts, [stacks_file(folder, beat.rank).read_bytes() for beat in beats]
        is_whole = [text.endswith(b"\n") or not is_alive(beat) for text, beat in zip(texts, beats, strict=True)]
        if texts == before and all(is_whole):
            return
        pause.wait(_QUIET)
