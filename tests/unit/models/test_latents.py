"""Pixels, and the latents of each VAE of diffusers, in training, generation and exports."""

from pathlib import Path

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_dc import AutoencoderDC
from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
from diffusers.pipelines.flux2.pipeline_flux2 import Flux2Pipeline
from torch import Tensor

from diffusion.config.data import ImageSize
from diffusion.config.model import Architecture, FlowConfig, ModelConfig, ObjectiveConfig, Posterior, PredictionType
from diffusion.datasets.batch import BatchKey
from diffusion.errors import ConfigurationError
from diffusion.evaluation.config import SamplingConfig
from diffusion.evaluation.generate import PipelineGenerator
from diffusion.models import LatentDiffusion, build_model, count_parameters
from diffusion.models.architectures import side_factor, with_seed
from diffusion.models.latents import fold_scaling, latent_space
from diffusion.models.sampling import image_seeds, initial_latents
from diffusion.preparation.encoding.models import Encoder, EncodingModels
from tests.tools.latent_models import perturb
from tests.tools.pipelines import write_model

SMALL = {"hidden_size": 64, "num_heads": 4, "depth": 2, "axes_dim": (8, 8)}
PROMPTS = ["a red circle", "a blue star on a white background"]


def configured(architecture: Architecture, vae: Path | None = None, **network) -> ModelConfig:
    options = {"vae": None if vae is None else str(vae), "network": SMALL | network, "frozen_seed": 3}
    return ModelConfig(architecture=architecture, **options)


def build(config: ModelConfig, posterior: Posterior = Posterior.sample) -> LatentDiffusion:
    flow = {"prediction_type": PredictionType.flow, "flow": FlowConfig(shift=2.0)}
    model = build_model(config, ObjectiveConfig(posterior=posterior, **flow), resolution=32, seed=17).eval()
    perturb(model.network.parameters(), 0.05)
    return model


def image_batch(model: LatentDiffusion) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        BatchKey.IMAGE: torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=generator),
        BatchKey.TOKEN_IDS: torch.from_numpy(model.tokenize(["a red circle"] * 4)).long(),
        BatchKey.SAMPLE: torch.arange(4),
    }


def assert_pipeline_generates_the_same(model: LatentDiffusion, folder: Path) -> None:
    """Compare an exported folder, read by `evaluate` with a class of diffusers, with `generate`."""
    exported = PipelineGenerator(write_model(model, folder, resolution=32), torch.device("cpu"))
    assert (exported.resolution, exported.side_factor) == (32, model.side_factor)
    latents = initial_latents(image_seeds(5, 2), exported.latent_shape(32, 32), torch.device("cpu"))
    images = exported.generate(PROMPTS, latents, SamplingConfig(num_inference_steps=25), 3.0)
    found = torch.stack([torch.tensor(list(image.getdata())).T.reshape(3, 32, 32) for image in images]) / 255
    expected = model.generate(
        PROMPTS, num_inference_steps=25, guidance_scale=3.0, latents=latents, output="tensor", progress=False
    )
    assert isinstance(expected, Tensor)
    assert expected.std() > 0.01, "there is something to see"
    assert (found - expected).abs().max() < 1 / 255


def test_on_pixels_the_loss_of_the_velocity_is_that_of_the_image_over_the_squared_noise_rate(monkeypatch):
    model = build(configured(Architecture.tiny_pixel_transformer))
    batch, given = image_batch(model), {}
    model.network.register_forward_hook(lambda module, inputs, output: given.update(image=output[0]))
    timesteps = torch.tensor([51.3, 200.0, 612.5, 999.0])
    monkeypatch.setattr(model, "_timesteps", lambda *_: timesteps)
    with torch.no_grad():
        errors = model.sample_errors(model.forward(batch))
    image = batch[BatchKey.IMAGE].float() / 127.5 - 1
    expected = (given["image"] - image).square().mean(dim=(1, 2, 3)) / (timesteps / 1000) ** 2
    torch.testing.assert_close(errors, expected, rtol=1e-4, atol=0)


def flux2(folder: Path) -> Path:
    """A small AutoencoderKLFlux2 with random weights and statistics, in a folder of diffusers."""
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    sizes = {"block_out_channels": (16, 32), "layers_per_block": 1, "latent_channels": 8, "norm_num_groups": 2}
    vae = with_seed(5, lambda: AutoencoderKLFlux2(**blocks, **sizes))  # pyright: ignore[reportArgumentType]
    generator = torch.Generator().manual_seed(2)
    vae.bn.running_mean = torch.randn(32, generator=generator)
    vae.bn.running_var = 1 + torch.rand(32, generator=generator)
    vae.save_pretrained(folder)
    return folder


def deep(folder: Path) -> Path:
    """A small AutoencoderDC with random weights, in a folder of diffusers."""
    sides = ("encoder", "decoder")
    channels: dict = {f"{side}_block_out_channels": (8, 16, 32) for side in sides}
    layers = {f"{side}_layers_per_block": (1, 1, 1) for side in sides}
    scales = {f"{side}_qkv_multiscales": ((), (), ()) for side in sides}
    sizes = {"latent_channels": 16, "attention_head_dim": 8, "scaling_factor": 0.4}
    with_seed(5, lambda: AutoencoderDC(**channels, **layers, **scales, **sizes)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("write", [flux2, deep])
def test_a_pipeline_of_diffusers_decodes_the_latents_of_other_vaes(write, tmp_path):
    channels, posterior = (8, Posterior.sample) if write is flux2 else (16, Posterior.mean)
    config = configured(Architecture.tiny_transformer, write(tmp_path / "vae"), in_channels=channels, patch_size=1)
    model = build(config, posterior)
    assert side_factor(config) == model.side_factor == (2 if write is flux2 else 4)
    counts = {"vae": model.vae, "network": model.network}
    assert count_parameters(config).items() >= {(k, sum(p.numel() for p in m.parameters())) for k, m in counts.items()}
    batch, size = image_batch(model), ImageSize(32, 32)
    encoder = Encoder(EncodingModels.of(model.frozen), "cpu", "fp32")
    mean, logvar = encoder.start({size: batch[BatchKey.IMAGE]}, batch[BatchKey.TOKEN_IDS].int()).moments[size]
    assert (logvar is None) == (write is deep)
    stored = {BatchKey.LATENT_MEAN: mean} | ({} if logvar is None else {BatchKey.LATENT_LOGVAR: logvar})
    encoded = {key: value for key, value in batch.items() if key != BatchKey.IMAGE} | stored
    with torch.no_grad():
        losses = [model.loss(model.forward(one), one) for one in (batch, encoded)]
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-3, atol=0)
    assert_pipeline_generates_the_same(model, tmp_path / "folder")
    with pytest.raises(ConfigurationError, match="no pipeline of a U-Net decodes"):
        build(ModelConfig(architecture=Architecture.tiny, vae=config.vae, network={"in_channels": channels}), posterior)


def test_a_vae_without_posterior_is_named(tmp_path):
    config = configured(Architecture.tiny_transformer, deep(tmp_path), in_channels=16, patch_size=1)
    with pytest.raises(ConfigurationError, match=r"no posterior. Set objective\.posterior=mean"):
        build(config)


def test_flux2_s_pipeline_decodes_the_same_from_a_folded_vae(tmp_path):
    """Its latents are patches of 2 x 2, normalised by the batch norm of the VAE."""
    vae = AutoencoderKLFlux2.from_pretrained(flux2(tmp_path)).eval()
    folded = fold_scaling(vae, latent_space(vae).scaling, 0.18215)
    latents = torch.randn(2, 32, 4, 4, generator=torch.Generator().manual_seed(3))

    def decoded(vae: AutoencoderKLFlux2) -> Tensor:
        std = (vae.bn.running_var + vae.config["batch_norm_eps"]).sqrt().view(1, -1, 1, 1)
        unscaled = latents * std + vae.bn.running_mean.view(1, -1, 1, 1)
        with torch.no_grad():
            return vae.decode(Flux2Pipeline._unpatchify_latents(unscaled), return_dict=False)[0]

    torch.testing.assert_close(decoded(folded), decoded(vae), rtol=1e-4, atol=1e-4)
