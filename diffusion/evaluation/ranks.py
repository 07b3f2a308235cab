"""Ranks of an evaluation: their process group, device and exchange of results.

The exchanged data are small (features, file names), so all devices use gloo on the CPU.
"""

import datetime
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from diffusion.config.checks import resolve_device
from diffusion.config.training import Device
from diffusion.distributed import has_process_group, local_rank, local_world_size, rank, world_size
from diffusion.errors import MachineError

TIMEOUT = datetime.timedelta(hours=24)
"""Longest wait for other ranks, which may be generating images."""

T = TypeVar("T")


def start_process_group() -> None:
    """Join the process group of the launched ranks, if there are several."""
    if world_size() > 1 and not has_process_group():
        dist.init_process_group("gloo", timeout=TIMEOUT)


def is_first_rank() -> bool:
    """Whether this rank writes and logs."""
    return rank() == 0


def barrier() -> None:
    """Wait for all ranks."""
    if has_process_group():
        dist.barrier()


def broadcast(value: T) -> T:
    """Value of the first rank, on all ranks."""
    if not has_process_group():
        return value
    values: list[Any] = [value]
    dist.broadcast_object_list(values)
    return values[0]


def gather(value: T) -> list[T]:
    """Values of all ranks in their order on the first rank; an empty list on others."""
    if not has_process_group():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.gather_object(value, values if is_first_rank() else None)
    return values if is_first_rank() else []


def choose_device(device: Device) -> torch.device:
    """Device of this rank.

    Raises:
        MachineError: the machine has fewer GPUs than ranks.
    """
    num_gpus = torch.cuda.device_count()
    if resolve_device(device, num_gpus) == Device.cpu:
        return torch.device("cpu")
    if num_gpus < local_world_size():
        raise MachineError(f"{local_world_size()} ranks on this machine, but {num_gpus} GPUs: start one rank per GPU")
    torch.cuda.set_device(local_rank())
    return torch.device("cuda", local_rank())
