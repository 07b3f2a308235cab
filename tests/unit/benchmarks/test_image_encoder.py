"""The image encoder of the leaderboard."""

import sys
from pathlib import Path

import pytest
import torch

from benchmarks import image_encoder
from diffusion.models.ingredients.alignment import load_image_encoder


def test_what_is_trained_is_an_image_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_encoder, "NUM_IMAGES", 80)
    monkeypatch.setattr(image_encoder, "NUM_TRAINED", 64)
    monkeypatch.setattr(sys, "argv", ["image_encoder.py", str(tmp_path), "--steps", "5"])
    image_encoder.main()
    features = load_image_encoder(str(tmp_path))(torch.zeros(2, 3, 32, 32, dtype=torch.uint8), (4, 4))
    assert features.shape == (2, image_encoder.WIDTH, 4, 4)
