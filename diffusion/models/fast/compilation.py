"""`torch.compile` of the U-Net or of its blocks, in training only.

Sampling and evaluation come with other shapes and run as they are. What is compiled is the forward function and not the
module's call, so that hooks around it (FSDP2's) stay outside of the graph, which may not break. The classes of existing
modules are changed in place.
"""

import functools
from typing import Any

import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import nn

from diffusion.models.fast.norms import FusedGroupNorm

MAX_GRAPHS = 256
"""Graphs of one function: one for each shape of the blocks, times the sizes of images that are trained at."""

RECOMPUTE = {"realize_reads_threshold": 16, "realize_acc_reads_threshold": 32, "realize_opcount_threshold": 100}
"""Inductor's options: in the backward pass each kernel works out the normalised values again. By default, as they
depend on many (small) tensors, one kernel writes them in fp32 for the others to read. Transformers keep the default:
there it is chains of residuals that would be worked out again."""


def find_blocks(network: nn.Module) -> list[nn.Module]:
    """Units of compilation and of FSDP2: ResNet blocks and transformers, of which deep ones are a unit per block."""
    shallow = [
        module
        for module in network.modules()
        if isinstance(module, Transformer2DModel) and len(module.transformer_blocks) == 1
    ]
    inside = {block for transformer in shallow for block in transformer.transformer_blocks}
    kinds = ResnetBlock2D | BasicTransformerBlock
    return [module for module in network.modules() if isinstance(module, kinds) and module not in inside] + shallow


def compile_blocks(network: nn.Module, *, cuda_graphs: bool = False) -> None:
    """Compile the blocks, and each GroupNorm that is outside of them."""
    blocks = find_blocks(network)
    inside = {module for block in blocks for module in block.modules()}
    norms = [module for module in network.modules() if isinstance(module, FusedGroupNorm) and module not in inside]
    compile_modules([*blocks, *norms], cuda_graphs=cuda_graphs)


@functools.cache
def _compiled(kind: type[nn.Module], cuda_graphs: bool) -> type[nn.Module]:
    """A subclass, of the same name (which diffusers stores with a model), that is compiled in training."""
    plain: Any = kind.forward
    options: dict[str, Any] = {} if issubclass(kind, Transformer2DModel | BasicTransformerBlock) else dict(RECOMPUTE)
    if cuda_graphs:
        options["triton.cudagraphs"] = True  # `mode="reduce-overhead"`, which torch does not take beside options.
    compiled = torch.compile(plain, fullgraph=True, dynamic=False, options=options or None)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_training = self.training and torch.is_grad_enabled()
        return (compiled if is_training else plain)(self, *args, **kwargs)

    members = {"forward": forward, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), members)  # pyright: ignore[reportReturnType]


def compile_modules(modules: list[nn.Module], *, cuda_graphs: bool = False) -> None:
    """Compile the forward pass of modules in training, in place, at its first call for each shape.

    Args:
        modules: units of compilation.
        cuda_graphs: record their kernels as CUDA graphs; `mark_steps` says when a step begins.
    """
    torch._dynamo.config.recompile_limit = MAX_GRAPHS
    torch._dynamo.config.accumulated_recompile_limit = MAX_GRAPHS
    torch._dynamo.config.optimize_ddp = False  # It would split a block at the buckets of DDP, which are larger.
    for module in modules:
        module.__class__ = _compiled(type(module), cuda_graphs)


def mark_steps(network: nn.Module) -> None:
    """Begin a step of the CUDA graphs at each forward pass in training: memory of the step before is used again.

    Without the mark, torch takes each compiled block for a step of its own.
    """

    def mark(module: nn.Module, _: Any) -> None:
        if module.training:
            torch.compiler.cudagraph_mark_step_begin()

    network.register_forward_pre_hook(mark)
