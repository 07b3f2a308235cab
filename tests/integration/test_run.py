"""`run.py` as a user meets it: one message, no traceback, exit code not 0, in seconds."""

import subprocess
import sys
import time

import pytest

from diffusion.cli import train_command
from diffusion.config.loading import load_config
from diffusion.errors import ConfigurationError, UserError
from diffusion.train import start_ranks
from tests.tools.training_runs import ROOT, environment

TINY = "yamls/tiny/phase1.yaml"
PLACES = ["data.local=/nowhere/train", "validation.local=/nowhere/validation", "model.vae=null"]

MISTAKES = {
    "unknown key in a YAML file": (
        "optimzer:\n  lr: 1.0\n",
        ["Unknown key optimzer ({file}, line 2): did you mean opt"],
    ),
    "missing file": (None, ["yamls/phase9.yaml cannot be read"]),
    "argument that does not fit the U-Net": (
        ["model.network.norm_num_groups=5"],
        ["model.network is {{'norm_num_groups': 5}}", "UNet2DConditionModel"],
    ),
    "plug-in that is not there": (
        ["plugins.callbacks=[{path: nope.B}]"],
        ["plugins.callbacks.0.path=nope.B: No module named 'nope'. Give package.module.Name"],
    ),
}
"""Overrides, lines of a YAML file, or None for a missing file; and parts of the message."""


def dry_run(*arguments: str) -> str:
    """Text of the plan."""
    said: list[str] = []
    train_command([*arguments, "--dry-run"], say=said.append)
    return "\n".join(said)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (["data.global_batch_size=33"], ["data.global_batch_size is 33", "1 or 3 ranks", "32 or 34"]),
        (
            ["output_folder=/proc/nowhere/run"],
            ["output_folder=/proc/nowhere/run cannot be written: ", "Choose another one"],
        ),
    ],
)
def test_a_mistake_ends_all_ranks_with_one_message(server, overrides, messages, tmp_path):
    job = server.start(2, ["run.py", TINY, *PLACES, f"output_folder={tmp_path / 'run'}", *overrides]).finish()
    assert job.codes == [2, 2], job.output
    for message in messages:
        assert message in job.output
    assert job.output.count("Error: ") == 1, job.output
    assert "Traceback" not in job.output


@pytest.mark.parametrize("name", MISTAKES)
def test_a_dry_run_names_the_mistake(name, tmp_path):
    mistake, messages = MISTAKES[name]
    file = tmp_path / "mine.yaml"
    if isinstance(mistake, str):
        file.write_text(f"extends: {ROOT / TINY}\n{mistake}")
    yaml = "yamls/phase9.yaml" if mistake is None else TINY if isinstance(mistake, list) else str(file)
    overrides = mistake if isinstance(mistake, list) else []
    with pytest.raises(ConfigurationError) as caught:
        train_command([yaml, *PLACES, *overrides, "--dry-run"], say=lambda text: None)
    assert all(message.format(file=file) in str(caught.value) for message in messages)


def test_a_mistake_ends_in_seconds():
    start = time.monotonic()
    command = [sys.executable, "run.py", TINY, *PLACES, "optimizer.lr=fast"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600)
    seconds = time.monotonic() - start
    assert done.returncode == 2
    assert done.stderr == "ConfigurationError: optimizer.lr is 'fast' (command line), but must be a number.\n"
    assert done.stdout == ""
    assert seconds < 20


def test_a_machine_that_lacks_the_precision_is_named():
    config = load_config(TINY, [*PLACES, "trainer.precision=amp_bf16", "trainer.device=cpu"])
    with pytest.raises(UserError, match=r"trainer\.precision"):
        start_ranks(config)


def test_a_dry_run_says_what_is_missing():
    said = dry_run("yamls/phase1.yaml", "seed=5")
    assert "seed: 5\n" in said
    assert "1,126,400,000 = 550,000 iterations x 2,048" in said
    assert "865,910,724" in said
    for key in ("data.local", "validation.local", "model.pretrained"):
        assert f"  {key}:" in said
    with pytest.raises(ConfigurationError, match=r"data\.local"):
        train_command(["yamls/phase1.yaml"], say=print)


def test_a_dry_run_says_which_folders_are_not_here():
    said = dry_run(TINY, *PLACES)
    assert "data.streams: not on this machine: /nowhere/train/32-64, /nowhere/train/64-up" in said
    assert "validation.streams: not on this machine: /nowhere/validation/32-64" in said
