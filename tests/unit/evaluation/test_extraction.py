"""Features of a set, computed batch by batch."""

import tracemalloc

import numpy as np
import torch
from PIL import Image

from diffusion.evaluation.config import ResizeFilter
from diffusion.evaluation.features import Extractor
from diffusion.evaluation.statistics import Moments


class MadeUpImages:
    """So many images of 8 x 8 pixels of one colour each."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Image.Image:
        return Image.new("RGB", (8, 8), (index % 256, index // 256 % 256, 7 * index % 256))


class RandomProjection:
    """Features [B, D] that depend linearly on the colour of an image."""

    name, size = "projection", 8

    def __init__(self, width: int) -> None:
        self.matrix = torch.randn(3, width, generator=torch.Generator().manual_seed(0))

    def image_features(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels.float().mean(dim=(2, 3)) @ self.matrix


def extract(num: int, width: int, batch_size: int, keep: bool):
    extractor = Extractor(
        device=torch.device("cpu"),
        resize_filter=ResizeFilter.bicubic,
        batch_size=batch_size,
        num_threads=1,
    )
    return extractor.extract(RandomProjection(width), MadeUpImages(num), keep=keep, label="test")


def test_moments_are_those_of_the_features_whether_these_are_kept_or_not():
    kept, moments_only = extract(2500, 5, 16, keep=True), extract(2500, 5, 16, keep=False)
    expected = Moments.of(kept.features)
    assert kept.features.shape == (2500, 5)
    assert moments_only.features is None
    for found in (kept.moments, moments_only.moments):
        assert found.num == 2500
        np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-12)
        np.testing.assert_allclose(found.scatter, expected.scatter, rtol=1e-10)


def test_memory_for_20_000_images_of_2048_features_stays_under_1_gb():
    tracemalloc.start()
    try:
        found = extract(20_000, 2048, 256, keep=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.features.shape == (20_000, 2048)
    assert peak < 1e9
