"""GEGLU by a matrix product for each half of its weight, in compiled graphs.

With one product, the gradients of both halves are concatenated in the backward pass, and Inductor's kernel for that
evaluates the gradients of both halves for each element of either. With two products, it evaluates them once.
"""

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.activations import GEGLU
from torch import Tensor, nn


class SplitGEGLU(GEGLU):
    """GEGLU by two matrix products in compiled graphs, and by diffusers' single one otherwise or with an adapter."""

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
