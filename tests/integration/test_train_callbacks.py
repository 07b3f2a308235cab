"""Callbacks that depend on the configuration."""

from pathlib import Path
from typing import Any

import pytest
from composer import Callback

from diffusion.callbacks import build_callbacks
from diffusion.callbacks.samples import SampleGrids
from diffusion.callbacks.step import CollectiveTimeout
from diffusion.checkpointing.resume import checkpoint_storage
from diffusion.composer_models import LatentDiffusionTraining
from diffusion.config.data import Mixing
from diffusion.config.loading import load_config
from diffusion.config.schema import Config
from diffusion.config.training import Device
from diffusion.models.build import build_parts


@pytest.mark.parametrize(
    ("compilation", "device", "mixing", "expected"),
    [
        ("auto", Device.gpu, Mixing.mixed, [(50.0, 40.0)]),
        ("auto", Device.cpu, Mixing.mixed, []),
        ("blocks", Device.cpu, Mixing.mixed, [(50.0, 40.0)]),
        ("blocks", Device.cpu, Mixing.groups, [(50.0, None)]),
        ("none", Device.gpu, Mixing.groups, []),
    ],
)
def test_collectives_wait_longer_where_it_compiles(tmp_path, compilation, device, mixing, expected):
    config = load_config(
        "tests/tools/toy.yaml", [f"output_folder={tmp_path}", f"performance.compilation={compilation}"]
    )
    config.data.mixing = mixing
    config.trainer.compile_timeout, config.trainer.dist_timeout = 50.0, 40.0
    callbacks = callbacks_of(config, tmp_path, device)
    found = [(one.first, one.then) for one in callbacks if isinstance(one, CollectiveTimeout)]
    assert found == expected


def test_grids_come_at_a_share_of_the_run(tmp_path):
    """0.14 * 100 is more than 14."""
    config = load_config("tests/tools/toy.yaml", ["trainer.max_duration=100ba", "samples.interval=0.14dur"])
    (grids,) = [one for one in callbacks_of(config, tmp_path, Device.cpu) if isinstance(one, SampleGrids)]
    assert grids.config.interval == "14ba"


def callbacks_of(config: Config, folder: Path, device: Device) -> list[Callback]:
    parts = build_parts(config.model, config.objective, resolution=config.data.resolution, seed=0)
    model = LatentDiffusionTraining(**parts)
    heartbeat: Any = object()
    return build_callbacks(config, model, None, checkpoint_storage(config, folder), device, heartbeat, {})
