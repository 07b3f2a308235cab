"""The command that measures runs, and what it prints are rates of the same thing."""

import json
import subprocess
import sys

import pytest

from tests.training_runs import ROOT, environment

PARTS = ("step", "ratio", "parity", "bytes", "save", "prepare", "load", "encode")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What one call printed, and what it wrote."""
    out = tmp_path_factory.mktemp("benchmark") / "benchmark.json"
    options = ["--quick", "--device", "cpu", "--microbatches", "2", "--out", str(out)]
    command = [sys.executable, "scripts/benchmark.py", *PARTS, *options, "trainer.parallelism=ddp"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, json.loads(out.read_text())


def test_the_way_of_the_data(measured):
    _, results = measured
    for name in ("prepare", "load latents", "load pictures", "encode", "save"):
        ratios = [value for key, value in results[name].items() if key.startswith("ratio") and isinstance(value, float)]
        assert ratios
        assert all(0 < ratio < 100 for ratio in ratios), (name, ratios)
    prepared = results["prepare"]
    assert abs(prepared["prepared_per_second"] / prepared["bare_per_second"] - prepared["ratio"]) < 1e-6, "one round"


def test_every_way_to_make_a_step(measured):
    printed, results = measured
    rows = {row["name"]: row for row in results["step"]["rows"]}
    options = ("low-precision norms", "channels last", "fused projections")
    assert list(rows) == ["bare, stock fp32", *(f"bare + {option}" for option in options), "loop", "trainer"]
    for row in rows.values():
        assert row["images_per_second"] == pytest.approx(2 / row["seconds"])
        assert row["tflops"] == pytest.approx(606_404_608 * row["images_per_second"] / 1e12, rel=1e-6)
        assert 0 < row["matmul_share"] < row["limit_share"] < 2
        assert row["name"] in printed
    found = results["step"]["parts"]["32 px, 2"]
    assert found["num_steps"] > 0
    assert found["parts"]["averages"] > 0
    within = [found["parts"][name] for name in ("data", "encode", "forward", "backward", "optimizer")]
    assert min(within) > 0
    assert sum(within) < found["whole"]


def test_options_beside_plain_fp32(measured):
    _, results = measured
    parity = results["parity"]
    assert parity["largest"]["bare, stock fp32"] == 0.0
    assert all(0 <= difference < 1e-3 for difference in parity["largest"].values())
    first, last = parity["first_and_last_loss"]
    assert last < first
    assert 0.2 < results["ratio"]["ratio"] < 5


def test_bytes_of_everything_but_products(measured):
    _, results = measured
    counted = results["bytes"]
    for kind in ("stock", "ours"):
        operations = counted[f"operations 32 {kind}"]
        assert counted[f"gigabytes 32 {kind}"] * 1e9 >= sum(operations.values()) > 1e6
        assert not {"mm", "bmm", "addmm", "convolution", "convolution_backward"} & set(operations)
    assert counted["ratio 32"] < 0.9
