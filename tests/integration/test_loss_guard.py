"""A loss that is no number, in real training: gone back from, and skipped where it comes again."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from composer import Callback, Logger, State
from composer.utils import dist

from diffusion.callbacks.guards import SKIPPED, LossGuard, RolledBackError
from diffusion.checkpointing.read import StoredState
from diffusion.checkpointing.resume import checkpoint_storage
from diffusion.checkpointing.roll_back import roll_back
from diffusion.config.loading import load_config
from diffusion.config.operations import GuardConfig
from diffusion.datasets.sample_order import sample_address
from diffusion.errors import DataError
from diffusion.formats.run_folder import (
    ROLLBACK,
    ROLLBACKS,
    TRAIN_LOSS,
    read_metrics,
    read_request,
    read_rollbacks,
    series,
)
from diffusion.operations.heartbeats import Phase, read_heartbeats
from diffusion.trainer import HostNumber
from tests.integration.test_failures import latents
from tests.tools.runs import losses, starts

COMMON = ["samples.prompts=[]", "data.global_batch_size=8", "trainer.save_interval=2ba"]


class PoisonAt(Callback):
    """Make the latents of the last rank's batch NaN in a step: always, or once, which a file remembers."""

    def __init__(self, step: int, once: str | None = None) -> None:
        self.step, self.once = step, Path(once) if once else None

    def after_dataloader(self, state: State, logger: Logger) -> None:
        is_last = dist.get_global_rank() == dist.get_world_size() - 1
        if state.timestamp.batch.value != self.step or not is_last or (self.once is not None and self.once.exists()):
            return
        if self.once is not None:
            self.once.touch()
        state.batch["latent_mean"] = torch.full_like(state.batch["latent_mean"], torch.nan)


def poison(step: int, once: Path | None = None) -> str:
    arguments = f"{{step: {step}" + (f", once: {once}}}" if once else "}")
    return f"plugins.callbacks=[{{path: tests.integration.test_loss_guard.PoisonAt, arguments: {arguments}}}]"


def run(folder: Path, *overrides: str) -> tuple[str, list[str]]:
    return "tests/tools/toy.yaml", [*COMMON, f"output_folder={folder}", *overrides]


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    (checkpoint,) = folder.glob(f"checkpoints/ep*-ba{step}")
    tensors = {
        name: value for name, value in StoredState(checkpoint).read_below("").items() if isinstance(value, torch.Tensor)
    }
    return {name: value for name, value in tensors.items() if name.startswith("state.model.")}


def are_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_spike_is_noticed_in_the_same_step_by_a_run_that_was_continued(tmp_path, is_late):
    def at(step: int, loss: float) -> State:
        timestamp = SimpleNamespace(batch=SimpleNamespace(value=step + 1))
        number = HostNumber()
        number.start(torch.tensor(loss))
        losses = {TRAIN_LOSS: number if is_late else loss}
        return cast("State", SimpleNamespace(timestamp=timestamp, total_loss_dict=losses, train_dataloader=None))

    guard = GuardConfig(spike_factor=3.0, spike_window=3)
    whole, continued, logger = LossGuard(guard, tmp_path), LossGuard(guard, tmp_path), cast("Logger", None)
    for step, loss in enumerate([9.0, 1.0, 1.0, 1.1]):
        whole.batch_end(at(step, loss), logger)
    whole.check(at(3, 1.1))  # As before a checkpoint is saved.
    continued.load_state_dict(whole.state_dict())
    for each in (whole, continued):
        each.batch_end(at(4, 2.9), logger)
        with pytest.raises(RolledBackError, match="the loss of step 5 is"):
            each.batch_end(at(5, 3.4), logger)
            each.check(at(5, 3.4))
    assert read_request(tmp_path) is not None


@pytest.mark.parametrize(
    ("before", "jump", "spike"),
    [
        ({"diffusion": 0.4, "alignment": -0.5}, {"diffusion": 0.41}, {"diffusion": 1.3}),
        ({"l1": 0.03, "l2": 0.02, "adversarial": 0.0}, {"adversarial": 1.0}, {"l1": 0.2}),
        ({"diffusion": 0.4, "alignment": -0.5}, {}, {"alignment": math.nan}),
        ({"total": -0.1}, {"total": -0.09}, {"total": 0.2}),
    ],
)
def test_terms_that_are_negative_or_start_late_are_no_spikes(tmp_path, before, jump, spike):
    def step(number: int, terms: dict[str, float]) -> State:
        losses = {TRAIN_LOSS: sum(terms.values())} | {f"loss/train/{name}": loss for name, loss in terms.items()}
        timestamp = SimpleNamespace(batch=SimpleNamespace(value=number + 1))
        return cast("State", SimpleNamespace(timestamp=timestamp, total_loss_dict=losses, train_dataloader=None))

    guard, logger = LossGuard(GuardConfig(spike_factor=3.0, spike_window=3), tmp_path), cast("Logger", None)
    for number, terms in enumerate([before, before, before, before | jump]):
        guard.batch_end(step(number, terms), logger)
    with pytest.raises(RolledBackError, match="the loss of step 4 is"):
        guard.batch_end(step(4, before | spike), logger)


@pytest.mark.world_size(2)
def test_a_nan_that_passes_leaves_no_trace_in_the_run(server, tmp_path):
    whole, hit = tmp_path / "whole", tmp_path / "hit"
    server.train(2, [run(whole)])
    job = server.run(2, [run(hit, poison(4, tmp_path / "done"))])
    assert job.codes == [75, 75], job.output[-3000:]
    assert job.output.count("the loss of step 4 is nan. Start the same command again") == 1
    assert [(beat.phase, beat.code) for beat in read_heartbeats(hit / "heartbeats")] == [(Phase.ended, 75)] * 2
    pending = read_request(hit)
    assert pending is not None
    assert (pending.step, pending.limit, pending.skipped) == (4, 3, ())
    assert list(hit.glob("checkpoints/*-ba4")), "saved before its weights were known to be good"
    server.train(2, [run(hit, poison(4, tmp_path / "done"))])
    assert starts(hit, "step") == [0, 2]
    assert read_rollbacks(hit) == [pending]
    assert losses(hit) == losses(whole)
    assert len(losses(whole)) == 8
    assert are_equal(weights(hit, 8), weights(whole, 8))


def test_a_loss_that_is_read_late_is_checked_before_a_checkpoint_is_saved(server, tmp_path):
    job = server.run(1, [run(tmp_path, poison(3), "performance.log_late=true")])
    assert job.codes == [75]
    assert "the loss of step 3 is nan" in job.output
    assert [path.name for path in tmp_path.glob("checkpoints/*")] == ["ep0-ba2"]
    assert [math.isnan(loss) for loss in losses(tmp_path)] == [False, False, False, True]


@pytest.mark.world_size(2)
def test_a_nan_that_comes_again_ends_the_run_until_its_steps_are_skipped_on_any_number_of_ranks(server, tmp_path):
    """Of two equal runs one goes on with another number of ranks."""
    one, two, anew = tmp_path / "one", tmp_path / "two", tmp_path / "anew"
    skip = "operations.guard.skip=2"
    assert server.run(1, [run(one, poison(5))]).codes == [75]
    job = server.run(1, [run(one, poison(5))])
    assert job.codes == [2]
    assert "DivergenceError: the loss of step 5 is nan for the second time" in job.output
    assert read_heartbeats(one / "heartbeats")[0].is_lasting
    assert server.run(1, [run(one, poison(5), skip)]).codes == [75]
    shutil.copytree(one, two)
    server.train(1, [run(one, poison(5), skip), run(anew, poison(5), "operations.guard.skip_steps=[4, 5]")])
    server.train(2, [run(two, poison(5), skip)])
    assert [row.skipped for row in read_rollbacks(one)] == [row.skipped for row in read_rollbacks(two)] == [(), (4, 5)]

    assert math.isnan(losses(one)[5])
    assert len(losses(one)) == 8
    assert losses(one)[:5] + losses(one)[6:] == losses(anew)[:5] + losses(anew)[6:]
    assert losses(two) == pytest.approx(losses(one), rel=1e-5, nan_ok=True)
    skipped = series(read_metrics(anew / "metrics.jsonl"), SKIPPED)
    assert dict(zip(*skipped, strict=True)) == {step: float(step in (4, 5)) for step in range(4, 8)}
    assert are_equal(weights(one, 4), weights(one, 6)), "a skipped step has changed the weights"
    assert not are_equal(weights(one, 6), weights(one, 8))
    assert are_equal(weights(one, 8), weights(anew, 8))


@pytest.mark.world_size(2)
def test_the_samples_of_a_wrong_loss_are_named(server, shapes, tmp_path):
    batches = f"{{path: tests.tools.toys.RecordBatches, arguments: {{folder: {tmp_path}/seen}}}}"
    wrong = "{path: tests.integration.test_loss_guard.PoisonAt, arguments: {step: 3}}"
    options = [f"plugins.callbacks=[{batches}, {wrong}]", "trainer.max_duration=8ba"]
    job = server.run(2, [latents(shapes, shapes / "latents-32", tmp_path / "run", *options)])
    assert set(job.codes) == {75}, job.output
    rows = [json.loads(line) for line in (tmp_path / "run" / "wrong_losses.jsonl").read_text().splitlines()]
    streams = {"32-64": 0, "64-up": 1}
    named = sorted(int(sample_address(streams[row["stream"]], row["index"])) for row in rows)
    lines = [line.split() for rank in range(2) for line in (tmp_path / "seen" / f"rank-{rank}.txt").open()]
    assert named == sorted(int(number) for step, *numbers in lines if step == "3" for number in numbers)
    assert {row["step"] for row in rows} == {3}
    assert all((shapes / "latents-32" / "train" / row["stream"] / row["shard"]).is_file() for row in rows)


@pytest.mark.world_size(2)
def test_a_damaged_file_of_rollbacks_is_one_message_on_all_ranks(server, tmp_path):
    for name in (ROLLBACK, ROLLBACKS):
        (tmp_path / name).write_text('{"step": 1}\n')
    config = load_config("tests/tools/toy.yaml", [f"output_folder={tmp_path}"])
    with pytest.raises(DataError, match=f"{ROLLBACK} is damaged"):
        roll_back(config, checkpoint_storage(config, tmp_path))
    (tmp_path / ROLLBACK).unlink()
    job = server.run(2, [run(tmp_path, "algorithms.ema=null")])
    assert job.codes == [2, 2], job.output
    assert job.output.count("DataError") == 1
    assert str(tmp_path / ROLLBACKS) in job.output


@pytest.mark.parametrize("options", [["trainer.parallelism=ddp"], ["trainer.parallelism=fsdp", "optimizer.name=muon"]])
def test_checkpoints_before_the_first_update_change_nothing(server, tmp_path, options):
    options = [*options, "schedule.warmup=0ba", "schedule.decay=constant", "operations.guard.skip_steps=[0, 1]"]
    options += ["algorithms.ema=null", "trainer.max_duration=5ba"]
    saved = run(tmp_path / "saved", *options, "trainer.save_interval=1ba")
    begun = run(tmp_path / "saved", *options, "trainer.save_interval=1ba", "trainer.max_duration=1ba")
    server.train(1, [run(tmp_path / "whole", *options, "trainer.save_interval=9ba"), begun, saved])
    assert losses(tmp_path / "saved") == losses(tmp_path / "whole")
