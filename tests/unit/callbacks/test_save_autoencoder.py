"""The VAE that a run leaves: weights that other runs may name stay, and ranks without images take part."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffusion.callbacks.autoencoder import AwaitDiscriminator, SaveAutoencoder
from diffusion.composer_models import AutoencoderTraining
from diffusion.config.model import Architecture, AutoencoderConfig, ModelConfig
from diffusion.datasets.batch import BatchKey
from diffusion.models.architectures import ARCHITECTURES, build_vae, with_seed
from diffusion.models.autoencoder import initialise_logvar
from diffusion.models.latents import latent_space
from diffusion.models.pretrained import load_frozen_parts

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


FLUX2 = {"_class_name": "AutoencoderKLFlux2", "latent_channels": 4}
DC = {
    "_class_name": "AutoencoderDC",
    "latent_channels": 4,
    **{f"{side}_block_out_channels": [8, 16, 32] for side in ("encoder", "decoder")},
    **{f"{side}_layers_per_block": [0, 1, 1] for side in ("encoder", "decoder")},
    **{f"{side}_qkv_multiscales": [[], [], []] for side in ("encoder", "decoder")},
}


@pytest.mark.parametrize("changes", [{}, FLUX2, DC])
def test_a_vae_of_each_class_learns_and_is_read_with_the_statistics_of_its_latents(changes, tmp_path):
    generator = torch.Generator().manual_seed(0)
    colours = torch.randint(0, 256, (8, 3, 4, 4), dtype=torch.uint8, generator=generator)
    images = colours.repeat_interleave(8, 2).repeat_interleave(8, 3)
    vae = with_seed(1, lambda: build_vae(ARCHITECTURES[Architecture.tiny], changes))
    initialise_logvar(vae, -5.0)
    training = AutoencoderTraining(vae, AutoencoderConfig(), seed=0)
    optimizer = torch.optim.AdamW(training.parameters(), lr=2e-3)
    losses = []
    for step in range(40):
        batch = {BatchKey.IMAGE: images, BatchKey.SAMPLE: torch.arange(8), BatchKey.STEP: torch.full((8,), step)}
        losses.append(sum(training.loss(training(batch), batch).values()))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.9 * losses[0]
    state: Any = SimpleNamespace(timestamp=SimpleNamespace(batch=SimpleNamespace(value=40)))
    logger: Any = None
    for _ in range(2):  # The same weights are not written again.
        SaveAutoencoder(training, list(images.split(4)), tmp_path).fit_end(state, logger)
    assert {path.name for path in tmp_path.iterdir()} == {"vae", "reconstructions.png"}
    config = ModelConfig(architecture=Architecture.tiny_transformer, vae=str(tmp_path / "vae"), frozen_seed=0)
    read = load_frozen_parts(config).vae
    assert type(read).__name__ == changes.get("_class_name", "AutoencoderKL")
    assert read.state_dict().keys() == vae.state_dict().keys()
    with torch.no_grad():
        mean, _ = latent_space(read).encode(images)
        assert torch.equal(mean, latent_space(vae).encode(images)[0])
    latents = latent_space(read).scaling.normalise(mean)
    assert latents.square().mean().item() == pytest.approx(1.0, rel=1e-3)
    if changes is not DC:
        assert latents.mean(dim=(0, 2, 3)).abs().max() < 1e-3


def test_a_rank_without_images_takes_part(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "1")
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
