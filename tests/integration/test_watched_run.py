"""Checkpoints of a watched run, in a folder and in an object store; the ledger."""

import shutil
from pathlib import Path

import pytest
import torch

from diffusion import storage
from diffusion.errors import DataError
from diffusion.evaluation.watch import (
    LEDGER,
    copy_checkpoint,
    finished_step,
    list_complete,
    locate,
    read_ledger,
)
from diffusion.files import write_json
from tests.tools.s3_server import s3_process, s3_server

__all__ = ["s3_process", "s3_server"]


def write_checkpoint(path: Path) -> Path:
    """A file that is whole, as a run with DDP writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"state": {}}, path)
    return path


def test_a_copy_of_a_checkpoint_stays_when_the_run_removes_its_own(tmp_path):
    checkpoints = str(tmp_path / "run" / "checkpoints")
    for step in (10, 2):
        write_checkpoint(Path(checkpoints, f"ep0-ba{step}.pt"))
    Path(checkpoints, "ep0-ba12").mkdir()
    Path(checkpoints, "ep0-ba12", "__0_0.distcp").write_bytes(b"half")
    assert list_complete(checkpoints) == ["ep0-ba2.pt", "ep0-ba10.pt"]
    assert copy_checkpoint(checkpoints, "ep0-ba2.pt", tmp_path / "copies") is None
    assert copy_checkpoint(checkpoints, "ep0-ba12", tmp_path / "copies") is not None
    shutil.rmtree(checkpoints)
    assert torch.load(tmp_path / "copies" / "ep0-ba2.pt", weights_only=True) == {"state": {}}
    assert list_complete(checkpoints) == []
    assert copy_checkpoint(checkpoints, "ep0-ba10.pt", tmp_path / "copies") is not None
    assert [path.name for path in (tmp_path / "copies").iterdir()] == ["ep0-ba2.pt"]


@pytest.mark.parametrize("named", ["run", "run/checkpoints"])
def test_a_run_is_named_by_its_folder_or_that_of_its_checkpoints(tmp_path, named):
    assert locate(str(tmp_path / named)) == (tmp_path / "run", str(tmp_path / "run" / "checkpoints"))


@pytest.mark.parametrize("elsewhere", ["/another/folder", "s3://bucket/prefix"])
def test_a_run_whose_checkpoints_are_elsewhere_leads_there_and_says_that_it_is_finished(tmp_path, elsewhere):
    (tmp_path / "config.yaml").write_text(f"trainer: {{checkpoint_folder: '{elsewhere}'}}\n")
    run, checkpoints = locate(str(tmp_path))
    assert checkpoints == elsewhere
    assert finished_step(run) is None
    write_json(tmp_path / "finished.json", {"step": 10})
    assert finished_step(run) == 10
    assert locate("s3://bucket/prefix") == (None, "s3://bucket/prefix")


def test_checkpoints_in_a_store_are_downloaded_and_removed_ones_are_skipped(tmp_path, s3_server):
    url = "s3://tests/followed/checkpoints"
    storage.upload(write_checkpoint(tmp_path / "ep0-ba2.pt"), f"{url}/ep0-ba2.pt")
    storage.write(f"{url}/ep0-ba4/__0_0.distcp", b"half")
    assert list_complete(url) == ["ep0-ba2.pt"]
    assert copy_checkpoint(url, "ep0-ba2.pt", tmp_path / "copies") is None
    assert torch.load(tmp_path / "copies" / "ep0-ba2.pt", weights_only=True) == {"state": {}}
    storage.delete([f"{url}/ep0-ba2.pt"])
    assert copy_checkpoint(url, "ep0-ba2.pt", tmp_path / "copies") is not None
    assert not list((tmp_path / "copies").iterdir())


def test_the_ledger_is_of_one_run(tmp_path):
    checkpoints = {"ep0-ba2": {"step": 2, "skipped": None, "is_last": False}}
    assert read_ledger(tmp_path / LEDGER, "runs/a") == {}
    write_json(tmp_path / LEDGER, {"run": "runs/a", "checkpoints": checkpoints})
    assert read_ledger(tmp_path / LEDGER, "runs/a") == checkpoints
    with pytest.raises(DataError, match="runs/a"):
        read_ledger(tmp_path / LEDGER, "runs/b")
