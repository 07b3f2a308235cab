"""A row of the leaderboard from the command, and its table."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.leaderboard import COLUMNS, write_tables

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


def test_a_recipe_is_trained_for_the_same_cpu_seconds_and_scored(tmp_path):
    rows = tmp_path / "rows.jsonl"
    options = ["--quick", "--cpu-seconds", "1", "--rows", str(rows), "--out", str(tmp_path / "out")]
    command = [sys.executable, "benchmarks/leaderboard.py", "yamls/tiny/transformer.yaml", "schedule.warmup=0.1dur"]
    for seed in ("1", "2"):
        subprocess.run([*command, *options, "--seeds", seed], cwd=ROOT, check=True)
    first, second = (json.loads(line) for line in rows.read_text().splitlines())
    assert (first["seed"], second["seed"]) == (1, 2)
    assert first["steps"] == second["steps"] > 0
    assert first["flops"] == second["flops"] > 0
    assert first["cpu_seconds"] > 0
    assert first["parameters"] > 2e6
    for kind, number in zip(COLUMNS, (128, 192, 192), strict=True):
        assert first["scores"][kind]["number"] == number
        assert all(0 <= first["scores"][kind][name] <= 1 for name in COLUMNS[kind])
    page = tmp_path / "page.md"
    page.write_text("<!-- leaderboard -->\nold\n<!-- /leaderboard -->\n")
    write_tables(rows, page)
    assert "old" not in page.read_text()
    assert f"| transformer | 2 | {first['steps']} |" in " ".join(page.read_text().split())
