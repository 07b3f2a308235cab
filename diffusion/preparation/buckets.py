"""Divisions into buckets: presets, and aspect-ratio buckets of one area."""

import math

from diffusion.datasets.buckets import (
    DEFAULT_EDGES,
    Buckets,
    EdgeBuckets,
    SizeBuckets,
    parse_edges,
    parse_sizes,
    sorted_sizes,
)
from diffusion.errors import ConfigurationError
from diffusion.preparation.config import AreaConfig, BucketsConfig

PRESETS = ("sd2", "sdxl")


def build_buckets(config: BucketsConfig) -> Buckets:
    """Make the division that a configuration asks for, the preset `sd2` if it asks for none.

    Raises:
        ConfigurationError: several are given, a name or number is wrong, or `upscale` does not go with them.
    """
    kinds = ("preset", "edges", "sizes", "area")
    given = [kind for kind in kinds if getattr(config, kind) is not None]
    if len(given) > 1:
        raise ConfigurationError(f"buckets.{given[0]} and buckets.{given[1]} are both given; leave one of them out")
    if config.preset not in (None, *PRESETS):
        raise ConfigurationError(f"buckets.preset is {config.preset!r}; it is one of {', '.join(PRESETS)}, or null")
    if config.reject_small and not config.min_samples:
        raise ConfigurationError("buckets.reject_small is true without buckets.min_samples, which says what is small")
    sizes = None
    if config.sizes is not None:
        sizes = parse_sizes(config.sizes)
    elif config.area is not None:
        sizes = area_sizes(config.area)
    elif config.preset == "sdxl":
        sizes = SDXL_SIZES
    if sizes is not None:
        return SizeBuckets(sizes, config.upscale)
    if config.min_samples:
        raise ConfigurationError(
            "buckets.min_samples is given, but buckets by the shorter side are not merged; give sizes, area or the "
            "preset sdxl, or other edges"
        )
    if config.upscale:
        raise ConfigurationError(
            "buckets.upscale is true, but buckets by the shorter side know no size to scale to; give sizes, area or "
            "the preset sdxl, or lower the first edge"
        )
    return EdgeBuckets(parse_edges(DEFAULT_EDGES if config.edges is None else config.edges))


def area_sizes(config: AreaConfig) -> tuple[tuple[int, int], ...]:
    """Make aspect-ratio buckets of about one area, and never of more.

    Every height and width whose product is at least 90 % of the area, and for each multiple of the step that serves as
    the shorter side the largest that is not above it. Both orientations are there. With 1024, 64 and 4 these are the
    sizes of SDXL and 1344x704, which its list lacks.

    Returns:
        Heights and widths in pixels, from portrait to landscape; the square is always among them.
    """
    side, step = config.side, config.step
    if step < 1 or side < step or side % step:
        raise ConfigurationError(
            f"buckets.area: side {side} must be a multiple of step {step}, and both at least 1; try side "
            f"{max(side // max(step, 1), 1) * max(step, 1)}"
        )
    if not 1 <= config.max_ratio < math.inf:
        raise ConfigurationError(f"buckets.area.max_ratio is {config.max_ratio}; it must be finite, and at least 1")
    sizes = set()
    for shorter in range(step, side + 1, step):
        longest = side * side // shorter // step * step
        for longer in range(longest, shorter - 1, -step):
            is_full = 10 * shorter * longer >= 9 * side * side
            if (is_full or longer == longest) and longer <= shorter * config.max_ratio:
                sizes |= {(shorter, longer), (longer, shorter)}
    return sorted_sizes(sizes)


SDXL_SIZES = tuple(size for size in area_sizes(AreaConfig(side=1024, step=64, max_ratio=4)) if size != (1344, 704))
"""Heights and widths in pixels that SDXL was trained with (Podell et al. 2023, appendix I)."""
