"""How FSDP2 and its checkpoints are set up: the few private or surprising parts of Composer and torch, in one place."""

import logging

import torch
import torch.distributed as dist
from composer.utils.parallelism import FSDP2Config
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.fsdp import FSDPModule

from diffusion.checkpointing.safe_loading import SafeLoadPlanner

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


class ElasticFSDP2Config(FSDP2Config):
    """FSDP2 whose checkpoints load safely at any world size and with other callbacks."""

    @property
    def load_planner(self) -> DefaultLoadPlanner:
        """A new planner for each load."""
        return TolerantLoadPlanner()


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
