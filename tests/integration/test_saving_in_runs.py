"""Saving in real runs: which checkpoints stay, full disks, ranks that cannot write."""

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from composer import Callback, Logger, State

from diffusion.callbacks.saving import SaveCheckpoints
from diffusion.checkpointing.find import find_checkpoints, find_damage
from diffusion.checkpointing.layout import batch_of, list_checkpoints
from diffusion.config.loading import load_config
from diffusion.formats.run_folder import LEASE, TRAIN_LOSS, read_metrics, series
from diffusion.train import train
from tests.tools.runs import flip_bit, signal_at

pytestmark = pytest.mark.slow

COMMON = ["trainer.max_duration=4ba", "samples.prompts=[]"]
FORMS = ("fsdp", "ddp")


def options(run: Path, form: str, *more: str) -> tuple[str, list[str]]:
    return "tests/tools/toy.yaml", [f"output_folder={run}", f"trainer.parallelism={form}", *COMMON, *more]


def flip_a_bit(checkpoint: Path) -> None:
    files = [file for file in [checkpoint, *checkpoint.rglob("*")] if file.is_file()]
    flip_bit(max(files, key=lambda file: file.stat().st_size))


def test_checkpoints_of_earlier_starts_are_removed_too(server, tmp_path):
    run, form = tmp_path / "run", "fsdp"
    keep = ["trainer.max_duration=9ba", "trainer.save_interval=1ba", "trainer.keep_every=4ba"]
    server.run(1, [options(run, form, *keep, signal_at(6))])
    checkpoints = find_checkpoints(run / "checkpoints")
    assert [batch_of(path) for path in checkpoints] == [1, 2, 3, 4, 5, 6]
    for path in checkpoints[-2:]:
        flip_a_bit(path)
    server.run(1, [options(run, form, *keep, "trainer.keep_checkpoints=1", signal_at(5))])
    checkpoints = find_checkpoints(run / "checkpoints")
    assert [batch_of(path) for path in checkpoints] == [4, 5, 6]
    assert find_damage(checkpoints[1]) is None, "a damaged one is not the newest that is kept"
    server.train(1, [options(run, form, *keep, "trainer.keep_checkpoints=2")])
    assert [batch_of(path) for path in find_checkpoints(run / "checkpoints")] == [4, 8, 9]


class Divide(Callback):
    """Raise an error that is not the user's in a step."""

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == 3:
            state.timestamp.batch.value / 0


def test_the_lease_is_held_until_a_write_in_the_background_has_ended(tmp_path, monkeypatch):
    write, held = SaveCheckpoints._write, []

    def write_slowly(self: SaveCheckpoints, *arguments: Any) -> None:
        time.sleep(2)
        write(self, *arguments)
        held.append((tmp_path / LEASE).is_file())

    monkeypatch.setattr(SaveCheckpoints, "_write", write_slowly)
    more = ["trainer.async_checkpoints=true", "trainer.save_interval=2ba"]
    more += [f"plugins.callbacks=[{{path: {__name__}.Divide}}]"]
    with pytest.raises(ZeroDivisionError):
        train(load_config(*options(tmp_path, "ddp", *more)))
    torch.distributed.destroy_process_group()
    assert held == [True]
    assert [batch_of(path) for path in find_checkpoints(tmp_path / "checkpoints")] == [2]


# Full disk


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in [path, *path.rglob("*")])


@pytest.fixture(params=FORMS)
def small_disk(request, server, tmp_path):
    """A disk with room for one checkpoint and a half."""
    place = tmp_path / "disk"
    place.mkdir()
    server.train(1, [options(tmp_path / "run", request.param)])
    size = int(1.5 * size_of(list_checkpoints(tmp_path / "run" / "checkpoints")[0]))
    try:
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("needs mount")
    if made.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield request.param, place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.world_size(2)
def test_a_full_disk_ends_the_run_with_one_message(server, small_disk):
    form, disk = small_disk
    run = disk / "run"
    job = server.run(2, [options(run, form)])
    assert job.codes == [2, 2], job.output[-4000:]
    first = run / "checkpoints" / ("ep0-ba2" if form == "fsdp" else "ep0-ba2.pt")
    second = run / "checkpoints" / first.name.replace("ba2", "ba4")
    assert job.output.count("MachineError") == 1, job.output[-4000:]
    assert f"checkpoint {second} cannot be written: No space left on device" in job.output
    assert "Traceback" not in job.output
    assert list_checkpoints(run / "checkpoints") == [first]
    assert find_damage(first) is None


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("form", "in_background"), [("fsdp", False), ("ddp", True)])
def test_where_one_rank_cannot_write_all_end_and_the_run_continues(server, tmp_path, form, in_background):
    run = tmp_path / "run"
    limit = "plugins.callbacks=[{path: tests.tools.toys.LimitFileSize, arguments: {step: 2, num_bytes: 60000}}]"
    # The write of step 2 in the background would meet the limit, too.
    interval, kept = ("4ba", []) if in_background else ("2ba", [2])
    more = [f"trainer.async_checkpoints={in_background}", f"trainer.save_interval={interval}"]
    job = server.run(2, [options(run, form, limit, *more)])
    assert job.codes == [2, 2], job.output[-4000:]
    assert job.output.count("MachineError") == 1, job.output[-4000:]
    assert "cannot be written: File too large" in job.output
    assert [batch_of(path) for path in list_checkpoints(run / "checkpoints")] == kept
    server.train(2, [options(run, form)])
    assert series(read_metrics(run / "metrics.jsonl"), TRAIN_LOSS)[0] == list(range(4))
