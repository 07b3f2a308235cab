"""Each command answers --help at once: it has imported nothing that takes long."""

import re
import subprocess
import sys

import pytest

from tests.tools.training_runs import ROOT, environment

SCRIPTS = sorted(path.name for path in ROOT.glob("scripts/*.py") if path.name != "document.py")  # Without arguments.
COMMANDS = [["run.py"], ["evaluate.py"], *([f"scripts/{name}"] for name in SCRIPTS)]
MODULES = ("benchmarks", "benchmarks.leaderboard", "benchmarks.quarter_hour", "demo", "verification.verify_elastic")
COMMANDS += [["-m", module] for module in MODULES]
SLOW = re.compile(r"\| +(torch|composer|diffusers|transformers|streaming|duckdb|pyarrow|pandas|matplotlib|scipy)\b")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_nothing_slow_is_imported(command):
    program = [sys.executable, "-X", "importtime", *command, "--help"]
    found = subprocess.run(program, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.startswith("usage:")
    assert SLOW.search(found.stderr) is None
