"""The ranks of an evaluation: who does which batch, and how they speak with one another.

Evaluation exchanges little (features, file names), so gloo on the CPU serves it on GPUs too.
"""

import datetime
import os
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from diffusion.config.machine import resolve_device
from diffusion.config.training import Device
from diffusion.distributed import local_rank, rank, world_size
from diffusion.errors import MachineError

TIMEOUT = datetime.timedelta(hours=24)
"""Ranks wait for one another while others generate."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among all."""

    rank: int = 0
    size: int = 1

    @classmethod
    def start(cls) -> "Ranks":
        """Join the ranks that the launcher has started."""
        if world_size() > 1 and not dist.is_initialized():
            dist.init_process_group("gloo", timeout=TIMEOUT)
        return cls(rank=rank(), size=world_size())

    @property
    def is_first(self) -> bool:
        """Whether this rank writes and speaks."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()

    def broadcast(self, value: T) -> T:
        """The first rank's value, on all ranks."""
        values: list[Any] = [value]
        if self.size > 1:
            dist.broadcast_object_list(values)
        return values[0]

    def gather(self, value: T) -> list[T]:
        """The values of all ranks in their order, on the first; an empty list on the others."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.gather_object(value, values if self.is_first else None)
        return values if self.is_first else []


def choose_device(device: Device) -> torch.device:
    """The device of this rank.

    Raises:
        MachineError: a GPU is asked for, and there are fewer than ranks on this machine.
    """
    num_gpus = torch.cuda.device_count()
    if resolve_device(device, num_gpus) == Device.cpu:
        return torch.device("cpu")
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if num_gpus < num_local:
        raise MachineError(f"{num_local} ranks on this machine, but {num_gpus} GPUs: start one rank for each GPU")
    torch.cuda.set_device(local_rank())
    return torch.device("cuda", local_rank())
