"""Buckets: images grouped by the length of their shorter side, or by a height and width that they are cut to.

A bucket is a folder. `256-512` holds images with 256 <= shorter side < 512, `1024-up` is open above; `896x1152` holds
images that are to be 896 px high and 1152 px wide. Heights come first everywhere, as in tensors.
"""

import bisect
import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from diffusion.config.data import named_size
from diffusion.errors import ConfigurationError

DEFAULT_EDGES = (256, 512, 768, 1024)
"""Lowest shorter side of each bucket, in pixels."""


@dataclass(frozen=True)
class EdgeBuckets:
    """Buckets by the shorter side."""

    edges: tuple[int, ...]
    """Lowest shorter side of each bucket in pixels, ascending, as `parse_edges` returns them."""

    @property
    def names(self) -> list[str]:
        """Folder names, ascending: `256-512`, ..., `1024-up`."""
        return [f"{low}-{high}" for low, high in itertools.pairwise(self.edges)] + [f"{self.edges[-1]}-up"]

    def of(self, width: int, height: int) -> str | None:
        """Return the name of the bucket of an upright image, or None below the lowest edge."""
        index = bisect.bisect_right(self.edges, min(width, height)) - 1
        return None if index < 0 else self.names[index]


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

    def of(self, width: int, height: int) -> str | None:
        """Return the name of the bucket of an upright image, or None if it covers none and is not to be upscaled."""
        covered = [size for size in self.sizes if size[0] <= height and size[1] <= width]
        if not covered and not self.upscale:
            return None
        sign, shape = -1 if covered else 1, math.log(width / height)

        def distance(size: tuple[int, int]) -> tuple[float, int]:
            return round(abs(math.log(size[1] / size[0]) - shape), 12), sign * size[0] * size[1]

        nearest = min(covered or self.sizes, key=distance)
        return f"{nearest[0]}x{nearest[1]}"


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

    Of an aspect-ratio bucket it is that of its size; images that are to be upscaled are smaller.

    Raises:
        ConfigurationError: it is not the name of a bucket.
    """
    if size := named_size(name):
        return min(size)
    match = re.fullmatch(r"([0-9]+)-(up|[0-9]+)", name)
    if not match:
        raise ConfigurationError(
            f"{name!r} is not the name of a bucket; they look like 256-512 or 1024-up, or 896x1152 (height x width)"
        )
    return int(match[1])
