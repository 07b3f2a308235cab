"""The proof in short, as a command: real processes, killed and resumed at another world size."""

import subprocess
import sys

import pytest

from tests.tools.training_runs import ROOT, SMALL_UNET, environment

RECIPE = ("yamls/tiny/phase1.yaml", SMALL_UNET)


@pytest.mark.world_size(2)
def test_the_short_proof_holds(tmp_path):
    options = ("--short", "--steps", "18", "--out", str(tmp_path / "out"))
    command = [sys.executable, "-m", "verification.verify_elastic", *RECIPE, *options]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "3 runs: everything drawn is equal in every step" in done.stdout
    table = (tmp_path / "out" / "table.txt").read_text().splitlines()
    assert len(table) == 4
    assert all(" equal " in line for line in table[1:])
    assert table[2].count("step ") == 1
    assert (tmp_path / "out" / "losses.png").stat().st_size > 0
