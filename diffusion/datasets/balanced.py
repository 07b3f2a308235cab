"""Numbers that the global order is made of: permutations that need no state, and even spreads of labels.

Both can be entered anywhere: a permutation is a function of its address, and the labels before any position of a
balanced sequence are counted without walking through them.

Shape letters: M labels, N positions.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

MAX_TOTAL = 2**31 - 1
"""Positions of a balanced sequence: products of two of them have to fit into 63 bits."""

_GOLDEN_RATIO = 618033988749894848
"""0.618... x 10^18: the number whose multiples modulo 1 are spread most evenly (Knuth, TAOCP 3, section 6.4)."""

_NUM_STEPS = 128
"""Steps on either side of the golden ratio that are tried."""


def raw_words(num: int, key: tuple[int, int], address: tuple[int, int, int]) -> NDArray[np.uint64]:
    """Draw 64-bit words that are a function of key and address alone, in every version of numpy.

    Args:
        num: how many.
        key: two 64-bit words.
        address: three 64-bit words, distinct for what is to be independent under one key.

    Returns:
        uint64 [num], from Philox4x64-10 (Salmon et al., SC 2011).
    """
    counter = np.array([0, *address], np.uint64)
    return np.random.Philox(key=np.array(key, np.uint64), counter=counter).random_raw(num)


def permutation(num: int, key: tuple[int, int], address: tuple[int, int, int]) -> Integers:
    """A random permutation of 0 ... num - 1, int64; key and address as in `raw_words`.

    Words whose low bits are replaced by their position are sorted: the result does not depend on the sorting algorithm,
    since no two are equal. Numpy's own shuffles may change from version to version.
    """
    mask = np.uint64((1 << max(num - 1, 0).bit_length()) - 1)
    words = raw_words(num, key, address)
    words &= ~mask
    words |= np.arange(num, dtype=np.uint64)
    words.sort()
    words &= mask
    return words.view(np.int64)


def floor_sum(num: Any, modulus: Any, factor: Any, shift: Any) -> Integers:
    """Sum of floor((factor * i + shift) / modulus) over 0 <= i < num, in about log(modulus) steps.

    Euclid's algorithm on the lattice points below a line (Graham, Knuth, Patashnik: Concrete Mathematics, section
    3.5). The arguments broadcast.

    Args:
        num: non-negative integers below 2^31.
        modulus: positive integers below 2^31.
        factor: non-negative integers below the modulus.
        shift: non-negative integers below twice the modulus.

    Returns:
        int64, the sums modulo 2^64.
    """
    arguments = [np.asarray(argument, np.int64) for argument in (num, modulus, factor, shift)]
    n, m, a, b = (argument.copy() for argument in np.broadcast_arrays(*arguments))
    total = np.zeros_like(n)
    while True:
        # Whole multiples of m in a and b: floor((a i + b) / m) = (a // m) i + (b // m) + floor((a % m i + b % m) / m),
        # and the sum of i over 0 <= i < n is n (n - 1) / 2.
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        a %= m
        b %= m
        # The rest counts the lattice points below the line from i = 0 to n, which ends at the height top / m. Counted
        # by rows instead of columns, they are a sum of top // m terms, with a and m exchanged: Euclid's step.
        top = a * n + b
        goes_on = top >= m
        if not goes_on.any():
            return total
        n, b = np.where(goes_on, top // m, 0), np.where(goes_on, top % m, 0)
        m, a = np.where(goes_on, a, 1), np.where(goes_on, m, 0)


class BalancedSequence:
    """A sequence of labels in which every stretch holds each label nearly as often as its count asks for.

    The label of position p is the segment of 0 ... total - 1 into which p * step + offset falls modulo total, where
    step is about the golden ratio of total and prime to it: so every `total` consecutive positions hold each label
    exactly as often as its count says.

    Args:
        counts: int64 [M], how often each label comes.
        offset: where the sequence starts, 0 <= offset.
    """

    def __init__(self, counts: Integers, offset: int = 0) -> None:
        self.counts = np.asarray(counts, np.int64)
        self.bounds = np.concatenate([[0], np.cumsum(self.counts)])
        self.total = int(self.bounds[-1])
        assert 0 < self.total <= MAX_TOTAL, self.total
        self._step = _even_step(self.total)
        self._offset = offset % self.total

    def _line(self, stride: int, phase: Any) -> tuple[int, Integers]:
        """Factor and shift of the values at positions phase + stride * i."""
        phase = np.asarray(phase, np.int64) % self.total
        return stride * self._step % self.total, (phase * self._step + self._offset) % self.total

    def labels(self, first: int, last: int, *, stride: int = 1, phase: int = 0) -> Integers:
        """Labels of the positions phase + stride * i for first <= i < last: int64 [last - first]."""
        factor, shift = self._line(stride, phase)
        values = (np.arange(first, last, dtype=np.int64) * factor + shift) % self.total
        return np.searchsorted(self.bounds, values, side="right") - 1

    def cumulative(self, num: Any, *, stride: int = 1, phase: Any = 0) -> Integers:
        """Count the labels at the positions phase + stride * i for 0 <= i < num.

        Args:
            num: integers [...], how many positions.
            stride: distance of the positions.
            phase: integers [...], the first position.

        Returns:
            int64 [..., M + 1]: how many of them hold a label below 0, 1, ... M.
        """
        factor, shift = self._line(stride, phase)
        num, shift = (array[..., None] for array in np.broadcast_arrays(np.asarray(num, np.int64), shift))
        # The value at position i is v(i) = (factor i + shift) mod total, and its label is below m where v(i) is below
        # bounds[m]. For 0 <= v < total, floor((v + total - bound) / total) is 1 where v >= bound and else 0. So the
        # number of values below a bound is num + sum floor(... + shift) - sum floor(... + shift + total - bound).
        rounds, rest = num // self.total, num % self.total
        # After `total` positions a stride that is not prime to the total has met each of its values several times.
        assert stride == 1 or not rounds.any(), "a stride is only counted within one round"
        below = floor_sum(rest, self.total, factor, shift)
        at_least = floor_sum(rest, self.total, factor, shift + self.total - self.bounds)
        return rounds * self.bounds + below - at_least + rest


def _even_step(total: int) -> int:
    """A step near the golden ratio of a total and prime to it, whose multiples modulo the total are spread evenly.

    How unevenly they can be spread is bounded by the largest quotient of the continued fraction of step / total
    (Kuipers and Niederreiter: Uniform Distribution of Sequences, section 2.3).
    """
    middle = max(1, total * _GOLDEN_RATIO // 10**18)
    candidates = (middle + sign * distance for distance in range(_NUM_STEPS) for sign in (1, -1))
    primes = [step for step in candidates if 0 < step <= total and math.gcd(step, total) == 1]
    return min(primes, key=lambda step: _largest_quotient(step, total), default=1)


def _largest_quotient(numerator: int, denominator: int) -> int:
    largest = 0
    while numerator:
        quotient, rest = divmod(denominator, numerator)
        # The last quotient of a fraction is at least 2 and may be split.
        largest = max(largest, quotient - (rest == 0))
        numerator, denominator = rest, numerator
    return largest
