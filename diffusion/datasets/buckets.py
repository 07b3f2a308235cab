"""Buckets: images grouped by the length of their shorter side, or by a height and width that they are cut to.

A bucket is a folder. `256-512` holds images with 256 <= shorter side < 512, `1024-up` is open above; `896x1152` holds
images that are to be 896 px high and 1152 px wide. Heights come first everywhere, as in tensors.
"""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diffusion.config.data import named_size
from diffusion.errors import ConfigurationError

DEFAULT_EDGES = (256, 512, 768, 1024)
"""Lowest shorter side of each bucket, in pixels."""

_CHUNK = 2**16
"""Images that are compared with all sizes at a time."""


@dataclass(frozen=True)
class EdgeBuckets:
    """Buckets by the shorter side."""

    edges: tuple[int, ...]
    """Lowest shorter side of each bucket in pixels, ascending, as `parse_edges` returns them."""

    @property
    def names(self) -> list[str]:
        """Folder names, ascending: `256-512`, ..., `1024-up`."""
        return [f"{low}-{high}" for low, high in itertools.pairwise(self.edges)] + [f"{self.edges[-1]}-up"]

    def indices(self, widths: NDArray[np.integer], heights: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the indices of the buckets of upright images, -1 below the lowest edge: int64 [N]."""
        return np.searchsorted(np.array(self.edges), np.minimum(widths, heights), side="right") - 1


@dataclass(frozen=True)
class SizeBuckets:
    """Buckets by aspect ratio.

    An image goes to the bucket with the nearest aspect ratio (the least |log| of the quotient of the ratios) among
    those that it covers: at least as high and as wide. Of equally near ones it goes to the larger.
    """

    sizes: tuple[tuple[int, int], ...]
    """Height and width of each bucket in pixels, as `parse_sizes` returns them."""
    upscale: bool = False
    """Take an image that covers none, too: to the nearest ratio of all, of equally near ones to the smaller."""

    @property
    def names(self) -> list[str]:
        """Folder names: `512x2048`, ..., `2048x512`."""
        return [f"{height}x{width}" for height, width in self.sizes]

    def indices(self, widths: NDArray[np.integer], heights: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the indices of the buckets of upright images, -1 for those that go to none: int64 [N].

        Widths and heights [N] are in pixels.
        """
        sizes = np.array(self.sizes)
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
            found[start : start + _CHUNK] = np.where(is_small[:, 0] & (not self.upscale), -1, chosen)
        return found


Buckets = EdgeBuckets | SizeBuckets


def parse_edges(edges: Iterable[int | str]) -> tuple[int, ...]:
    """Return the lowest shorter side of each bucket in pixels, from numbers or their decimal text.

    Raises:
        ConfigurationError: there is none, one is not a positive whole number, or they do not ascend.
    """
    given = list(edges)
    shown = " ".join(map(str, given))
    if not given:
        raise ConfigurationError(
            "edges: there is none; give the lowest shorter side of each bucket, as in 256 512 1024"
        )
    if not all(re.fullmatch(r"[0-9]+", str(edge)) and int(edge) > 0 for edge in given):
        raise ConfigurationError(f"edges: {shown}: each must be a whole number of pixels, 1 or more")
    numbers = tuple(int(edge) for edge in given)
    ascending = sorted(set(numbers))
    if list(numbers) != ascending:
        raise ConfigurationError(f"edges: {shown}: they must ascend; try {' '.join(map(str, ascending))}")
    return numbers


def parse_sizes(sizes: Iterable[str]) -> tuple[tuple[int, int], ...]:
    """Return height and width in pixels of aspect-ratio buckets from texts such as `896x1152`, as `sorted_sizes` does.

    Raises:
        ConfigurationError: there is none, one is not a size, or one is given twice.
    """
    given = list(sizes)
    if not given:
        raise ConfigurationError("sizes: there is none; give height x width of each bucket, as in 1024x1024")
    parsed: set[tuple[int, int]] = set()
    for text in given:
        size = named_size(text)
        if size is None:
            raise ConfigurationError(f"sizes: {text!r}: give height x width in pixels, as in 896x1152")
        if size in parsed:
            raise ConfigurationError(f"sizes: {text} is given twice; give it once")
        parsed.add(size)
    return sorted_sizes(parsed)


def sorted_sizes(sizes: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Sort heights and widths from portrait to landscape, of one ratio from small to large."""
    return tuple(sorted(sizes, key=lambda size: (size[1] / size[0], size[0])))


def lowest_side(name: str) -> int:
    """Return the lowest shorter side in pixels of the images of a bucket of either kind from its folder name.

    Of an aspect-ratio bucket it is that of its size; images that are to be upscaled are smaller. Another name is a
    ConfigurationError.
    """
    if size := named_size(name):
        return min(size)
    match = re.fullmatch(r"([0-9]+)-(up|[0-9]+)", name)
    if not match:
        raise ConfigurationError(
            f"{name!r} is not the name of a bucket; they look like 256-512 or 1024-up, or 896x1152 (height x width)"
        )
    return int(match[1])
