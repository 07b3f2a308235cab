"""Host time of a step over 686 sharded parameters, as many as SD2's: torch's AdamW, and this package's.

python -m tests.tools.optimizer_time
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from diffusion.optimizers import AdamW

NUM_PARAMETERS = 686
NUM_STEPS = 60


def main() -> None:
    """Print the shortest step of each, in CPU milliseconds of this thread; in turns, for equal conditions."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    optimizers = [kind(_parameters(mesh), fused=True) for kind in (torch.optim.AdamW, AdamW)]
    seconds: list[list[float]] = [[], []]
    for _ in range(NUM_STEPS):
        for optimizer, found in zip(optimizers, seconds, strict=True):
            start = time.thread_time()
            optimizer.step()
            found.append(time.thread_time() - start)
    for optimizer, found in zip(optimizers, seconds, strict=True):
        print(f"{type(optimizer).__module__}: {min(found) * 1e3:.1f} ms")
    dist.destroy_process_group()


def _parameters(mesh: DeviceMesh) -> list[nn.Parameter]:
    def draw() -> DTensor:
        return DTensor.from_local(torch.randn(4, 4), mesh, [Shard(0)])

    parameters = [nn.Parameter(draw()) for _ in range(NUM_PARAMETERS)]
    for parameter in parameters:
        parameter.grad = draw()
    return parameters


if __name__ == "__main__":
    main()
