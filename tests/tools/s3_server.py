"""A real S3 server for tests: `s3rver`, a process that can be killed, frozen and started again.

The fixture `s3_server` is imported by the test modules that use it: `from tests.tools.s3_server import s3_server`.
"""

import concurrent.futures
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from composer import Callback, Logger, State
from composer.utils import dist

from diffusion import storage
from diffusion.callbacks.saving import SaveCheckpoints
from verification.store import KEY as KEY
from verification.store import S3Server, find_s3rver


class KillServerAt(Callback):
    """Kill the server when a step begins, on rank 0 of a training that names this class.

    Args:
        step: the step.
        pid: the server's process.
        between_uploads: not before what is written in the background has been written.
    """

    def __init__(self, step: int, pid: int, between_uploads: bool = False) -> None:
        self.step, self.pid, self.between_uploads = step, pid, between_uploads

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == self.step and dist.get_global_rank() == 0:
            (saver,) = [callback for callback in state.callbacks if isinstance(callback, SaveCheckpoints)]
            if self.between_uploads and saver._pending is not None:
                concurrent.futures.wait([saver._pending])
            os.kill(self.pid, signal.SIGKILL)


class FreezeServerAt(Callback):
    """Freeze the server when a step begins, on rank 0 of a training that names this class."""

    def __init__(self, step: int, pid: int) -> None:
        self.step, self.pid = step, pid

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == self.step and dist.get_global_rank() == 0:
            os.kill(self.pid, signal.SIGSTOP)


def object_file(server: S3Server, url: str) -> Path:
    """The file that holds an object's bytes."""
    return server.path(url + "._S3rver_object")


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
