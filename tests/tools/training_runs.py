"""Start real processes for tests: `TrainingServer` forks ranks (the fixture `server`).

As a program, this file trains.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.tools.forking import ForkedJob, ForkingServer

ROOT = Path(__file__).resolve().parent.parent.parent
BIN = Path(sys.executable).parent

LIMIT = 1500.0
"""Seconds after which a job that should have ended is a failure."""

SMALL_UNET = (
    "model.network={block_out_channels: [16], down_block_types: [DownBlock2D], up_block_types: [UpBlock2D], "
    "attention_head_dim: [2], norm_num_groups: 4}"
)
"""The U-Net of toy.yaml as an override. It has attention to the caption between down and up."""

SMALL_TRANSFORMER = "model.network={hidden_size: 32, num_heads: 2, depth: 4, axes_dim: [8, 8]}"
"""A small transformer."""

Run = tuple[str, list[str]]
"""A YAML file and overrides."""

_MODULES = [
    "boto3.s3.transfer",
    "diffusers.pipelines.prx.pipeline_prx",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion",
    "diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl",
    "diffusion.cli",
    "diffusion.evaluation.watch",
    "diffusion.planning.plan",
    "diffusion.preparation.encoding.encode",
    "diffusion.preparation.prepare",
    "diffusion.preparation.report",
    "duckdb",
    "peft",
    "streaming.base.format.mds.encodings",
    "torch._dynamo",
    "torch.distributed.run",
    "torch.utils.tensorboard.writer",
]
"""Imports of the server beside what training needs."""

OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_PORT")

FORKING_PROGRAM = """#!/bin/sh
case "$1" in
  *.py | -m) exec {launch} "$@" ;;
  *) exec {others} "$@" ;;
esac
"""


def environment() -> dict[str, str]:
    """For a child: offline, one thread per rank, the repository importable, and nothing of a launcher.

    Composer writes what a launcher says into the environment of a process that has none, such as this one.
    """
    return {
        **{name: value for name, value in os.environ.items() if name not in OF_A_LAUNCHER},
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "MASTER_ADDR": "127.0.0.1",
    }


@dataclass(frozen=True)
class Ended:
    """How a job ended: the exit code of each rank, negative for a signal, and what all ranks printed."""

    codes: list[int]
    output: str


class Job:
    """A job of the server, with a file that takes the ranks' output."""

    def __init__(self, job: ForkedJob, log: Path) -> None:
        self._job, self._log = job, log
        self.pids = job.pids

    @property
    def output(self) -> str:
        """Of all ranks, so far."""
        return self._log.read_text(errors="replace")

    def poll(self) -> list[int] | None:
        """Exit codes of the ranks, when they have ended."""
        return self._job.wait(0)

    def finish(self, timeout: float = LIMIT) -> Ended:
        """Wait until the ranks have ended by themselves; it is a failure if they do not."""
        codes = self._job.wait(timeout)
        if codes is None:
            self._job.kill()
            raise AssertionError(f"still running after {timeout} s:\n{self.output[-6000:]}")
        return Ended(codes, self.output)

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Wait for a condition, which must hold before the ranks have ended."""
        deadline = time.monotonic() + LIMIT
        while not ready():
            assert self._job.wait(0.01) is None or ready(), f"they have ended:\n{self.output[-6000:]}"
            assert time.monotonic() < deadline, self.output[-6000:]

    def kill(self) -> None:
        """End the ranks, and what they have started, with SIGKILL."""
        self._job.kill()
        self._job.wait()


class TrainingServer:
    """A process that has imported everything and forks the ranks of jobs, with their output in files of a folder."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self._folder = folder
        self._count = 0
        self._server = ForkingServer(_MODULES, environment(), python)
        self.launcher, self.address = self._server.launcher, self._server.address

    def start(self, num_ranks: int, program: Sequence[str], **variables: str) -> Job:
        """Start a program, as `ForkedJob` names it, on so many ranks; with 0, as one process without a launcher."""
        self._count += 1
        log = self._folder / f"job-{self._count}.txt"
        with log.open("ab") as output:
            options = {"environment": environment() | variables, "output": output.fileno()}
            return Job(self._server.start(num_ranks, [str(word) for word in program], **options), log)

    def start_training(self, num_ranks: int, runs: Sequence[Run], **variables: str) -> Job:
        """Start ranks that train the configurations one after the other."""
        return self.start(num_ranks, ["tests/tools/training_runs.py", json.dumps(runs)], **variables)

    def run(self, num_ranks: int, runs: Sequence[Run]) -> Ended:
        """Train the configurations one after the other."""
        return self.start_training(num_ranks, runs).finish()

    def train(self, num_ranks: int, runs: Sequence[Run]) -> Ended:
        """Like `run`, and all must succeed."""
        return _successful(self.run(num_ranks, runs))

    def command(self, num_ranks: int, program: Sequence[str]) -> Ended:
        """Run a Python program with arguments on so many ranks; it must succeed."""
        return _successful(self.start(num_ranks, program).finish())

    def programs(self, folder: Path) -> Path:
        """A folder with a `python` that has programs forked here, and a `composer` that does so for one rank."""
        self._server.await_start()
        folder.mkdir()
        launch = " ".join(self._server.launcher(0)[:-1])
        for name, num_ranks, others in (("python", 0, sys.executable), ("composer", 1, str(BIN / "composer"))):
            program = folder / name
            program.write_text(FORKING_PROGRAM.format(launch=f"{launch} {num_ranks}", others=others))
            program.chmod(0o755)
        return folder

    def close(self) -> None:
        """End the process."""
        self._server.close()


def _successful(job: Ended) -> Ended:
    assert not any(job.codes), job.output[-6000:]
    return job


def train_runs(runs: Sequence[Run]) -> int:
    """Train configurations one after the other as a rank; return the exit code."""
    import logging

    from diffusion.config.loading import load_config
    from diffusion.launch import run_command
    from diffusion.train import train

    logging.basicConfig(level=logging.WARNING, force=True)

    def main() -> None:
        for yaml, overrides in runs:
            train(load_config(yaml, overrides))

    return run_command(main)


if __name__ == "__main__":
    sys.exit(train_runs(json.loads(sys.argv[1])))
