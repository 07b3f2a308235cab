"""The command that measures runs, and what it writes are rates of the same thing."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.rows import finished, read_rows
from tests.tools.training_runs import ROOT, environment

pytestmark = pytest.mark.slow

PARTS = ("step", "ratio", "parity", "bytes", "save", "prepare", "load", "encode")
CPU = ["--quick", "--device", "cpu"]


def start(out, *arguments):
    command = [sys.executable, "benchmarks/__main__.py", *arguments, *CPU, "--out", str(out)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Results by row of one call of all parts."""
    out = tmp_path_factory.mktemp("benchmark")
    process = start(out, *PARTS, "trainer.parallelism=ddp", "--microbatches", "2")
    printed, errors = process.communicate(timeout=1200)
    assert process.returncode == 0, errors[-3000:]
    lines = finished(read_rows(out / "rows.jsonl"))
    assert [line["error"] for line in lines.values() if "error" in line] == []
    assert all(f"{name}: " in printed for name in lines)
    return {name: line["result"] for name, line in lines.items()}


def test_the_way_of_the_data(measured):
    for name in ("prepare", "load latents", "load images", "encode", "save"):
        ratios = [
            value for key, value in measured[name].items() if key.startswith("ratio") and isinstance(value, float)
        ]
        assert ratios
        assert all(0 < ratio < 100 for ratio in ratios), (name, ratios)
    prepared = measured["prepare"]
    assert abs(prepared["prepared_per_second"] / prepared["bare_per_second"] - prepared["ratio"]) < 1e-6, "one round"


def test_every_way_to_make_a_step(measured):
    options = ("fp32 stock", "+ low-precision norms", "+ channels last", "+ fused projections", "loop")
    names = [*(f"step/32/2/{option}" for option in options), "trainer/32/2"]
    assert names == [name for name in measured if name.startswith(("step/", "trainer/"))]
    for name in names:
        found = measured[name]
        assert found["images_per_second"] == pytest.approx(2 / found["seconds"])
        assert found["tflops"] == pytest.approx(606_404_608 * found["images_per_second"] / 1e12, rel=1e-6)
    found = measured["parts/32/2"]
    assert found["num_steps"] > 0
    assert found["parts"]["averages"] > 0
    within = [found["parts"][name] for name in ("data", "encode", "forward", "backward", "optimizer")]
    assert min(within) > 0
    assert sum(within) < found["whole"]


def test_options_beside_plain_fp32(measured):
    losses = {name: found["losses"] for name, found in measured.items() if name.startswith("losses/")}
    reference = losses["losses/32/2/fp32 stock"]
    assert len(losses) == 4
    for found in losses.values():
        assert found == pytest.approx(reference, rel=1e-3)
    assert reference[-1] < reference[0]
    assert 0.2 < measured["ratio/32/2"]["ratio"] < 5


def test_bytes_of_everything_but_products(measured):
    counted = measured["bytes/32"]
    for kind in ("stock", "ours"):
        operations = counted[f"operations 32 {kind}"]
        assert counted[f"gigabytes 32 {kind}"] * 1e9 >= sum(operations.values()) > 1e6
        assert not {"mm", "bmm", "addmm", "convolution", "convolution_backward"} & set(operations)
    assert counted["ratio 32"] < 0.9


def test_the_plan_is_killed_and_continues(tmp_path):
    path = tmp_path / "rows.jsonl"
    process = start(tmp_path, "plan")
    while len(finished(read_rows(path))) < 5:
        assert process.poll() is None, process.communicate()[1][-3000:]
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    before = read_rows(path)
    process = start(tmp_path, "plan")
    _, errors = process.communicate(timeout=1200)
    assert process.returncode == 0, errors[-3000:]
    lines = read_rows(path)
    assert lines[: len(before)] == before
    names = [line["name"] for line in lines if "started" not in line]
    assert len(names) == len(set(names)), "a row was measured twice"
    found = finished(lines)
    assert {line["name"] for line in lines} == set(found), "a row was lost"
    assert [(name, line["error"]) for name, line in found.items() if "error" in line] == []
    kinds = "resumption rates precision normals synchronisations norm attention step trainer parts losses stall samples"
    assert {line["kind"] for line in found.values()} == set(kinds.split())
    results = {name: line["result"] for name, line in found.items()}
    assert results["resumption"]["different_when_resumed"] == results["resumption"]["different_when_repeated"] == 0
    assert results["precision/fp32, eager"]["ours_gradient_error"] < 1e-5
    assert all(results[f"normals/{number}"]["largest_difference"] == 0 for number in (1, 5, 64))
    assert len(results["stall"]["stall_seconds"]) == 2
    assert results["samples"]["is_finite"]
    assert len(results["step/64/4/fp32 stock"]["kernels"]) == 30
    divided, whole = (results[f"losses/32/4/ours in microbatches of {size}"]["losses"] for size in (1, 4))
    assert divided == pytest.approx(whole, rel=1e-5)
    assert json.loads(path.read_text().splitlines()[-1])["machine"]["torch"]
