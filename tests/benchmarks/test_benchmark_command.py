"""The command that measures runs, and what it prints are rates of the same thing."""

import json
import subprocess
import sys

from tests.training_runs import ROOT, environment


def test_every_part_is_measured(tmp_path):
    out = tmp_path / "benchmark.json"
    command = [sys.executable, "scripts/benchmark.py", "prepare", "load", "encode", "--quick", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(out.read_text())
    for name in ("prepare", "load latents", "load pictures", "encode"):
        ratios = [value for key, value in results[name].items() if key.startswith("ratio") and isinstance(value, float)]
        assert ratios
        assert all(0 < ratio < 100 for ratio in ratios), (name, ratios)
    measured = results["prepare"]
    assert abs(measured["prepared_per_second"] / measured["bare_per_second"] - measured["ratio"]) < 1e-6, "one round"
