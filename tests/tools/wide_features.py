"""Ranks extract features of the shipped protocol's width and compare them: `wide_features.py OUT` writes the memory."""

import json
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
from PIL import Image
from torch import Tensor

from diffusion.distributed import is_first_rank, start_process_group
from diffusion.evaluation.config import EvaluationConfig
from diffusion.evaluation.features import extract_features
from diffusion.evaluation.images import Images
from diffusion.evaluation.statistics import frechet_distance
from verification.simulate_start import peak_memory

NUM_IMAGES, WIDTH = 10_000, 2048


class Wide:
    """Features without a network."""

    name = identity = "wide"
    size = 2

    def to(self, device: torch.device) -> Any:
        return self

    def image_features(self, pixels: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(int(pixels.sum()))
        return torch.rand(len(pixels), WIDTH, generator=generator)


def main() -> None:
    start_process_group()
    image = Image.new("RGB", (2, 2), (1, 2, 3))
    images = Images(NUM_IMAGES, lambda index: image)
    config = EvaluationConfig(batch_size=64)
    before = psutil.Process().memory_info().rss
    sets = [extract_features(Wide(), images, config, torch.device("cpu"), name) for name in ("own", "reference")]
    if is_first_rank():
        own, reference = sets
        assert own is not None and reference is not None
        assert own.shape == (NUM_IMAGES, WIDTH)
        distance = frechet_distance(own, reference[::-1])
        found = {"distance": distance, "bytes": peak_memory() - before}
        Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
