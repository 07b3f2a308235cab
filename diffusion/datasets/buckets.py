"""Resolution buckets: pictures grouped by the length of their shorter side."""

import bisect
import itertools
import re
from collections.abc import Iterable, Sequence

from diffusion.errors import ConfigurationError

DEFAULT_EDGES = (256, 512, 768, 1024)
"""Lowest shorter side of each bucket, in pixels."""


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


def bucket_names(edges: Sequence[int]) -> list[str]:
    """Return the folder name of each bucket, ascending: `256-512`, ..., `1024-up`."""
    return [f"{low}-{high}" for low, high in itertools.pairwise(edges)] + [f"{edges[-1]}-up"]


def bucket_of(shorter_side: int, edges: Sequence[int]) -> str | None:
    """Return the name of the bucket of a picture.

    Args:
        shorter_side: Pixels.
        edges: Ascending, as `parse_edges` returns them.

    Returns:
        The bucket with low <= shorter side < high, or None below the lowest edge.
    """
    index = bisect.bisect_right(edges, shorter_side) - 1
    return None if index < 0 else bucket_names(edges)[index]


def bucket_range(name: str) -> tuple[int, int | None]:
    """Return the lowest shorter side of a bucket and the first above it (None: open) from its folder name.

    Raises:
        ConfigurationError: It is not the name of a bucket.
    """
    match = re.fullmatch(r"([0-9]+)-(up|[0-9]+)", name)
    if not match:
        raise ConfigurationError(f"{name!r} is not the name of a bucket; they look like 256-512 or 1024-up")
    return int(match[1]), None if match[2] == "up" else int(match[2])
