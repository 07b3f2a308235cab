"""`torch.compile` of the network or of its parts, and of the text encoder's layers, in training only.

Sampling and evaluation have other shapes and run uncompiled. The forward function is compiled instead of the module's
call, so that its hooks (FSDP2's) stay outside of the graph, which must not break. The classes of existing modules are
changed in place.
"""

import copyreg
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.activations import GEGLU
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.transformers.transformer_prx import PRXBlock, PRXTransformer2DModel
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from diffusion.config.model import Compilation
from diffusion.models.fast.norms import FusedGroupNorm

MAX_GRAPHS = 4096
"""Largest number of graphs of one function."""

RECOMPUTE = {"realize_reads_threshold": 16, "realize_acc_reads_threshold": 32, "realize_opcount_threshold": 100}
"""Options of Inductor: each kernel of the backward pass recomputes the normalised values. By default, one kernel writes
them in fp32 for the others, because they depend on many (small) tensors. Transformers keep the default, because chains
of residuals would be recomputed there."""


def find_blocks(network: nn.Module) -> list[nn.Module]:
    """ResNet blocks, shallow transformers, and blocks of deep transformers."""
    shallow = [
        module
        for module in network.modules()
        if isinstance(module, Transformer2DModel) and len(module.transformer_blocks) == 1
    ]
    inside = {block for transformer in shallow for block in transformer.transformer_blocks}
    kinds = ResnetBlock2D | BasicTransformerBlock | PRXBlock
    return [module for module in network.modules() if isinstance(module, kinds) and module not in inside] + shallow


def find_units(network: nn.Module, compilation: Compilation) -> list[nn.Module]:
    """Units of compilation and of FSDP2: with `stages` the down, mid and up blocks of a U-Net, otherwise its blocks."""
    if compilation is Compilation.stages and isinstance(network, UNet2DConditionModel):
        return [*network.down_blocks, network.mid_block, *network.up_blocks]
    return find_blocks(network)


def outer_norms(network: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """List each GroupNorm outside of units."""
    inside = {module for unit in units for module in unit.modules()}
    return [module for module in network.modules() if isinstance(module, FusedGroupNorm) and module not in inside]


@functools.cache
def _compiled(kind: type[nn.Module], weights: tuple[torch.Size, ...], cuda_graphs: bool) -> type[nn.Module]:
    """Subclass with a forward pass that is compiled in training, for modules with weights of these shapes.

    Inputs of each shape have a function of their own: Dynamo tries the graphs of a function one after the other.
    """
    is_transformer = issubclass(kind, Transformer2DModel | BasicTransformerBlock | PRXBlock | PRXTransformer2DModel)
    options: dict[str, Any] = {} if is_transformer else dict(RECOMPUTE)
    if cuda_graphs:
        options["triton.cudagraphs"] = True  # As `mode="reduce-overhead"`, which cannot be combined with options.

    @functools.cache
    def compiled(shapes: tuple[torch.Size | None, ...]) -> Callable[..., Any]:
        return torch.compile(_copy(kind.forward), fullgraph=True, dynamic=False, options=options or None)

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        shapes = tuple(getattr(value, "shape", None) for value in (*args, *kwargs.values()))
        return compiled(shapes)(module, *args, **kwargs)

    return _with_compiled(kind, forward, lambda module: module.training and torch.is_grad_enabled())


def _copy(function: Any) -> Callable[..., Any]:
    """Copy a function with its code, to which Dynamo attaches graphs."""
    code = function.__code__.replace()
    copy = types.FunctionType(code, function.__globals__, None, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _with_compiled(
    kind: type[nn.Module], compiled: Callable[..., Any], is_used: Callable[[nn.Module], bool]
) -> type[nn.Module]:
    """Subclass that calls a compiled forward pass where it is used; it keeps the name, which diffusers stores."""
    plain: Any = kind.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (compiled if is_used(self) else plain)(self, *args, **kwargs)

    members = {"forward": forward, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), members)  # pyright: ignore[reportReturnType]


def compile_modules(modules: list[nn.Module], *, cuda_graphs: bool = False) -> None:
    """Compile the forward pass of modules in training, in place, at its first call for each shape.

    CUDA graphs need `mark_steps`.
    """
    _configure()
    for module in modules:
        weights = tuple(weight.shape for weight in module.parameters())
        module.__class__ = _compiled(type(module), weights, cuda_graphs)


def compile_text_encoder(text_encoder: nn.Module, network: nn.Module) -> None:
    """Compile the layers of a frozen text encoder, in place, for batches that the network is trained with.

    Layers with equal inputs share a graph.
    """
    _configure()
    layers: list[nn.Module] = [one for one in text_encoder.modules() if isinstance(one, GradientCheckpointingLayer)]
    kinds = {
        kind: _with_compiled(kind, torch.compile(kind.forward, dynamic=False), lambda _: network.training)
        for kind in {type(layer) for layer in layers}
    }
    for layer in layers:
        layer.__class__ = kinds[type(layer)]


def _configure() -> None:
    torch._dynamo.config.recompile_limit = MAX_GRAPHS
    torch._dynamo.config.accumulated_recompile_limit = MAX_GRAPHS
    torch._dynamo.config.optimize_ddp = False  # It would split blocks at the boundaries of DDP's buckets.
    copyreg.pickle(torch.memory_format, _reduce_memory_format)


def _reduce_memory_format(memory_format: torch.memory_format) -> Any:
    """Pickle a memory format by its name, as torch does with a layout, for keys of Inductor's cache.

    By default the pickle names the module that imported torch first, so that another program would find nothing.
    """
    return _memory_format, (str(memory_format),)


def _memory_format(name: str) -> torch.memory_format:
    return getattr(torch, name.removeprefix("torch."))


def mark_steps(network: nn.Module) -> None:
    """Mark each forward pass in training as a step of the CUDA graphs, which then reuse memory.

    Without the mark, torch assumes one step per compiled block.
    """

    def mark(module: nn.Module, _: Any) -> None:
        if module.training:
            torch.compiler.cudagraph_mark_step_begin()

    network.register_forward_pre_hook(mark)


class SplitGEGLU(GEGLU):
    """GEGLU by two matrix products in compiled graphs, and by diffusers' single one otherwise or with an adapter.

    With one product, the gradients of both halves are concatenated in the backward pass, and Inductor's kernel for that
    evaluates the gradients of both halves for each element of either. With two products, it evaluates them once.
    """

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Map [..., C] to [..., D]."""
        if not torch.compiler.is_compiling() or type(self.proj) is not nn.Linear:
            return super().forward(hidden_states, *args, **kwargs)
        value_weight, gate_weight = self.proj.weight.chunk(2)
        value_bias, gate_bias = (None, None) if self.proj.bias is None else self.proj.bias.chunk(2)
        gate = self.gelu(F.linear(hidden_states, gate_weight, gate_bias))
        return F.linear(hidden_states, value_weight, value_bias) * gate


def split_geglu(module: nn.Module) -> None:
    """Change each GEGLU below a module to this form, in place."""
    for layer in module.modules():
        if type(layer) is GEGLU:
            layer.__class__ = SplitGEGLU
