"""The U-Net made fast: the same parameters, names and results up to rounding, in less time."""

from diffusion.models.fast.applying import apply, resolve_compilation

__all__ = ["apply", "resolve_compilation"]
