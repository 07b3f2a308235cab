"""`run.py` as a user meets it: one message, no traceback, exit code not 0, in seconds."""

import subprocess
import sys
import time

import pytest

from tests.training_runs import ROOT, environment, launch

TINY = "yamls/tiny/phase1.yaml"
PLACES = ["data.local=/nowhere/train", "validation.local=/nowhere/validation", "model.vae=null"]

MISTAKES = {
    "unknown key": (["optimizer.learning_rat=1"], "Unknown key optimizer.learning_rat"),
    "unknown key elsewhere": (["lr=1"], "did you mean optimizer.lr?"),
    "unknown key in a YAML file": (["UNKNOWN_KEY_YAML"], "optimzer.lr"),
    "wrong type": (["trainer.keep_checkpoints=many"], "trainer.keep_checkpoints is 'many' (command line)"),
    "wrong choice": (["trainer.precision=fp8"], "fp32, amp_bf16"),
    "missing value": (["data.local=???"], "data.local"),
    "missing file": (["MISSING_YAML"], "does not exist"),
    "batch not divisible by the microbatch": (
        ["trainer.device_train_microbatch_size=5"],
        "device_train_microbatch_size",
    ),
    "EMA after the end": (["algorithms.ema={start: 5000ba}"], "algorithms.ema.start is '5000ba', at or after the end"),
    "cache limit without a remote": (["data.cache_limit=1gb"], "data.cache_limit"),
    "random crop of latents": (["data.crop=random"], "data.crop"),
    "flip of latents": (["data.horizontal_flip=0.5"], "data.horizontal_flip"),
    "zero-terminal SNR with epsilon": (
        ["objective.zero_terminal_snr=true", "objective.prediction_type=epsilon"],
        "objective.zero_terminal_snr",
    ),
}


def run(arguments: list[str]) -> tuple[subprocess.CompletedProcess[str], float]:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "run.py", *arguments], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120
    )
    return done, time.monotonic() - start


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_in_seconds_with_one_message(name, tmp_path):
    overrides, message = MISTAKES[name]
    yaml = TINY
    if overrides == ["UNKNOWN_KEY_YAML"]:
        file = tmp_path / "mine.yaml"
        file.write_text(f"extends: {ROOT / TINY}\noptimzer:\n  lr: 1.0\n")
        yaml, overrides = str(file), []
        message = f"Unknown key optimzer ({file}, line 2)"
    if overrides == ["MISSING_YAML"]:
        yaml, overrides = "yamls/phase9.yaml", []
    done, seconds = run([yaml, *PLACES, *overrides])
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert done.stderr.count("Error: ") == 1
    assert seconds < 20


def test_a_machine_that_lacks_the_precision_is_named():
    done, _ = run([TINY, *PLACES, "trainer.precision=amp_bf16", "trainer.device=cpu"])
    assert done.returncode == 2
    assert "trainer.precision" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_dry_run_says_what_is_missing_and_exits_0():
    done, _ = run(["yamls/phase1.yaml", "--dry-run"])
    assert done.returncode == 0, done.stderr
    assert "1,126,400,000 = 550,000 iterations x 2,048" in done.stdout
    assert "865,910,724" in done.stdout
    for key in ("data.local", "validation.local", "model.pretrained"):
        assert f"  {key}:" in done.stdout
    done, _ = run(["yamls/phase1.yaml"])
    assert done.returncode == 2
    assert "data.local" in done.stderr


@pytest.mark.world_size(2)
def test_two_ranks_say_it_once():
    done = launch(2, ["run.py", TINY, *PLACES, "data.global_batch_size=33"])
    assert done.returncode != 0
    assert done.stdout.count("data.global_batch_size") == 1
    assert "Traceback" not in done.stdout


def test_a_dry_run_says_which_folders_are_not_here():
    done, _ = run([TINY, *PLACES, "--dry-run"])
    assert done.returncode == 0, done.stderr
    assert "data.streams: not on this machine: /nowhere/train/32-64, /nowhere/train/64-up" in done.stdout
    assert "validation.streams: not on this machine: /nowhere/validation/32-64" in done.stdout


def test_missing_data_is_an_error_before_training():
    done, _ = run([TINY, *PLACES, "trainer.precision=fp32"])
    assert done.returncode == 2
    assert "/nowhere/train" in done.stderr
    assert "Traceback" not in done.stderr
