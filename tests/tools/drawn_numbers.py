"""Compare the kernel's numbers with those of a CPU, in Triton's interpreter (TRITON_INTERPRET=1) or on a GPU (`cuda`).

Prints JSON: whether all integers are equal, and the largest distance between normal numbers.
"""

import json
import sys

import torch

from diffusion.kernels import draw
from diffusion.randomness import NUM_SEEDS, Purpose, normal, random_words

CASES = [
    (1, 1, 0, 0, Purpose.NOISE),
    (1, 1025, 2**31, 2**40, Purpose.POSTERIOR),
    (5, 7, 2**31 - 1, 2**40 + 3, Purpose.TIMESTEP_STRATUM),
    (16, 16, 17, 2**53 + 1, Purpose.NOISE),
    (64, 3, NUM_SEEDS - 1, 2**63 - 64, Purpose.FLIP),
]
"""Samples, numbers per sample, seed, first address, purpose."""


def main() -> None:
    device = sys.argv[1]
    is_equal, distance = True, 0.0
    for num_samples, num, seed, first, purpose in CASES:
        sample = first + torch.arange(num_samples)
        step = NUM_SEEDS - 1 - 100_000_007 * torch.arange(1).expand(num_samples)
        key = purpose << 32 | seed
        on_device = (step.to(device), sample.to(device), num)
        words = draw(key, *on_device, torch.int64).cpu()
        normals = draw(key, *on_device, torch.float32).cpu()
        is_equal &= torch.equal(words, random_words(seed, purpose, step, sample, num))
        distance = max(distance, float((normals - normal(seed, purpose, step, sample, (num,))).abs().max()))
    json.dump({"is_equal": is_equal, "distance": distance}, sys.stdout)


if __name__ == "__main__":
    main()
