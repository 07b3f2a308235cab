"""Checkpoints of a watched run, in a folder and in an object store; the ledger."""

import shutil
from pathlib import Path

import pytest
import torch

from diffusion import storage
from diffusion.errors import DataError
from diffusion.evaluation.watch import Entry, Ledger, LocalRun, RemoteRun, open_run
from diffusion.files import write_json
from tests.tools.s3_server import s3_process, s3_server

__all__ = ["s3_process", "s3_server"]


def write_checkpoint(path: Path) -> Path:
    """A file that is whole, as a run with DDP writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"state": {}}, path)
    return path


def test_a_held_checkpoint_stays_when_the_run_removes_its_own(tmp_path):
    run = LocalRun(tmp_path / "run")
    for step in (10, 2):
        write_checkpoint(tmp_path / "run" / "checkpoints" / f"ep0-ba{step}.pt")
    half = tmp_path / "run" / "checkpoints" / "ep0-ba12"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half")
    assert run.list_checkpoints() == ["ep0-ba2.pt", "ep0-ba10.pt"]
    held = run.copy("ep0-ba2.pt", tmp_path / "held")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert held is not None
    assert torch.load(held, weights_only=True) == {"state": {}}
    assert run.copy("ep0-ba10.pt", tmp_path / "held") is None
    assert run.finished_step() is None
    write_json(tmp_path / "run" / "finished.json", {"step": 10})
    assert run.finished_step() == 10


@pytest.mark.parametrize("named", ["run", "run/checkpoints"])
def test_a_run_is_named_by_its_folder_or_that_of_its_checkpoints(tmp_path, named):
    write_checkpoint(tmp_path / "run" / "checkpoints" / "ep0-ba2.pt")
    assert open_run(str(tmp_path / named)).list_checkpoints() == ["ep0-ba2.pt"]


def test_a_run_whose_checkpoints_are_elsewhere_leads_there(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(f"trainer: {{checkpoint_folder: {tmp_path / 'other'}}}\n")
    write_checkpoint(tmp_path / "other" / "ep0-ba4.pt")
    assert open_run(str(tmp_path / "run")).list_checkpoints() == ["ep0-ba4.pt"]


def test_checkpoints_in_a_store_are_downloaded_and_removed_ones_are_skipped(tmp_path, s3_server):
    url = "s3://tests/followed/checkpoints"
    storage.upload(write_checkpoint(tmp_path / "ep0-ba2.pt"), f"{url}/ep0-ba2.pt")
    storage.write(f"{url}/ep0-ba4/__0_0.distcp", b"half")
    run = open_run(url)
    assert isinstance(run, RemoteRun)
    assert run.list_checkpoints() == ["ep0-ba2.pt"]
    held = run.copy("ep0-ba2.pt", tmp_path / "held")
    assert held is not None
    assert torch.load(held, weights_only=True) == {"state": {}}
    storage.delete([f"{url}/ep0-ba2.pt"])
    assert run.copy("ep0-ba2.pt", tmp_path / "held") is None


def test_a_run_folder_whose_checkpoints_are_in_a_store_says_that_it_is_finished(tmp_path, s3_server):
    url = "s3://tests/finished/checkpoints"
    (tmp_path / "config.yaml").write_text(f"trainer: {{checkpoint_folder: '{url}'}}\n")
    assert open_run(str(tmp_path)).finished_step() is None
    write_json(tmp_path / "finished.json", {"step": 10})
    assert open_run(str(tmp_path)).finished_step() == 10
    assert open_run(url).finished_step() is None


def test_the_ledger_is_of_one_run(tmp_path):
    Ledger.open(tmp_path, "runs/a").add("ep0-ba2", Entry(step=2))
    assert Ledger.open(tmp_path, "runs/a").entries == {"ep0-ba2": Entry(step=2)}
    with pytest.raises(DataError, match="runs/a"):
        Ledger.open(tmp_path, "runs/b")


def test_a_checkpoint_that_is_gone_is_not_held(tmp_path):
    run = LocalRun(tmp_path / "run")
    assert run.list_checkpoints() == []
    assert run.copy("ep0-ba2", tmp_path / "held") is None
    assert not (tmp_path / "held" / "ep0-ba2").exists()
