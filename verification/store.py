"""A real S3 server, `s3rver` (npm), as a process that can be killed, frozen and started again."""

import os
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from verification.ports import free_port

KEY = "S3RVER"
"""User name and password of the server."""

_ROOT = Path(__file__).resolve().parent.parent.parent
_PLACES = (_ROOT / "node_modules" / ".bin", Path.home() / ".local" / "bin")
_PATIENCE = 60.0
_KILL_PATIENCE = 600.0
"""Seconds within which a run has come to where it kills the server."""


def find_s3rver() -> str | None:
    """The program: on PATH, in the repository's `node_modules`, or in `~/.local/bin`."""
    return shutil.which("s3rver") or shutil.which("s3rver", path=os.pathsep.join(map(str, _PLACES)))


class S3Server:
    """A server whose objects are kept in a folder, so that they outlive it.

    Args:
        folder: where the objects are.
        program: path of `s3rver`.
    """

    def __init__(self, folder: Path, program: str) -> None:
        self.folder, self._program = folder, program
        self._buckets: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    @property
    def endpoint(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it was started and not killed."""
        return self._process is not None

    @property
    def environment(self) -> dict[str, str]:
        """What a client's environment needs."""
        return {
            "S3_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def start(self, *buckets: str) -> None:
        """Start with these buckets and those of earlier starts, and wait until it answers."""
        assert self._process is None, "it runs already"
        self._buckets = sorted({*self._buckets, *buckets})
        configured = [argument for name in self._buckets for argument in ("--configure-bucket", name)]
        command = [self._program, "-d", str(self.folder), "-a", "127.0.0.1", "-p", str(self.port), "-s", *configured]
        # With several threads s3rver can answer before it has written; with one it does things in their order.
        environment = os.environ | {"UV_THREADPOOL_SIZE": "1"}
        self._process = subprocess.Popen(command, env=environment, start_new_session=True)
        deadline, pause = time.monotonic() + _PATIENCE, threading.Event()
        while not self._answers():
            assert self._process.poll() is None, "s3rver has ended"
            assert time.monotonic() < deadline, "s3rver does not answer"
            pause.wait(0.05)

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(self.endpoint, timeout=5)
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """End it at once; its objects stay."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Kill it and start it again."""
        self.kill()
        self.start()

    def await_end(self) -> None:
        """Wait until somebody has killed it."""
        assert self._process is not None
        self._process.wait(_KILL_PATIENCE)
        self._process = None

    def freeze(self) -> None:
        """Let it accept connections and answer nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def path(self, url: str) -> Path:
        """The folder in which the server keeps the objects of a URL, each as `NAME._S3rver_object`."""
        return self.folder / url.removeprefix("s3://")
