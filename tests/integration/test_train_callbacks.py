"""Callbacks that depend on the configuration."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer import Callback
from torch import nn

from diffusion.callbacks import build_callbacks
from diffusion.callbacks.collectives import AccumulateLocally, CollectiveTimeout
from diffusion.callbacks.samples import SampleGrids
from diffusion.checkpointing.resume import checkpoint_storage
from diffusion.composer_models import LatentDiffusionTraining
from diffusion.config.data import Mixing
from diffusion.config.loading import load_config
from diffusion.config.schema import Config
from diffusion.config.training import Device, SamplesConfig
from diffusion.errors import MachineError
from diffusion.models.build import build_parts


def callbacks_of(config: Config, device: Device) -> list[Callback]:
    parts = build_parts(config.model, config.objective, resolution=config.data.resolution, seed=0)
    heartbeat: Any = object()
    storage = checkpoint_storage(config, Path(config.output_folder))
    return build_callbacks(config, LatentDiffusionTraining(**parts), None, storage, device, heartbeat, {})


@pytest.mark.parametrize(
    ("compilation", "device", "mixing", "expected"),
    [
        ("auto", Device.gpu, Mixing.mixed, [(50.0, 40.0)]),
        ("auto", Device.cpu, Mixing.mixed, [(40.0, None)]),
        ("blocks", Device.cpu, Mixing.mixed, [(50.0, 40.0)]),
        ("blocks", Device.cpu, Mixing.groups, [(50.0, None)]),
        ("none", Device.gpu, Mixing.groups, [(40.0, None)]),
    ],
)
def test_collectives_wait_longer_where_it_compiles(tmp_path, compilation, device, mixing, expected):
    config = load_config(
        "tests/tools/toy.yaml", [f"output_folder={tmp_path}", f"performance.compilation={compilation}"]
    )
    config.data.mixing = mixing
    config.trainer.compile_timeout, config.trainer.dist_timeout = 50.0, 40.0
    found = [(one.first, one.then) for one in callbacks_of(config, device) if isinstance(one, CollectiveTimeout)]
    assert found == expected


@pytest.mark.parametrize(("precision", "is_once"), [("fp32", True), ("bf16", False)])
def test_microbatches_are_added_up_in_fp32(tmp_path, precision, is_once):
    config = load_config("tests/tools/toy.yaml", [f"output_folder={tmp_path}", f"trainer.reduce_precision={precision}"])
    assert any(isinstance(one, AccumulateLocally) for one in callbacks_of(config, Device.cpu)) == is_once


def test_a_grid_that_cannot_be_written_is_one_message(tmp_path):
    (tmp_path / "samples").touch()
    model: Any = SimpleNamespace(generate=lambda prompts, **_: torch.zeros(len(prompts), 3, 8, 8))
    grids = SampleGrids(model, SamplesConfig(prompts=["a"]), tmp_path / "samples", None, "toy")
    state: Any = SimpleNamespace(timestamp=SimpleNamespace(batch=SimpleNamespace(value=3)), model=nn.Identity())
    logger: Any = None
    with pytest.raises(MachineError, match=r"step-000003\.png cannot be written"):
        grids.fit_end(state, logger)


def test_grids_come_at_a_share_of_the_run(tmp_path):
    """0.14 * 100 is more than 14."""
    changes = [f"output_folder={tmp_path}", "trainer.max_duration=100ba", "samples.interval=0.14dur"]
    config = load_config("tests/tools/toy.yaml", changes)
    (grids,) = [one for one in callbacks_of(config, Device.cpu) if isinstance(one, SampleGrids)]
    assert grids.config.interval == "14ba"
