"""Which images are copies of others, decided over all partitions from hashes: same bytes, or nearly the same look.

Images are taken in an order of preference: the largest first, of equally large ones the one that comes first in the
order of the data set. Each is a duplicate if one that was *kept before it* has the same bytes, or a perceptual hash
that differs in at most `max_distance` of 64 bits; otherwise it is kept. So every duplicate looks like the image that
stands for it, and a chain of images that resemble their neighbours only is not taken for one (which the transitive
closure would). The result depends on the arguments alone.

Near hashes are found without comparing all with all: the 64 bits are cut into blocks, and of two hashes within the
distance at least (blocks - distance) blocks are equal (the pigeonhole principle). For each choice of so many blocks the
hashes are sorted by them, and those that agree there are compared. The number of blocks follows from the number of
images. Time grows about linearly, except where very many distinct hashes agree in most bits.
"""

import itertools
import math

import numpy as np
from numpy.typing import NDArray

from diffusion.errors import ConfigurationError

HASH_BITS = 64
LARGEST_DISTANCE = 16
"""Beyond it most pairs of unrelated images of one kind would be near."""

_SORT_COST = 60
"""Comparisons that cost as much as sorting one hash: for the choice of the number of blocks."""


def find_duplicates(
    order: NDArray[np.uint64],
    exact: NDArray[np.uint64],
    phash: NDArray[np.uint64],
    pixels: NDArray[np.integer],
    max_distance: int | None,
    settled: NDArray[np.bool_] | None = None,
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Decide which images are duplicates, and of which.

    Args:
        order: uint64 [N], place of each image in the order of the data set; all different.
        exact: uint64 [N] or [N, words], hash of its bytes.
        phash: uint64 [N], perceptual hash.
        pixels: integer [N], width times height.
        max_distance: Largest number of differing bits of near duplicates; None looks at the bytes only.
        settled: bool [N], images that an earlier run kept by the same rule: they are preferred to all others, so that
            none of them becomes a duplicate of one that came later. None: there are none.

    Returns:
        bool [N], whether it is a duplicate; int64 [N], the index of the kept image that stands for it: its own where
        it is kept.

    Raises:
        ConfigurationError: The distance is out of range.
    """
    check_distance(max_distance)
    num = len(order)
    if not num:
        return np.empty(0, bool), np.empty(0, np.int64)
    later = np.zeros(num, bool) if settled is None else ~settled
    preferred = np.lexsort((order, -pixels.astype(np.int64), later))
    stands = _first_equal(exact[preferred])
    if max_distance is not None:
        distinct = np.flatnonzero(stands == np.arange(num))
        nearest = np.arange(num)
        nearest[distinct] = distinct[_stand_ins(phash[preferred[distinct]], max_distance)]
        stands = nearest[stands]
    of = np.empty(num, np.int64)
    of[preferred] = preferred[stands]
    return of != np.arange(num), of


def check_distance(max_distance: int | None) -> None:
    """Refuse a distance that is out of range.

    Raises:
        ConfigurationError: It is.
    """
    if max_distance is not None and not 0 <= max_distance <= LARGEST_DISTANCE:
        raise ConfigurationError(
            f"duplicates.max_distance is {max_distance}; it must be at least 0 and at most {LARGEST_DISTANCE} bits"
        )


def hash_words(hexadecimal: str) -> list[int]:
    """Return a hash in hexadecimal digits as 64-bit words, the highest first."""
    return [int(hexadecimal[start : start + 16], 16) for start in range(0, len(hexadecimal), 16)]


def _first_equal(values: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return for each row the index of the first row that is equal to it: int64 [N]."""
    columns = values.reshape(len(values), -1)
    by_value = np.lexsort(columns.T)  # stable: equal rows keep their order
    ordered = columns[by_value]
    is_new = np.concatenate([[True], (ordered[1:] != ordered[:-1]).any(axis=1)])
    first = np.empty(len(values), np.int64)
    first[by_value] = by_value[np.flatnonzero(is_new)][np.cumsum(is_new) - 1]
    return first


def _stand_ins(hashes: NDArray[np.uint64], distance: int) -> NDArray[np.int64]:
    """Return for each image, in order of preference, the index of the one that it looks like: int64 [N]."""
    first = _first_equal(hashes)
    unique = np.flatnonzero(first == np.arange(len(hashes)))
    stands = np.empty(len(hashes), np.int64)
    stands[unique] = unique[_greedy(*_near_pairs(hashes[unique], distance), len(unique))]
    return stands[first]


def _near_pairs(hashes: NDArray[np.uint64], distance: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find all pairs within a distance.

    Args:
        hashes: uint64 [N], all different.
        distance: Largest number of differing bits.

    Returns:
        Indices i < j of each pair once, sorted by j and then i: int64 [pairs] each.
    """
    num = len(hashes)
    masks = _block_masks(num, distance)
    found: list[NDArray[np.uint64]] = []
    for number, mask in enumerate(masks):
        key = hashes & mask
        by_key = np.argsort(key, kind="stable")
        key, ordered = key[by_key], hashes[by_key]
        places = np.arange(num - 1)
        for step in range(1, num):
            places = places[key[places] == key[places + step]]  # the images that have one with the same key so far on
            if not len(places):
                break
            difference = ordered[places] ^ ordered[places + step]
            near = places[np.bitwise_count(difference) <= distance]
            one, other = by_key[near], by_key[near + step]
            difference = hashes[one] ^ hashes[other]
            new = np.ones(len(one), bool)
            for earlier in masks[:number]:
                new &= (difference & earlier) != 0
            low, high = np.minimum(one, other)[new], np.maximum(one, other)[new]
            found.append(high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64))
            places = places[places + step + 1 < num]
    pairs = np.sort(np.concatenate(found)) if found else np.empty(0, np.uint64)
    return (pairs & np.uint64(2**32 - 1)).astype(np.int64), (pairs >> np.uint64(32)).astype(np.int64)


def _block_masks(num: int, distance: int) -> list[np.uint64]:
    """Choose how the bits are cut: masks such that two hashes within the distance agree in the bits of at least one."""
    best: tuple[float, int] = (math.inf, distance + 1)
    for blocks in range(distance + 1, min(distance + 6, HASH_BITS) + 1):
        equal_bits = HASH_BITS * (blocks - distance) // blocks
        cost = math.comb(blocks, distance) * (_SORT_COST + num / 2.0**equal_bits)
        best = min(best, (cost, blocks))
    blocks = best[1]
    bounds = [HASH_BITS * i // blocks for i in range(blocks + 1)]
    parts = [sum(1 << bit for bit in range(low, high)) for low, high in itertools.pairwise(bounds)]
    return [np.uint64(sum(chosen)) for chosen in itertools.combinations(parts, blocks - distance)]


def _greedy(low: NDArray[np.int64], high: NDArray[np.int64], num: int) -> NDArray[np.int64]:
    """Keep each image unless a kept one before it is near, in rounds over all pairs that are still open.

    Args:
        low: int64 [pairs], the earlier image of each pair.
        high: int64 [pairs], the later one; pairs are sorted by `high`, then `low`.
        num: Images.

    Returns:
        int64 [N]: for each image the first kept one that is near, its own index where it is kept.
    """
    of = np.full(num, num, np.int64)
    all_low, all_high = low, high
    kept = np.zeros(num, bool)
    dropped = np.zeros(num, bool)
    while True:
        waiting = np.zeros(num, bool)
        waiting[high] = True
        kept |= ~waiting & ~dropped
        dropped[high[kept[low]]] = True
        still = ~dropped[high] & ~dropped[low]
        if not len(low):
            break
        low, high = low[still], high[still]
    of[kept] = np.flatnonzero(kept)
    settled = kept[all_low]
    np.minimum.at(of, all_high[settled], all_low[settled])
    return of
