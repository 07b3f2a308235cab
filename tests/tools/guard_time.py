"""CPU time of the host for a call of a compiled ResNet block: one function for all blocks, and one for each shape.

    python -m tests.tools.guard_time [SIZES ...]

Ten blocks of different shapes are called in turn with images of each size. Graphs run eagerly, so that a call takes the
uncompiled one and Dynamo's part: checking the guards of a function's graphs until one fits.
"""

import functools
import logging
import sys
import time

import torch
from diffusers.models.resnet import ResnetBlock2D

from diffusion.models.fast import compilation

CHANNELS = [(4, 4), (4, 8), (8, 8), (8, 16), (16, 16), (32, 16), (24, 8), (16, 8), (12, 4), (8, 4)]
REPEATS = 5


def measure(num_sizes: int) -> list[float]:
    """Return microseconds of a call, the least of some repeats: uncompiled, one function, a function for each shape."""
    torch._dynamo.reset()
    compilation._compiled.cache_clear()
    kinds = [
        [ResnetBlock2D(in_channels=i, out_channels=o, temb_channels=16, groups=2).train() for i, o in CHANNELS]
        for _ in range(3)
    ]
    compilation.compile_modules(kinds[2])
    shared = torch.compile(ResnetBlock2D.forward, fullgraph=True, dynamic=False)
    kinds[1] = [functools.partial(shared, block) for block in kinds[1]]  # pyright: ignore
    time_embedding = torch.randn(1, 16)
    inputs = [[torch.randn(1, i, 2, side) for i, _ in CHANNELS] for side in range(2, 2 + num_sizes)]
    best = [float("inf")] * 3
    for _ in range(1 + REPEATS):  # The first one compiles.
        for number, blocks in enumerate(kinds):
            began = time.process_time()
            for images in inputs:
                for block, image in zip(blocks, images, strict=True):
                    block(image, time_embedding)
            best[number] = min(best[number], time.process_time() - began)
    return [1e6 * seconds / (num_sizes * len(CHANNELS)) for seconds in best]


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.compile = functools.partial(torch.compile, backend="eager")
    for size in map(int, sys.argv[1:] or (1, 9)):
        plain, one, own = measure(size)
        print(f"{size} sizes: uncompiled {plain:.0f} us, one function {one:.0f}, a function for each shape {own:.0f}")
