"""The VAE that a run leaves: weights that other runs may name stay, and ranks without images take part."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer.utils import dist

from diffusion.callbacks.autoencoder import AwaitDiscriminator, SaveAutoencoder
from diffusion.composer_models import AutoencoderTraining
from diffusion.config.model import Architecture, AutoencoderConfig
from diffusion.models.architectures import ARCHITECTURES, build_vae, with_seed

IMAGES = torch.arange(3 * 32 * 32, dtype=torch.uint8).view(1, 3, 32, 32)


def end(folder: Path, step: int, *, seed: int, images: list[torch.Tensor]) -> None:
    """End a run of the autoencoder whose weights are those of a seed."""
    vae = with_seed(seed, lambda: build_vae(ARCHITECTURES[Architecture.tiny]))
    state: Any = SimpleNamespace(timestamp=SimpleNamespace(batch=SimpleNamespace(value=step)))
    logger: Any = None
    SaveAutoencoder(AutoencoderTraining(vae, AutoencoderConfig(), seed=0), images, folder).fit_end(state, logger)


def test_weights_that_another_run_may_name_stay(tmp_path):
    contents: dict[str, bytes] = {}
    for step, seed, added in [(2, 0, "vae"), (2, 0, None), (4, 1, "vae-ba4"), (4, 1, None), (4, 2, "vae-ba4-2")]:
        end(tmp_path, step, seed=seed, images=[IMAGES])
        weights = {path.parent.name: path.read_bytes() for path in tmp_path.glob("*/*.safetensors")}
        assert weights.keys() - contents.keys() == ({added} if added else set())
        assert {name: weights[name] for name in contents} == contents
        contents = weights
    assert len(set(contents.values())) == 3


def test_a_rank_without_images_takes_part(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dist, "get_global_rank", lambda: 1)
    end(tmp_path, 2, seed=0, images=[])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("step", "counts"), [(3, False), (4, True)])
def test_updates_of_a_discriminator_that_has_not_started_do_not_count(step, counts):
    vae = build_vae(ARCHITECTURES[Architecture.tiny])
    model = AutoencoderTraining(vae, AutoencoderConfig(adversarial_weight=1.0), seed=0, adversarial_start=4)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    batch, logger = SimpleNamespace(value=step), SimpleNamespace()
    state: Any = SimpleNamespace(timestamp=SimpleNamespace(batch=batch), optimizers=[optimizer])
    AwaitDiscriminator(model).fit_start(state, logger)  # pyright: ignore[reportArgumentType]
    assert model.discriminator is not None
    assert {one in optimizer.state for one in vae.parameters()} == {True}
    assert {one in optimizer.state for one in model.discriminator.parameters()} == {counts}
