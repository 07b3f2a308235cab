"""The text adapter continues a CLIP text encoder, and is one in an export."""

import pytest
import torch

from diffusion.config.ingredients import TextAdapterConfig
from diffusion.config.model import Architecture, ModelConfig, ObjectiveConfig, PredictionType
from diffusion.datasets.batch import BatchKey
from diffusion.errors import ConfigurationError
from diffusion.models import build_model
from diffusion.models.architectures import ARCHITECTURES, build_text_encoder, with_seed
from diffusion.models.build import load_weights
from diffusion.models.conditioning import encode_tokens
from diffusion.models.ingredients.text_adapter import TextAdapter, with_adapter
from diffusion.models.latent_diffusion import LatentDiffusion
from tests.tools.latent_models import latent_batch, perturb

IDS = torch.randint(1, 2000, (3, 24), generator=torch.Generator().manual_seed(0))
UNET = {"block_out_channels": [16, 32], "norm_num_groups": 4}


def build(layers: int | None, architecture: Architecture = Architecture.tiny) -> LatentDiffusion:
    adapter = None if layers is None else TextAdapterConfig(layers=layers)
    config = ModelConfig(architecture=architecture, network=UNET, text_adapter=adapter, frozen_seed=3)
    objective = ObjectiveConfig(prediction_type=PredictionType.v_prediction)
    return build_model(config, objective, resolution=32, seed=17)


def trained(adapter: TextAdapter) -> TextAdapter:
    perturb(adapter.parameters(), 0.1, seed=2)
    return adapter


@pytest.mark.parametrize("num_frozen", [0, 2])
def test_an_encoder_with_more_layers_gives_the_same_text(num_frozen):
    spec = ARCHITECTURES[Architecture.tiny]
    spec.text_encoder.update(num_hidden_layers=num_frozen)
    try:
        encoder = with_seed(1, lambda: build_text_encoder(spec)).eval()
    finally:
        spec.text_encoder.update(num_hidden_layers=0)
    adapter = TextAdapter(encoder, 2)
    with torch.no_grad():
        before = encoder(IDS).last_hidden_state
        states = encode_tokens(encoder, IDS, before_norm=True).hidden
        torch.testing.assert_close(adapter(states), before, msg="the identity at first")
        expected = trained(adapter)(states)
        merged = with_adapter(encoder, adapter)
        torch.testing.assert_close(merged(IDS).last_hidden_state, expected)
    assert merged.config.num_hidden_layers == num_frozen + 2
    assert (expected - before).abs().max() > 0.1


def test_it_is_trained_with_the_network():
    plain, adapted = build(None), build(2)
    batch = latent_batch(3) | {BatchKey.TOKEN_IDS: IDS}
    losses = [model.loss(model.forward(batch), batch) for model in (plain, adapted)]
    torch.testing.assert_close(losses[0], losses[1], msg="the identity at first")
    losses[1].backward()
    adapter = adapted.get_submodule("text_adapter")
    assert isinstance(adapter, TextAdapter)
    last = adapter.layers[1].mlp.fc2.weight.grad
    assert last is not None and last.abs().max() > 0
    assert all(not parameter.requires_grad for parameter in adapted.text_encoder.parameters())
    trained(adapter)
    options = {"num_inference_steps": 2, "seed": 0, "output": "tensor", "progress": False}
    images = [model.generate("a red circle", **options) for model in (plain, adapted)]
    assert not torch.equal(*images)


def test_weights_without_an_adapter_leave_it_as_it_is():
    plain, adapted = build(None), build(1)
    for parameter in plain.parameters():
        parameter.data += 1
    load_weights(adapted, plain.state_dict(), "elsewhere")
    assert torch.equal(adapted.unet.conv_in.weight, plain.unet.conv_in.weight)
    with pytest.raises(ConfigurationError, match="weights missing"):
        load_weights(adapted, build(2).state_dict(), "elsewhere")


def test_the_mark_of_images_depends_on_the_adapter():
    model = build(1)
    before = model.mark.version
    trained(model.get_submodule("text_adapter"))
    assert model.mark.version != before
