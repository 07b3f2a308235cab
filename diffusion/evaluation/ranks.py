"""Device of a rank of an evaluation."""

import torch

from diffusion.config.checks import resolve_device
from diffusion.config.training import Device
from diffusion.distributed import local_rank, local_world_size
from diffusion.errors import MachineError


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
