"""Checkpoints of a watched run, in a folder and in an object store; the ledger."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from diffusion import storage
from diffusion.errors import DataError
from diffusion.evaluation.config import EvaluationConfig, ProtocolConfig
from diffusion.evaluation.protocol import Result
from diffusion.evaluation.watch import (
    LEDGER,
    WatchedRun,
    Watcher,
    copy_checkpoint,
    list_complete,
    locate,
    read_ledger,
)
from diffusion.files import write_json
from diffusion.formats.run_folder import finished_step
from diffusion.operations.metrics import DONE, LEASED, QUEUE
from tests.tools.s3_server import s3_process, s3_server

__all__ = ["s3_process", "s3_server"]


def write_checkpoint(path: Path, **state: str | None) -> Path:
    """A file that is whole, as a run with DDP writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"state": state}, path)
    return path


def test_a_copy_of_a_checkpoint_stays_when_the_run_removes_its_own(tmp_path):
    checkpoints = str(tmp_path / "run" / "checkpoints")
    for step in (10, 2):
        write_checkpoint(Path(checkpoints, f"ep0-ba{step}.pt"))
    Path(checkpoints, "ep0-ba12").mkdir()
    Path(checkpoints, "ep0-ba12", "__0_0.distcp").write_bytes(b"half")
    assert list(list_complete(checkpoints)) == ["ep0-ba2.pt", "ep0-ba10.pt"]
    assert copy_checkpoint(checkpoints, "ep0-ba2.pt", tmp_path / "copies") is None
    assert copy_checkpoint(checkpoints, "ep0-ba12", tmp_path / "copies") is not None
    shutil.rmtree(checkpoints)
    assert torch.load(tmp_path / "copies" / "ep0-ba2.pt", weights_only=True) == {"state": {}}
    assert list_complete(checkpoints) == {}
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
    assert list(list_complete(url)) == ["ep0-ba2.pt"]
    assert copy_checkpoint(url, "ep0-ba2.pt", tmp_path / "copies") is None
    assert torch.load(tmp_path / "copies" / "ep0-ba2.pt", weights_only=True) == {"state": {}}
    storage.delete([f"{url}/ep0-ba2.pt"])
    assert copy_checkpoint(url, "ep0-ba2.pt", tmp_path / "copies") is not None
    assert not list((tmp_path / "copies").iterdir())


@pytest.fixture
def watched(tmp_path) -> WatchedRun:
    """A run with two checkpoints."""
    for step in (2, 4):
        write_checkpoint(tmp_path / "run" / "checkpoints" / f"ep0-ba{step}.pt")
    run = WatchedRun(str(tmp_path / "run"), tmp_path / "evaluation")
    run.update()
    return run


def test_the_ledger_is_of_one_run(watched):
    assert watched.pending == ["ep0-ba2.pt", "ep0-ba4.pt"]
    watched.record("ep0-ba2.pt", "it is damaged", None)
    watched.update()
    assert watched.pending == ["ep0-ba4.pt"]
    assert watched.entries["ep0-ba2.pt"].skipped == "it is damaged"
    assert not watched.is_finished
    with pytest.raises(DataError, match="choose another output_folder"):
        read_ledger(watched.folder / LEDGER, "runs/another")


def test_a_checkpoint_is_evaluated_by_one_watcher_and_counted(watched):
    other = WatchedRun(watched.uri, watched.folder)
    other.update()
    assert watched.count() == {QUEUE: 2, LEASED: 0, DONE: 0}
    lease = watched.acquire("ep0-ba2.pt")
    assert lease is not None
    assert other.acquire("ep0-ba2.pt") is None
    assert watched.count() == {QUEUE: 2, LEASED: 1, DONE: 0}
    watched.record("ep0-ba2.pt", "it is damaged", None)
    lease.release()
    assert other.pending == ["ep0-ba2.pt", "ep0-ba4.pt"], "as it was before"
    assert other.acquire("ep0-ba2.pt") is None
    assert other.acquire("ep0-ba4.pt") is not None
    assert watched.count() == {QUEUE: 1, LEASED: 1, DONE: 1}


def test_a_checkpoint_that_a_rollback_has_removed_and_written_again_is_evaluated_again(watched):
    other = WatchedRun(watched.uri, watched.folder)
    path, (name, _) = Path(watched.uri, "checkpoints", "ep0-ba2.pt"), watched.pending
    for skipped in ("it was removed before it could be read", None):
        path.unlink()
        write_checkpoint(path, skipped=skipped)
        for run in (watched, other):
            run.update()
            assert run.pending[0] == name
        lease = watched.acquire(name)
        watched.record(name, skipped, None)
        lease.release()
        assert other.acquire(name) is None
        assert watched.count() == {QUEUE: 1, LEASED: 0, DONE: 1}
    entry = watched.folder / LEDGER / f"{name}.json"  # As earlier versions have written it.
    write_json(entry, {key: value for key, value in json.loads(entry.read_text()).items() if key != "identity"})
    assert WatchedRun(watched.uri, watched.folder).count()[DONE] == 1


def test_a_watcher_with_other_weights_evaluates_the_checkpoints_again(watched):
    def watcher(*weights: str, **options: bool) -> WatchedRun:
        protocol = ProtocolConfig(metrics=[], validation_loss=True)
        out = str(watched.folder)
        config = EvaluationConfig(
            model=watched.uri, output_folder=out, watch=True, protocol=protocol, weights=list(weights), **options
        )
        (run,) = Watcher(config).runs
        run.update()
        return run

    raw = watcher("raw")
    Result(name="ep0-ba2-raw", path=watched.uri, step=2, weights="raw").write(watched.folder)
    raw.record("ep0-ba2.pt", None, None)
    assert (watcher("raw").pending, watcher("raw", watch_only=True).pending) == (["ep0-ba4.pt"], ["ep0-ba4.pt"])
    both = watcher("raw", "ema")
    assert both.pending == ["ep0-ba2.pt", "ep0-ba4.pt"]
    assert (raw.count()[QUEUE], both.count()[QUEUE]) == (1, 2)
    lease = both.acquire("ep0-ba2.pt")
    assert lease is not None
    both.record("ep0-ba2.pt", "it has no such weights", None)
    lease.release()
    for weights in (["raw"], ["ema", "raw"]):
        assert watcher(*weights).pending == ["ep0-ba4.pt"]
    assert both.acquire("ep0-ba2.pt") is None
    both.update()
    assert both.entries["ep0-ba2.pt"].skipped is None, "the numbers of the first watcher count"
