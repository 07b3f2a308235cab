"""Averages of tensors, sharded or not, and their profiles, the share of each past weight; knows nothing of Composer.

Profiles are exponential or the power functions of Karras et al. 2024, "Analyzing and Improving the Training Dynamics of
Diffusion Models", section 3.1: at time t, the weight of time tau is proportional to tau^gamma. Time counts the weights
that are averaged: those at the start of the averaging have time 1.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from diffusion.checkpointing.save import local_shard
from diffusion.config.training import MAX_WIDTH
from diffusion.distributed import is_first_rank
from diffusion.errors import ConfigurationError

# Profiles


@dataclass(frozen=True)
class Exponential:
    """avg <- decay * avg + (1 - decay) * weights, with the decay in [0, 1)."""

    decay: float

    @property
    def label(self) -> str:
        """Such as `decay-0.9999`."""
        return f"decay-{self.decay!r}"

    def step(self, time: int) -> float:
        """The fraction by which the average moves towards the weights, the same at all times."""
        return 1.0 - self.decay


@dataclass(frozen=True)
class PowerFunction:
    """beta(t) = (1 - 1/t)^(gamma + 1) (Karras et al. 2024, equation 2).

    The relative width sigma_rel is the profile's standard deviation over its length, in (0, `MAX_WIDTH`), which is that
    of the plain mean (gamma = 0).
    """

    width: float

    def __post_init__(self) -> None:
        if not 0 < self.width < MAX_WIDTH:
            raise ConfigurationError(
                f"the relative width of an average is {self.width}, but must be above 0 and below {MAX_WIDTH:.4f}, "
                "that of the plain mean. Usual are 0.05 to 0.10"
            )

    @property
    def label(self) -> str:
        """Such as `width-0.05`."""
        return f"width-{self.width!r}"

    @property
    def gamma(self) -> float:
        """The exponent.

        Equation 3 is width = (gamma + 1)^(1/2) (gamma + 2)^(-1) (gamma + 3)^(-1/2). Squared it is
        (gamma + 2)^2 (gamma + 3) - (gamma + 1) / width^2 = 0, whose largest root is the exponent.
        """
        inverse = self.width**-2
        return float(np.roots([1.0, 7.0, 16.0 - inverse, 12.0 - inverse]).real.max())

    def step(self, time: int) -> float:
        """The fraction 1 - beta(t) by which the average moves towards the weights of time t = 2, 3, ..."""
        return -math.expm1((self.gamma + 1.0) * math.log1p(-1.0 / time))


Profile = Exponential | PowerFunction
"""The rule of an average: its label in files and commands, and its step towards the weights of a time."""


# Tensors

_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def plain_name(name: str) -> str:
    """Name of a parameter without the components that DDP, compilation and activation checkpointing insert."""
    return ".".join(component for component in name.split(".") if component not in _WRAPPERS)


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor, gathered from all ranks if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_on_rank_0(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Gather whole tensors on the CPU of rank 0, in another dtype if given; nothing on the others.

    To be called by all ranks. On devices and on other ranks, one tensor at a time is whole.
    """
    whole = ((name, full_tensor(tensor)) for name, tensor in tensors.items())
    return {name: tensor.to("cpu", dtype) for name, tensor in whole if is_first_rank()}


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
    """Average of fp32 parameters by a profile, of this rank's shards only.

    It starts as a copy of the parameters, which are the weights of time 1.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], profile: Profile) -> None:
        assert all(parameter.dtype == torch.float32 for parameter in parameters.values()), "master weights are fp32"
        self.profile = profile
        self.num_updates = 0
        self.averages = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        self._parameters = parameters

    def _shards(self) -> tuple[list[Tensor], list[Tensor]]:
        """This rank's shards of averages and parameters; not kept, because FSDP2 may replace those of parameters."""
        pairs = [(local_shard(self.averages[name]), local_shard(p.detach())) for name, p in self._parameters.items()]
        pairs = [(average, parameter) for average, parameter in pairs if average.numel()]
        return [average for average, _ in pairs], [parameter for _, parameter in pairs]

    @property
    def time(self) -> int:
        """Number of weights that are averaged, those at the start included."""
        return self.num_updates + 1

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the parameters; touches local shards only."""
        self.num_updates += 1
        step = self.profile.step(self.time)
        torch._foreach_lerp_(*self._shards(), step)  # pyright: ignore

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange average and parameters in place, one tensor of scratch at a time."""
        for average, parameter in zip(*self._shards(), strict=True):
            scratch = parameter.clone()
            parameter.copy_(average)
            average.copy_(scratch)


def check_names(expected: Iterable[str], found: Iterable[str]) -> None:
    """Raise a ValueError if names are missing or unexpected."""
    missing, unexpected = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or unexpected:
        raise ValueError(
            f"averaged weights do not fit the model: {len(missing)} missing {missing[:3]}, "
            f"{len(unexpected)} unexpected {unexpected[:3]}"
        )
