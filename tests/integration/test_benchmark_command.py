"""The command that measures runs, and what it writes are rates of the same thing."""

import subprocess
import sys

import pytest

from benchmarks.rows import read_rows
from tests.tools.training_runs import ROOT, environment

pytestmark = pytest.mark.slow

PARTS = ("step", "open", "prepare")
CPU = ["--quick", "--device", "cpu"]


def start(out, *arguments):
    command = [sys.executable, "-m", "benchmarks", *arguments, *CPU, "--out", str(out)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_parts(tmp_path):
    process = start(tmp_path, *PARTS, "trainer.parallelism=ddp", "--microbatches", "2")
    printed, errors = process.communicate(timeout=1200)
    assert process.returncode == 0, errors[-3000:]
    lines = read_rows(tmp_path / "rows.jsonl")
    assert [line["error"] for line in lines.values() if "error" in line] == []
    assert all(f"{name}: " in printed for name in lines)
    measured = {name: line["result"] for name, line in lines.items()}
    ratios = [value for key, value in measured["prepare"].items() if key.startswith("ratio")]
    assert ratios
    assert all(0 < ratio < 100 for ratio in ratios), ratios
    assert measured["open/40"]["requests"] > measured["open/1"]["requests"] > 1
    speed = measured["trainer/32/2"]
    assert speed["images_per_second"] == pytest.approx(2 / speed["seconds"])
    assert speed["tflops"] == pytest.approx(606_404_608 * speed["images_per_second"] / 1e12, rel=1e-6)
    parts = measured["parts/32/2"]
    assert parts["num_steps"] == 2
    assert all(seconds > 0 for seconds in parts["parts"].values())
