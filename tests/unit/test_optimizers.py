"""Muon against closed forms, on one rank; on several: tests/integration/test_replicas.py."""

import copy
import math
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from composer import State, Time, Timestamp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from diffusion import optimizers
from diffusion.checkpointing.save import local_shard
from diffusion.config.ingredients import (
    AlignmentConfig,
    LoraConfig,
    ScoreColumn,
    ScoreConditioningConfig,
    TextAdapterConfig,
)
from diffusion.config.loading import load
from diffusion.config.model import Architecture, ModelConfig
from diffusion.config.schema import Config
from diffusion.config.training import Decay, Device
from diffusion.datasets.batch import BatchKey
from diffusion.models.architectures import build_network
from diffusion.models.ingredients.lora import add_lora
from diffusion.models.networks import wide_matrices
from diffusion.optimizers import (
    AdamW,
    Muon,
    build_muon,
    deal,
    hidden_matrices,
    matrix_shape,
    newton_schulz,
    newton_schulz_each,
    newton_schulz_flops,
    num_rows,
    scale_rates,
    warmup_stable_decay,
)
from diffusion.planning.memory import meta_parts
from diffusion.train import _build_scheduler, build_optimizer, build_training_model
from tests.tools.image_encoders import write_image_encoder
from tests.tools.launches import LaunchCounter
from tests.unit.models.fast.test_fast_unet import process_group  # noqa: F401

SETTINGS = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.2, "fused": True}


def orthogonal(size: int, seed: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(seed)))[0]


@pytest.mark.parametrize("shape", [(8, 8), (8, 24), (24, 8)])
def test_singular_values_come_near_one_and_singular_vectors_stay(shape):
    left, right = orthogonal(shape[0], 0)[:, :8], orthogonal(shape[1], 1)[:, :8]
    values = torch.logspace(0, -2, 8)
    [result] = newton_schulz((left @ torch.diag(values) @ right.mT)[None])
    along = left.mT @ result @ right
    assert along.diagonal().min() > 0.68
    assert along.diagonal().max() < 1.2
    torch.testing.assert_close(left @ torch.diag(along.diagonal()) @ right.mT, result, atol=1e-4, rtol=0)


def test_each_singular_value_goes_through_the_polynomial():
    values = torch.tensor([1.0, 0.5, 0.25, 0.0], dtype=torch.float64)
    expected = values / values.norm()
    for _ in range(5):
        expected = 3.4445 * expected - 4.7750 * expected**3 + 2.0315 * expected**5
    torch.testing.assert_close(newton_schulz(torch.diag(values)[None]), torch.diag(expected)[None])
    assert newton_schulz(torch.zeros(1, 3, 4)).abs().max() == 0


def test_operations_are_those_that_torch_counts():
    with FlopCounterMode(display=False) as counter:
        newton_schulz(torch.zeros(1, 12, 40, dtype=torch.bfloat16))
    assert counter.get_total_flops() == newton_schulz_flops((12, 40)) == newton_schulz_flops((40, 12))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_of_one_shape_are_computed_together(monkeypatch, dtype):
    monkeypatch.setattr(optimizers, "MAX_STACK", 2 * 6 * 8)
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 8)] * 5 + [(8, 6), (20, 10), (20, 10)]
    matrices = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    alone = [newton_schulz(matrix[None])[0] for matrix in matrices]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close([*newton_schulz_each(matrices)], alone, rtol=tolerance, atol=tolerance)


def test_launches_for_a_large_transformer():
    weights = sorted(
        hidden_matrices(meta_parts(ModelConfig(architecture=Architecture.transformer_l))[0]), key=matrix_shape
    )
    matrices = [weight.detach().bfloat16() for weight in weights]
    with LaunchCounter("all") as counter:
        list(newton_schulz_each(matrices))
    assert len(matrices) == 112
    assert counter.total("all") == 437


@pytest.mark.parametrize("shape", [(6, 10), (4, 3, 3, 3)])
def test_two_steps_follow_the_equations(shape):
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(shape, generator=generator))
    expected, momentum = weight.detach().clone().flatten(1), torch.zeros(shape).flatten(1)
    optimizer = Muon([{"params": [weight], "momentum": 0.95}], **SETTINGS)
    for _ in range(2):
        weight.grad = torch.randn(shape, generator=generator)
        gradient = weight.grad.flatten(1)
        momentum = 0.95 * momentum + 0.05 * gradient
        [update] = newton_schulz((0.95 * momentum + 0.05 * gradient)[None])
        expected = (1 - 0.1 * 0.2) * expected - 0.1 * 0.2 * max(expected.shape) ** 0.5 * update
        optimizer.step()
        torch.testing.assert_close(weight.detach().flatten(1), expected)
    assert list(optimizer.state[weight]) == ["momentum_buffer"]


def test_updates_have_the_size_of_those_of_adamw():
    weight = nn.Parameter(torch.zeros(64, 256))
    weight.grad = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    Muon([{"params": [weight], "momentum": 0.95}], **SETTINGS).step()
    assert weight.square().mean().sqrt().item() == pytest.approx(0.1 * 0.2, rel=0.15)


def test_the_rest_is_updated_by_adamw_to_the_bit():
    ours, theirs = (nn.Parameter(torch.ones(5)) for _ in range(2))
    matrix = nn.Parameter(torch.ones(2, 2))
    groups = [{"params": [matrix], "momentum": 0.95}, {"params": [ours]}]
    optimizers = [Muon(groups, **SETTINGS), torch.optim.AdamW([theirs], **SETTINGS)]
    for step in range(3):
        ours.grad = theirs.grad = torch.arange(5.0) - step
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(ours, theirs)
    assert torch.equal(matrix, torch.ones(2, 2)), "a weight without a gradient stays"


def test_adamw_on_dtensors_computes_as_torch_does_to_the_bit(process_group):  # noqa: F811
    mesh = init_device_mesh("cpu", (1,))
    generator = torch.Generator().manual_seed(0)
    numbers = [torch.randn(3, 4, generator=generator) for _ in range(4)]
    weights = [nn.Parameter(distribute_tensor(numbers[0].clone(), mesh, [Shard(0)])) for _ in range(2)]
    ours, theirs = AdamW([weights[0]], **SETTINGS), torch.optim.AdamW([weights[1]], **SETTINGS)
    for number in numbers[1:]:
        for weight, optimizer in zip(weights, (ours, theirs), strict=True):
            weight.grad = distribute_tensor(number.clone(), mesh, [Shard(0)])
            with WatchUpdates() as updates:
                optimizer.step()
            assert updates.on_dtensors == [optimizer is theirs]
    state, expected = (optimizer.state[weight] for optimizer, weight in zip((ours, theirs), weights, strict=True))
    assert list(state) == list(expected)
    for one, other in [
        (weights[0], weights[1]),
        *zip(state.values(), expected.values(), strict=True),
    ]:
        assert type(one) is type(other)
        assert torch.equal(local_shard(one), local_shard(other))
    continued = AdamW([weights[1]], **SETTINGS)
    continued.load_state_dict(theirs.state_dict())
    for weight, optimizer in zip(weights, (ours, continued), strict=True):
        weight.grad = distribute_tensor(numbers[0].clone(), mesh, [Shard(0)])
        optimizer.step()
    assert torch.equal(*map(local_shard, weights))


class WatchUpdates(TorchDispatchMode):
    """Notes for each fused update whether its first argument holds DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.on_dtensors: list[bool] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten._fused_adamw_:
            self.on_dtensors.append(isinstance(args[0][0], DTensor))
        return func(*args, **(kwargs or {}))


def test_continues_from_its_state_to_the_bit():
    def run(model, optimizer, steps):
        for step in steps:
            for number, weight in enumerate(model.parameters()):
                weight.grad = torch.full_like(weight, 0.1 * (number + 1)) + 0.01 * step * weight.detach()
            optimizer.step()

    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(6, 4), nn.Conv2d(2, 3, 3)])
    optimizer = build_muon(model, [{"params": list(model.parameters())}], momentum=0.9, **SETTINGS)
    run(model, optimizer, range(2))
    other = copy.deepcopy(model)
    continued = build_muon(other, [{"params": list(other.parameters())}], momentum=0.9, **SETTINGS)
    continued.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(model, optimizer, range(2, 4))
    run(other, continued, range(2, 4))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("architecture", "outside"),
    [
        ("tiny", {"conv_in", "conv_out", "time_embedding.linear_1", "time_embedding.linear_2"}),
        (
            "tiny_transformer",
            {
                "img_in", "txt_in", "time_in.in_layer", "time_in.out_layer", "final_layer.linear",
                "final_layer.adaLN_modulation.1",
            },
        ),
    ],
)  # fmt: skip
def test_muon_gets_all_matrices_but_those_of_inputs_and_outputs(architecture, outside):
    network, _ = meta_parts(ModelConfig(architecture=Architecture(architecture)))
    inside = set(hidden_matrices(network))
    matrices = {name: weight for name, weight in network.named_parameters() if weight.ndim > 1}
    assert {name.removesuffix(".weight") for name, weight in matrices.items() if weight not in inside} == outside
    assert all(weight in set(matrices.values()) for weight in inside)


def test_of_lora_only_the_trained_matrices():
    network = build_network(ModelConfig(architecture=Architecture.tiny))
    add_lora(network, LoraConfig(rank=2), seed=0)
    trained = {weight for weight in network.parameters() if weight.requires_grad}
    assert set(hidden_matrices(network)) == trained


def test_matrices_are_dealt_evenly():
    assert deal([1, 5, 3, 3, 2], 2) == [1, 0, 1, 1, 0]


@pytest.mark.parametrize(("size", "num_ranks"), [(8, 2), (7, 2), (5, 4), (3, 4), (1, 3)])
def test_rows_are_cut_as_fsdp_cuts_them(size, num_ranks):
    parts = [len(part) for part in torch.zeros(size).chunk(num_ranks)]
    assert [num_rows(size, num_ranks, rank) for rank in range(num_ranks)] == parts + [0] * (num_ranks - len(parts))


def test_wsd_at_its_corners():
    def at(step):
        return warmup_stable_decay(step, warmup=10, cooldown=20, total=100, final=0.1)

    assert [at(0), at(5), at(10), at(79), at(80)] == [0, 0.5, 1, 1, 1]
    assert at(85) == pytest.approx(1 - 0.9 * 0.5)
    assert at(100) == pytest.approx(0.1)
    assert warmup_stable_decay(0, warmup=0, cooldown=4, total=4, final=0) == 1


# Widths

WIDTHS = (64, 256)


def wide_transformer(width):
    return {"hidden_size": width, "num_heads": width // 32, "depth": 2}


def growth(*overrides):
    """Exponents by which changes of the last block's MLP and of the output in a few steps grow with the width."""
    found = []
    for width in WIDTHS:
        config = load(Config, "yamls/tiny/transformer.yaml", ["model.vae=null", "optimizer.lr=0.001", *overrides])
        config.model.network = wide_transformer(width)
        model = build_training_model(config, Device.cpu)
        optimizer, generator = build_optimizer(config, model), torch.Generator().manual_seed(0)
        batch = {
            BatchKey.LATENT_MEAN: torch.randn(8, 4, 4, 4, generator=generator),
            BatchKey.TOKEN_IDS: torch.randint(2048, (8, 24), generator=generator),
            BatchKey.SAMPLE: torch.arange(8),
        }
        kept = []
        for layer in (model.network.blocks[-1].down_proj, model.network.final_layer):
            layer.register_forward_hook(lambda layer, inputs, output, kept=kept: kept.append(output.detach()))
        for _ in range(4):
            loss = model.loss(model(batch), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found.append([(kept[-2 + i] - kept[i]).square().mean().sqrt().log2().item() for i in range(2)])
    return [(wide - narrow) / math.log2(WIDTHS[1] / WIDTHS[0]) for narrow, wide in zip(*found, strict=True)]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_activations_change_alike_at_all_widths_with_a_base_width_and_not_without(name):
    """The coordinate check of muP (Yang et al. 2022, appendix D.1)."""
    assert growth(f"optimizer.name={name}", "optimizer.base_width=64") == pytest.approx([0, 0], abs=0.1)
    assert min(growth(f"optimizer.name={name}")) > 0.3


def test_wide_inputs_are_those_that_grow_with_the_network(tmp_path):
    encoder = str(write_image_encoder(tmp_path / "dinov2"))

    def inputs(width, architecture):
        ingredients = {
            "text_adapter": TextAdapterConfig(),
            "score_conditioning": ScoreConditioningConfig(columns=[ScoreColumn(name="a")]),
            "alignment": AlignmentConfig(path=encoder),
        }
        network, parts = meta_parts(
            ModelConfig(architecture=architecture, network=wide_transformer(width), **ingredients)
        )
        model = nn.ModuleDict({"transformer": network, **{one.part: one.module for one in parts}})
        own = [model.get_parameter(f"{one.part}.{name}") for one in parts for name in one.wide_matrices]
        found = {*wide_matrices(network), *own}
        matrices = {name: weight for name, weight in model.named_parameters() if weight.ndim > 1}
        return {name: weight.shape[1] for name, weight in matrices.items()}, {
            name for name, weight in matrices.items() if weight in found
        }

    for architecture in (Architecture.tiny_transformer, Architecture.tiny_pixel_transformer):
        (narrow, found), (wide, _) = (inputs(width, architecture) for width in WIDTHS)
        growing = {name for name in narrow if wide[name] > narrow[name]}
        assert len(growing) == 2 * 7 + 5
        assert found == growing


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_base_width_itself_and_the_weight_decay_of_a_step_change_nothing(name):
    torch.manual_seed(0)
    model = nn.ModuleDict({"transformer": nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(6, 4)])})})
    others = [copy.deepcopy(model) for _ in range(2)]
    optimizers = []
    for one, ratio in zip((model, *others), (None, 1, 4), strict=True):
        groups = [{"params": list(one.parameters())}]
        build = partial(build_muon, one, momentum=0.95) if name == "muon" else AdamW
        optimizers.append(build(groups, **SETTINGS))
        if ratio is not None:
            scale_rates(optimizers[-1], wide_matrices(one), ratio)
        for weight in one.parameters():
            weight.grad = torch.ones_like(weight)
        optimizers[-1].step()
    assert all(map(torch.equal, model.parameters(), others[0].parameters()))
    factor = 2 if name == "muon" else 4
    (wide,) = (group for group in optimizers[2].param_groups if group["lr"] != SETTINGS["lr"])
    assert wide["lr"] == SETTINGS["lr"] / factor
    assert wide["lr"] * wide["weight_decay"] == pytest.approx(SETTINGS["lr"] * SETTINGS["weight_decay"])
    assert [weight.shape for weight in wide["params"]] == [(4, 6)]


@pytest.mark.parametrize("decay", Decay)
def test_a_warm_up_in_shares_of_the_run_has_the_same_steps_with_each_decay(decay):
    """0.29 * 100 is a little less than 29."""
    settings = ["trainer.max_duration=100ba", "schedule.warmup=0.29dur", f"schedule.decay={decay.value}"]
    schedule = _build_scheduler(load(Config, "tests/tools/toy.yaml", settings))
    end = Time.from_timestring("100ba")
    before, reached = (
        schedule(cast("State", SimpleNamespace(timestamp=Timestamp(batch=step), max_duration=end))) for step in (28, 29)
    )
    assert before == pytest.approx(28 / 29)
    assert reached == 1
