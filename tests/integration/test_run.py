"""`run.py` as a user meets it: one message, no traceback, exit code not 0, in seconds."""

import subprocess
import sys
import time

import pytest

from tests.tools.training_runs import ROOT, Ended, TrainingServer, environment, launch

TINY = "yamls/tiny/phase1.yaml"
PLACES = ["data.local=/nowhere/train", "validation.local=/nowhere/validation", "model.vae=null"]

MISTAKES = {
    "unknown key": (
        ["optimizer.weight_decoy=1"],
        ["Unknown key optimizer.weight_decoy (command line): did you mean optimizer.weight_decay?"],
    ),
    "unknown key like no other": (
        ["optimizer.learning_rat=1"],
        ["Unknown key optimizer.learning_rat (command line). The keys of optimizer are name, lr, weight_decay, betas, eps"],
    ),
    "unknown key elsewhere": (["lr=1"], ["Unknown key lr (command line): did you mean optimizer.lr?"]),
    "unknown key in a YAML file": (
        "optimzer:\n  lr: 1.0\n",
        ["Unknown key optimzer ({file}, line 2): did you mean opt"],
    ),
    "wrong type": (
        ["trainer.keep_checkpoints=many"],
        ["trainer.keep_checkpoints is 'many' (command line), but must be an integer."],
    ),
    "wrong choice": (
        ["trainer.precision=fp8"],
        ["trainer.precision is 'fp8' (command line), but must be one of fp32, amp_bf16, amp_fp16."],
    ),
    "missing value": (
        ["data.local=???"],
        [TINY, "data.local (", "data.local=VALUE"],
    ),
    "missing file": (None, ["yamls/phase9.yaml cannot be read"]),
    "control character": (
        ["group=a\x92b"],
        ["'group=a\x92b' (command line)", "#x0092"],
    ),
    "batch not divisible by the ranks": (
        ["data.global_batch_size=33"],
        ["data.global_batch_size is 33", "1 or 3 ranks", "32 or 34"],
    ),
    "EMA after the end": (
        ["algorithms.ema={start: 5000ba}"],
        ["algorithms.ema.start is '5000ba'", "algorithms.ema=null"],
    ),
    "cache limit without a remote": (
        ["data.cache_limit=1gb"],
        ["data.cache_limit is '1gb', but stream '64-up' has no remote", "data.cache_limit=null"],
    ),
    "random crop of latents": (
        ["data.crop=random"],
        ["data.crop is random with data.representation latents", "data.representation=images"],
    ),
    "flip of latents": (
        ["data.horizontal_flip=0.5"],
        ["data.horizontal_flip is 0.5 with data.representation latents", "data.representation=images"],
    ),
    "zero-terminal SNR with epsilon": (
        ["objective.zero_terminal_snr=true", "objective.prediction_type=epsilon"],
        [
            "objective.zero_terminal_snr is true with objective.prediction_type epsilon",
            "Set objective.prediction_type=v_prediction.",
        ],
    ),
    "unknown argument of the U-Net": (
        ["model.network.block_out_chanels=[16,32]"],
        ["Unknown key model.network.block_out_chanels (no arg", "did you mean model.network.block_out_channels?"],
    ),
    "argument that does not fit the U-Net": (
        ["model.network.norm_num_groups=5"],
        ["model.network is {{'norm_num_groups': 5}}", "UNet2DConditionModel"],
    ),
    "plug-in that is not there": (
        ["plugins.callbacks=[{path: nope.B}]"],
        ["plugins.callbacks.0.path=nope.B: No module named 'nope'. Give package.module.Name"],
    ),
    "output folder that cannot be written": (
        ["output_folder=/proc/nowhere/run"],
        ["output_folder=/proc/nowhere/run cannot be written: ", "Choose another one"],
    ),
}
"""Overrides, lines of a YAML file, or None for a missing file; and parts of the message."""


def run(server: TrainingServer, *arguments: str) -> Ended:
    """What `python run.py` does with arguments, without the seconds of a start."""
    return server.start(0, ["run.py", *arguments]).finish()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_all_ranks_with_one_message(server, name, tmp_path):
    mistake, messages = MISTAKES[name]
    file = tmp_path / "mine.yaml"
    if isinstance(mistake, str):
        file.write_text(f"extends: {ROOT / TINY}\n{mistake}")
    yaml = "yamls/phase9.yaml" if mistake is None else TINY if isinstance(mistake, list) else str(file)
    overrides = mistake if isinstance(mistake, list) else []
    job = server.start(2, ["run.py", yaml, *PLACES, f"output_folder={tmp_path / 'run'}", *overrides]).finish()
    assert job.codes == [2, 2], job.output
    for message in messages:
        assert message.format(file=file) in job.output
    assert job.output.count("Error: ") == 1, job.output
    assert "Traceback" not in job.output


@pytest.mark.parametrize("name", ["unknown argument of the U-Net", "plug-in that is not there"])
def test_a_dry_run_tells_it_as_well(server, name):
    overrides, messages = MISTAKES[name]
    job = server.start(0, ["run.py", TINY, *PLACES, *overrides, "--dry-run"]).finish()
    assert job.codes == [2], job.output
    assert all(message in job.output for message in messages)
    assert "Traceback" not in job.output


def test_a_mistake_ends_in_seconds():
    start = time.monotonic()
    command = [sys.executable, "run.py", TINY, *PLACES, "optimizer.lr=fast"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600)
    seconds = time.monotonic() - start
    assert done.returncode == 2
    assert done.stderr == "ConfigurationError: optimizer.lr is 'fast' (command line), but must be a number.\n"
    assert done.stdout == ""
    assert seconds < 20


def test_a_machine_that_lacks_the_precision_is_named(server):
    job = run(server, TINY, *PLACES, "trainer.precision=amp_bf16", "trainer.device=cpu")
    assert job.codes == [2]
    assert "trainer.precision" in job.output
    assert "Traceback" not in job.output


def test_a_dry_run_says_what_is_missing_and_exits_0(server):
    job = run(server, "yamls/phase1.yaml", "--dry-run")
    assert job.codes == [0], job.output
    assert "1,126,400,000 = 550,000 iterations x 2,048" in job.output
    assert "865,910,724" in job.output
    for key in ("data.local", "validation.local", "model.pretrained"):
        assert f"  {key}:" in job.output
    job = run(server, "yamls/phase1.yaml")
    assert job.codes == [2]
    assert "data.local" in job.output


@pytest.mark.world_size(2)
def test_two_ranks_say_it_once():
    done = launch(2, ["run.py", TINY, *PLACES, "data.global_batch_size=33"])
    assert done.returncode != 0
    assert done.stdout.count("data.global_batch_size") == 1
    assert "Traceback" not in done.stdout


def test_a_dry_run_says_which_folders_are_not_here(server):
    job = run(server, TINY, *PLACES, "--dry-run")
    assert job.codes == [0], job.output
    assert "data.streams: not on this machine: /nowhere/train/32-64, /nowhere/train/64-up" in job.output
    assert "validation.streams: not on this machine: /nowhere/validation/32-64" in job.output


def test_missing_data_is_an_error_before_training(server):
    job = run(server, TINY, *PLACES, "trainer.precision=fp32")
    assert job.codes == [2]
    assert "/nowhere/train" in job.output
    assert "Traceback" not in job.output
