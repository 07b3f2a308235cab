"""Divisions into buckets: named ones, aspect-ratio buckets made for an area, and the buckets of many images at once."""

import math

import numpy as np
from numpy.typing import NDArray

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

SDXL_SIZES: tuple[tuple[int, int], ...] = (
    *((512, width) for width in (2048, 1984, 1920, 1856)),
    *((576, width) for width in (1792, 1728, 1664)),
    *((640, width) for width in (1600, 1536)),
    *((704, width) for width in (1472, 1408, 1344)),
    *((768, width) for width in (1344, 1280)),
    *((832, width) for width in (1216, 1152)),
    *((896, width) for width in (1152, 1088)),
    *((960, width) for width in (1088, 1024)),
    *((1024, width) for width in (1024, 960)),
    *((1088, width) for width in (960, 896)),
    *((1152, width) for width in (896, 832)),
    *((height, 832) for height in (1216,)),
    *((height, 768) for height in (1280, 1344)),
    *((height, 704) for height in (1408, 1472)),
    *((height, 640) for height in (1536, 1600)),
    *((height, 576) for height in (1664, 1728, 1792)),
    *((height, 512) for height in (1856, 1920, 1984, 2048)),
)
"""Heights and widths in pixels that SDXL was trained with (Podell et al. 2023, appendix I)."""

PRESETS = ("sd2", "sdxl")

_CHUNK = 2**16


def build_buckets(config: BucketsConfig) -> Buckets:
    """Make the division that a configuration asks for.

    Args:
        config: at most one of `preset`, `edges`, `sizes` and `area`; with none, the preset `sd2`.

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
        sizes = sorted_sizes(SDXL_SIZES)
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

    Args:
        config: side of the square of that area, step and largest ratio.

    Returns:
        Heights and widths in pixels, from portrait to landscape; the square is always among them.

    Raises:
        ConfigurationError: a number is out of range, or the side is not a multiple of the step.
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


def bucket_indices(buckets: Buckets, widths: NDArray[np.integer], heights: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return what `buckets.of` does for many upright images.

    Args:
        buckets: the division.
        widths: integer [N], pixels.
        heights: integer [N], pixels.

    Returns:
        int64 [N], index into `buckets.names`; -1 without a bucket.
    """
    if isinstance(buckets, EdgeBuckets):
        return np.searchsorted(np.array(buckets.edges), np.minimum(widths, heights), side="right") - 1
    sizes = np.array(buckets.sizes)
    shapes, areas = np.log(sizes[:, 1] / sizes[:, 0]), sizes.prod(axis=1)
    found = np.empty(len(widths), np.int64)
    for start in range(0, len(widths), _CHUNK):
        width, height = widths[start : start + _CHUNK, None], heights[start : start + _CHUNK, None]
        covered = (sizes[:, 0] <= height) & (sizes[:, 1] <= width)
        is_small = ~covered.any(axis=1, keepdims=True)
        distance = np.round(np.abs(shapes - np.log(width / height)), 12)
        distance[~(covered | is_small)] = np.inf
        nearest = distance == distance.min(axis=1, keepdims=True)
        area = np.where(is_small, areas, -areas)
        chosen = np.where(nearest, area, area.max() + 1).argmin(axis=1)
        found[start : start + _CHUNK] = np.where(is_small[:, 0] & (not buckets.upscale), -1, chosen)
    return found
