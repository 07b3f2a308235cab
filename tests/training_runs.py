"""Start real training processes for tests, several runs in each to share the time that imports take.

As a program: `composer -n 2 tests/training_runs.py RUNS.json`, a list of [yaml, overrides].
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


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


def train_on(num_ranks: int, runs: list[tuple[str, list[str]]], folder: Path) -> str:
    """Train several configurations one after the other on so many ranks; they must all succeed."""
    plan = folder / f"runs-{num_ranks}-{len(list(folder.glob('runs-*')))}.json"
    plan.write_text(json.dumps(runs))
    done = launch(num_ranks, ["tests/training_runs.py", str(plan)])
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def main() -> None:
    """Train what the file lists."""
    import torch

    from diffusion.config.loading import load_config
    from diffusion.train import train

    torch.set_num_threads(1)
    for yaml, overrides in json.loads(Path(sys.argv[1]).read_text()):
        train(load_config(yaml, overrides))


if __name__ == "__main__":
    main()
