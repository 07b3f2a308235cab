"""Start real training processes for tests, without paying for imports at each start.

`TrainingServer` imports everything once and forks ranks from there: a start takes a second instead of ten. Tests have
it as the fixture `server`, one for all. `launch` is for tests of launchers.
"""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent

Run = tuple[str, list[str]]
"""A YAML file and overrides."""


def environment() -> dict[str, str]:
    """For a child: offline, one thread per rank, the repository importable."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "MASTER_ADDR": "127.0.0.1",
    }


def launch(num_ranks: int, program: list[str], timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a program on so many ranks with the composer launcher, and return what it printed."""
    command = [str(BIN / "composer"), "-n", str(num_ranks), *program]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"still running after {timeout} s:\n{output[-4000:]}") from None
    return subprocess.CompletedProcess(command, process.returncode, output)


@dataclass(frozen=True)
class Job:
    """How a job of the server ended."""

    codes: list[int]
    """Exit code of each rank; negative for a signal."""

    output: str
    """What all ranks printed."""


class TrainingServer:
    """A process that has imported everything and forks the ranks of one job at a time.

    Like the launchers it ends all ranks when one has failed: SIGTERM, and after `PATIENCE` seconds SIGKILL.

    Args:
        folder: where the ranks' output goes.
    """

    PATIENCE = 20.0

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = 0
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "training_runs.py")],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def start(self, num_ranks: int, runs: list[Run]) -> list[int]:
        """Start the ranks, which train the configurations one after the other; return their process ids."""
        return self._start(num_ranks, {"runs": runs})

    def _start(self, num_ranks: int, work: dict[str, Any]) -> list[int]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._count += 1
        self._log = self.folder / f"job-{self._count}"
        self._log.mkdir(parents=True)
        assert self._process.stdin is not None
        request = {"num_ranks": num_ranks, "port": port, "log": str(self._log), "environment": environment(), **work}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def finish(self) -> Job:
        """Wait for the ranks that were started."""
        codes = self._answer()
        logs = [(self._log / f"rank-{rank}.txt").read_text(errors="replace") for rank in range(len(codes))]
        return Job(codes, "\n".join(logs))

    def run(self, num_ranks: int, runs: list[Run]) -> Job:
        """Start the ranks and wait for them."""
        self.start(num_ranks, runs)
        return self.finish()

    def train(self, num_ranks: int, runs: list[Run]) -> Job:
        """Like `run`, and all must succeed."""
        job = self.run(num_ranks, runs)
        assert job.codes == [0] * num_ranks, job.output[-6000:]
        return job

    def command(self, num_ranks: int, command: list[str]) -> Job:
        """Run a Python program with arguments, as launchers do, on so many ranks; it must succeed."""
        self._start(num_ranks, {"command": command})
        job = self.finish()
        assert job.codes == [0] * num_ranks, job.output[-6000:]
        return job

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _answer(self) -> list[int]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the training server has ended"
        return json.loads(line)


def preload() -> None:
    """Import what training needs."""
    import matplotlib.backends.backend_agg
    from composer.utils.collect_env import get_composer_env_dict

    import diffusion.cli
    import diffusion.evaluation.evaluate
    import diffusion.train

    assert matplotlib.backends.backend_agg
    assert diffusion.cli and diffusion.evaluation.evaluate and diffusion.train
    get_composer_env_dict()  # Asks for the CPU's name, which takes a second and is remembered.


def serve() -> None:
    """Answer requests on stdin: the process ids of a job's ranks, and when they have ended, their exit codes."""
    preload()
    for line in sys.stdin:
        request = json.loads(line)
        children = [_fork(request, rank) for rank in range(request["num_ranks"])]
        _say(children)
        _say(_wait(children))


def _say(answer: list[int]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _fork(request: dict[str, Any], rank: int) -> int:
    if child := os.fork():
        return child
    code = 1
    try:
        log = os.open(f"{request['log']}/rank-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "MASTER_PORT": request["port"]}
        sizes = {"WORLD_SIZE": request["num_ranks"], "LOCAL_WORLD_SIZE": request["num_ranks"]}
        os.environ.clear()
        os.environ.update(request["environment"])
        os.environ.update({name: str(value) for name, value in {**numbers, **sizes}.items()})
        code = train_runs(request["runs"]) if "runs" in request else _run_program(request["command"])
    finally:
        if (failure := sys.exception()) is not None:
            traceback.print_exception(failure)
            code = failure.code if isinstance(failure, SystemExit) and isinstance(failure.code, int) else 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def train_runs(runs: list[Run]) -> int:
    """Train configurations one after the other as a rank; return the exit code."""
    import logging

    import torch

    from diffusion.config.loading import load_config
    from diffusion.launch import run_command
    from diffusion.train import train

    logging.basicConfig(level=logging.WARNING, force=True)
    torch.set_num_threads(1)

    def main() -> None:
        for yaml, overrides in runs:
            train(load_config(yaml, overrides))

    return run_command(main)


def _run_program(command: list[str]) -> int:
    import torch

    torch.set_num_threads(1)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")
    return 0


def _wait(children: list[int]) -> list[int]:
    codes: dict[int, int] = {}
    deadline = None
    while len(codes) < len(children):
        for child in _ended(children, codes):
            if codes[child] and deadline is None:
                deadline = time.monotonic() + TrainingServer.PATIENCE
                _signal(children, codes, signal.SIGTERM)
        if deadline is not None and time.monotonic() > deadline:
            _signal(children, codes, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[child] for child in children]


def _ended(children: list[int], codes: dict[int, int]) -> Iterator[int]:
    for child in children:
        if child not in codes:
            number, status = os.waitpid(child, os.WNOHANG)
            if number:
                codes[child] = os.waitstatus_to_exitcode(status)
                yield child


def _signal(children: list[int], codes: dict[int, int], number: int) -> None:
    for child in children:
        if child not in codes:
            os.kill(child, number)


if __name__ == "__main__":
    serve()
