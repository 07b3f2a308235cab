"""A row of the leaderboard from the command, and its table."""

import json
import sys

import pytest

from benchmarks import leaderboard
from benchmarks.leaderboard import COLUMNS, read_rows, write_tables
from tests.tools.training_runs import environment

pytestmark = pytest.mark.slow


def test_a_recipe_is_trained_for_the_same_cpu_seconds_and_scored(server, tmp_path, monkeypatch):
    """Its commands are forked."""
    rows, programs = tmp_path / "rows.jsonl", server.programs(tmp_path / "bin")
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    options = ["--quick", "--cpu-seconds", "2", "--seeds", "1", "--rows", str(rows), "--out", str(tmp_path / "out")]
    recipe = ["benchmarks/scores.yaml", "schedule.warmup=0.1dur", "--prepare", "benchmarks/wrong_captions.yaml"]
    command = ["leaderboard.py", *recipe, *options]
    monkeypatch.setattr(sys, "argv", command)
    leaderboard.main()
    [row] = read_rows(rows)
    assert row["steps"] > 0
    assert row["flops"] > 0
    assert row["cpu_seconds"] > 0
    assert row["parameters"] > 2e6
    for kind, number in zip(COLUMNS, (128, 192, 192), strict=True):
        assert row["scores"][kind]["number"] == number
        assert all(0 <= row["scores"][kind][name] <= 1 for name in COLUMNS[kind])
    rows.write_text("".join(json.dumps(row | {"seed": seed}) + "\n" for seed in (1, 2)))
    (tmp_path / "images").mkdir()
    page = tmp_path / "page.md"
    page.write_text("<!-- leaderboard -->\nold\n<!-- /leaderboard -->\n")
    write_tables(rows, page)
    assert "old" not in page.read_text()
    assert (tmp_path / "images" / "leaderboard.png").stat().st_size > 1000
    assert f"| scores | 2 | {row['steps']} |" in " ".join(page.read_text().split())
