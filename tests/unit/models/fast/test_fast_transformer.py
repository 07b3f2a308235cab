"""A transformer made fast has the names, results and gradients of the plain one, and one graph for all its blocks."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion.config.model import Architecture, AttentionBackend, Compilation, ModelConfig, PerformanceConfig
from diffusion.config.training import Device
from diffusion.models import fast
from diffusion.models.architectures import build_network, with_seed

SMALL = ModelConfig(
    architecture=Architecture.tiny_transformer,
    network={"hidden_size": 32, "num_heads": 2, "depth": 3, "axes_dim": [8, 8]},
)


def build(performance: PerformanceConfig | None = None) -> nn.Module:
    network = with_seed(3, lambda: build_network(SMALL)).train()
    generator = torch.Generator().manual_seed(4)
    for parameter in network.parameters():  # The modulations are zero at first.
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    if performance is not None:
        fast.apply(network, performance, Device.cpu)
    return network


def loss_of(network: nn.Module, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    noised, text = torch.randn(2, 4, 8, 6, generator=generator), torch.randn(2, 7, 64, generator=generator)
    mask = torch.arange(7) < torch.tensor([[3], [7]])
    prediction = network(noised, torch.tensor([30, 700]), text, attention_mask=mask, return_dict=False)[0]
    return F.mse_loss(prediction, noised)


@pytest.mark.parametrize(
    ("what", "attention", "is_checkpointed"),
    [
        (Compilation.unet, AttentionBackend.math, False),
        (Compilation.blocks, AttentionBackend.auto, False),
        (Compilation.blocks, AttentionBackend.math, True),
    ],
)
def test_one_graph_with_the_gradients_of_the_plain_transformer(traced, what, attention, is_checkpointed):
    plain, ours = build(), build(PerformanceConfig(compilation=what, attention=attention))
    assert [*plain.state_dict()] == [*ours.state_dict()]
    assert dict(plain.config) == dict(ours.config)
    if is_checkpointed:
        ours.enable_gradient_checkpointing()
    for seed in range(3):
        losses = [loss_of(network, seed) for network in (plain, ours)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
        for loss in losses:
            loss.backward()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    for (name, one), other in zip(plain.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=2e-6, msg=name)


def test_the_backend_that_is_asked_for_computes_the_attention(monkeypatch):
    found, attend = [], F.scaled_dot_product_attention

    def look(*args, **kwargs):
        found.append((torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()))
        return attend(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", look)
    loss_of(build(PerformanceConfig(attention=AttentionBackend.math)))
    assert set(found) == {(True, False)}
