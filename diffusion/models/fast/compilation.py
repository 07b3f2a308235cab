"""`torch.compile` of the network or of its blocks, in training only.

Sampling and evaluation have other shapes and run uncompiled. The forward function is compiled instead of the module's
call, so that its hooks (FSDP2's) stay outside of the graph, which must not break. The classes of existing modules are
changed in place.
"""

import functools
from typing import Any

import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.transformers.transformer_prx import PRXBlock, PRXTransformer2DModel
from torch import nn

from diffusion.models.fast.norms import FusedGroupNorm

MAX_GRAPHS = 4096
"""Largest number of graphs of one function: blocks of a kind times sizes of images."""

RECOMPUTE = {"realize_reads_threshold": 16, "realize_acc_reads_threshold": 32, "realize_opcount_threshold": 100}
"""Options of Inductor: each kernel of the backward pass recomputes the normalised values. By default, one kernel writes
them in fp32 for the others, because they depend on many (small) tensors. Transformers keep the default, because chains
of residuals would be recomputed there."""


def find_blocks(network: nn.Module) -> list[nn.Module]:
    """Units of compilation and of FSDP2: ResNet blocks, shallow transformers, and blocks of deep transformers."""
    shallow = [
        module
        for module in network.modules()
        if isinstance(module, Transformer2DModel) and len(module.transformer_blocks) == 1
    ]
    inside = {block for transformer in shallow for block in transformer.transformer_blocks}
    kinds = ResnetBlock2D | BasicTransformerBlock | PRXBlock
    return [module for module in network.modules() if isinstance(module, kinds) and module not in inside] + shallow


def compile_blocks(network: nn.Module, *, cuda_graphs: bool = False) -> None:
    """Compile the blocks, and each GroupNorm outside of them."""
    blocks = find_blocks(network)
    inside = {module for block in blocks for module in block.modules()}
    norms = [module for module in network.modules() if isinstance(module, FusedGroupNorm) and module not in inside]
    compile_modules([*blocks, *norms], cuda_graphs=cuda_graphs)


@functools.cache
def _compiled(kind: type[nn.Module], cuda_graphs: bool) -> type[nn.Module]:
    """Subclass with a forward pass that is compiled in training; it keeps the name, which diffusers stores."""
    plain: Any = kind.forward
    is_transformer = issubclass(kind, Transformer2DModel | BasicTransformerBlock | PRXBlock | PRXTransformer2DModel)
    options: dict[str, Any] = {} if is_transformer else dict(RECOMPUTE)
    if cuda_graphs:
        options["triton.cudagraphs"] = True  # As `mode="reduce-overhead"`, which cannot be combined with options.
    compiled = torch.compile(plain, fullgraph=True, dynamic=False, options=options or None)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_training = self.training and torch.is_grad_enabled()
        return (compiled if is_training else plain)(self, *args, **kwargs)

    members = {"forward": forward, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), members)  # pyright: ignore[reportReturnType]


def compile_modules(modules: list[nn.Module], *, cuda_graphs: bool = False) -> None:
    """Compile the forward pass of modules in training, in place, at its first call for each shape.

    CUDA graphs need `mark_steps`.
    """
    torch._dynamo.config.recompile_limit = MAX_GRAPHS
    torch._dynamo.config.accumulated_recompile_limit = MAX_GRAPHS
    torch._dynamo.config.optimize_ddp = False  # It would split blocks at the boundaries of DDP's buckets.
    for module in modules:
        module.__class__ = _compiled(type(module), cuda_graphs)


def mark_steps(network: nn.Module) -> None:
    """Mark each forward pass in training as a step of the CUDA graphs, which then reuse memory.

    Without the mark, torch assumes one step per compiled block.
    """

    def mark(module: nn.Module, _: Any) -> None:
        if module.training:
            torch.compiler.cudagraph_mark_step_begin()

    network.register_forward_pre_hook(mark)
