"""Random numbers addressed by (seed, purpose, step or epoch, sample), not by rank, worker or call order.

A generator with a state gives a different number to a sample as soon as the number of GPUs, the microbatch or the
moment of resumption changes. Here every number is a pure function of its address: Philox4x32-10 (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.2) of the key (seed, purpose) and the counter
(position, step, sample), in integer arithmetic that gives the same bits on every device: by operations of torch on a
CPU, by one kernel (`diffusion.kernels`) on a GPU.

Shape letters: B batch, N numbers per sample.
"""

import math
from enum import IntEnum, unique
from typing import Any, TypeVar

import torch
from torch import Tensor

NUM_SEEDS = 2**32
"""Seeds, steps and epochs are 32-bit words of the address."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10

_Words = TypeVar("_Words", int, Tensor)


@unique
class Purpose(IntEnum):
    """Purpose of a random number. Its value is part of the address: never renumber them."""

    NOISE = 1
    OFFSET_NOISE = 2
    TIMESTEP = 3
    POSTERIOR = 4
    CAPTION_DROP = 5
    CROP = 6
    FLIP = 7
    CAPTION_CHOICE = 8
    EVALUATION_NOISE = 9
    EVALUATION_TIMESTEP = 10
    EVALUATION_POSTERIOR = 11
    INITIAL_LATENTS = 12
    TIMESTEP_STRATUM = 13
    TOKEN_ROUTING = 16
    SCORE_DROP = 17
    EQUIVARIANCE = 18


def _multiply(multiplier: int, x: _Words) -> tuple[_Words, _Words]:
    """High and low 32 bits of a 32 x 32 bit product, held in int64 (the product wraps, its bits are right)."""
    product = x * multiplier
    return (product >> 32) & _MASK, product & _MASK


def philox(counter: tuple[_Words, _Words, _Words, _Words], key: tuple[Any, Any]) -> tuple[Any, ...]:
    """Philox4x32-10.

    Args:
        counter: four int64 tensors that broadcast with one another, or four integers, each holding 32-bit words.
        key: two 32-bit words: integers, or int64 tensors that broadcast with the counter.

    Returns:
        Four int64 tensors (or integers) of random 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def random_words(seed: int, purpose: Purpose, step: Tensor, sample: Tensor, num_words: int) -> Tensor:
    """Draw random 32-bit words.

    Args:
        seed: seed of the run, 0 <= seed < 2^32.
        purpose: what they are drawn for.
        step: int64 [B], optimizer step or epoch, below 2^32.
        sample: int64 [B], addresses of the samples.
        num_words: how many for each sample.

    Returns:
        int64 [B, num_words], each 0 <= word < 2^32.
    """
    if sample.is_cuda:
        return _draw_on_gpu(seed, purpose, step, sample, num_words, torch.int64)
    assert 0 <= seed < NUM_SEEDS, f"seed {seed}"
    position = torch.arange((num_words + 3) // 4, device=sample.device)
    counter = (position[None, :], step[:, None] & _MASK, sample[:, None] & _MASK, (sample[:, None] >> 32) & _MASK)
    words = torch.stack(torch.broadcast_tensors(*philox(counter, (seed, int(purpose)))), dim=-1)
    return words.flatten(1)[:, :num_words]


def _draw_on_gpu(seed: int, purpose: Purpose, step: Tensor, sample: Tensor, num: int, dtype: torch.dtype) -> Tensor:
    """Words (int64) or normal numbers (float32) [B, num], in one launch."""
    from diffusion.kernels import draw  # Triton need not be installed for a CPU.

    assert 0 <= seed < NUM_SEEDS, f"seed {seed}"
    return draw(purpose << 32 | seed, step, sample, num, dtype)


def random_word(seed: int, purpose: Purpose, step: int, sample: int) -> int:
    """Draw one 32-bit word for one sample without tensors (5 us): the first of `random_words`."""
    assert 0 <= seed < NUM_SEEDS, f"seed {seed}"
    return philox((0, step & _MASK, sample & _MASK, (sample >> 32) & _MASK), (seed, int(purpose)))[0]


def uniform(seed: int, purpose: Purpose, step: Tensor, sample: Tensor, num: int = 1) -> Tensor:
    """Draw uniform numbers: float64 [B, num] in [0, 1), multiples of 2^-32."""
    return random_words(seed, purpose, step, sample, num).double() * 2.0**-32


def permutation(seed: int, purpose: Purpose, step: Tensor, num: int) -> Tensor:
    """Draw an order of 0 ... num - 1 for one step.

    Args:
        seed: seed of the run, 0 <= seed < 2^32.
        purpose: what it is drawn for.
        step: int64 [1].
        num: how many.

    Returns:
        int64 [num]: each number once. The same on every device.
    """
    positions = torch.arange(num, device=step.device)
    return random_words(seed, purpose, step.expand(num), positions, 1)[:, 0].argsort(stable=True)


def bernoulli(seed: int, purpose: Purpose, step: Tensor, sample: Tensor, probability: float) -> Tensor:
    """Draw one event per sample: bool [B], True with the given probability (resolution 2^-32)."""
    return random_words(seed, purpose, step, sample, 1)[:, 0] < round(probability * 2**32)


def normal(seed: int, purpose: Purpose, step: Tensor, sample: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Draw standard normal numbers by the Box-Muller transform.

    Args:
        seed: seed of the run, 0 <= seed < 2^32.
        purpose: what they are drawn for.
        step: int64 [B], optimizer step.
        sample: int64 [B], addresses of the samples.
        shape: shape of the numbers of one sample.

    Returns:
        float32 [B, *shape]. The same on every device to 1e-6; largest magnitude 6.7.
    """
    num = math.prod(shape)
    if sample.is_cuda:
        return _draw_on_gpu(seed, purpose, step, sample, num, torch.float32).reshape(sample.shape[0], *shape)
    words = random_words(seed, purpose, step, sample, num + num % 2).float().view(sample.shape[0], -1, 2)
    radius = torch.sqrt(-2.0 * torch.log((words[..., 0] + 0.5) * 2.0**-32))
    angle = words[..., 1] * (2.0 * math.pi * 2.0**-32)
    pairs = torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], dim=-1)
    return pairs.flatten(1)[:, :num].reshape(sample.shape[0], *shape)
