"""What each tier of storage holds, gives and is asked for: the store, the disk of a node, and its shared memory."""

import math
from dataclasses import dataclass

from diffusion.config.data import DataConfig, ImageSize, Representation, image_sizes
from diffusion.config.fields import parse_size
from diffusion.config.model import Posterior
from diffusion.config.schema import Config
from diffusion.config.training import NumberFormat
from diffusion.datasets.loader import order_settings
from diffusion.datasets.mds import DEFAULT_SHARD_BYTES
from diffusion.models.architectures import ARCHITECTURES

STORED_BYTES = {NumberFormat.fp32: 4, NumberFormat.fp16: 2, NumberFormat.bf16: 2}

REQUESTS_PER_SHARD = 2
"""A HEAD and a GET, of S3."""

PLACEMENT_NUMBERS = 6


@dataclass(frozen=True, kw_only=True)
class TierPlan:
    """What tiers hold and give, in bytes where nothing else is said. None is not known."""

    num_nodes: int
    node_bytes: float | None
    """Data that one node keeps on its disk where there is no limit: what it reads in an epoch, or all of it without a
    remote."""

    disk_bytes: float | None
    """... and what it keeps with `data.cache_limit`."""

    first_epoch_bytes: float | None
    """That one node fetches in its first epoch; 0 without a remote, as of everything that is fetched."""

    epoch_bytes: float | None
    """... and in each other one."""

    fetched_bytes: float | None
    """That all nodes fetch in the run."""

    epoch_requests: float | None
    """Of one node, in an epoch in which it fetches all that it reads."""

    requests: float | None
    """Of all nodes, in the run."""

    memory_bytes: int
    """Batches that loader workers hold ready in the shared memory of one node."""


def plan_tiers(
    config: Config,
    *,
    num_ranks: int,
    num_images: int,
    num_samples: int | None,
    sample_bytes: int | None,
    num_shards: int | None,
) -> TierPlan:
    """Work out what tiers hold and give.

    Where some streams have a remote and some have none, all count as fetched.

    Args:
        config: the configuration; locations may be missing (`???`).
        num_ranks: world size.
        num_images: of the run.
        num_samples: of the data set.
        sample_bytes: of a stored sample.
        num_shards: of the data set; None takes shards of images of the size that `scripts/prepare.py` writes.
    """
    data = config.data
    num_nodes = math.ceil(num_ranks / config.plan.gpus_per_node)
    ranks_per_node = min(num_ranks, config.plan.gpus_per_node)
    memory = ranks_per_node * waiting_bytes(config, math.ceil(data.global_batch_size / num_ranks))
    held = ("node_bytes", "disk_bytes")
    fetched = ("first_epoch_bytes", "epoch_bytes", "fetched_bytes", "epoch_requests", "requests")
    if sample_bytes is None or num_samples is None:
        return TierPlan(num_nodes=num_nodes, memory_bytes=memory, **dict.fromkeys((*held, *fetched)))
    total = float(num_samples * sample_bytes)
    if not _has_remote(data):
        amounts = dict.fromkeys(held, total) | dict.fromkeys(fetched, 0.0)
        return TierPlan(num_nodes=num_nodes, memory_bytes=memory, **amounts)
    # A node reads the shards of its lanes, of which nodes beyond their number share some.
    lanes = order_settings(data, config.seed).num_lanes
    share = math.ceil(lanes / num_nodes) / lanes
    node = total * share
    limit = parse_size(data.cache_limit, "data.cache_limit") if data.cache_limit is not None else math.inf
    epochs = num_images / num_samples
    fetches = min(1.0, epochs) if node <= limit else epochs
    if num_shards is None and config.plan.image_kb is not None:
        num_shards = math.ceil(num_samples * config.plan.image_kb * 1000 / DEFAULT_SHARD_BYTES)
    requests = REQUESTS_PER_SHARD * num_shards * share if num_shards is not None else None
    return TierPlan(
        num_nodes=num_nodes,
        node_bytes=node,
        disk_bytes=min(node, limit),
        first_epoch_bytes=node,
        epoch_bytes=0.0 if node <= limit else node,
        fetched_bytes=num_nodes * node * fetches,
        epoch_requests=requests,
        requests=num_nodes * requests * fetches if requests is not None else None,
        memory_bytes=memory,
    )


def _has_remote(data: DataConfig) -> bool:
    streams = data.streams if isinstance(data.streams, list) else []  # Missing beside a plug-in.
    return data.remote is not None or any(stream.remote is not None for stream in streams)


def stored_bytes(config: Config, size: ImageSize) -> int | None:
    """Of a stored sample with one caption; None where images are read and `plan.image_kb` is not given."""
    if config.data.representation is Representation.images:
        return round(config.plan.image_kb * 1000) if config.plan.image_kb is not None else None
    numbers = ARCHITECTURES[config.model.architecture].max_tokens + PLACEMENT_NUMBERS
    return _latent_bytes(config, size.height * size.width) + 4 * numbers + _embedding_bytes(config)


def waiting_bytes(config: Config, rank_batch_size: int) -> int:
    """Bytes of the batches that a rank's loader workers hold ready in shared memory."""
    data, validation = config.data, config.validation
    samples = rank_batch_size + (validation.device_batch_size if validation is not None else 0)
    return data.num_workers * data.prefetch_factor * samples * _batch_bytes(config)


def _batch_bytes(config: Config) -> int:
    """Bytes of the largest sample in a batch: image or latent, token ids, placement, address and stream."""
    streams = config.data.streams if isinstance(config.data.streams, list) else []  # Missing beside a plug-in.
    sizes = image_sizes(streams, config.data.resolution)
    pixels = max([size.height * size.width for size in sizes], default=config.data.resolution**2)
    is_image = config.data.representation is Representation.images
    content = 3 * pixels if is_image else _latent_bytes(config, pixels) + _embedding_bytes(config)
    return content + 8 * (ARCHITECTURES[config.model.architecture].max_tokens + PLACEMENT_NUMBERS + 2)


def _latent_bytes(config: Config, pixels: int) -> int:
    """Of the moments of an image's latent."""
    spec = ARCHITECTURES[config.model.architecture]
    moments = 2 if config.objective.posterior is Posterior.sample else 1
    return moments * (pixels // spec.vae_factor**2) * spec.vae["latent_channels"] * STORED_BYTES[NumberFormat.fp16]


def _embedding_bytes(config: Config) -> int:
    """Of a caption's encoding, where that is stored."""
    if not config.data.text_embeddings:
        return 0
    spec = ARCHITECTURES[config.model.architecture]
    width = {**spec.unet, **config.model.unet}["cross_attention_dim"]
    return spec.max_tokens * width * STORED_BYTES[NumberFormat.fp16]
