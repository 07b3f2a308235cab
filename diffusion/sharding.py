"""FSDP2 and its checkpoints: every workaround for private or surprising parts of Composer and torch."""

import importlib
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
from torch.distributed.fsdp import FSDPModule

from diffusion.checkpointing.read import SafeLoadPlanner
from diffusion.config.training import TrainerConfig
from diffusion.distributed import set_timeout
from diffusion.errors import MachineError

log = logging.getLogger(__name__)

BOOKKEEPING = (
    "state.callbacks.",
    "state.schedulers.",
    "state.integrations.",
    "state.metadata.",
    "state.scaler.",
    "rng.",
)
"""Prefixes of keys that a checkpoint may lack; those of model, optimizer and data are required."""


class TolerantLoadPlanner(SafeLoadPlanner):
    """Tolerates missing bookkeeping keys: callbacks may change between starts, weights may not."""

    def create_local_plan(self) -> LoadPlan:
        """Keep the current values of bookkeeping keys that the checkpoint lacks."""
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
    """Groups of ranks, each with one copy of the sharded model."""

    @property
    def data_parallel_replicate_degree(self) -> int | None:
        """Replicas; more than one make Composer's device mesh two-dimensional, which is HSDP for FSDP2."""
        return self.num_replicas if self.num_replicas > 1 else None

    @property
    def load_planner(self) -> DefaultLoadPlanner:
        """Return a new planner for each load."""
        return TolerantLoadPlanner()


def fsdp_config(settings: TrainerConfig) -> ElasticFSDP2Config:
    """Configure FSDP2 with sharded checkpoints."""
    precisions = {"param_dtype": settings.precision.value, "reduce_dtype": settings.reduce_precision.value}
    return ElasticFSDP2Config(
        reshard_after_forward=settings.reshard_after_forward,
        state_dict_type="sharded",
        mixed_precision=precisions,  # pyright: ignore[reportArgumentType]
        num_replicas=settings.num_replicas,
    )


def load_smddp() -> None:
    """Register SageMaker's collectives as a backend of torch; a MachineError if they do not load with this torch."""
    try:
        importlib.import_module("smdistributed.dataparallel.torch.torch_smddp")
    except (ImportError, OSError, RuntimeError) as error:
        raise MachineError(
            f"trainer.collectives is smddp, and SageMaker's library of collectives does not load with torch "
            f"{torch.__version__} ({error}): set trainer.collectives=nccl, or use an image that holds it for this torch"
        ) from error


def set_collective_timeout(seconds: float, mesh: DeviceMesh | None) -> None:
    """Change the timeout of collectives; called by all ranks together.

    The mesh is FSDP2's, for its process groups, which are made with the defaults of torch; None without FSDP2.
    """
    dist.barrier()  # A rank with a shorter timeout would give up on ranks with the longer one.
    if dist.get_backend() == "nccl":
        torch.cuda.synchronize()
    for group in [dist.group.WORLD, *(mesh.get_all_groups() if mesh is not None else [])]:
        set_timeout(timedelta(seconds=seconds), group)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """List the modules that FSDP2 gathers and reduces one by one."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def set_last_microbatch(modules: list[FSDPModule], is_last: bool) -> None:
    """Let FSDP2 reduce gradients and reshard weights after the next backward pass only if it is the last of a step."""
    for module in modules:
        module.set_requires_gradient_sync(is_last, recurse=False)
        module.set_reshard_after_backward(is_last, recurse=False)
