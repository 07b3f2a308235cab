"""Weights and data that are not there: a dry run and the doctor name each key, in a folder and in a store."""

import time

import pytest

from diffusion.cli import train_command
from diffusion.config.keys import schema_keys
from diffusion.config.loading import load_config
from diffusion.config.locations import is_location
from diffusion.config.resumption import is_used
from diffusion.config.schema import Config, Task
from diffusion.errors import ConfigurationError
from diffusion.formats.run_folder import STARTS
from scripts.doctor import check_initial_weights
from tests.tools.s3_server import s3_process, s3_server

__all__ = ["s3_process", "s3_server"]

BASES = {Task.diffusion: "yamls/tiny/phase1.yaml", Task.autoencoder: "yamls/tiny/autoencoder.yaml"}
DATA = [f"{section}.{key}" for section in ("data", "validation") for key in ("streams=[{name: a}]", "local=/nowhere")]
NUM_SECONDS = 60
PLANNED = ["model.text_encoder.path", "model.alignment.path"]
"""Models whose configuration a plan reads: the error of the dry run names their keys."""


def weights_of(task: Task) -> list[str]:
    keys = [key for key in schema_keys(Config) if is_location(key) and is_used(key, task)]
    return [key for key in keys if not key.startswith(("data.", "validation.")) and key not in PLANNED]


def named(task: Task, *overrides: str) -> tuple[str, dict[str, str]]:
    """Return what a dry run says, and the doctor's problems by key."""
    images = ["data.representation=images", "autoencoder.perceptual_weight=1"]
    command, said = [BASES[task], *DATA, *images, *overrides], list[str]()
    began = time.monotonic()
    train_command([*command, "--dry-run"], say=said.append)
    problems = {verdict.check: verdict.what for verdict in check_initial_weights(load_config(BASES[task], command[1:]))}
    assert time.monotonic() - began < NUM_SECONDS
    return said[-1], problems


@pytest.mark.parametrize("task", Task)
@pytest.mark.parametrize("source", ["/nowhere/a", "nowhere/a"])
def test_each_key_is_named_of_what_is_not_on_this_machine(task, source, tmp_path):
    keys = weights_of(task)
    said, problems = named(task, f"output_folder={tmp_path}", *(f"{key}={source}" for key in keys))
    assert sorted(problems) == sorted(keys)
    for key in keys:
        assert f"  {key}: {problems[key]}" in said
        assert source in problems[key]
    (tmp_path / STARTS).touch()
    _, problems = named(task, f"output_folder={tmp_path}", *(f"{key}={source}" for key in keys))
    assert sorted(problems) == sorted({*keys} - {"init_from.checkpoint"}), "what has begun needs no initial weights"


@pytest.mark.parametrize("key", PLANNED)
def test_a_model_that_is_planned_with_and_is_not_here_is_named(key):
    overrides = [*DATA, "data.representation=images", f"{key}=/nowhere/a"]
    problems = check_initial_weights(load_config(BASES[Task.diffusion], overrides))
    assert key in {verdict.check for verdict in problems}
    with pytest.raises(ConfigurationError, match=f"{key}=/nowhere/a"):
        train_command([BASES[Task.diffusion], *overrides, "--dry-run"], say=print)


@pytest.mark.parametrize("yaml", ["language_model", "alignment"])
def test_a_model_that_is_planned_with_and_is_still_to_be_named(yaml):
    with pytest.raises(ConfigurationError, match=r"^model\.(text_encoder|alignment)\.path=\?\?\?: .*Give the folder"):
        train_command([f"yamls/tiny/{yaml}.yaml", "--dry-run"], say=print)


@pytest.mark.s3
def test_each_key_is_named_of_what_is_not_in_a_store(s3_server, tmp_path):
    start = [f"output_folder={tmp_path}", "data.remote=s3://tests/none", "validation.remote=s3://tests/none"]
    for initial in ("s3://tests/none", "s3://tests/none/ep0-ba4", "s3://other/none"):
        said, problems = named(Task.diffusion, *start, f"init_from.checkpoint={initial}")
        assert initial.split("/ep")[0] in problems["init_from.checkpoint"]
        assert f"  init_from.checkpoint: {problems['init_from.checkpoint']}" in said
        for key in ("data.streams", "validation.streams"):
            assert f"  {key}: s3://tests/none" in said
