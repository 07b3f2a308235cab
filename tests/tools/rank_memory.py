"""Bytes of a training state, counted by sharding the real U-Net over a fake process group: no memory, no GPU."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from composer.core import Precision
from composer.distributed.fsdp2 import prepare_fully_shard
from composer.distributed.fsdp2_utils import generate_composer_model_policy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from diffusion.config.schema import Config
from diffusion.ema.averaging import Exponential, WeightAverage, local_shard, trainable_parameters
from diffusion.planning.memory import meta_parts
from diffusion.sharding import fsdp_config


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes of the training state on one rank."""

    weights: int
    gradients: int
    optimizer: int
    ema: int


def count_rank_memory(config: Config, *, num_ranks: int, rank: int) -> StateBytes:
    """Count what a rank of an FSDP run holds.

    FSDP2 splits each parameter by its first dimension and pads the shards to one size, so that a rank holds a little
    more than its share. To be called where there is no process group; one is made and destroyed.

    Args:
        config: architecture, precision and how many averages of the weights there are.
        num_ranks: world size.
        rank: which one is looked at.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        return _count(config)
    finally:
        dist.destroy_process_group()


def _count(config: Config) -> StateBytes:
    model = nn.Module()
    model.unet, _ = meta_parts(config.model)
    fsdp = fsdp_config(config.trainer)
    if fsdp.num_replicas > 1:
        shape = (fsdp.num_replicas, dist.get_world_size() // fsdp.num_replicas)
        fsdp.device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    policy: Any = generate_composer_model_policy(model)  # pyright: ignore[reportArgumentType]
    prepare_fully_shard(model, fsdp, Precision(config.trainer.precision.value), policy)
    parameters = trainable_parameters(model)
    optimizer = torch.optim.AdamW(parameters.values())
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moments = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    averages = [tensor for average in _averages(config, parameters) for tensor in average.averages.values()]
    # The gradients of a unit are views of one reduced buffer, laid out as the padded weights are.
    return StateBytes(
        weights=_stored(model.parameters()),
        gradients=_stored(parameters.values()),
        optimizer=_stored(moments),
        ema=_stored(averages),
    )


def _averages(config: Config, parameters: dict[str, nn.Parameter]) -> list[WeightAverage]:
    ema = config.algorithms.ema
    return [WeightAverage(parameters, Exponential(0.0)) for _ in range(ema.num_averages)] if ema is not None else []


def _stored(tensors: Any) -> int:
    """Bytes of the storages behind this rank's shards, each once."""
    storages = [local_shard(tensor.detach()).untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
