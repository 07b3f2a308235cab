"""Scores on their way from `prepare` to a batch, of images and of latents."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diffusion.config.data import Representation
from diffusion.config.model import Architecture, ModelConfig
from diffusion.datasets.batch import BatchKey
from diffusion.datasets.loader import train_loader
from diffusion.errors import DataError
from diffusion.models import load_frozen_parts
from diffusion.preparation.config import ScorerConfig
from diffusion.preparation.encoding.encode import encode
from diffusion.preparation.encoding.models import EncodingModels
from diffusion.preparation.takedown import take_down
from tests.tools.preparing import prepare
from tests.tools.written_data import data_config
from tests.unit.preparation.test_encode import read

NAMES = ["aesthetic", "brightness"]


class Scorer:
    """The red of an image as a number; nothing for bright ones."""

    def __call__(self, images: Any, captions: Any) -> list[float | None]:
        reds = [float(np.asarray(image)[..., 0].mean()) for image in images]
        return [None if red > 100 else red for red in reds]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from PIL import Image

    root = tmp_path_factory.mktemp("scores")
    (root / "source").mkdir()
    for i in range(12):
        noise = np.random.default_rng(i).integers(0, 40, (40, 48, 3)) + np.array([10 * i, 0, 0])
        Image.fromarray(noise.astype(np.uint8)).save(root / "source" / f"{i}.png")
        (root / "source" / f"{i}.txt").write_text(f"number {i}")
    scorers = [ScorerConfig(path=f"{__name__}.Scorer", column="aesthetic"),
               ScorerConfig(path="demo.shapes.Brightness", column="brightness")]  # fmt: skip
    prepare([root / "source"], root / "prepared", edges=[32], scorers=scorers)
    models = EncodingModels.of(load_frozen_parts(ModelConfig(architecture=Architecture.tiny)))
    encode(root / "prepared", root / "latents", models=models, resolutions=[32], scores=NAMES)
    encode(root / "prepared", root / "plain", models=models, resolutions=[32])
    return root


def batch_of(root: Path, data: str, names: list[str], representation: Representation) -> dict[BatchKey, torch.Tensor]:
    config = data_config(
        root / data / "train", "32-up", resolution=32, representation=representation, global_batch_size=12
    )
    is_image = representation is Representation.images
    tokenize = (lambda captions: np.zeros((len(captions), 5), np.int32)) if is_image else None
    (batch,) = train_loader(config, seed=1, tokenize=tokenize, score_names=names)
    return batch


def test_latents_have_the_scores_of_their_images(root: Path) -> None:
    images = batch_of(root, "prepared", NAMES, Representation.images)
    latents = batch_of(root, "latents", NAMES, Representation.latents)
    assert torch.equal(images[BatchKey.SAMPLE], latents[BatchKey.SAMPLE])
    scores = images[BatchKey.SCORES]
    assert scores.dtype == torch.float32 and scores.shape == (12, 2)
    torch.testing.assert_close(scores, latents[BatchKey.SCORES], rtol=0, atol=0, equal_nan=True)
    aesthetic, brightness = scores[brightness_order(scores)].T
    assert aesthetic.isnan().tolist() == [False] * 9 + [True] * 3, "the scorer gave None"
    assert brightness.isfinite().all() and aesthetic[:9].diff().min() > 5
    assert json.loads((root / "latents/manifest.json").read_text())["scores"] == NAMES


def test_an_erased_sample_has_no_scores(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "prepared", tmp_path / "prepared")
    take_down(str(tmp_path / "prepared"), ["source/0.png"], erase=True)
    models = EncodingModels.of(load_frozen_parts(ModelConfig(architecture=Architecture.tiny)))
    encode(tmp_path / "prepared", tmp_path / "out", models=models, resolutions=[32], scores=NAMES)
    scores = {sample["key"]: sample["scores"] for sample in read(tmp_path / "out/train/32-up")}
    assert len(scores) == 12 and np.isnan(scores[""]).all()
    assert all(np.isfinite(of_sample[1]) for key, of_sample in scores.items() if key)


def brightness_order(scores: torch.Tensor) -> torch.Tensor:
    return scores[:, 1].argsort()


def test_scores_are_read_only_where_they_are_wanted(root: Path) -> None:
    assert BatchKey.SCORES not in batch_of(root, "latents", [], Representation.latents)
    assert BatchKey.SCORES not in batch_of(root, "prepared", [], Representation.images)


@pytest.mark.parametrize("data, names", [("latents", ["aesthetic"]), ("latents", NAMES[::-1]), ("plain", NAMES)])
def test_latents_with_other_scores_are_refused(root: Path, data: str, names: list[str]) -> None:
    with pytest.raises(DataError, match=f"scores: .* there, {', '.join(names)} here"):
        batch_of(root, data, names, Representation.latents)


def test_scores_that_no_image_has(root: Path) -> None:
    with pytest.raises(DataError, match="no score 'beauty' in its metadata, only aesthetic, brightness"):
        batch_of(root, "prepared", ["beauty"], Representation.images)
