"""What cannot work in the configuration of averaged weights."""

import math
from collections.abc import Iterator

from diffusion.config.training import EMAConfig

MAX_WIDTH = 1 / math.sqrt(12)
"""Relative width of the plain mean of all weights; a wider profile would count the oldest most."""


def average_problems(ema: EMAConfig) -> Iterator[str]:
    """Sentences about decays and widths."""
    widths = ema.power.relative_widths if ema.power is not None else []
    for decay in ema.decays:
        if not 0 <= decay < 1:
            yield f"algorithms.ema.decays has {decay}, but a decay must be at least 0 and below 1."
    for width in widths:
        if not 0 < width < MAX_WIDTH:
            yield (
                f"algorithms.ema.power.relative_widths has {width}, but a relative width must be above 0 and below "
                f"{MAX_WIDTH:.4f}, that of the plain mean."
            )
    for key, values in (("decays", ema.decays), ("power.relative_widths", widths)):
        if len(set(values)) < len(values):
            yield f"algorithms.ema.{key} is {values}: the same average twice. Name each once."
    if ema.power is not None and not widths:
        yield "algorithms.ema.power.relative_widths is empty: name widths, such as [0.05, 0.10], or set power to null."
    elif not ema.num_averages:
        yield "algorithms.ema.decays is empty, so that there is no average: name one, or set algorithms.ema=null."
