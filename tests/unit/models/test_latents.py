"""What the network works on: pixels, and the latents of each VAE of diffusers, in training, generation and exports."""

from pathlib import Path

import torch

from diffusion.config.model import Architecture, FlowConfig, ModelConfig, ObjectiveConfig, PredictionType
from diffusion.datasets.batch import BatchKey
from diffusion.evaluation.config import SamplingConfig
from diffusion.evaluation.generate import PipelineGenerator
from diffusion.models import LatentDiffusion, build_model
from diffusion.models.sampling import image_seeds, initial_latents
from tests.tools.pipelines import write_model

SMALL = {"hidden_size": 64, "num_heads": 4, "depth": 2, "axes_dim": (8, 8)}
PROMPTS = ["a red circle", "a blue star on a white background"]


def build(architecture: Architecture, vae: Path | None = None, **network) -> LatentDiffusion:
    options = {"vae": None if vae is None else str(vae), "network": SMALL | network, "frozen_seed": 3}
    objective = ObjectiveConfig(prediction_type=PredictionType.flow, flow=FlowConfig(shift=2.0))
    model = build_model(ModelConfig(architecture=architecture, **options), objective, resolution=32, seed=17).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.network.parameters():  # The modulations are zero at first, and so is the influence of t.
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def image_batch(model: LatentDiffusion) -> dict[str, torch.Tensor]:
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
    assert isinstance(expected, torch.Tensor)
    assert expected.std() > 0.01, "there is something to see"
    assert (found - expected).abs().max() < 1 / 255


def test_on_pixels_the_loss_of_the_velocity_is_that_of_the_image_over_the_squared_noise_rate(monkeypatch):
    model = build(Architecture.tiny_pixel_transformer)
    batch, given = image_batch(model), {}
    model.network.register_forward_hook(lambda module, inputs, output: given.update(image=output[0]))
    timesteps = torch.tensor([51.3, 200.0, 612.5, 999.0])
    monkeypatch.setattr(model, "_timesteps", lambda *_: timesteps)
    with torch.no_grad():
        errors = model.sample_errors(model.forward(batch))
    image = batch[BatchKey.IMAGE].float() / 127.5 - 1
    expected = (given["image"] - image).square().mean(dim=(1, 2, 3)) / (timesteps / 1000) ** 2
    torch.testing.assert_close(errors, expected, rtol=1e-4, atol=0)


def test_on_pixels_a_pipeline_of_diffusers_gives_the_images_of_generate(tmp_path):
    assert_pipeline_generates_the_same(build(Architecture.tiny_pixel_transformer), tmp_path / "folder")
