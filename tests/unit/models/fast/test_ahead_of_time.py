"""The code that Inductor makes of the networks' blocks with the shipped options compiles for GPUs."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import nn

from diffusion.config.model import Architecture, Compilation, ModelConfig, PerformanceConfig
from diffusion.config.training import Device
from diffusion.models import fast
from diffusion.models.architectures import build_network
from diffusion.models.fast.compilation import find_blocks
from diffusion.models.fast.norms import use_low_precision_norms
from tests.tools.inductor_aot import Graph, lowering_for_gpu
from tests.tools.triton_aot import ARCHITECTURES

pytestmark = pytest.mark.slow

BATCH, EDGE = 4, 32
ARCH = 90
"""Architecture of GPUs (SM 9.0) where one is enough."""


def unet(architecture: Architecture, compilation: Compilation = Compilation.auto, **network: Any) -> Any:
    """A U-Net as it is trained on a GPU, without weights."""
    with torch.device("meta"):
        unet = build_network(ModelConfig(architecture=architecture, network=network))
    use_low_precision_norms(unet)
    fast.apply(unet, PerformanceConfig(compilation=compilation), Device.gpu)
    return unet


def blocks(architecture: Architecture) -> list[tuple[nn.Module, dict[str, torch.Tensor]]]:
    """The first ResNet block that changes the width, and the first unit of attention after it, with their inputs."""
    whole = unet(architecture)
    units = set(find_blocks(whole))
    resnet, attention = whole.down_blocks[1].resnets[0], whole.down_blocks[1].attentions[0]
    image = torch.empty(BATCH, resnet.in_channels, EDGE, EDGE).to(memory_format=torch.channels_last)
    hidden = torch.empty(BATCH, resnet.out_channels, EDGE, EDGE).to(memory_format=torch.channels_last)
    text = torch.empty(BATCH, 77, whole.config["cross_attention_dim"])
    embedding = torch.empty(BATCH, whole.time_embedding.linear_2.out_features)
    if attention not in units:  # A deep transformer is a unit per block.
        attention, hidden = attention.transformer_blocks[0], hidden.flatten(2).mT
    assert {resnet, attention} <= units
    return [
        (resnet, {"input_tensor": image, "temb": embedding}),
        (attention, {"hidden_states": hidden, "encoder_hidden_states": text}),
    ]


def lower(module: nn.Module, inputs: dict[str, torch.Tensor], dtype: torch.dtype) -> list[Graph]:
    """Forward and backward pass in mixed precision."""
    module.to_empty(device="cpu").train()
    inputs = {name: value.to(dtype).requires_grad_(name != "encoder_hidden_states") for name, value in inputs.items()}
    with lowering_for_gpu() as graphs, torch.autocast("cpu", dtype):
        if isinstance(module, Transformer2DModel):
            (output,) = module(**inputs, return_dict=False)
        else:
            output = module(**inputs)
        output.backward(torch.empty_like(output))
    return graphs


def check(graphs: list[Graph], *, architectures: Sequence[int] = ARCHITECTURES, every_tiling: bool = False) -> None:
    assert [graph.is_backward for graph in graphs] == [False, True]
    for graph in graphs:
        for arch in architectures:
            kernels = graph.kernels(arch, every_tiling=every_tiling and arch == ARCH)
            assert kernels
            # The autotuner does not choose a tiling that spills, if another does not.
            assert {kernel.name for kernel in kernels} == {one.name for one in kernels if not one.num_spilled}


def test_blocks_compile_in_bf16():
    (resnet, *resnet_inputs), (attention, *attention_inputs) = blocks(Architecture.stable_diffusion_2)
    check(lower(resnet, *resnet_inputs, torch.bfloat16), architectures=(ARCH,))
    graphs = lower(attention, *attention_inputs, torch.bfloat16)
    check(graphs, architectures=(ARCH,))
    assert [graph.source.count(".erf(") for graph in graphs] == [1, 1], "once for both halves of a GEGLU's gradient"


def transformer_block() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A block of the small transformer at 256 px, with its inputs."""
    with torch.device("meta"):
        network: Any = build_network(ModelConfig(architecture=Architecture.transformer_s))
    use_low_precision_norms(network)
    fast.apply(network, PerformanceConfig(), Device.gpu)
    block, width = network.blocks[0], network.config["hidden_size"]
    assert find_blocks(network)[0] is block
    head = width // network.config["num_heads"]
    return block, {
        "hidden_states": torch.empty(BATCH, EDGE**2 // 4, width, dtype=torch.bfloat16, requires_grad=True),
        "encoder_hidden_states": torch.empty(BATCH, 77, width, dtype=torch.bfloat16, requires_grad=True),
        "temb": torch.empty(BATCH, width, dtype=torch.bfloat16, requires_grad=True),
        "image_rotary_emb": torch.empty(BATCH, 1, EDGE**2 // 4, head // 2, 2, 2),
        "attention_mask": torch.ones(BATCH, 77, dtype=torch.bool),
    }


def test_a_block_of_a_transformer_compiles_in_bf16():
    block, inputs = transformer_block()
    block.to_empty(device="cpu").train()
    with lowering_for_gpu() as graphs, torch.autocast("cpu", torch.bfloat16):
        output = block(**inputs)
        output.backward(torch.empty_like(output))
    check(graphs, architectures=(ARCH,))
    keys = EDGE**2 // 4 + 77
    masks = [sizes for sizes, _, _ in graphs[1].inputs if sizes[-1] == keys]
    assert masks == [[BATCH, 1, 1, keys]], "the backward pass gets one mask for all heads and queries"


def test_a_block_of_a_deep_transformer_compiles_with_every_tiling():
    """SDXL; its ResNet block is that of SD2."""
    _, (attention, inputs) = blocks(Architecture.stable_diffusion_xl)
    check(lower(attention, inputs, torch.float16), every_tiling=True)


def test_a_whole_unet_compiles():
    """It has one level, with attention to the caption between down and up: other blocks have tests of their own."""
    kinds = {"down_block_types": ["DownBlock2D"], "up_block_types": ["UpBlock2D"]}
    module = unet(Architecture.tiny, Compilation.unet, block_out_channels=[64], attention_head_dim=[2], **kinds)
    text = torch.empty(BATCH, 77, module.config["cross_attention_dim"])
    inputs = {"sample": torch.empty(BATCH, 4, 16, 16), "timestep": torch.empty(BATCH), "encoder_hidden_states": text}
    module.to_empty(device="cpu").train()
    with lowering_for_gpu() as graphs, torch.autocast("cpu", torch.bfloat16):
        output = module(**inputs).sample
        output.backward(torch.empty_like(output))
    check(graphs, architectures=(ARCH,))
