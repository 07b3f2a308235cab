"""Buckets: images grouped by the length of their shorter side, or by a height and width that they are cut to.

A bucket is a folder. `256-512` holds images with 256 <= shorter side < 512, `1024-up` is open above; `896x1152` holds
images that are to be 896 px high and 1152 px wide. Heights come first everywhere, as in tensors.
"""

import bisect
import functools
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from diffusion.config.data import named_size
from diffusion.errors import ConfigurationError

DEFAULT_EDGES = (256, 512, 768, 1024)
"""Lowest shorter side of each bucket, in pixels."""

_LOOKS = "they look like 256-512 or 1024-up, or 896x1152 (height x width)"


class Buckets(Protocol):
    """A division of images."""

    @property
    def names(self) -> list[str]:
        """Folder names, in the order in which they are listed."""
        ...

    def of(self, width: int, height: int) -> str | None:
        """Return the name of the bucket of an upright image in pixels, or None if it is too small for each."""
        ...


@dataclass(frozen=True)
class EdgeBuckets:
    """Buckets by the shorter side.

    Attributes:
        edges: Lowest shorter side of each bucket in pixels, ascending, as `parse_edges` returns them.
    """

    edges: tuple[int, ...]

    @property
    def names(self) -> list[str]:
        """`256-512`, ..., `1024-up`."""
        return bucket_names(self.edges)

    def of(self, width: int, height: int) -> str | None:
        """Return the name of the bucket of an image, or None below the lowest edge."""
        return bucket_of(min(width, height), self.edges)


@dataclass(frozen=True)
class SizeBuckets:
    """Buckets by aspect ratio.

    An image goes to the bucket with the nearest aspect ratio (the least |log| of the quotient of the ratios) among
    those that it covers: at least as high and as wide. Of equally near ones it goes to the larger.

    Attributes:
        sizes: Height and width of each bucket in pixels, as `parse_sizes` returns them.
        upscale: Take an image that covers none, too: to the nearest ratio of all, of equally near ones to the smaller.
        min_samples: Fewest training images of a bucket.
        refuse_small: Whether the images of a bucket with fewer are refused; otherwise they go to others.
    """

    sizes: tuple[tuple[int, int], ...]
    upscale: bool = False
    min_samples: int = 0
    refuse_small: bool = False

    @property
    def names(self) -> list[str]:
        """`512x2048`, ..., `2048x512`."""
        return [size_name(height, width) for height, width in self.sizes]

    def of(self, width: int, height: int) -> str | None:
        """Return the name of the bucket of an image, or None if it covers no bucket and is not to be upscaled."""
        shape = math.log(width / height)
        covered = [entry for entry in self._entries if entry[1] <= height and entry[2] <= width]
        if not covered and not self.upscale:
            return None
        sign = -1 if covered else 1
        nearest = min(
            covered or self._entries, key=lambda entry: (round(abs(entry[0] - shape), 12), sign * entry[1] * entry[2])
        )
        return size_name(nearest[1], nearest[2])

    @functools.cached_property
    def _entries(self) -> list[tuple[float, int, int]]:
        """Logarithm of width / height, height, width."""
        return [(math.log(width / height), height, width) for height, width in self.sizes]


def parse_edges(edges: Iterable[int | str]) -> tuple[int, ...]:
    """Check the edges of the buckets.

    Args:
        edges: Lowest shorter side of each bucket in pixels, ascending; numbers or their decimal text.

    Returns:
        The edges as numbers.

    Raises:
        ConfigurationError: There is none, one is not a positive whole number, or they do not ascend.
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
    if any(low >= high for low, high in itertools.pairwise(numbers)):
        raise ConfigurationError(f"edges: {shown}: they must ascend; try {' '.join(map(str, sorted(set(numbers))))}")
    return numbers


def parse_sizes(sizes: Iterable[str]) -> tuple[tuple[int, int], ...]:
    """Check the sizes of aspect-ratio buckets.

    Args:
        sizes: Texts such as `896x1152`: height x width in pixels.

    Returns:
        Height and width of each, from portrait to landscape, of one ratio from small to large.

    Raises:
        ConfigurationError: There is none, one is not a size, or one is given twice.
    """
    given = list(sizes)
    if not given:
        raise ConfigurationError("sizes: there is none; give height x width of each bucket, as in 1024x1024")
    parsed = [named_size(size) for size in given]
    wrong = [size for size, found in zip(given, parsed, strict=True) if found is None]
    if wrong:
        raise ConfigurationError(f"sizes: {wrong[0]!r}: give height x width in pixels, as in 896x1152")
    twice = [size for size in given if given.count(size) > 1]
    if twice:
        raise ConfigurationError(f"sizes: {twice[0]} is given twice; give it once")
    return sorted_sizes(size for size in parsed if size)


def sorted_sizes(sizes: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Sort heights and widths from portrait to landscape, of one ratio from small to large."""
    return tuple(sorted(sizes, key=lambda size: (size[1] / size[0], size[0])))


def bucket_names(edges: Sequence[int]) -> list[str]:
    """Return the folder name of each bucket, ascending: `256-512`, ..., `1024-up`."""
    return [f"{low}-{high}" for low, high in itertools.pairwise(edges)] + [f"{edges[-1]}-up"]


def bucket_of(shorter_side: int, edges: Sequence[int]) -> str | None:
    """Return the name of the bucket of an image.

    Args:
        shorter_side: Pixels.
        edges: Ascending, as `parse_edges` returns them.

    Returns:
        The bucket with low <= shorter side < high, or None below the lowest edge.
    """
    index = bisect.bisect_right(edges, shorter_side) - 1
    return None if index < 0 else bucket_names(edges)[index]


def size_name(height: int, width: int) -> str:
    """Return the folder name of an aspect-ratio bucket: `896x1152` is 896 px high and 1152 px wide."""
    return f"{height}x{width}"


def bucket_range(name: str) -> tuple[int, int | None]:
    """Return the lowest shorter side of a bucket and the first above it (None: open) from its folder name.

    Raises:
        ConfigurationError: It is not the name of a bucket by the shorter side.
    """
    match = re.fullmatch(r"([0-9]+)-(up|[0-9]+)", name)
    if not match:
        raise ConfigurationError(f"{name!r} is not the name of a bucket by the shorter side; {_LOOKS}")
    return int(match[1]), None if match[2] == "up" else int(match[2])


def lowest_side(name: str) -> int:
    """Return the lowest shorter side in pixels of the images of a bucket of either kind from its folder name.

    Of an aspect-ratio bucket it is that of its size; images that are to be upscaled are smaller.

    Raises:
        ConfigurationError: It is not the name of a bucket.
    """
    size = named_size(name)
    return min(size) if size else bucket_range(name)[0]
