import copy
import functools
from collections import Counter
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from composer import Logger, State
from composer.core import Precision
from composer.distributed.fsdp2 import prepare_fully_shard
from composer.distributed.fsdp2_utils import generate_composer_model_policy
from diffusers.models.activations import GEGLU
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from diffusers.models.upsampling import Upsample2D
from torch import nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.nn.parallel import DistributedDataParallel

from diffusion.callbacks.collectives import AccumulateLocally
from diffusion.config.model import AttentionBackend, Compilation, PerformanceConfig
from diffusion.config.training import Device, TrainerConfig
from diffusion.config.training import Precision as TrainPrecision
from diffusion.datasets.batch import BatchKey
from diffusion.ema.averaging import full_tensor, plain_name
from diffusion.errors import ConfigurationError
from diffusion.models import fast
from diffusion.models.architectures import STABLE_DIFFUSION_2, TINY, with_seed
from diffusion.models.fast import compilation
from diffusion.models.fast.channels_last import ChannelsLastUpsample
from diffusion.models.fast.compilation import split_geglu
from diffusion.models.fast.norms import use_low_precision_norms
from diffusion.sharding import fsdp_config, fsdp_modules

SHRUNK = {"block_out_channels": (16, 32, 32, 32), "attention_head_dim": (2, 4, 4, 4), "cross_attention_dim": 16}
SD2 = {**STABLE_DIFFUSION_2.network, **SHRUNK, "norm_num_groups": 4}
TOY = {**TINY.network, "block_out_channels": (16, 32), "norm_num_groups": 4, "cross_attention_dim": 16}
ONE_LEVEL = {
    **TOY,
    "down_block_types": ("CrossAttnDownBlock2D",),
    "up_block_types": ("CrossAttnUpBlock2D",),
    "block_out_channels": (16,),
    "attention_head_dim": (2,),
}
STOCK = PerformanceConfig(channels_last=False, fused_norms=False, fused_projections=False)


def build(config: dict, performance: PerformanceConfig | None) -> UNet2DConditionModel:
    unet = with_seed(3, lambda: UNet2DConditionModel(**config))
    if performance is not None:
        fast.apply(unet, performance, Device.cpu)
    return unet.train()


def batch(num: int = 2, size: int = 16, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, 4, size, size, generator=generator)
    timesteps = torch.randint(0, 1000, (num,), generator=generator)
    return x, timesteps, torch.randn(num, 7, 16, generator=generator)


def loss_of(unet: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    prediction = unet(*inputs, return_dict=False)[0]
    return F.mse_loss(prediction.float(), inputs[0])


class Orders:
    """Counts the 4-D outputs of modules, and their gradients, that are not in channels-last order."""

    def __init__(self, unet: nn.Module) -> None:
        self.num_outputs, self.wrong, self.wrong_gradients = 0, [], []
        for name, module in unet.named_modules():
            module.register_forward_hook(functools.partial(self._look, name))

    def _look(self, name, module, args, outputs) -> None:
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            if isinstance(output, torch.Tensor) and output.dim() == 4:
                self.num_outputs += 1
                if not output.is_contiguous(memory_format=torch.channels_last):
                    self.wrong.append(name)
                if output.requires_grad:
                    output.register_hook(functools.partial(self._look_back, name))

    def _look_back(self, name, gradient) -> None:
        if gradient.stride(1) != 1:  # Those of concatenated skip connections are parts of a larger tensor.
            self.wrong_gradients.append(name)


@pytest.mark.parametrize(("config", "num", "size"), [(TOY, 2, 8), (SD2, 2, 16)])
def test_every_feature_map_in_training_is_channels_last(config, num, size):
    ours, stock = (build(config, performance) for performance in (PerformanceConfig(), STOCK))
    orders, stock_orders = Orders(ours), Orders(stock.to(memory_format=torch.channels_last))
    for unet in (ours, stock):
        loss_of(unet, batch(num, size)).backward()
    assert len(stock_orders.wrong) > 25
    assert orders.num_outputs > 70
    assert orders.wrong == []
    assert set(orders.wrong_gradients) <= {"conv_out", ""}, "only the one that comes from the loss"


@pytest.mark.parametrize("config", [TOY, SD2])
@pytest.mark.parametrize("attention", [AttentionBackend.auto, AttentionBackend.math])
def test_names_results_and_gradients_are_those_of_the_plain_unet(config, attention):
    plain, ours = build(config, None), build(config, PerformanceConfig(attention=attention))
    assert [*plain.state_dict()] == [*ours.state_dict()]
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in ours.named_parameters()]
    assert dict(plain.config) == dict(ours.config)
    plain.load_state_dict(ours.state_dict())
    ours.load_state_dict(plain.state_dict())
    inputs = batch()
    losses = [loss_of(unet, inputs) for unet in (plain, ours)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    for loss in losses:
        loss.backward()
    for (name, one), other in zip(plain.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=2e-6, msg=name)
    assert other.is_contiguous(), "FSDP2 takes no other order"


@pytest.mark.parametrize(("num", "is_channels_last"), [(7, True), (8, False)])
def test_a_feature_map_whose_upsampling_has_no_backward_pass_in_channels_last_order_leaves_it(num, is_channels_last):
    upsample = Upsample2D(64, use_conv=True)
    upsample.__class__, upsample.conv = ChannelsLastUpsample, nn.Identity()
    x = torch.empty(num, 64, 1024, 1024, device="meta").to(memory_format=torch.channels_last)
    assert upsample(x).is_contiguous(memory_format=torch.channels_last) is is_channels_last


def test_odd_sizes_and_inference_go_as_before():
    plain, ours = build(SD2, None).eval(), build(SD2, PerformanceConfig()).eval()
    x = torch.randn(1, 4, 12, 20)
    with torch.no_grad():
        expected, found = (unet(x, torch.tensor(5), torch.ones(1, 7, 16)).sample for unet in (plain, ours))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_backend_that_is_asked_for_computes_the_attention(monkeypatch):
    found = []
    attend = F.scaled_dot_product_attention

    def look(*args, **kwargs):
        found.append((torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()))
        assert kwargs.get("attn_mask") is None
        return attend(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", look)
    loss_of(build(TOY, PerformanceConfig(attention=AttentionBackend.flash)), batch())
    assert set(found) == {(True, False)}


def test_options_for_gpus_are_rejected_on_a_cpu():
    with pytest.raises(ConfigurationError, match=r"performance\.attention=cudnn"):
        build(TOY, PerformanceConfig(attention=AttentionBackend.cudnn))
    with pytest.raises(ConfigurationError, match=r"performance\.cuda_graphs"):
        build(TOY, PerformanceConfig(cuda_graphs=True))


def test_layers_with_adapters_are_left_to_them():
    plain, ours = build(TOY, None), build(TOY, PerformanceConfig())
    for unet in (plain, ours):
        layer = unet.mid_block.attentions[0].transformer_blocks[0].attn1
        layer.to_k = nn.Sequential(layer.to_k, nn.Softsign())
        block = unet.mid_block.resnets[0]
        block.conv1 = nn.Sequential(block.conv1, nn.Softsign())
    torch.testing.assert_close(loss_of(ours, batch()), loss_of(plain, batch()), rtol=1e-6, atol=0)


# Loss over 15 steps


def train(unet: nn.Module, num_steps: int = 15, autocast: bool = False) -> torch.Tensor:
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3, fused=True)
    losses = []
    for step in range(num_steps):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = loss_of(unet, batch(4, 4, seed=step % 10))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses)


@pytest.fixture(scope="module")
def plain_losses() -> torch.Tensor:
    losses = train(build(TOY, None))
    assert losses[-5:].mean() < 0.9 * losses[:5].mean()
    return losses


def test_checkpointed_blocks_keep_the_gradients():
    plain, checkpointed = build(TOY, PerformanceConfig()), build(TOY, PerformanceConfig())
    checkpointed.enable_gradient_checkpointing()
    calls = []
    checkpointed.down_blocks[0].resnets[0].register_forward_pre_hook(lambda *_: calls.append(1))
    for unet in (plain, checkpointed):
        loss_of(unet, batch()).backward()
    assert len(calls) == 2, "computed again in the backward pass"
    for one, other in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)


def test_bf16_keeps_the_losses_of_15_steps_with_fp32_masters(plain_losses, process_group):
    """FSDP2 makes bf16 weights of fp32 masters, and autocast leaves them as they are."""
    unet = build(TOY, None)
    use_low_precision_norms(unet)
    fast.apply(unet, PerformanceConfig(), Device.cpu)
    seen = []
    unet.mid_block.resnets[0].conv2.register_forward_pre_hook(lambda conv, _: seen.append(conv.weight.dtype))
    losses = train(shard(unet, Precision.AMP_BF16), autocast=True)
    assert set(seen) == {torch.bfloat16}
    assert all(parameter.dtype == torch.float32 for parameter in unet.parameters())
    relative = (losses / plain_losses - 1).abs()
    assert relative.mean() < 0.02
    assert relative.max() < 0.1


# FSDP2


@pytest.fixture
def process_group():
    is_first = not dist.is_initialized()
    if is_first:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if is_first:
        dist.destroy_process_group()


def shard(unet: UNet2DConditionModel, precision: Precision = Precision.FP32) -> UNet2DConditionModel:
    """Shard a U-Net as Composer shards the model's only child."""
    holder = nn.Module()
    holder.unet = unet
    settings = fsdp_config(TrainerConfig(precision=TrainPrecision(precision.value)))
    prepare_fully_shard(holder, settings, precision, generate_composer_model_policy(holder))
    return unet


@pytest.fixture
def collectives(monkeypatch) -> Counter[str]:
    """Counts gatherings and reductions of FSDP's units, which torch 2.11 leaves out where there is one rank only."""
    counts: Counter[str] = Counter()

    def count(owner: object, name: str) -> None:
        function = getattr(owner, name)

        def counted(*arguments, **options):
            counts[name] += 1
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, counted)

    count(_fsdp_param_group, "foreach_reduce")
    count(_fsdp_param_group.FSDPParamGroup, "_to_unsharded")
    return counts


@pytest.mark.parametrize("is_local", [True, False])
def test_gradients_are_reduced_once_per_step(process_group, collectives, is_local):
    plain = build(TOY, None)
    unet = shard(build(TOY, PerformanceConfig()))
    num_units = len(fsdp_modules(unet))
    assert num_units > 10, "a unit for each block"
    callback, logger = AccumulateLocally(), cast("Logger", None)
    steps = {BatchKey.SAMPLE: torch.arange(3)}
    state = cast("State", SimpleNamespace(model=unet, batch=steps, device_train_microbatch_size=1))
    callback.fit_start(state, logger)
    callback.before_train_batch(state, logger)
    for number in range(3):
        if is_local:
            callback.before_forward(state, logger)
        loss_of(unet, batch(seed=number)).backward()
    for number in range(3):
        loss_of(plain, batch(seed=number)).backward()
    num_times = 1 if is_local else 3
    assert collectives == {"foreach_reduce": num_times * num_units, "_to_unsharded": num_times * num_units}
    found = {plain_name(name): full_tensor(parameter.grad) for name, parameter in unet.named_parameters()}
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=2e-6)


# Compilation


def num_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("what", [Compilation.unet, Compilation.stages, Compilation.blocks])
def test_compiles_without_breaks_and_once(traced, process_group, what):
    plain = build(ONE_LEVEL, None)
    unet = shard(build(ONE_LEVEL, PerformanceConfig(compilation=what, attention=AttentionBackend.flash)))
    assert type(unet).__name__.removeprefix("FSDP") == "UNet2DConditionModel"
    numbers = []
    for step in range(5):
        loss = loss_of(unet, batch(seed=step))
        torch.testing.assert_close(loss, loss_of(plain, batch(seed=step)), rtol=1e-5, atol=0)
        loss.backward()
        numbers.append(num_graphs())
    assert numbers[0] == (1 if what is Compilation.unet else numbers[0]) > 0
    assert numbers == numbers[:1] * 5, "no recompilation for an equal batch"
    assert not torch._dynamo.utils.counters["graph_break"]
    unet.eval()
    with torch.no_grad():
        loss_of(unet, batch(3, 8))
    assert num_graphs() == numbers[0], "evaluation and sampling run as they are"


def test_a_block_s_call_tries_one_graph(monkeypatch, traced):
    """Whatever the number of sizes: Dynamo checks the guards of a function's graphs one after the other."""
    codes = []

    def compile_(function, **options):
        codes.append(function.__code__)
        return original(function, **options)

    original = torch.compile
    monkeypatch.setattr(torch, "compile", compile_)
    unet = build(ONE_LEVEL, PerformanceConfig(compilation=Compilation.blocks))
    for size in (8, 16, 24, 32):
        loss_of(unet, batch(size=size)).backward()
    assert num_graphs() > 8
    assert [len(_debug_get_cache_entry_list(code)) for code in codes] == [1] * num_graphs()


def test_compiled_blocks_can_be_checkpointed(traced):
    plain, unet = build(ONE_LEVEL, None), build(ONE_LEVEL, PerformanceConfig(compilation=Compilation.blocks))
    unet.enable_gradient_checkpointing()
    for one in (plain, unet):
        loss_of(one, batch()).backward()
    for (name, one), other in zip(plain.named_parameters(), unet.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=2e-6, msg=name)


@pytest.mark.parametrize("bias", [True, False])
def test_a_geglu_of_two_products_has_the_results_of_one(traced, bias):
    one = with_seed(3, lambda: GEGLU(16, 64, bias=bias))
    two = copy.deepcopy(one)
    split_geglu(two)
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(two(x), one(x)), "one product without compilation"
    outputs = one(x), torch.compile(two, fullgraph=True)(x)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-6, atol=1e-6)
    gradients = [
        torch.autograd.grad(y.square().sum(), layer.parameters()) for y, layer in zip(outputs, (one, two), strict=True)
    ]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-6, atol=1e-6)


def test_every_norm_is_compiled(traced, monkeypatch):
    """Eager ones on a GPU would copy to NCHW and back."""
    unet = build(ONE_LEVEL, PerformanceConfig(compilation=Compilation.blocks))
    eager = []
    monkeypatch.setattr(F, "group_norm", lambda *args: eager.append(args))
    loss_of(unet, batch()).backward()
    assert eager == []


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_blocks_become_cuda_graphs_where_it_is_asked_for(monkeypatch, cuda_graphs):
    recorded, marks = [], []

    def compile_(function, **options):
        recorded.append("triton.cudagraphs" in (options["options"] or ()))
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1))
    compilation._compiled.cache_clear()
    unet = with_seed(3, lambda: UNet2DConditionModel(**ONE_LEVEL)).train()
    fast.apply(unet, PerformanceConfig(cuda_graphs=cuda_graphs, fused_norms=False), Device.gpu)
    for step in range(3):
        loss_of(unet, batch(seed=step)).backward()
    compilation._compiled.cache_clear()
    assert recorded
    assert set(recorded) == {cuda_graphs}
    assert len(marks) == (3 if cuda_graphs else 0), "once per forward pass"
    with torch.no_grad():
        loss_of(unet.eval(), batch())
    assert len(marks) == (3 if cuda_graphs else 0)


def test_ddp_does_not_split_a_block(process_group, monkeypatch):
    graphs = []

    def count(graph, inputs, **options):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count))
    compilation._compiled.cache_clear()
    torch._dynamo.reset()
    block = ResnetBlock2D(in_channels=256, temb_channels=16)  # Two convolutions of 2.4 MB; DDP's first bucket is 1 MiB.
    compilation.compile_modules([block])
    ddp = DistributedDataParallel(block, bucket_cap_mb=1)
    ddp(torch.randn(1, 256, 2, 2), torch.randn(1, 16)).sum().backward()
    compilation._compiled.cache_clear()
    torch._dynamo.reset()
    assert len(graphs) == 1
