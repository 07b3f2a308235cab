"""Waiting for what other threads and processes do."""

import subprocess
import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object],
    what: str = "waited in vain",
    timeout: float = 300,
    process: subprocess.Popen | None = None,
) -> None:
    """Wait for a condition; fail with `what` after a time, or when a process has ended meanwhile."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert process is None or process.poll() is None, f"{what}: the process has ended with {process.returncode}"
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
