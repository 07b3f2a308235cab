"""How FSDP2 and its checkpoints are set up: the few private or surprising parts of Composer and torch, in one place."""

import logging
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from composer.utils.parallelism import FSDP2Config
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule

from diffusion.checkpointing.read import SafeLoadPlanner
from diffusion.config.training import TrainerConfig

log = logging.getLogger(__name__)

BOOKKEEPING = ("state.callbacks.", "state.schedulers.", "state.integrations.", "state.metadata.", "rng.")
"""Keys that an older checkpoint may lack; those of model, optimizer and data may not."""


class TolerantLoadPlanner(SafeLoadPlanner):
    """Lets bookkeeping keys be absent as well: callbacks may change between runs, weights may not."""

    def create_local_plan(self) -> LoadPlan:
        """Drop bookkeeping keys that the checkpoint lacks, and keep their current values."""
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        for key in [key for key in self.state_dict if key not in stored and key.startswith(BOOKKEEPING)]:
            log.info("not in the checkpoint, keeps its current value: %s", key)
            self.state_dict.pop(key)
        return super().create_local_plan()


@dataclass
class ElasticFSDP2Config(FSDP2Config):
    """FSDP2 whose checkpoints load safely at any world size and with other callbacks."""

    num_replicas: int = 1
    """Groups of ranks that each hold the sharded model once."""

    @property
    def data_parallel_replicate_degree(self) -> int | None:
        """Makes Composer's device mesh two-dimensional, which FSDP2 takes for HSDP."""
        return self.num_replicas if self.num_replicas > 1 else None

    @property
    def load_planner(self) -> DefaultLoadPlanner:
        """A new planner for each load."""
        return TolerantLoadPlanner()


def fsdp_config(settings: TrainerConfig) -> ElasticFSDP2Config:
    """FSDP2 as configured, with sharded checkpoints."""
    precisions = {"param_dtype": settings.precision.value, "reduce_dtype": settings.reduce_precision.value}
    return ElasticFSDP2Config(
        reshard_after_forward=settings.reshard_after_forward,
        state_dict_type="sharded",
        mixed_precision=precisions,  # pyright: ignore[reportArgumentType]
        num_replicas=settings.num_replicas,
    )


def set_collective_timeout(seconds: float, mesh: DeviceMesh | None) -> None:
    """Change after how many seconds a collective that not all ranks reach ends the run; called by all ranks together.

    NCCL takes the new number for what is started from now on; gloo keeps that of its start.

    Args:
        seconds: how many.
        mesh: FSDP2's, whose groups are changed beside that of all ranks; None without FSDP2.
    """
    dist.barrier()  # A rank with the shorter time would give up on those that are still within the longer one.
    if dist.get_backend() == "nccl":
        torch.cuda.synchronize()
    for group in [dist.group.WORLD, *(mesh.get_all_groups() if mesh is not None else [])]:
        _set_pg_timeout(timedelta(seconds=seconds), group)


def set_last_microbatch(model: nn.Module, is_last: bool) -> None:
    """Let FSDP2 keep weights whole and gradients to itself after the next backward pass, unless it is a step's last."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(is_last, recurse=False)
            module.set_reshard_after_backward(is_last, recurse=False)


def reduce_scatter_averages() -> bool:
    """Whether this backend's reduce_scatter(AVG) divides by the world size: gloo of torch 2.7 adds without dividing."""
    if dist.get_world_size() == 1:
        return True
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    output, inputs = torch.empty(1, device=device), torch.ones(dist.get_world_size(), device=device)
    dist.reduce_scatter_tensor(output, inputs, op=dist.ReduceOp.AVG)
    return abs(output.item() - 1.0) < 1e-6


def correct_gradient_average(model: nn.Module) -> None:
    """Divide FSDP2's gradients by the world size where the backend forgets to."""
    if reduce_scatter_averages():
        return
    world_size = dist.get_world_size()

    def divide(gradient: torch.Tensor) -> None:
        gradient.div_(world_size)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(divide)
