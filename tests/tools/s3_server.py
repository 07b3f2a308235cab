"""A real S3 server, `s3rver` (npm), as a process that can be killed, frozen and started again.

Test modules import the fixtures: `from tests.tools.s3_server import s3_process, s3_server`.
"""

import concurrent.futures
import os
import shutil
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from composer import Callback, Logger, State
from composer.utils import dist

from diffusion import storage
from diffusion.callbacks.saving import SaveCheckpoints
from tests.tools.forking import free_port
from tests.tools.image_files import tree
from tests.tools.waiting import wait_until

KEY = "S3RVER"
"""User name and password of the server."""


def find_s3rver() -> str | None:
    """The program: on PATH, in the repository's `node_modules`, or in `~/.local/bin`."""
    folders = [Path(__file__).parents[2] / "node_modules" / ".bin", Path.home() / ".local" / "bin"]
    return shutil.which("s3rver") or shutil.which("s3rver", path=os.pathsep.join(map(str, folders)))


class S3Server:
    """A server whose objects are kept in a folder, so that they outlive it."""

    def __init__(self, folder: Path, program: str) -> None:
        self.folder, self._program = folder, program
        self._buckets: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.environment = {
            "S3_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the server does not run"
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_running(self) -> bool:
        """Whether it was started and not killed."""
        return self._process is not None

    def start(self, *buckets: str) -> None:
        """Start with these buckets and those of earlier starts, and wait until it answers."""
        assert not self.is_running
        self._buckets = sorted({*self._buckets, *buckets})
        configured = [argument for name in self._buckets for argument in ("--configure-bucket", name)]
        command = [self._program, "-d", str(self.folder), "-a", "127.0.0.1", "-p", str(self.port), "-s", *configured]
        # With several threads s3rver can answer before it has written; with one it does things in their order.
        # Tokens of pages need a cipher that Node's OpenSSL 3 has in the legacy provider only.
        environment = os.environ | {"UV_THREADPOOL_SIZE": "1", "NODE_OPTIONS": "--openssl-legacy-provider"}
        self._process = subprocess.Popen(command, env=environment, start_new_session=True)
        wait_until(self._answers, "s3rver does not answer", process=self._process)

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
        if self.is_running:
            self.process.kill()
            self.await_end()

    def await_end(self) -> None:
        """Wait until it has been killed."""
        self.process.wait(600)
        self._process = None

    def freeze(self) -> None:
        """Accept connections and answer nothing."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue."""
        self.process.send_signal(signal.SIGCONT)

    def path(self, url: str) -> Path:
        """The folder in which the server keeps the objects of a URL, each as `NAME._S3rver_object`."""
        return self.folder / url.removeprefix("s3://")


def object_file(server: S3Server, url: str) -> Path:
    """The file that holds an object's bytes."""
    return server.path(url + "._S3rver_object")


def upload(folder: Path, url: str, access: storage.Access | None = None) -> None:
    """Write the files below a folder to a store."""
    for name, content in tree(folder).items():
        storage.write(f"{url}/{name}", content, access)


class SignalServerAt(Callback):
    """Sends the server a signal when a step begins, on rank 0.

    Args:
        step: Number of the step.
        pid: The server's process.
        number: Of the signal.
        between_uploads: Only when what is written in the background has been written.
    """

    def __init__(self, step: int, pid: int, number: int = signal.SIGKILL, between_uploads: bool = False) -> None:
        self.step, self.pid, self.number, self.between_uploads = step, pid, number, between_uploads

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == self.step and dist.get_global_rank() == 0:
            (saver,) = [callback for callback in state.callbacks if isinstance(callback, SaveCheckpoints)]
            if self.between_uploads and saver._pending is not None:
                concurrent.futures.wait([saver._pending])
            os.kill(self.pid, self.number)


@pytest.fixture(scope="session")
def s3_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """The server of all tests."""
    program = find_s3rver()
    if program is None:
        pytest.skip("needs s3rver: npm install --global s3rver")
    server = S3Server(tmp_path_factory.mktemp("s3"), program)
    server.start("tests")
    yield server
    server.kill()


@pytest.fixture
def s3_server(s3_process: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The server, running, with its address and keys in the environment; `s3://tests` is a bucket."""
    for name, value in s3_process.environment.items():
        monkeypatch.setenv(name, value)
    if not s3_process.is_running:
        s3_process.start()
    storage._s3_client.cache_clear()
    yield s3_process
    storage._s3_client.cache_clear()
    if not s3_process.is_running:
        s3_process.start()
