"""A transformer made fast has the names, results and gradients of the plain one, and one graph for all its blocks."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from composer.core import Precision
from torch import Tensor, nn

from diffusion.checkpointing.save import local_shard
from diffusion.config.loading import load_config
from diffusion.config.model import Architecture, AttentionBackend, Compilation, ModelConfig, PerformanceConfig
from diffusion.config.training import Device
from diffusion.config.training import Precision as TrainPrecision
from diffusion.models import fast
from diffusion.models.architectures import build_network, with_seed
from diffusion.train import build_training_model
from tests.tools.latent_models import perturb
from tests.unit.models.fast.test_fast_unet import process_group, shard  # noqa: F401

SMALL = ModelConfig(
    architecture=Architecture.tiny_transformer,
    network={"hidden_size": 32, "num_heads": 2, "depth": 3, "axes_dim": [8, 8]},
)


def build(performance: PerformanceConfig | None = None) -> nn.Module:
    network = with_seed(3, lambda: build_network(SMALL)).train()
    perturb(network.parameters(), 0.05, seed=4)
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


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("compilation", ["none", "blocks"])
def test_recomputation_under_fsdp_in_bf16_keeps_the_gradients(monkeypatch, compilation):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))

    def gradients(recomputes: str) -> list[Tensor]:
        config = load_config(
            "tests/tools/toy.yaml",
            [
                "model={architecture: tiny_transformer, network: {}}",
                f"performance.compilation={compilation}",
                f"trainer.activation_checkpointing={recomputes}",
            ],
        )
        config.model.network = dict(SMALL.network)
        config.trainer.precision = TrainPrecision.amp_bf16
        network = build_training_model(config, Device.cpu).network
        shard(network, Precision.AMP_BF16)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(network)
        loss.backward()
        return [local_shard(parameter.grad) for parameter in network.parameters() if parameter.grad is not None]

    plain, recomputed = gradients("false"), gradients("true")
    assert len(plain) == len(recomputed) > 20
    torch.testing.assert_close(recomputed, plain, rtol=2e-2, atol=1e-4)
