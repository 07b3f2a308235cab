"""Training of the VAE: losses, discriminator and perceptual distance."""

import pytest
import torch
from torch import Tensor, nn

from diffusion.composer_models import AutoencoderTraining
from diffusion.config.model import AutoencoderConfig
from diffusion.datasets.batch import BatchKey
from diffusion.errors import ConfigurationError
from diffusion.models.architectures import ARCHITECTURES, Architecture, build_vae, with_seed
from diffusion.models.autoencoder import (
    PatchDiscriminator,
    adversarial_losses,
    initialise_logvar,
    load_perceptual,
)
from diffusion.optimizers import build_muon
from tests.tools.toys import write_vgg

START = 7


@pytest.fixture(scope="module")
def model() -> AutoencoderTraining:
    config = AutoencoderConfig(adversarial_weight=0.5, discriminator_lr=3e-4)
    vae = with_seed(0, lambda: build_vae(ARCHITECTURES[Architecture.tiny]))
    return with_seed(1, lambda: AutoencoderTraining(vae, config, seed=0, adversarial_start=START))


def random_pixels(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def gradients(module: nn.Module | None) -> list[Tensor]:
    """Gradients of all parameters, each of which must have one."""
    assert module is not None
    found = [parameter.grad for parameter in module.parameters()]
    assert found and None not in found
    return [gradient for gradient in found if gradient is not None]


def batch_at(step: int) -> dict[str, Tensor]:
    images = ((random_pixels(2, 3, 32, 32) + 1) * 127).to(torch.uint8)
    return {
        BatchKey.IMAGE: images,
        BatchKey.SAMPLE: torch.arange(2),
        BatchKey.STEP: torch.full((2,), step),
    }


def test_one_backward_pass_gives_each_side_the_gradients_of_its_own_loss():
    discriminator = with_seed(0, PatchDiscriminator)
    pixels, decoded = random_pixels(2, 3, 32, 32), random_pixels(2, 3, 32, 32, seed=1).requires_grad_()
    losses = adversarial_losses(discriminator, pixels, decoded)
    (losses.generator + losses.discriminator).backward()
    both = gradients(discriminator)
    assert decoded.grad is not None

    (of_decoded,) = torch.autograd.grad(-discriminator(decoded).mean(), decoded)
    assert torch.allclose(decoded.grad, of_decoded, rtol=1e-5, atol=1e-8)
    real, fake = discriminator(pixels), discriminator(decoded.detach())
    hinge = 0.5 * ((1 - real).clamp(min=0).mean() + (1 + fake).clamp(min=0).mean())
    assert losses.discriminator.item() == pytest.approx(hinge.item(), rel=1e-6)
    assert losses.generator.item() == pytest.approx(-fake.mean().item(), rel=1e-6)
    for gradient, expected in zip(both, torch.autograd.grad(hinge, list(discriminator.parameters())), strict=True):
        assert torch.allclose(gradient, expected, rtol=1e-3, atol=1e-5)


def test_an_image_is_judged_by_itself():
    discriminator = with_seed(0, PatchDiscriminator)
    images = random_pixels(3, 3, 40, 32)
    alone = torch.cat([discriminator(image[None]) for image in images])
    assert torch.allclose(discriminator(images), alone, rtol=1e-5, atol=1e-6)


def test_the_discriminator_starts_late_and_has_gradients_of_zero_before(model):
    for step, has_begun in ((START - 1, False), (START, True)):
        model.zero_grad(set_to_none=True)
        batch = batch_at(step)
        terms = model.loss(model(batch), batch)
        torch.stack(list(terms.values())).sum().backward()
        assert (terms["adversarial"].item() != 0) == has_begun
        assert {bool(gradient.any()) for gradient in gradients(model.discriminator)} == {has_begun}


def test_absolute_and_squared_errors_are_weighted():
    vae = with_seed(0, lambda: build_vae(ARCHITECTURES[Architecture.tiny]))
    model = AutoencoderTraining(vae, AutoencoderConfig(l1_weight=0.5, l2_weight=3.0), seed=0)
    batch = batch_at(0)
    outputs = model(batch)
    terms = model.loss(outputs, batch)
    error = (outputs.decoded - (batch[BatchKey.IMAGE] / 127.5 - 1)).double()
    assert terms["l1"].item() == pytest.approx(0.5 * error.abs().mean().item(), rel=1e-5)
    assert terms["l2"].item() == pytest.approx(3.0 * error.pow(2).mean().item(), rel=1e-5)
    assert set(AutoencoderTraining(vae, AutoencoderConfig(), seed=0).loss(outputs, batch)) == {"l1", "kl"}


@pytest.mark.parametrize("has_convolutions", [True, False])
def test_a_new_posterior_has_nearly_the_initial_variance(has_convolutions):
    changes = {"latent_channels": 16, "use_quant_conv": has_convolutions, "use_post_quant_conv": has_convolutions}
    vae = with_seed(0, lambda: build_vae(ARCHITECTURES[Architecture.tiny], changes))
    initialise_logvar(vae, -5.0)
    with torch.no_grad():
        posterior = vae.encode(random_pixels(2, 3, 32, 32)).latent_dist  # pyright: ignore[reportAttributeAccessIssue]
    assert posterior.mean.shape == (2, 16, 8, 8)
    assert (posterior.logvar + 5).abs().max() < 0.5 < posterior.mean.abs().max()


def test_the_optimizer_has_a_group_for_each_side(model):
    vae, discriminator = model.parameter_groups()
    assert sum(map(len, (vae["params"], discriminator["params"]))) == len(list(model.parameters()))
    assert (discriminator["lr"], discriminator["weight_decay"]) == (3e-4, 0.0)
    assert "lr" not in vae
    matrices, others, judging = build_muon(model, [vae, discriminator], momentum=0.9, lr=1e-3).param_groups
    assert [group["lr"] for group in (matrices, others, judging)] == [1e-3, 1e-3, 3e-4]
    assert matrices["momentum"] == 0.9 and "momentum" not in others and "momentum" not in judging
    assert {id(weight) for weight in matrices["params"]} < {id(weight) for weight in vae["params"]}
    assert judging["params"] == discriminator["params"]


def test_the_perceptual_distance_is_lpips_on_the_weights_of_the_file(tmp_path):
    features = write_vgg(tmp_path / "vgg.pth")
    lpips = load_perceptual(str(tmp_path / "vgg.pth"))
    images, others = random_pixels(2, 3, 32, 32), random_pixels(2, 3, 32, 32, seed=1)
    shift, scale = torch.tensor([-0.030, -0.088, -0.188]), torch.tensor([0.458, 0.448, 0.450])
    maps = [(x - shift[:, None, None]) / scale[:, None, None] for x in (images, others)]
    expected = torch.zeros(2)
    for head, (first, last) in enumerate([(0, 4), (4, 9), (9, 16), (16, 23), (23, 30)]):
        maps = [features[first:last](x.clone()) for x in maps]
        a, b = (x / x.norm(dim=1, keepdim=True) for x in maps)
        weights = lpips.state_dict()[f"lin{head}.model.1.weight"][0]
        assert weights.min() >= 0
        expected += ((a - b).square() * weights).sum(1).mean((1, 2)).detach()
    assert lpips(images, others).flatten() == pytest.approx(expected, rel=1e-3)
    assert lpips(images, images).abs().max() == 0


@pytest.mark.parametrize("content", [None, b"no weights", {"features.0.weight": torch.zeros(1)}])
def test_without_the_weights_of_vgg_the_error_names_the_file(tmp_path, content):
    file = tmp_path / "vgg.pth"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        torch.save(content, file)
    with pytest.raises(ConfigurationError, match=f"autoencoder.vgg_weights={file}.*vgg16-397923af.pth"):
        AutoencoderTraining(
            build_vae(ARCHITECTURES[Architecture.tiny]),
            AutoencoderConfig(perceptual_weight=1, vgg_weights=str(file)),
            0,
        )
