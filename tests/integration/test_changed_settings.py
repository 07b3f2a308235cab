"""A run that is started again: settings that may change, and what is left to do after a kill at its end."""

import json
import os
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from composer import Callback, Logger, State

from diffusion.checkpointing.find import resolve_checkpoint
from diffusion.checkpointing.layout import batch_of, list_checkpoints
from diffusion.checkpointing.resume import check_changes, group_settings
from diffusion.config.loading import load_config, to_public_yaml
from diffusion.errors import ConfigurationError
from diffusion.formats.run_folder import FINISHED, TRAIN_LOSS, read_metrics, series
from diffusion.loading import load_config_of

SHORT = ["samples.prompts=[]", "algorithms.ema=null", "trainer.device=cpu"]
OWN = ["data.local=/data", "data.streams=[{name: a}]"]
LATE_DISCRIMINATOR = ["task=autoencoder", "autoencoder={adversarial_weight: 0.1, adversarial_start: 0.5dur}"]
OTHER_OBJECTIVE = ["objective.prediction_type=epsilon", "objective.offset_noise=0.3"]


def command(run: Path, *overrides: str) -> list[str]:
    return ["run.py", "tests/tools/toy.yaml", f"output_folder={run}", "trainer.max_duration=2ba", *SHORT, *overrides]


@pytest.fixture(scope="module")
def finished(server, tmp_path_factory) -> Path:
    """A run of two steps."""
    run = tmp_path_factory.mktemp("finished") / "run"
    server.command(1, command(run))
    return run


def test_another_objective_is_refused_also_when_nothing_is_left_to_do(server, finished):
    run = finished
    config, checkpoints = (run / "config.yaml").read_bytes(), list_checkpoints(run / "checkpoints")
    job = server.start(1, command(run, *OTHER_OBJECTIVE)).finish()
    assert job.codes == [2], job.output
    message = "objective.prediction_type (was v_prediction, is epsilon); objective.offset_noise (was 0.0, is 0.3)"
    assert message in job.output
    assert "another run_name or output_folder" in job.output
    assert "Traceback" not in job.output
    assert (run / "config.yaml").read_bytes() == config
    assert list_checkpoints(run / "checkpoints") == checkpoints


@pytest.mark.parametrize(
    ("before", "now", "refused"),
    [
        (["model.vae=/a/vae"], ["model.vae=/b/vae", "model.local_files_only=true"], []),
        ([], ["model.vae=/b/vae"], ["model.vae (was null, is /b/vae)"]),
        (
            ["model.text_encoder.path=/a/t5"],
            ["model.text_encoder={path: /b/t5, max_tokens: 64}"],
            ["settings: model.text_encoder.max_tokens (was 256, is 64). Set"],
        ),
        ([], ["objective.flow.shift=2.0"], ["objective.flow.shift (was 1.0, is 2.0)"]),
        (["model.network={a: 1}"], [], ["model.network (was {"]),
        (["init_from.checkpoint=/a", "model.lora.rank=2"], [], ["model.lora (was {"]),
        (
            ["task=autoencoder", "autoencoder.vae={latent_channels: 4}"],
            ["task=autoencoder"],
            ["autoencoder.vae ("],
        ),
        (["task=autoencoder"], ["task=autoencoder", "objective.offset_noise=0.1"], []),
        (
            [*LATE_DISCRIMINATOR, "trainer.max_duration=2ba"],
            [*LATE_DISCRIMINATOR, "trainer.max_duration=8ba"],
            ["is step 4 of this run", "set autoencoder.adversarial_start=1ba"],
        ),
        ([*LATE_DISCRIMINATOR, "trainer.max_duration=4ba"], [*LATE_DISCRIMINATOR, "trainer.max_duration=8ba"], []),
        ([], ["seed=18"], ["seed (was 17, is 18)"]),
        ([], ["data={global_batch_size: 16, shuffle: none}"], ["data.global_batch_size (was", "data.shuffle (was"]),
        (["plugins.train_dataset=null", *OWN], [], ["plugins.train_dataset (was null"]),
        ([], ["plugins.train_dataset=null", *OWN], ["plugins.train_dataset (was {"]),
        (
            ["plugins.train_dataset=null", "data.local=/d", "data.streams=[{name: a}, {name: b}]"],
            ["plugins.train_dataset=null", "data.local=/d", "data.streams=[{name: b}, {name: a}]"],
            ["data.streams (was"],
        ),
        (["plugins.train_dataset=null", *OWN], ["plugins.train_dataset=null", *OWN, "data.streams.0.name=c"], []),
        (["plugins.train_dataset=null", *OWN], ["plugins.train_dataset=null", *OWN, "seed=18"], []),  # `order`
        ([], ["task=autoencoder"], ["task (was diffusion, is autoencoder)"]),
    ],
)
def test_which_changes_make_another_run(tmp_path, before, now, refused):
    checkpoint, toy = tmp_path / "ep0-ba2.pt", "tests/tools/toy.yaml"
    record = {"config": to_public_yaml(load_config(toy, before))}
    torch.save({"state": {"callbacks": {"RunRecord": record}}}, checkpoint)
    with pytest.raises(ConfigurationError) if refused else nullcontext() as caught:
        check_changes(load_config(toy, now), checkpoint, "it")
    assert all(part in str(caught.value) for part in refused if caught is not None)


def test_a_key_that_the_checkpoint_does_not_know_had_its_default(tmp_path):
    checkpoint, toy = tmp_path / "ep0-ba1.pt", "tests/tools/toy.yaml"
    record = to_public_yaml(load_config(toy)).replace("  posterior: sample\n", "") + "a_key_of_another_version: 1\n"
    assert "posterior" not in record
    torch.save({"state": {"callbacks": {"RunRecord": {"config": record}}}}, checkpoint)
    check_changes(load_config(toy), checkpoint, "it")
    with pytest.raises(ConfigurationError, match=r"objective.posterior \(was sample, is mean\)"):
        check_changes(load_config(toy, ["objective.posterior=mean"]), checkpoint, "it")


def test_a_finished_run_keeps_its_configuration_and_says_so(server, finished):
    run = finished
    kept = [run / "config.yaml", run / "metrics.jsonl", *(run / "checkpoints").rglob("*")]
    before = {path: path.read_bytes() for path in kept if path.is_file()}
    job = server.command(1, command(run, "optimizer.lr=0.77"))
    assert {path: path.read_bytes() for path in before} == before
    assert job.output.count(f"resuming from {run / 'checkpoints'}") == 1
    assert job.output.count("run toy has reached its end (2) before; nothing is left to do") == 1


def test_what_may_be_another_is_told_and_recorded(server, finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    free = ["trainer.max_duration=3ba", "optimizer.lr=0.002", "model.low_precision_norms=false"]
    job = server.command(1, command(run, *free))
    changed = [line for line in job.output.splitlines() if line.startswith("settings that differ from")]
    assert len(changed) == 1, job.output
    for change in (
        "trainer.max_duration (was 2ba, is 3ba)",
        "optimizer.lr (was 0.001, is 0.002)",
        "model.low_precision_norms (was true, is false)",
    ):
        assert change in changed[0]
    newest = list_checkpoints(run / "checkpoints")[-1]
    assert batch_of(newest) == 3
    for config in (load_config(run / "config.yaml"), load_config_of(newest)):
        assert (config.optimizer.lr, config.trainer.max_duration) == (0.002, "3ba")
    assert "composer" not in job.output.lower()


class RecordGroups(Callback):
    """Record the settings of the parameter groups at each step."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def batch_start(self, state: State, logger: Logger) -> None:
        rows = group_settings(state.optimizers[0])
        with self.file.open("a") as file:
            file.write(json.dumps({"step": state.timestamp.batch.value, "groups": rows}) + "\n")


OPTIMIZER = ["optimizer.lr=0.004", "optimizer.weight_decay=0.3", "optimizer.betas=[0.5,0.6]", "optimizer.eps=1e-4"]
DISCRIMINATOR = ["autoencoder.adversarial_weight=0.1", "autoencoder.adversarial_start=1ba"]


@pytest.mark.parametrize(
    ("yaml", "common", "changes"),
    [
        ("toy", ["trainer.parallelism=ddp"], [*OPTIMIZER, "schedule.warmup=5ba"]),
        ("toy", ["trainer.parallelism=fsdp"], [*OPTIMIZER, "schedule.decay=linear", "schedule.final=0.5"]),
        ("toy", ["trainer.parallelism=ddp", "optimizer.lr=0"], ["optimizer.lr=0.004"]),
        ("autoencoder", DISCRIMINATOR, [*OPTIMIZER, "autoencoder.discriminator_lr=0.007"]),
    ],
    ids=["ddp", "fsdp", "zero", "autoencoder"],
)
def test_optimizer_and_schedule_have_the_settings_of_this_start(server, shapes, tmp_path, yaml, common, changes):
    yaml = {"toy": "tests/tools/toy.yaml", "autoencoder": "yamls/tiny/autoencoder.yaml"}[yaml]
    common = [*common, *SHORT]
    if "tiny" in yaml:
        common = [
            *common[:-3],
            "validation=null",
            f"data.local={shapes / 'prepared' / 'train'}",
            "data.num_workers=0",
            "schedule.warmup=2ba",
        ]

    def start(name: str, *overrides: str) -> tuple[str, list[str]]:
        record = f"{{path: {__name__}.RecordGroups, arguments: {{file: {tmp_path / name}.jsonl}}}}"
        return yaml, [f"output_folder={tmp_path / name}", f"plugins.callbacks=[{record}]", *common, *overrides]

    common.append("trainer.save_interval=100ba")
    second = ["trainer.max_duration=6ba", *changes]
    server.train(1, [start("whole", *second), start("changed", "trainer.max_duration=3ba"), start("changed", *second)])
    whole, changed = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("whole", "changed")
    )
    assert [row["step"] for row in changed] == [*range(6)]
    assert changed[4:] == whole[4:]
    assert changed[:3] != whole[:3]
    for before, after in zip(changed[3]["groups"], whole[3]["groups"], strict=True):
        assert {**before, "lr": None} == {**after, "lr": None}
        if not any(change.startswith("schedule.") for change in changes):
            assert before["lr"] == pytest.approx(after["lr"], rel=1e-12)


# After the last checkpoint

NUM_STEPS = 8
"""An epoch of the toy data."""


class KillAtEnd(Callback):
    """Kill the process after the last checkpoint: at the end of the run, or of the epoch if it comes first."""

    def epoch_end(self, state: State, logger: Logger) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    fit_end = epoch_end


@pytest.mark.world_size(2)
def test_samples_and_metrics_follow_after_a_kill(server, shapes, tmp_path):
    runs = {name: tmp_path / name for name in ("whole", "killed")}
    common = [
        "samples.prompts=[a red circle]",
        "samples.interval=100ba",
        "trainer.eval_interval=5ba",
        f"trainer.max_duration={NUM_STEPS}ba",
    ]
    common += [f"validation.local={shapes / 'latents-32' / 'validation'}", "validation.device_batch_size=8"]
    common += ["validation.streams=[{name: 32-64}, {name: 64-up}]", "model.vae=" + str(shapes / "vae")]
    toy = {name: ("tests/tools/toy.yaml", [f"output_folder={run}", *common]) for name, run in runs.items()}
    server.train(2, [toy["whole"]])
    kill = "plugins.callbacks=[{path: tests.integration.test_changed_settings.KillAtEnd}]"
    job = server.run(2, [(toy["killed"][0], [*toy["killed"][1], kill])])
    assert -9 in job.codes
    assert batch_of(resolve_checkpoint(str(runs["killed"]))) == NUM_STEPS
    grid = f"samples/step-{NUM_STEPS:06d}.png"
    assert not (runs["killed"] / grid).exists()
    assert not (runs["killed"] / FINISHED).exists()

    server.train(2, [toy["killed"]])
    assert (runs["killed"] / grid).read_bytes() == (runs["whole"] / grid).read_bytes()
    rows = {name: read_metrics(run / "metrics.jsonl") for name, run in runs.items()}
    for metric in (TRAIN_LOSS, "metrics/validation/loss"):
        assert series(rows["killed"], metric) == series(rows["whole"], metric)
        assert [row["step"] for row in rows["whole"]] == [*range(NUM_STEPS + 1)], (
            "the last evaluation in a row of its own"
        )
    assert series(rows["whole"], "metrics/validation/loss")[0] == [5, NUM_STEPS]

    before = {path: path.stat().st_mtime_ns for path in runs["killed"].rglob("*.png")}
    server.train(2, [toy["killed"]])
    assert {path: path.stat().st_mtime_ns for path in runs["killed"].rglob("*.png")} == before


def test_the_vae_and_its_statistics_follow_after_a_kill(server, shapes, tmp_path):
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
    shutil.rmtree(run / "checkpoints")
    kill = "plugins.callbacks=[{path: tests.integration.test_changed_settings.KillAtEnd}]"
    job = server.run(1, [("yamls/tiny/autoencoder.yaml", [*overrides, kill])])
    assert -9 in job.codes
    shutil.rmtree(run / "vae")
    server.train(1, [("yamls/tiny/autoencoder.yaml", overrides)])
    assert {path.name: path.read_bytes() for path in (run / "vae").iterdir()} == expected
