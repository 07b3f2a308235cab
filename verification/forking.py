"""Ranks that are forked from a process that has imported everything: a start takes a second or two instead of ten.

`ForkingServer` starts such a process and has jobs started there. For a launcher as supervisors know it there is a
command: `python -m verification.forking launch SOCKET NUM_RANKS PROGRAM ...` ends with the exit code of the
ranks, as `composer -n NUM_RANKS PROGRAM ...` would. When one rank fails, or who asked for them is gone, the others get
SIGTERM, and after a while SIGKILL.
"""

import gc
import importlib
import json
import os
import runpy
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from verification.ports import free_port

PATIENCE = 300.0
"""Seconds that ranks have after SIGTERM: they may save and finish their loggers, on a machine that is busy."""

Launcher = Callable[[int], list[str]]
"""The command that starts a program on so many ranks; the program and its arguments follow it."""

_BLOCK = 2**16
_START_SECONDS = 300.0


class ForkedJob:
    """Ranks of one program, each with what it starts in a session of its own.

    Args:
        place: socket of the server.
        num_ranks: how many; 0 for one process that finds nothing of a launcher in its environment.
        program: a Python file and its arguments.
        environment: of the ranks, to which that of a launcher is added.
        output: file descriptor that takes what they print; by default they share this process's outputs.

    Raises:
        RuntimeError: the server has not started them.
    """

    def __init__(
        self,
        place: Path,
        num_ranks: int,
        program: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        output: int | None = None,
    ) -> None:
        request = {
            "num_ranks": num_ranks,
            "program": list(program),
            "environment": dict(os.environ if environment is None else environment),
            "at": str(Path.cwd()),
        }
        outputs = [1, 2] if output is None else [output, output]
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(str(place))
        content = f"{json.dumps(request)}\n".encode()
        self._connection.sendall(content[socket.send_fds(self._connection, [content], outputs) :])
        self._answers = self._connection.makefile("r")
        self._codes: list[int] | None = None
        answer = self._answers.readline()
        if not answer:
            raise RuntimeError(f"{place}: the process that forks ranks has not started {' '.join(program)}")
        self.pids: list[int] = json.loads(answer)

    def wait(self, timeout: float | None = None) -> list[int] | None:
        """Wait for the ranks.

        Args:
            timeout: seconds after which None is returned; forever by default.

        Returns:
            The exit code of each rank, negative for a signal.
        """
        if self._codes is None:
            if timeout is not None and not select.select([self._connection], [], [], timeout)[0]:
                return None
            self._codes = json.loads(self._answers.readline() or "null") or [1] * len(self.pids)
            self._connection.close()
        return self._codes

    def kill(self) -> None:
        """End the ranks and all that they have started in their sessions with SIGKILL."""
        for pid in self.pids:
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


class ForkingServer:
    """A process that has imported what training needs.

    Args:
        modules: what else it imports.
        environment: of that process.
        python: its interpreter.
    """

    def __init__(
        self,
        modules: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="forking-"))
        self.place = self._folder / "socket"
        command = [python, "-m", "verification.forking", "serve", str(self.place), *modules]
        self._process = subprocess.Popen(command, env=environment, start_new_session=True)

    def start(self, num_ranks: int, program: Sequence[str], **options: Any) -> ForkedJob:
        """Start a job when everything is imported; `options` are those of `ForkedJob`."""
        self.await_start()
        return ForkedJob(self.place, num_ranks, program, **options)

    def await_start(self) -> None:
        """Wait until everything is imported.

        Raises:
            RuntimeError: the process has ended, or takes too long.
        """
        deadline = time.monotonic() + _START_SECONDS
        with selectors.DefaultSelector() as pause:
            while not self.place.exists():
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the process that forks ranks has not started: {self._process.returncode}")
                pause.select(0.05)

    def launcher(self, num_ranks: int) -> list[str]:
        """See `Launcher`."""
        return [sys.executable, "-m", "verification.forking", "launch", str(self.place), str(num_ranks)]

    def close(self) -> None:
        """End the process. Jobs that run go on until who started them is gone."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def launchers(*, composer: bool) -> Iterator[Launcher]:
    """What starts a proof's ranks.

    Args:
        composer: the usual launcher, instead of a process from which they are forked.
    """
    if composer:
        yield lambda num_ranks: [str(Path(sys.executable).parent / "composer"), "-n", str(num_ranks)]
        return
    server = ForkingServer(environment={**os.environ, "PYTHONWARNINGS": "ignore"})
    try:
        server.await_start()
        yield server.launcher
    finally:
        server.close()


def serve(place: Path, modules: Sequence[str]) -> NoReturn:
    """Import what training needs, and launch what is asked for, until the process is killed."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # Ranks could not use a GPU that this process has initialised.
    import matplotlib.backends.backend_agg
    from composer.utils.collect_env import get_cpu_model

    import diffusion.train

    assert matplotlib.backends.backend_agg
    assert diffusion.train
    for module in modules:
        importlib.import_module(module)
    get_cpu_model()  # Takes a second and is remembered.
    gc.freeze()  # What is imported is not looked at by ranks' collections, which would copy all its pages.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody waits for those that keep the ranks.
    with socket.socket(socket.AF_UNIX) as server:
        unfinished = place.with_suffix(".partial")
        server.bind(str(unfinished))
        server.listen()
        unfinished.rename(place)
        while True:
            connection, _ = server.accept()
            if os.fork() == 0:
                server.close()
                _keep(connection)
            connection.close()


def _keep(connection: socket.socket) -> NoReturn:
    """Start the ranks of one request, answer with their process ids, and with their exit codes when they have ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    content, outputs, _, _ = socket.recv_fds(connection, _BLOCK, 2)
    while not content.endswith(b"\n"):
        content += connection.recv(_BLOCK) or b"\n"
    request = json.loads(content)
    port = free_port()
    pids = [_fork(request, rank, port, connection, outputs) for rank in range(max(request["num_ranks"], 1))]
    try:
        connection.send(f"{json.dumps(pids)}\n".encode())
        connection.send(f"{json.dumps(_wait(pids, connection))}\n".encode())
    except ConnectionError:
        os._exit(1)
    os._exit(0)


def _fork(request: dict[str, Any], rank: int, port: int, connection: socket.socket, outputs: Sequence[int]) -> int:
    """Return the process id of a rank that has a session of its own."""
    ready, begun = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        for number in (ready, begun):
            os.close(number)
        connection.close()
        _end_as_program(lambda: _run(request, rank, port, outputs))
    os.close(begun)
    os.read(ready, 1)  # Ends when the rank has closed its end.
    os.close(ready)
    return pid


def _end_as_program(main: Callable[[], int | None]) -> NoReturn:
    """Run something in a forked process and end it as a program ends, without what the parent would do at its exit.

    Args:
        main: returns the exit code, None for 0; SystemExit and other exceptions mean what they mean in a program.
    """
    code = 1
    try:
        code = main() or 0
    finally:
        failure = sys.exc_info()[1]
        if isinstance(failure, SystemExit):
            code = failure.code if isinstance(failure.code, int) else int(failure.code is not None)
        elif failure is not None:
            traceback.print_exception(failure)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(request: dict[str, Any], rank: int, port: int, outputs: Sequence[int]) -> None:
    """Be a rank."""
    for number, output in zip((1, 2), outputs, strict=True):
        os.dup2(output, number)
    os.environ.clear()
    os.environ.update(request["environment"] | _world(rank, request["num_ranks"], port))
    os.chdir(request["at"])
    sys.argv = request["program"]
    _compute_with(int(os.environ.get("OMP_NUM_THREADS", "1")))
    runpy.run_path(sys.argv[0], run_name="__main__")


def _world(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """Environment variables of a rank."""
    if num_ranks == 0:
        return {}
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    return {name: str(value) for name, value in {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items()}


def _compute_with(num_threads: int) -> None:
    import torch

    torch.set_num_threads(num_threads)


def _wait(pids: Sequence[int], connection: socket.socket) -> list[int]:
    """Wait for the ranks, and end them all when one has failed or who asked is gone; return their exit codes."""
    codes: dict[int, int] = {}
    deadline: float | None = None
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        for pid in pids:
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
        while len(codes) < len(pids):
            for key, _ in selector.select(None if deadline is None else max(0.0, deadline - time.monotonic())):
                selector.unregister(key.fileobj)
                if key.data is not None:
                    codes[key.data] = os.waitstatus_to_exitcode(os.waitpid(key.data, 0)[1])
                if (key.data is None or codes[key.data]) and deadline is None:
                    deadline = time.monotonic() + PATIENCE
                    _signal(set(pids) - codes.keys(), signal.SIGTERM)
            if deadline is not None and time.monotonic() >= deadline:
                _signal(set(pids) - codes.keys(), signal.SIGKILL)
    return [codes[pid] for pid in pids]


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def exit_code(codes: Sequence[int]) -> int:
    """The exit code of a job, as a shell says it: that of the first rank that failed; 128 and more for signals."""
    first = next((code for code in codes if code), 0)
    return first if first >= 0 else 128 - first


def main() -> int:
    """Serve or launch."""
    what, place, *more = sys.argv[1:]
    if what == "serve":
        serve(Path(place), more)
    return exit_code(ForkedJob(Path(place), int(more[0]), more[1:]).wait() or [1])


if __name__ == "__main__":
    sys.exit(main())
