"""Token routing: which tokens skip which blocks, and where routing has no effect."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from diffusion.config.ingredients import TokenRoutingConfig
from diffusion.config.loading import to_yaml
from diffusion.config.model import (
    Architecture,
    ModelConfig,
    ObjectiveConfig,
    PredictionType,
)
from diffusion.datasets.batch import BatchKey
from diffusion.errors import ConfigurationError
from diffusion.models import build_model
from diffusion.models.conditioning import Conditioning
from diffusion.models.flops import count_flops
from diffusion.models.ingredients import Call, Caller
from diffusion.models.ingredients.token_routing import TokenRoutingIngredient, select_tokens
from diffusion.models.latent_diffusion import LatentDiffusion, Prediction
from diffusion.planning.memory import ImageSize, _activation_bytes, meta_forward, meta_parts
from tests.tools.latent_models import gradients, latent_batch, perturb

SMALL = {"hidden_size": 32, "num_heads": 2, "depth": 5, "axes_dim": (8, 8)}
ROUTING = TokenRoutingConfig(share=0.5, first=1, last=-2)


def build(routing: TokenRoutingConfig | None) -> LatentDiffusion:
    config = ModelConfig(
        architecture=Architecture.tiny_transformer, network=SMALL, token_routing=routing, frozen_seed=3
    )
    objective = ObjectiveConfig(prediction_type=PredictionType.flow)
    model = build_model(config, objective, resolution=32, seed=17).train()
    perturb(model.network.parameters(), 0.1)
    return model


def batch(num: int = 6) -> dict[str, Tensor]:
    return latent_batch(num, width=6, spread=1000, step=7)


def test_share_0_is_no_routing_to_the_bit():
    plain, routed = build(None), build(TokenRoutingConfig(share=0.0, first=1, last=-2))
    outputs = [model.forward(batch()) for model in (plain, routed)]
    assert torch.equal(outputs[0].prediction, outputs[1].prediction)
    found = [gradients(model, [batch()]) for model in (plain, routed)]
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_tokens_skip_the_blocks_between_and_keep_their_positions():
    """A block adds 10^i, and so says which blocks a token went through; its positions come out in another channel."""

    class Probe(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def forward(self, hidden_states: Tensor, image_rotary_emb: Tensor, **_: Tensor) -> Tensor:
            positions = image_rotary_emb[:, 0, :, 0, 0, 0]
            added = torch.stack([torch.full_like(positions, 10.0**self.number), positions], dim=-1)
            return hidden_states + added

    class Probed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.config = nn.ModuleList(Probe(i) for i in range(5)), {}

        def forward(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
            for block in self.blocks:
                hidden_states = block(hidden_states=hidden_states, image_rotary_emb=positions)
            return hidden_states

    network: Any = Probed()
    router = TokenRoutingIngredient(ROUTING)
    caller = Caller(network, [router])
    places = torch.arange(10.0).expand(2, 10)
    positions = places[:, None, :, None, None, None].expand(2, 1, 10, 4, 2, 2)

    def predict(is_training: bool = True) -> Tensor:
        addresses = {BatchKey.STEP: torch.tensor([3, 3]), BatchKey.SAMPLE: torch.tensor([11, 12])}
        caller.call = Call(seed=17, is_training=is_training, batch=addresses)
        router.prepare(caller.call, torch.zeros(2, 4, 2, 5), Conditioning(torch.zeros(2, 1, 1)))
        return network(torch.zeros(2, 10, 2), positions)

    found, kept = predict(), caller.call.kept
    assert kept is not None and kept.shape == (2, 5)
    is_kept = torch.zeros(2, 10, dtype=torch.bool).scatter(1, kept, True)
    assert torch.equal(found[..., 0], torch.where(is_kept, 11111.0, 10001.0))
    assert torch.equal(found[..., 1], torch.where(is_kept, 5 * places, 2 * places))
    network.eval()
    assert (predict()[..., 0] == 11111).all()
    network.train()
    assert (predict(is_training=False)[..., 0] == 11111).all()


def test_each_set_of_tokens_is_as_likely_and_a_function_of_the_address():
    sample = torch.arange(6000)
    kept = select_tokens(17, torch.zeros_like(sample), sample, 4, 2)
    assert (kept[:, 0] < kept[:, 1]).all()
    counts = torch.bincount(4 * kept[:, 0] + kept[:, 1], minlength=16)
    counts = counts[counts > 0].double()
    assert len(counts) == 6
    assert ((counts - 1000) ** 2 / 1000).sum() < 20.5  # Chi-square with 5 degrees of freedom, p = 0.001.
    assert torch.equal(select_tokens(17, torch.zeros_like(sample[5:6]), sample[5:6], 4, 2), kept[5:6])
    assert not torch.equal(select_tokens(17, torch.ones_like(sample), sample, 4, 2), kept)


def test_validation_and_sampling_use_all_tokens():
    plain, routed = build(None), build(ROUTING)
    outputs: list[Prediction] = [model.forward(batch()) for model in (plain, routed)]
    assert not torch.equal(outputs[0].prediction, outputs[1].prediction)
    outputs = [model.eval_forward(batch()) for model in (plain, routed)]
    assert torch.equal(outputs[0].prediction, outputs[1].prediction)
    routed.forward(batch())
    options = {"num_inference_steps": 2, "seed": 0, "output": "tensor", "progress": False}
    images = [model.generate("a red circle", **options) for model in (plain, routed)]
    assert isinstance(images[0], Tensor) and isinstance(images[1], Tensor)
    assert torch.equal(images[0], images[1])


def test_operations_are_those_that_torch_counts():
    config = ModelConfig(architecture=Architecture.tiny_transformer, network=SMALL, token_routing=ROUTING)
    (network, ingredients), size = meta_parts(config), ImageSize(32, 24)
    with FlopCounterMode(display=False) as counter:
        meta_forward(config, network, ingredients, size, torch.float32).sum().backward()
    counts = [
        count_flops(network.config, height=8, width=6, num_tokens=24, ingredients=of_run)
        for of_run in ([], ingredients)
    ]
    assert counts[0] is not None and counts[1] is not None
    assert counts[1].training == counter.get_total_flops() < 0.8 * counts[0].training
    assert counts[1].forward == counts[0].forward
    assert build(ROUTING).batch_flops(batch()) == 6 * counts[1].training
    whole = ModelConfig(architecture=Architecture.tiny_transformer, network=SMALL)
    planned = [_activation_bytes(to_yaml(one), size, torch.float32) for one in (whole, config)]
    assert planned[1] < 0.8 * planned[0]


@pytest.mark.parametrize("first, last", [(3, -3), (5, -1), (0, -6)])
def test_blocks_that_are_not_there(first, last):
    with pytest.raises(ConfigurationError, match=r"token_routing\.first"):
        build(TokenRoutingConfig(first=first, last=last))
