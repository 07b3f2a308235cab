"""Dtypes of mixed precision; frozen networks that float16 overflows run in float32."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from diffusion.config.training import Precision

AUTOCAST_DTYPES = {Precision.amp_bf16: torch.bfloat16, Precision.amp_fp16: torch.float16}


@contextmanager
def without_float16(module: nn.Module) -> Iterator[None]:
    """Run a module in float32 where its weights are float16, or autocast would compute in it."""
    parameter = next(module.parameters())
    device, is_half = parameter.device.type, parameter.dtype == torch.float16
    is_autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
    if is_half:
        module.float()
    try:
        with torch.autocast(device, enabled=False) if is_autocast else nullcontext():
            yield
    finally:
        if is_half:
            module.half()


@contextmanager
def upcast(vae: Any) -> Iterator[Any]:
    """Run a VAE in float32 if its configuration says that float16 overflows (`force_upcast`, as SDXL's)."""
    with without_float16(vae) if vae.config.get("force_upcast") else nullcontext():
        yield vae
