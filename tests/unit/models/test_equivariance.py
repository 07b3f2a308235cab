"""Equivariance of latents: the transformation of a step, and the loss with it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion.composer_models import AutoencoderTraining
from diffusion.config.model import AutoencoderConfig, EquivarianceConfig
from diffusion.datasets.batch import BatchKey
from diffusion.models.architectures import TINY, build_vae, with_seed
from diffusion.models.autoencoder import VALIDATED, Transformation, draw_transformation, psnr, to_pixels, transform
from diffusion.models.latents import SPACES, LatentSpace
from diffusion.randomness import Purpose, normal

SEED = 5
NUM_STEPS = 2000


def images(height: int, width: int, num: int = 4, cell: int = 1) -> Tensor:
    """Random images of cells of one colour, uint8 [num, 3, height, width]."""
    generator = torch.Generator().manual_seed(0)
    small = torch.randint(256, (num, 3, height // cell, width // cell), generator=generator, dtype=torch.uint8)
    return small.repeat_interleave(cell, dim=2).repeat_interleave(cell, dim=3)


def batch_of(content: Tensor, step: int) -> dict[str, Tensor]:
    sample = torch.arange(len(content))
    return {BatchKey.IMAGE: content, BatchKey.SAMPLE: sample, BatchKey.STEP: torch.full_like(sample, step)}


class Posterior:
    """A posterior without variance."""

    def __init__(self, mean: Tensor) -> None:
        self.mean, self.logvar = mean, torch.full_like(mean, -100.0)


class ToyVAE(nn.Module):
    """Means of cells, with their colours mixed by an invertible matrix; mirrored if told so."""

    def __init__(self, cell: int, is_mirrored: bool = False) -> None:
        super().__init__()
        self.cell, self.mirrored = cell, [3] if is_mirrored else []
        self.mix = nn.Parameter(torch.tensor([[1.0, 0.5, 0.0], [0.0, 1.0, -0.25], [0.5, 0.0, 1.0]]))

    def encode(self, pixels: Tensor) -> Any:
        """Return the posterior as diffusers does."""
        colours = F.avg_pool2d(pixels, self.cell).flip(self.mirrored)
        return SimpleNamespace(latent_dist=Posterior(torch.einsum("dc,bchw->bdhw", self.mix, colours)))

    def decode(self, latents: Tensor, return_dict: bool) -> tuple[Tensor]:
        """Invert `encode` for images of cells of one colour."""
        colours = torch.einsum("dc,bchw->bdhw", self.mix.inverse(), latents).flip(self.mirrored)
        return (colours.repeat_interleave(self.cell, 2).repeat_interleave(self.cell, 3),)


def toy(vae: nn.Module, **settings: Any) -> AutoencoderTraining:
    config = AutoencoderConfig(equivariance=EquivarianceConfig(probability=1.0, **settings))
    return AutoencoderTraining(vae, config, seed=SEED)  # pyright: ignore[reportArgumentType]


def test_steps_draw_what_the_paper_draws():
    config = EquivarianceConfig()
    drawn = [draw_transformation(config, SEED, step) for step in range(NUM_STEPS)]
    some = [one for one in drawn if one is not None]
    assert len(some) / NUM_STEPS == pytest.approx(0.5, abs=0.03)
    assert {one.quarter_turns for one in some} == {1, 2, 3}
    scales = torch.tensor([one.scale for one in some])
    assert (scales.min() >= 0.25, scales.max() < 1) == (True, True)
    assert scales.mean().item() == pytest.approx(0.625, abs=0.02)
    assert drawn[:20] == [draw_transformation(config, SEED, step) for step in range(20)]
    assert drawn[:20] != [draw_transformation(config, SEED + 1, step) for step in range(20)]
    always = EquivarianceConfig(probability=1.0, min_scale=1.0, rotations=False)
    assert {draw_transformation(always, SEED, step) for step in range(20)} == {Transformation(1.0, 0)}
    assert draw_transformation(EquivarianceConfig(probability=0.0), SEED, 0) is None


@pytest.mark.parametrize(("size", "turns"), [((8, 8), 1), ((7, 9), 0), ((5, 12), 3)])
@pytest.mark.parametrize("scale", [0.05, 0.5, 0.77, 1.0])
def test_images_and_latents_keep_their_ratio_of_sizes(size, turns, scale):
    latents, pixels = torch.randn(2, 4, *size), torch.randn(2, 3, *(8 * side for side in size))
    one = Transformation(scale, turns)
    small = transform(latents, one)
    assert transform(pixels, one, cell=8).shape[-2:] == tuple(8 * side for side in small.shape[-2:])
    sides = [max(1, round(scale * side)) for side in size]
    assert list(small.shape[-2:]) == (sides[::-1] if turns % 2 else sides)


def test_halving_averages_pairs_and_a_turn_is_counterclockwise():
    ramp = torch.tensor([[0.0, 1.0, 4.0, 5.0], [2.0, 3.0, 6.0, 7.0]])[None, None]
    assert transform(ramp, Transformation(0.5, 0)).tolist() == [[[[1.5, 5.5]]]]
    assert transform(ramp, Transformation(0.5, 1)).tolist() == [[[[5.5], [1.5]]]]
    assert torch.equal(transform(ramp, Transformation(1.0, 0)), ramp)


@pytest.mark.parametrize(("cell", "settings"), [(1, {}), (4, {"min_scale": 1.0})])
def test_an_equivariant_vae_has_no_loss(cell, settings, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(SPACES, "ToyVAE", LatentSpace)
    content = images(24, 32, cell=cell)
    errors = {is_mirrored: [] for is_mirrored in (False, True)}
    for is_mirrored, found in errors.items():
        model = toy(ToyVAE(cell, is_mirrored), **settings)
        for step in range(10):
            batch = batch_of(content, step)
            found.append(model.loss(model(batch), batch)["l1"].item())
    assert max(errors[False]) < 1e-5
    assert max(errors[True]) > 0.1, "it reconstructs as well, but a quarter turn of its latents is one the other way"


def test_the_loss_is_that_of_the_paper():
    vae = with_seed(0, lambda: build_vae(TINY))
    config = AutoencoderConfig(l2_weight=2.0, kl_weight=0.3)
    plain = AutoencoderTraining(vae, config, seed=SEED)
    model = AutoencoderTraining(vae, replace(config, equivariance=EquivarianceConfig()), seed=SEED)
    content, kinds = images(32, 48), set()
    pixels = to_pixels(content)
    for step in range(8):
        batch = batch_of(content, step)
        tau = draw_transformation(EquivarianceConfig(), SEED, step)
        kinds.add(tau is None)
        with torch.no_grad():
            terms, without = model.loss(model(batch), batch), plain.loss(plain(batch), batch)
            assert torch.equal(terms["kl"], without["kl"])
            if tau is None:
                assert torch.equal(terms["l1"], without["l1"])
                continue
            posterior = vae.encode(pixels).latent_dist  # pyright: ignore[reportAttributeAccessIssue]
            noise = normal(SEED, Purpose.POSTERIOR, batch[BatchKey.STEP], batch[BatchKey.SAMPLE], (4, 8, 12))
            decoded = vae.decode(transform(posterior.mean + posterior.std * noise, tau), return_dict=False)[0]
            error = decoded - transform(pixels, tau, cell=4)
        assert terms["l1"].item() == pytest.approx(error.abs().mean().item(), rel=1e-5)
        assert terms["l2"].item() == pytest.approx(2 * error.square().mean().item(), rel=1e-5)
    assert kinds == {True, False}


def test_microbatches_of_a_step_share_the_transformation():
    vae = with_seed(0, lambda: build_vae(TINY))
    model = AutoencoderTraining(vae, AutoencoderConfig(equivariance=EquivarianceConfig(probability=1.0)), seed=SEED)
    whole = batch_of(images(32, 32), 3)
    parts = [{key: value[part] for key, value in whole.items()} for part in (slice(1), slice(1, 4))]
    with torch.no_grad():
        decoded = torch.cat([model(part).decoded for part in parts])
        torch.testing.assert_close(decoded, model(whole).decoded, rtol=1e-4, atol=1e-5)


def test_validation_measures_the_images_and_the_equivariance():
    vae = with_seed(0, lambda: build_vae(TINY))
    model = AutoencoderTraining(vae, AutoencoderConfig(equivariance=EquivarianceConfig()), seed=SEED).eval()
    batch = batch_of(images(32, 32), 0)
    with torch.no_grad():
        outputs = model.eval_forward(batch)
        pixels = to_pixels(batch[BatchKey.IMAGE])
        latents = vae.encode(pixels).latent_dist.mean  # pyright: ignore[reportAttributeAccessIssue]
        decoded = vae.decode(transform(latents, VALIDATED), return_dict=False)[0]
        expected = psnr(decoded, transform(pixels, VALIDATED, cell=4))
    found = {}
    for name, metric in model.get_metrics().items():
        model.update_metric(batch, outputs, metric)
        found[name] = metric.compute().item()
    assert found["psnr"] == pytest.approx(psnr(outputs.decoded, pixels).mean().item())
    assert found["equivariance_psnr"] == pytest.approx(expected.mean().item(), rel=1e-5)
    assert list(AutoencoderTraining(vae, AutoencoderConfig(), seed=0).get_metrics()) == ["psnr"]
