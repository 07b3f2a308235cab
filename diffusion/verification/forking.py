"""A launcher whose ranks are forked from a process that has imported everything: a start takes a second or two.

`python -m diffusion.verification.forking serve SOCKET` imports and waits; `... launch SOCKET NUM_RANKS PROGRAM ...`
starts ranks there and ends with their exit code, as `composer -n NUM_RANKS PROGRAM ...` would: when one rank fails, or
the launcher is killed, the others get SIGTERM, and after a while SIGKILL.
"""

import json
import os
import runpy
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

PATIENCE = 30.0
"""Seconds that ranks have after SIGTERM."""

_MAX_REQUEST = 2**20


def serve(place: Path) -> NoReturn:
    """Import what training needs, and launch what is asked for, until the process is killed."""
    import matplotlib.backends.backend_agg
    from composer.utils.collect_env import get_composer_env_dict

    import diffusion.train

    assert matplotlib.backends.backend_agg
    assert diffusion.train
    get_composer_env_dict()  # Asks for the CPU's name, which takes a second and is remembered.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody waits for the launchers.
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place))
        server.listen()
        while True:
            connection, _ = server.accept()
            if os.fork() == 0:
                server.close()
                _serve_one(connection)
            connection.close()


def launch(place: Path, num_ranks: int, program: Sequence[str]) -> int:
    """Have ranks started that write to this process's output; wait for them and return their exit code."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(place))
        request = {
            "num_ranks": num_ranks,
            "program": list(program),
            "environment": dict(os.environ),
            "at": str(Path.cwd()),
        }
        socket.send_fds(connection, [json.dumps(request).encode()], [1, 2])
        answer = connection.recv(16)
    return int(answer or b"1")


def _serve_one(connection: socket.socket) -> NoReturn:
    """Start the ranks of one request and answer with their exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    content, outputs, _, _ = socket.recv_fds(connection, _MAX_REQUEST, 2)
    request = json.loads(content)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(request["num_ranks"]):
        pid = os.fork()
        if pid == 0:
            connection.close()
            _run(request, rank, port, outputs)
        ranks.append(pid)
    code = _wait(ranks, connection)
    try:
        connection.send(str(code).encode())
    except ConnectionError:
        code = 1
    os._exit(code)


def _run(request: dict[str, Any], rank: int, port: int, outputs: Sequence[int]) -> NoReturn:
    """Be a rank."""
    code = 1
    try:
        for number, output in zip((1, 2), outputs, strict=True):
            os.dup2(output, number)
        size = request["num_ranks"]
        world = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ.clear()
        os.environ.update(request["environment"] | places | {name: str(value) for name, value in world.items()})
        os.chdir(request["at"])
        sys.argv = request["program"]
        _compute_with(int(os.environ.get("OMP_NUM_THREADS", "1")))
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    finally:
        failure = sys.exception()
        if isinstance(failure, SystemExit):
            code = failure.code if isinstance(failure.code, int) else int(failure.code is not None)
        elif failure is not None:
            traceback.print_exception(failure)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _compute_with(num_threads: int) -> None:
    import torch

    torch.set_num_threads(num_threads)


def _wait(ranks: Sequence[int], connection: socket.socket) -> int:
    """Wait for the ranks, and end them all when one has failed or the launcher is gone."""
    codes: dict[int, int] = {}
    deadline: float | None = None
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        for pid in ranks:
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
        while len(codes) < len(ranks):
            for key, _ in selector.select(None if deadline is None else max(0.0, deadline - time.monotonic())):
                selector.unregister(key.fileobj)
                if key.data is not None:
                    codes[key.data] = os.waitstatus_to_exitcode(os.waitpid(key.data, 0)[1])
                if (key.data is None or codes[key.data]) and deadline is None:
                    deadline = time.monotonic() + PATIENCE
                    _signal(set(ranks) - codes.keys(), signal.SIGTERM)
            if deadline is not None and time.monotonic() >= deadline:
                _signal(set(ranks) - codes.keys(), signal.SIGKILL)
    first = next((codes[pid] for pid in ranks if codes[pid]), 0)
    return first if first >= 0 else 128 - first


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def main() -> int:
    """Serve or launch."""
    what, place, *more = sys.argv[1:]
    if what == "serve":
        serve(Path(place))
    return launch(Path(place), int(more[0]), more[1:])


if __name__ == "__main__":
    sys.exit(main())
