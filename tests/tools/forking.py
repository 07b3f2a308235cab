"""Ranks forked from a process that has imported everything: a start takes a second or two instead of ten.

`ForkingServer` starts such a process, `ForkedJob` has it fork the ranks of a program. As a launcher for supervisors:
`python -m tests.tools.forking launch SOCKET NUM_RANKS PROGRAM ...` ends with the exit code of the ranks, as
`composer -n NUM_RANKS PROGRAM ...` would. When one rank fails, or the client is gone, the others get SIGTERM, and
after a while SIGKILL.
"""

import collections
import contextlib
import errno
import functools
import gc
import importlib
import json
import os
import runpy
import secrets
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.tools.waiting import wait_until

TERMINATION_SECONDS = 300.0
"""Between SIGTERM and SIGKILL: ranks may save and finish their loggers, on a machine that is busy."""

START_SECONDS = 300.0

_PORTS = range(10_000, 29_000)
"""Below those that Linux gives to clients (32768 and up), and below torchrun's own."""

_reservations: collections.deque[socket.socket] = collections.deque(maxlen=64)


def free_port() -> int:
    """A TCP port of 127.0.0.1 on which nobody listens.

    It is not given again while this process lives and draws fewer than 64 others, as the server may listen much later:
    an abstract socket reserves it.
    """
    while True:
        port = _PORTS[secrets.randbelow(len(_PORTS))]
        reservation = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                reservation.bind(f"\0diffusion-port-{port}")
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                reservation.close()
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
        _reservations.append(reservation)
        return port


class ForkedJob:
    """Ranks of one program, each in a session of its own.

    Args:
        address: Socket of the server.
        num_ranks: World size; 0 for one process without the variables of a launcher.
        program: A Python file, or `-c` or `-m` and what it names, and arguments.
        environment: Of the ranks, to which that of a launcher is added.
        output: File descriptor for what they print; by default they share this process's outputs.
    """

    def __init__(
        self,
        address: Path,
        num_ranks: int,
        program: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        output: int | None = None,
    ) -> None:
        variables = dict(os.environ if environment is None else environment)
        request = {"num_ranks": num_ranks, "program": list(program), "environment": variables, "cwd": str(Path.cwd())}
        outputs = [1, 2] if output is None else [output, output]
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(str(address))
        content = f"{json.dumps(request)}\n".encode()
        self._connection.sendall(content[socket.send_fds(self._connection, [content], outputs) :])
        self._answers = self._connection.makefile("r")
        self._codes: list[int] | None = None
        self.pids: list[int] = json.loads(self._answers.readline())

    def wait(self, timeout: float | None = None) -> list[int] | None:
        """Wait for the ranks; their exit codes, negative for signals, or None after `timeout` seconds."""
        if self._codes is None:
            if timeout is not None and not select.select([self._connection], [], [], timeout)[0]:
                return None
            self._codes = json.loads(self._answers.readline() or "null") or [1] * len(self.pids)
            self._connection.close()
        return self._codes

    def kill(self) -> None:
        """End the ranks, and what they have started in their sessions, with SIGKILL."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


class ForkingServer:
    """A process that has imported what training needs.

    Args:
        modules: Further imports.
        environment: Of that process.
        python: Its interpreter.
    """

    def __init__(
        self,
        modules: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="forking-"))
        self.address = self._folder / "socket"
        command = [python, "-m", "tests.tools.forking", "serve", str(self.address), *modules]
        self._process = subprocess.Popen(command, env=environment, start_new_session=True)

    def start(self, num_ranks: int, program: Sequence[str], **options: Any) -> ForkedJob:
        """Start a job when everything is imported; `options` are those of `ForkedJob`."""
        self.await_start()
        return ForkedJob(self.address, num_ranks, program, **options)

    def await_start(self) -> None:
        """Wait until everything is imported."""
        what = "the process that forks ranks does not start"
        wait_until(self.address.exists, what, START_SECONDS, self._process)

    def launcher(self, num_ranks: int) -> list[str]:
        """The command that starts a program on so many ranks; the program and its arguments follow it."""
        self.await_start()
        return launcher(self.address, num_ranks)

    def close(self) -> None:
        """End the process. Jobs continue until their clients are gone."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def launcher(address: Path, num_ranks: int) -> list[str]:
    """The command by which the server at an address starts a program; the program and its arguments follow it."""
    return [sys.executable, "-m", "tests.tools.forking", "launch", str(address), str(num_ranks)]


def serve(address: Path, modules: Sequence[str]) -> NoReturn:
    """Import what training needs, and start requested jobs until the process is killed."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # Ranks could not use a GPU that this process has initialised.
    for module in ("matplotlib.backends.backend_agg", "diffusion.train", *modules):
        importlib.import_module(module)
    collect_env = importlib.import_module("composer.utils.collect_env")
    collect_env.get_composer_commit_hash = functools.cache(collect_env.get_composer_commit_hash)
    collect_env.get_composer_commit_hash()  # Is asked for with each checkpoint.
    from diffusion.config.loading import load_config
    from diffusion.planning.memory import parameter_counts

    parameter_counts(load_config(str(Path(__file__).with_name("toy.yaml"))))  # Each start of the toy asks for them.
    gc.freeze()  # Collections in ranks skip what is imported, and do not copy its pages.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The processes of jobs leave no zombies.
    with socket.socket(socket.AF_UNIX) as server:
        unfinished = address.with_suffix(".partial")
        server.bind(str(unfinished))
        server.listen()
        unfinished.rename(address)
        while True:
            connection, _ = server.accept()
            if os.fork() == 0:
                server.close()
                _supervise(connection)
            connection.close()


def _supervise(connection: socket.socket) -> NoReturn:
    """Start the ranks of a request, answer with their process IDs, and with their exit codes when they have ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    content, outputs, _, _ = socket.recv_fds(connection, 2**16, 2)
    while not content.endswith(b"\n"):
        content += connection.recv(2**16) or b"\n"
    request, port = json.loads(content), free_port()
    pids = [_fork(request, rank, port, connection, outputs) for rank in range(max(request["num_ranks"], 1))]
    with contextlib.suppress(ConnectionError):
        connection.send(f"{json.dumps(pids)}\n".encode())
        connection.send(f"{json.dumps(_wait(pids, connection))}\n".encode())
    os._exit(0)


def _fork(request: dict[str, Any], rank: int, port: int, connection: socket.socket, outputs: Sequence[int]) -> int:
    """Return the process ID of a rank when it has a session of its own."""
    ready, begun = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(ready)
        os.close(begun)
        connection.close()
        end_as_program(lambda: _run(request, rank, port, outputs))
    os.close(begun)
    os.read(ready, 1)  # Ends when the rank has closed its end.
    os.close(ready)
    return pid


def end_as_program(main: Callable[[], None]) -> NoReturn:
    """Run a function and end this forked process as a program ends, without the parent's exit handlers."""
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(request: dict[str, Any], rank: int, port: int, outputs: Sequence[int]) -> None:
    """Be a rank."""
    import torch

    for number, output in zip((1, 2), outputs, strict=True):
        os.dup2(output, number)
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    size, world = request["num_ranks"], {}
    if size:
        world = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.clear()
    os.environ.update(request["environment"] | {name: str(value) for name, value in world.items()})
    os.chdir(request["cwd"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    run_as_main(request["program"])


def run_as_main(words: Sequence[str]) -> None:
    """Run what Python would run with these arguments: a file, `-c` or `-m`, with arguments of its own."""
    kind, *rest = words
    sys.argv = [*rest] if kind in ("-c", "-m") else [*words]
    if kind == "-c":
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(kind, run_name="__main__")


def _wait(pids: Sequence[int], connection: socket.socket) -> list[int]:
    """Wait for the ranks, and end them all when one has failed or the client is gone; return their exit codes."""
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
                    deadline = time.monotonic() + TERMINATION_SECONDS
                    _signal(set(pids) - codes.keys(), signal.SIGTERM)
            if deadline is not None and time.monotonic() >= deadline:
                _signal(set(pids) - codes.keys(), signal.SIGKILL)
    return [codes[pid] for pid in pids]


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def main() -> int:
    """Serve or launch; the exit code of a job is that of the first rank that failed, 128 and more for signals."""
    command, address, *rest = sys.argv[1:]
    if command == "serve":
        serve(Path(address), rest)
    codes = ForkedJob(Path(address), int(rest[0]), rest[1:]).wait() or [1]
    first = next((code for code in codes if code), 0)
    return first if first >= 0 else 128 - first


if __name__ == "__main__":
    sys.exit(main())
