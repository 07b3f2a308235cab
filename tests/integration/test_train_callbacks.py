"""Callbacks that depend on the configuration."""

from typing import Any

import pytest

from diffusion.callbacks import build_callbacks
from diffusion.callbacks.step import CollectiveTimeout
from diffusion.checkpointing.resume import checkpoint_storage
from diffusion.config.loading import load_config
from diffusion.config.training import Device
from diffusion.models.build import build_model


@pytest.mark.parametrize(
    ("compilation", "device", "is_there"),
    [
        ("auto", Device.gpu, True),
        ("auto", Device.cpu, False),
        ("blocks", Device.cpu, True),
        ("none", Device.gpu, False),
    ],
)
def test_collectives_wait_longer_where_it_compiles(tmp_path, compilation, device, is_there):
    config = load_config(
        "tests/tools/toy.yaml", [f"output_folder={tmp_path}", f"performance.compilation={compilation}"]
    )
    config.trainer.compile_timeout, config.trainer.dist_timeout = 50.0, 40.0
    model = build_model(config.model, config.objective, resolution=config.data.resolution, seed=0)
    heartbeat: Any = object()
    callbacks = build_callbacks(config, model, None, checkpoint_storage(config, tmp_path), device, heartbeat, {})
    found = [(one.first, one.then) for one in callbacks if isinstance(one, CollectiveTimeout)]
    assert found == ([(50.0, 40.0)] if is_there else [])
