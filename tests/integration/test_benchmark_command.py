"""The command that measures runs, and what it writes are rates of the same thing."""

import json
import os
import signal
import subprocess
import sys
import time

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


def test_the_plan_is_killed_and_continues(tmp_path):
    """All rows, but of the Trainer's at several sizes only one."""
    path = tmp_path / "rows.jsonl"
    plan = ["plan", "--only", "[!t]*", "trainer/32/4"]
    process = start(tmp_path, *plan)
    while len(read_rows(path)) < 5:
        assert process.poll() is None, process.communicate()[1][-3000:]
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=600)
    before = path.read_text()
    process = start(tmp_path, *plan)
    _, errors = process.communicate(timeout=1200)
    assert process.returncode == 0, errors[-3000:]
    assert path.read_text().startswith(before[: before.rindex("\n")])
    found = read_rows(path)
    assert len(path.read_text().splitlines()) == len(found), "a row was measured twice"
    assert [(name, line["error"]) for name, line in found.items() if "error" in line] == []
    kinds = "resumption rates precision normals synchronisations attention step trainer parts losses stall samples"
    assert {line["kind"] for line in found.values()} == set(kinds.split())
    results = {name: line["result"] for name, line in found.items()}
    assert results["resumption"]["different_when_resumed"] == results["resumption"]["different_when_repeated"] == 0
    assert results["precision/fp32, eager"]["ours_gradient_error"] < 1e-5
    assert all(results[f"normals/{number}"]["largest_difference"] == 0 for number in (1, 5, 64))
    assert len(results["stall"]["stall_seconds"]) == 2
    assert results["samples"]["is_finite"]
    assert len(results["step/64/4/fp32 stock"]["kernels"]) == 30
    stock, divided, whole = (
        results[f"losses/32/4/{name}"]["losses"]
        for name in ("fp32 stock", "ours in microbatches of 1", "ours in microbatches of 4")
    )
    assert stock == pytest.approx(whole, rel=1e-5)
    assert divided == pytest.approx(whole, rel=1e-5)
    assert json.loads(path.read_text().splitlines()[-1])["machine"]["torch"]
