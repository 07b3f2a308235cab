"""Tiny image encoders with random weights, as folders in the layout of transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Dinov2Config, Dinov2Model, ViTConfig, ViTModel

MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]


def write_image_encoder(folder: Path, kind: str = "dinov2") -> Path:
    """Write a vision transformer, `dinov2` or `vit`, with patches of 4 pixels and features of 24 values."""
    options: dict[str, Any] = {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 4,
        "image_size": 16,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "dinov2":
            network = Dinov2Model(Dinov2Config(**options))
        else:
            network = ViTModel(ViTConfig(intermediate_size=48, **options), add_pooling_layer=False)
    network.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": MEAN, "image_std": STD}))
    return folder
