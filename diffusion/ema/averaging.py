"""Averages of tensors, sharded or not; knows nothing of Composer."""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from diffusion.ema.profiles import Profile

_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def plain_name(name: str) -> str:
    """Name of a parameter without the components that DDP, compilation and activation checkpointing insert."""
    return ".".join(component for component in name.split(".") if component not in _WRAPPERS)


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, which shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor, gathered from all ranks if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_on_rank_0(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Gather whole tensors on the CPU of rank 0; nothing on the others. To be called by all ranks.

    On devices and on other ranks, one tensor at a time is whole.

    Args:
        tensors: sharded or not, by name.
        dtype: of the result; None keeps it.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    whole = ((name, full_tensor(tensor)) for name, tensor in tensors.items())
    return {name: tensor.to("cpu", dtype) for name, tensor in whole if is_first}


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, so that `named_parameters` yields shards and the next forward pass gathers anew."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable floating-point parameters by plain name, as shards where they are sharded."""
    reshard(model)
    return {
        plain_name(name): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.is_floating_point()
    }


class WeightAverage:
    """Average of parameters by a profile, in fp32, of this rank's shards only.

    Args:
        parameters: fp32, by name; the average starts as a copy of them, which are the weights of time 1.
        profile: the rule of its updates.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], profile: Profile) -> None:
        assert all(parameter.dtype == torch.float32 for parameter in parameters.values()), "master weights are fp32"
        self.profile = profile
        self.num_updates = 0
        self.averages = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        pairs = [(local_shard(self.averages[name]), local_shard(p.detach())) for name, p in parameters.items()]
        pairs = [(average, parameter) for average, parameter in pairs if average.numel()]
        self._average_shards = [average for average, _ in pairs]
        self._parameter_shards = [parameter for _, parameter in pairs]

    @property
    def time(self) -> int:
        """Number of weights that are averaged, those at the start included."""
        return self.num_updates + 1

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the parameters; touches local shards only."""
        self.num_updates += 1
        step = self.profile.step(self.time)
        torch._foreach_lerp_(self._average_shards, self._parameter_shards, step)  # pyright: ignore

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange average and parameters in place, one tensor of scratch at a time."""
        for average, parameter in zip(self._average_shards, self._parameter_shards, strict=True):
            scratch = parameter.clone()
            parameter.copy_(average)
            average.copy_(scratch)

    @torch.no_grad()
    def load(self, averages: dict[str, Tensor], num_updates: int) -> None:
        """Load whole (unsharded) averages.

        Raises:
            ValueError: the names are not those of the parameters.
        """
        check_names(self.averages, averages)
        for name, average in self.averages.items():
            source = averages[name].to(local_shard(average).device, torch.float32)
            if isinstance(average, DTensor):
                source = distribute_tensor(source, average.device_mesh, average.placements)
            average.copy_(source)
        self.num_updates = num_updates


def check_names(expected: Iterable[str], found: Iterable[str]) -> None:
    """Raise a ValueError if names are missing or unexpected."""
    missing, unexpected = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or unexpected:
        raise ValueError(
            f"averaged weights do not fit the model: {len(missing)} missing {missing[:3]}, "
            f"{len(unexpected)} unexpected {unexpected[:3]}"
        )
