"""Which images are copies of others, decided over all images from hashes: same bytes, or nearly the same look.

Images are taken in an order of preference: those kept by an earlier run first, then the largest, then by their place in
the order of the data set. Each is a duplicate if one that was *kept before it* has the same bytes, or a perceptual hash
that differs in at most `max_distance` of 64 bits; otherwise it is kept. So every duplicate resembles its original, and
a chain of images that resemble their neighbours only is not one image (as it would be in the transitive closure). The
result depends on the arguments alone.

Two steps keep memory and time small. `find_candidates` looks at the bare hashes and finds the few that other images
share or are near to; images with the same bytes have the same perceptual hash, so they are among them.
`find_duplicates` decides about the images with these hashes.

Near hashes are found without comparing all with all: the 64 bits are cut into blocks, and two hashes within the
distance are equal in at least (blocks - distance) blocks (the pigeonhole principle). For each choice of this many
blocks the bits are permuted so that the chosen ones come first, the hashes are sorted, and neighbours with equal first
bits are compared. Where very many distinct hashes agree in these bits, as crafted ones do, a hash is compared with the
next ones only, so that time and memory grow about linearly with any hashes; such hashes are reported as dense.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffusion.distributed import num_cores

HASH_BITS = 64

_SORT_COST = 4
"""Comparisons that cost as much as permuting and sorting one hash: for the choice of the number of blocks."""

_MAX_THREADS = 4
"""Each holds a permuted copy of the hashes."""

_MAX_COMPARED, _MAX_PAIRS = 1024, 128
"""Largest number of following hashes that a hash is compared with in one search, and of pairs that it gets there."""

_CHUNK = 2**17
"""Hashes that are compared at a time: they fit into a processor's cache."""


@dataclass(frozen=True)
class Candidates:
    """Hashes that may belong to duplicates."""

    values: NDArray[np.uint64]
    """uint64 [M], ascending: shared by several images, or near to another."""

    pairs: NDArray[np.int64]
    """int64 [P, 2]: indices of the different values that are near, each pair once."""

    dense: NDArray[np.uint64]
    """uint64 [D], ascending: hashes with too many others around them, so that some of their pairs may be missing."""


def find_candidates(hashes: NDArray[np.uint64], max_distance: int | None) -> Candidates:
    """Find the hashes that several images share, and those that are near to others.

    Args:
        hashes: uint64 [N], perceptual hash of each image; sorted in place.
        max_distance: largest number of differing bits of near hashes, 0 to 16; None looks for equal ones only.
    """
    hashes.sort()
    starts = np.flatnonzero(np.concatenate([[True], hashes[1:] != hashes[:-1]])) if len(hashes) else np.empty(0, int)
    shared = hashes[starts[np.diff(starts, append=len(hashes)) > 1]]
    if not max_distance:
        return Candidates(shared, np.empty((0, 2), np.int64), np.empty(0, np.uint64))
    pairs, dense = _near_pairs(hashes[starts], max_distance)
    values = np.union1d(shared, pairs)
    return Candidates(values, np.searchsorted(values, pairs), dense)


def find_duplicates(
    order: NDArray[np.uint64],
    exact: NDArray[np.uint64],
    phash: NDArray[np.uint64],
    pixels: NDArray[np.integer],
    kept_before: NDArray[np.bool_],
    near: Candidates | None,
) -> NDArray[np.int64]:
    """Decide which images are duplicates, and of which.

    Args:
        order: uint64 [N], place of each image in the order of the data set; all different.
        exact: uint64 [N, 2], hash of its bytes; only used without `near`.
        phash: uint64 [N], perceptual hash.
        pixels: integer [N], width times height.
        kept_before: bool [N], images that an earlier run kept: preferred to all others, so that none of them becomes a
            duplicate of one that came later.
        near: what `find_candidates` found, where near duplicates count; each `phash` is one of its values.

    Returns:
        int64 [N], the index of each image's original: its own where it is kept.
    """
    preferred = np.lexsort((order, -pixels.astype(np.int64), ~kept_before))
    if near is None:
        originals = _first_equal(exact[preferred])
    else:
        value = np.searchsorted(near.values, phash[preferred])
        first = np.empty(len(near.values), np.int64)
        first[value[::-1]] = np.arange(len(preferred))[::-1]  # Of several assignments the last one stays.
        low, high = np.sort(first[near.pairs], axis=1).T
        originals = _greedy(low, high, len(preferred))[first[value]]
    of = np.empty(len(preferred), np.int64)
    of[preferred] = preferred[originals]
    return of


def _first_equal(rows: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return for each row the index of the first row that is equal to it: int64 [N]."""
    by_value = np.lexsort(rows.T)  # Stable: equal rows keep their order.
    ordered = rows[by_value]
    is_new = np.concatenate([[True], (ordered[1:] != ordered[:-1]).any(axis=1)])[: len(rows)]
    first = np.empty(len(rows), np.int64)
    first[by_value] = by_value[np.flatnonzero(is_new)][np.cumsum(is_new) - 1]
    return first


def _greedy(low: NDArray[np.int64], high: NDArray[np.int64], num: int) -> NDArray[np.int64]:
    """Keep each image unless a kept one before it is near, in rounds over all pairs that are still open.

    Args:
        low: int64 [P], the preferred image of each pair.
        high: int64 [P], the other one.
        num: images.

    Returns:
        int64 [num]: for each image the first kept one that is near, its own index where it is kept.
    """
    of = np.arange(num)
    all_low, all_high = low, high
    kept, dropped = np.zeros(num, bool), np.zeros(num, bool)
    while True:
        waiting = np.zeros(num, bool)
        waiting[high] = True
        kept |= ~waiting & ~dropped
        dropped[high[kept[low]]] = True
        if not len(low):
            break
        is_open = ~dropped[high] & ~dropped[low]
        low, high = low[is_open], high[is_open]
    of[dropped] = num
    decided = kept[all_low]
    np.minimum.at(of, all_high[decided], all_low[decided])
    return of


# Near pairs


def _near_pairs(hashes: NDArray[np.uint64], distance: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Find the pairs within a distance: all, except for some of dense hashes.

    Args:
        hashes: uint64 [N], all different.
        distance: largest number of differing bits.

    Returns:
        uint64 [P, 2]: the hashes of each pair, once; uint64 [D], ascending: dense hashes.
    """
    blocks, num_equal = _choose_blocks(len(hashes), distance)
    choices = list(itertools.combinations(blocks, num_equal))
    masks = [np.bitwise_or.reduce([_mask(block) for block in chosen]) for chosen in choices]

    def search(number: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        moves = _moves([*choices[number], *(block for block in blocks if block not in choices[number])])
        back = [(_shift(mask, bits), -bits) for mask, bits in moves]
        found, dense = [np.empty((0, 2), np.uint64)], [np.empty(0, np.uint64)]
        for permuted, some in _neighbours(_permute(hashes, moves), choices[number], distance):
            pairs = _permute(permuted, back)
            difference = pairs[:, 0] ^ pairs[:, 1]
            is_new = np.ones(len(pairs), bool)
            for earlier in masks[:number]:
                is_new &= (difference & earlier) != 0  # The search for that mask has found the others.
            found.append(pairs[is_new])
            dense.append(_permute(some, back))
        return np.concatenate(found), np.concatenate(dense)

    with ThreadPoolExecutor(min(num_cores(), _MAX_THREADS)) as threads:
        pairs, dense = zip(*threads.map(search, range(len(choices))), strict=True)
    return np.concatenate(pairs), np.unique(np.concatenate(dense))


_Block = tuple[int, int]
"""Lowest bit, and the bit behind the highest."""


def _choose_blocks(num: int, distance: int) -> tuple[list[_Block], int]:
    """Choose how the bits are cut, and how many blocks two near hashes have in common."""

    def cost(blocks: int) -> float:
        equal_bits = HASH_BITS * (blocks - distance) // blocks
        return math.comb(blocks, distance) * (_SORT_COST + num / 2.0 ** (equal_bits + 1))

    num_blocks = min(range(distance + 1, min(distance + 6, HASH_BITS) + 1), key=cost)
    bounds = [HASH_BITS * i // num_blocks for i in range(num_blocks + 1)]
    return list(itertools.pairwise(bounds)), num_blocks - distance


_Moves = list[tuple[np.uint64, int]]
"""Masks of blocks, and how many bits each is moved to the left."""


def _moves(order: Sequence[_Block]) -> _Moves:
    """Make the first block of an order the highest, and so on."""
    widths = [high - low for low, high in order]
    tops = HASH_BITS - np.cumsum([0, *widths])
    return [(_mask(block), int(top) - block[1]) for block, top in zip(order, tops, strict=False)]


def _mask(block: _Block) -> np.uint64:
    return np.uint64((1 << block[1]) - (1 << block[0]))


def _permute(hashes: NDArray[np.uint64], moves: _Moves) -> NDArray[np.uint64]:
    permuted = np.zeros_like(hashes)
    for start in range(0, len(hashes), _CHUNK):
        chunk, target = hashes[start : start + _CHUNK], permuted[start : start + _CHUNK]
        for mask, bits in moves:
            target |= _shift(chunk & mask, bits)
    return permuted


def _shift(values: Any, bits: int) -> Any:
    return values << np.uint64(bits) if bits >= 0 else values >> np.uint64(-bits)


def _neighbours(
    hashes: NDArray[np.uint64], chosen: Sequence[_Block], distance: int
) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint64]]]:
    """Sort in place, and yield pairs within the distance that agree in the highest bits, and dense hashes.

    Yields:
        uint64 [P, 2], and uint64 [D].
    """
    num_bits = sum(high - low for low, high in chosen)
    limit = np.uint64(1 << (HASH_BITS - num_bits))  # Of the difference of two that agree.
    hashes.sort()
    for start in range(0, len(hashes), _CHUNK):
        places = np.arange(start, min(start + _CHUNK, len(hashes) - 1))
        num_pairs = np.zeros(len(places), np.int16)
        for step in range(1, _MAX_COMPARED + 1):
            difference = hashes[places] ^ hashes[places + step]
            agree = np.flatnonzero(difference < limit)
            places, difference = places[agree], difference[agree]
            near = places[np.bitwise_count(difference) <= distance]
            num_pairs[near - start] += 1
            is_full = num_pairs[places - start] == _MAX_PAIRS
            if len(near):
                yield np.stack([hashes[near], hashes[near + step]], axis=1), hashes[places[is_full]]
            places = places[~is_full]
            places = places[: np.searchsorted(places, len(hashes) - 1 - step)]
            if not len(places):
                break
        else:
            yield np.empty((0, 2), np.uint64), hashes[places]
