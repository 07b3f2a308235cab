"""The proof in short: real processes, killed and resumed at another world size."""

import sys

import pytest

from tests.tools.training_runs import ROOT, SMALL_UNET
from verification.verify_elastic import main

pytestmark = pytest.mark.slow


@pytest.mark.world_size(2)
def test_the_short_proof_holds(server, tmp_path, monkeypatch, capsys):
    recipe = [str(ROOT / "yamls/tiny/phase1.yaml"), SMALL_UNET]
    monkeypatch.setattr(sys, "argv", ["verify_elastic", *recipe, "--short", "--steps", "18", "--out", str(tmp_path)])
    monkeypatch.chdir(ROOT)
    main(server.launcher)
    assert "3 runs: everything drawn is equal in every step" in capsys.readouterr().out
    table = (tmp_path / "table.txt").read_text().splitlines()
    assert len(table) == 4
    assert all(" equal " in line for line in table[1:])
    assert table[2].count("step ") == 1
