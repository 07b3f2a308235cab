"""What a run that was killed after its last checkpoint does when the same command is given again."""

import os
import shutil
import signal

import pytest
from composer import Callback, Logger, State

from diffusion.callbacks.metrics_file import TRAIN_LOSS, read_metrics, series
from diffusion.checkpointing.find import resolve_checkpoint
from diffusion.checkpointing.layout import batch_of
from diffusion.checkpointing.resume import FINISHED

NUM_STEPS = 8
"""An epoch of the toy data."""


class KillAtEpochEnd(Callback):
    """Kill the process at the end of the epoch, which is that of the run: after its last checkpoint, before its end."""

    def epoch_end(self, state: State, logger: Logger) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.world_size(2)
def test_samples_and_metrics_are_made_up(server, shapes, tmp_path):
    runs = {name: tmp_path / name for name in ("whole", "killed")}
    common = ["samples.interval=100ba", "trainer.eval_interval=5ba", f"trainer.max_duration={NUM_STEPS}ba"]
    common += [f"validation.local={shapes / 'latents-32' / 'validation'}", "validation.device_batch_size=8"]
    common += ["validation.streams=[{name: 32-64}, {name: 64-up}]", "model.vae=" + str(shapes / "vae")]
    toy = {name: ("tests/tools/toy.yaml", [f"output_folder={run}", *common]) for name, run in runs.items()}
    server.train(2, [toy["whole"]])
    kill = "plugins.callbacks=[{path: tests.unit.checkpointing.test_ending.KillAtEpochEnd}]"
    job = server.run(2, [(toy["killed"][0], [*toy["killed"][1], kill])])
    assert -9 in job.codes
    assert batch_of(resolve_checkpoint(str(runs["killed"]))) == NUM_STEPS
    grid = f"samples/step-{NUM_STEPS:06d}.png"
    assert not (runs["killed"] / grid).exists()
    assert not (runs["killed"] / FINISHED).exists()

    server.train(2, [toy["killed"]])
    assert (runs["killed"] / grid).read_bytes() == (runs["whole"] / grid).read_bytes()
    assert (runs["killed"] / "loss.png").is_file()
    rows = {name: read_metrics(run / "metrics.jsonl") for name, run in runs.items()}
    for metric in (TRAIN_LOSS, "metrics/validation/loss"):
        assert series(rows["killed"], metric) == series(rows["whole"], metric)
    assert series(rows["whole"], "metrics/validation/loss")[0] == [5, NUM_STEPS]

    before = {path: path.stat().st_mtime_ns for path in runs["killed"].rglob("*.png")}
    server.train(2, [toy["killed"]])
    assert {path: path.stat().st_mtime_ns for path in runs["killed"].rglob("*.png")} == before


def test_the_vae_and_its_statistics_are_made_up(server, shapes, tmp_path):
    run = tmp_path / "run"
    overrides = [
        f"output_folder={run}",
        f"data.local={shapes / 'prepared' / 'train'}",
        "validation=null",
        "trainer.max_duration=2ba",
        "schedule.warmup=1ba",
        "data.num_workers=0",
    ]
    server.train(1, [("yamls/tiny/autoencoder.yaml", overrides)])
    expected = {path.name: path.read_bytes() for path in (run / "vae").iterdir()}
    assert {"config.json", FINISHED} <= {*expected, *(path.name for path in run.iterdir())}
    shutil.rmtree(run / "vae")
    (run / FINISHED).unlink()
    server.train(1, [("yamls/tiny/autoencoder.yaml", overrides)])
    assert {path.name: path.read_bytes() for path in (run / "vae").iterdir()} == expected
