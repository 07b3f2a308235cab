"""Data and checkpoints of a run: bytes in the store, on the disk of a node and in its memory."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from diffusion.checkpointing.layout import kept_steps
from diffusion.config.data import ImageSize, Representation
from diffusion.config.fields import parse_size, parse_time
from diffusion.config.model import Posterior
from diffusion.config.schema import Config
from diffusion.config.training import NumberFormat
from diffusion.datasets.sample_order import order_settings
from diffusion.models.architectures import encoder_width, latent_channels, num_text_tokens, vae_factor
from diffusion.planning.amounts import StreamPlan
from diffusion.planning.memory import (
    FORMAT_BYTES,
    WEIGHT_BYTES,
    ParameterCounts,
    average_bytes,
    largest_size,
    mean_over_streams,
    moment_bytes,
)

PLACEMENT_NUMBERS = 6


@dataclass(frozen=True, kw_only=True)
class TierPlan:
    """Bytes of the data in each tier of storage. None: unknown."""

    num_nodes: int
    sample_bytes: int | None
    """Mean stored sample, without its key."""

    data_bytes: float | None
    """All samples."""

    node_bytes: float | None
    """Bytes that a node reads in an epoch and keeps on its disk without a limit; all of the data without a remote."""

    disk_bytes: float | None
    """Bytes that a node keeps with `data.cache_limit`."""

    epoch_bytes: float | None
    """Downloads of a node in each epoch after the first."""

    fetched_bytes: float | None
    """Downloads of all nodes in the run; 0 without a remote."""

    memory_bytes: int
    """Batches of loader workers in the shared memory of one node."""


def plan_tiers(
    config: Config, streams: Sequence[StreamPlan], *, num_ranks: int, num_images: int, num_samples: int | None
) -> TierPlan:
    """Compute the bytes in each tier. With a remote for some streams only, all count as fetched.

    Locations of the configuration may be missing (`???`).
    """
    data = config.data
    num_nodes = math.ceil(num_ranks / config.plan.gpus_per_node)
    ranks_per_node = min(num_ranks, config.plan.gpus_per_node)
    counts = [stream.num_samples for stream in streams]
    mean = mean_over_streams(config, counts, functools.partial(stored_bytes, config))
    sample = None if mean is None else round(mean)
    total = node = kept = again = fetched = None
    if sample is not None and num_samples is not None:
        total = node = kept = float(num_samples * sample)
        again = fetched = 0.0
    has_remote = data.remote is not None or any(stream.remote is not None for stream in data.known_streams)
    if total is not None and num_samples and has_remote:
        # A node reads the shards of its lanes, of which nodes beyond their number share some.
        lanes = order_settings(data, config.seed).num_lanes
        node = total * math.ceil(lanes / num_nodes) / lanes
        limit = parse_size(data.cache_limit, "data.cache_limit") if data.cache_limit is not None else math.inf
        kept = min(node, limit)
        again = 0.0 if node <= limit else node
        epochs = num_images / num_samples
        fetched = num_nodes * node * (min(1.0, epochs) if node <= limit else epochs)
    return TierPlan(
        num_nodes=num_nodes,
        sample_bytes=sample,
        data_bytes=total,
        node_bytes=node,
        disk_bytes=kept,
        epoch_bytes=again,
        fetched_bytes=fetched,
        memory_bytes=ranks_per_node * waiting_bytes(config, math.ceil(data.global_batch_size / num_ranks)),
    )


def stored_bytes(config: Config, size: ImageSize) -> int | None:
    """Bytes of a stored sample with one caption; None for images without `plan.image_kb`."""
    if config.data.representation is Representation.images:
        return round(config.plan.image_kb * 1000) if config.plan.image_kb is not None else None
    return _encoded_bytes(config, size) + 4 * (num_text_tokens(config.model) + PLACEMENT_NUMBERS)


def waiting_bytes(config: Config, rank_batch_size: int) -> int:
    """Bytes of the batches that a rank's loader workers hold ready in shared memory."""
    data, validation, size = config.data, config.validation, largest_size(config)
    is_image = data.representation is Representation.images
    content = 3 * size.height * size.width if is_image else _encoded_bytes(config, size)
    # Token ids, placement, address and stream are int64 in a batch.
    sample = content + 8 * (num_text_tokens(config.model) + PLACEMENT_NUMBERS + 2)
    num_samples = rank_batch_size + (validation.device_batch_size if validation is not None else 0)
    return data.num_workers * data.prefetch_factor * num_samples * sample


def _encoded_bytes(config: Config, size: ImageSize) -> int:
    """Moments of an image's latent, and a caption's encoding where that is stored."""
    moments = 2 if config.objective.posterior is Posterior.sample else 1
    numbers = moments * (size.height * size.width // vae_factor(config.model) ** 2) * latent_channels(config.model)
    if config.data.text_embeddings:
        numbers += num_text_tokens(config.model) * encoder_width(config.model)
    return numbers * FORMAT_BYTES[NumberFormat.fp16]


# Checkpoints


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """Bytes of checkpoints and of averages stored beside them. None: unknown, such as for an interval in epochs."""

    largest_bytes: int
    num_kept: int | None
    kept_bytes: int | None
    num_average_files: int | None
    average_file_bytes: int

    @property
    def average_bytes(self) -> int | None:
        """All files of averages."""
        return None if self.num_average_files is None else self.num_average_files * self.average_file_bytes


def plan_checkpoints(config: Config, counts: ParameterCounts, epoch_steps: int | None = None) -> CheckpointPlan:
    """Compute the bytes of the checkpoints that stay: weights, moments of those that are trained, started averages.

    The steps of an epoch are needed for intervals in epochs only.
    """
    ema, trainer, total = config.algorithms.ema, config.trainer, config.planned_steps()
    state = (counts.fixed + counts.trained) * WEIGHT_BYTES + moment_bytes(config, counts.trained, counts.matrices)
    averages = counts.trained * average_bytes(config)
    interval = config.steps_of(trainer.save_interval, "trainer.save_interval")
    if interval is None and epoch_steps is not None:
        interval = parse_time(trainer.save_interval, "trainer.save_interval").value * epoch_steps
    start = config.steps_of(ema.start, "algorithms.ema.start") if ema is not None else math.inf
    kept = None
    if interval is not None and start is not None:
        interval = max(interval, 1)
        saved = [min(number * interval, total) for number in range(1, math.ceil(total / interval) + 1)]
        if trainer.keep_checkpoints != -1:
            keep_every = trainer.keep_every
            every = None if keep_every is None else config.steps_of(keep_every, "trainer.keep_every")
            saved = kept_steps(saved, newest=trainer.keep_checkpoints, every=every)
        kept = [state + (averages if step >= start else 0) for step in saved]
    num_files: int | None = 0
    power = ema.power if ema is not None else None
    if power is not None:
        every = config.steps_of(power.snapshot_interval, "algorithms.ema.power.snapshot_interval")
        num_files = None
        if start is not None and every is not None:
            ends = {*range(0, total + 1, int(every)), total}
            num_files = sum(step > max(1, math.ceil(start)) for step in ends) * len(power.relative_widths)
    return CheckpointPlan(
        largest_bytes=state + averages,
        num_kept=len(kept) if kept is not None else None,
        kept_bytes=sum(kept) if kept is not None else None,
        num_average_files=num_files,
        average_file_bytes=counts.trained * FORMAT_BYTES[power.snapshot_precision] if power is not None else 0,
    )
