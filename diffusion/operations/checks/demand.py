"""What a run needs of each machine, worked out from its configuration."""

from dataclasses import dataclass, replace

from diffusion.config.schema import Config
from diffusion.config.training import Device
from diffusion.datasets.mds import MAX_OPEN
from diffusion.planning.plan import plan_run
from diffusion.planning.tiers import waiting_bytes

FILES_PER_RANK = 256
"""File handles of a rank without loader workers: libraries, data sets, logs."""

FILES_PER_WORKER, FILES_PER_BATCH, FILES_PER_PEER = 12, 6, 2
"""... for a loader worker, for a batch that it holds ready (one for each tensor), and for a connection to a rank."""

RANK_BYTES, WORKER_BYTES = 1.0e9, 0.15e9
"""Memory of a rank's process without the model, and what a loader worker does not share with it (estimates)."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a run needs. Bytes of one node unless said."""

    num_ranks: int
    """Of the node."""

    num_workers: int
    """Loader processes of the node."""

    shm_bytes: int
    """Batches that loader workers hold ready."""

    num_files: int
    """File handles of one rank."""

    memory_bytes: float
    """Processes, and with training on the CPU (or checkpoints in the background) the model's state (estimate)."""

    gpu_bytes: float | None
    """Of one GPU (`Plan.gpu_bytes`); None without GPUs."""

    checkpoint_bytes: int
    """The largest checkpoint."""

    storage_bytes: int | None
    """All checkpoints that stay; None where their number is not known."""


def find_demand(config: Config, *, world_size: int, ranks_per_node: int, device: Device) -> Demand:
    """Work out what a run needs.

    Args:
        config: the configuration, complete and checked.
        world_size: ranks of the job.
        ranks_per_node: ranks of a node.
        device: what it trains on.
    """
    here = replace(config, plan=replace(config.plan, num_gpus=None))
    plan = plan_run(here, world_size=world_size)
    state = next(memory.total for memory in plan.memory if memory.is_chosen)
    data = config.data
    workers = data.num_workers * (2 if config.validation is not None else 1)
    in_memory = state if device is Device.cpu or config.trainer.async_checkpoints else 0
    return Demand(
        num_ranks=ranks_per_node,
        num_workers=ranks_per_node * data.num_workers,
        shm_bytes=ranks_per_node * waiting_bytes(config, data.global_batch_size // world_size),
        num_files=FILES_PER_RANK
        + MAX_OPEN
        + workers * (FILES_PER_WORKER + data.prefetch_factor * FILES_PER_BATCH)
        + world_size * FILES_PER_PEER,
        memory_bytes=ranks_per_node * (RANK_BYTES + workers * WORKER_BYTES + in_memory),
        gpu_bytes=plan.gpu_bytes if device is Device.gpu else None,
        checkpoint_bytes=plan.checkpoint_bytes,
        storage_bytes=plan.storage_bytes,
    )
