"""The transformer: timesteps, padding, sizes, and the pipeline of diffusers with the same images."""

import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from diffusion.config.ingredients import TokenRoutingConfig
from diffusion.config.model import Architecture, FlowConfig, ModelConfig, ObjectiveConfig, PredictionType
from diffusion.datasets.batch import BatchKey
from diffusion.models import build_model
from diffusion.models.architectures import side_factor
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.networks import predict
from diffusion.models.sampling import image_seeds, initial_latents
from diffusion.models.tokenizers import tokenize
from tests.tools.latent_models import latent_batch, perturb
from tests.tools.pipelines import images_of_model, images_of_pipeline, read_pipeline, write_model

SMALL = {"hidden_size": 64, "num_heads": 4, "depth": 2, "axes_dim": (8, 8)}


def build(routing: TokenRoutingConfig | None = None) -> LatentDiffusion:
    config = ModelConfig(
        architecture=Architecture.tiny_transformer, network=SMALL, token_routing=routing, frozen_seed=3
    )
    objective = ObjectiveConfig(prediction_type=PredictionType.flow, flow=FlowConfig(shift=2.0))
    return build_model(config, objective, resolution=32, seed=17)


@pytest.fixture(scope="module")
def model() -> LatentDiffusion:
    model = build().eval()
    perturb(model.network.parameters(), 0.05)
    return model


def token_ids(model: LatentDiffusion, *captions: str) -> Tensor:
    return torch.from_numpy(tokenize(model.tokenizer, list(captions))).long()


def batch(model: LatentDiffusion, num: int) -> dict[str, Tensor]:
    captions = ["a red circle", "a blue star on a white background", "", "a green square"]
    return latent_batch(num) | {BatchKey.TOKEN_IDS: token_ids(model, *(captions[i % 4] for i in range(num)))}


def test_the_loss_does_not_depend_on_the_microbatch(model):
    whole = batch(model, 6)
    with torch.no_grad():
        expected = model.forward(whole).prediction
        parts = [model.forward({key: value[part] for key, value in whole.items()}) for part in (slice(4), slice(4, 6))]
    torch.testing.assert_close(torch.cat([part.prediction for part in parts]), expected, rtol=1e-4, atol=1e-5)


def test_whole_timesteps_are_noise_rates(model):
    conditioning = model.conditioner.encode_batch(batch(model, 2), token_ids(model, "a red circle", "a star"))
    noised = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found = predict(model.network, noised, torch.tensor([250, 999]), conditioning)
        rates = torch.tensor([0.25, 0.999])
        expected = model.network(noised, rates, conditioning.text, attention_mask=conditioning.mask).sample
        other = predict(model.network, noised, torch.tensor([251, 998]), conditioning)
    torch.testing.assert_close(found, expected)
    assert (found - other).abs().max() > 1e-4


def test_padding_has_no_influence(model):
    ids = token_ids(model, "a red circle", "a blue star on a white background")
    conditioning = model.conditioner.encode_batch({}, ids)
    assert conditioning.mask is not None
    num_words = conditioning.mask.sum(dim=1)
    ends = (ids == ids[0, num_words[0] - 1]).int().argmax(dim=1)
    assert torch.equal(num_words, ends + 1), "up to the end token"
    changed = torch.where(conditioning.mask[..., None], conditioning.text, torch.randn_like(conditioning.text))
    noised, timesteps = torch.randn(2, 4, 8, 8), torch.tensor([300, 600])
    with torch.no_grad():
        found = predict(model.network, noised, timesteps, conditioning._replace(text=changed))
        expected = predict(model.network, noised, timesteps, conditioning)
    torch.testing.assert_close(found, expected)


def kept_bytes(compute: Callable[[], Tensor]) -> int:
    """Bytes that autograd keeps for the backward pass, each storage once."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compute().sum().backward()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("routing", [None, TokenRoutingConfig(share=0.5, first=1, last=-1)])
def test_the_mask_that_is_kept_is_one_for_all_heads_and_queries(routing):
    model = build(routing).train()
    inputs = batch(model, 4)
    model.forward(inputs)  # Selects the tokens of the next pass.
    conditioning = model.conditioner.encode_batch({}, inputs[BatchKey.TOKEN_IDS])
    assert conditioning.mask is not None and not conditioning.mask.all()
    noised, timesteps = inputs[BatchKey.LATENT_MEAN], torch.tensor([10, 300, 600, 990])
    masked, plain = (
        kept_bytes(lambda text=text: predict(model.network, noised, timesteps, text))
        for text in (conditioning, conditioning._replace(mask=None))
    )
    num_keys = inputs[BatchKey.TOKEN_IDS].numel() + noised[:, 0].numel() // 2**2
    assert 0 < masked - plain <= SMALL["depth"] * num_keys * 4  # Float32; 4 heads x 16 queries would be 64 times that.


def test_images_of_any_size(model):
    options = {"num_inference_steps": 2, "output": "tensor", "progress": False, "seed": 3}
    images = model.generate("a star", height=24, width=40, **options)
    assert isinstance(images, Tensor)
    assert images.shape == (1, 3, 24, 40)


def test_the_pipeline_of_diffusers_gives_the_images_of_generate(model, tmp_path):
    write_model(model, tmp_path, resolution=32)
    pipeline = read_pipeline(tmp_path)
    assert pipeline.get_default_resolution() == 32
    latents = initial_latents(image_seeds(5, 1), (4, 8, 8), torch.device("cpu"))
    options = {"num_inference_steps": 4, "latents": latents}
    for scale, negative in ((1.0, ""), (3.0, ""), (3.0, "a green square")):
        expected = images_of_model(model, "a red circle", negative, guidance_scale=scale, **options)
        found = images_of_pipeline(pipeline, "a red circle", negative, guidance_scale=scale, **options)
        assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("architecture", "network", "factor"),
    [("transformer_s", {}, 16), ("tiny_transformer", {"patch_size": 4}, 16), ("stable_diffusion_2", {}, 8)],
)
def test_sides_of_images_are_multiples_of_the_vae_s_factor_and_the_patch(architecture, network, factor):
    assert side_factor(ModelConfig(architecture=Architecture(architecture), network=network)) == factor


def test_a_model_is_pickled(model):
    found = pickle.loads(pickle.dumps(model))
    images = [
        one.generate("a", seed=0, num_inference_steps=1, output="tensor", progress=False) for one in (found, model)
    ]
    assert torch.equal(*images)
