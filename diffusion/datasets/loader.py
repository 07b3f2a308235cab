"""Loaders: the global order of training, cut into the batches of one rank; and held-out data by index."""

import logging
from collections.abc import Iterator
from typing import Any

import torch
from streaming.base.world import World
from torch.utils.data import DataLoader

from diffusion.config.data import (
    DataConfig,
    ImageSize,
    Mixing,
    Representation,
    Shuffling,
    StreamConfig,
    ValidationConfig,
    image_sizes,
)
from diffusion.datasets.batching import OrderSettings
from diffusion.datasets.collation import CollateGroups, collate
from diffusion.datasets.encoded import ENCODED, EncodedManifest, check_encoded
from diffusion.datasets.fetching import Downloads
from diffusion.datasets.held_out import HeldOutBatches, HeldOutData
from diffusion.datasets.locations import StreamLocation, check_location, find_manifest, locate_streams
from diffusion.datasets.streams import TextImageDataset, Tokenize
from diffusion.datasets.transforms import ImageTransform
from diffusion.errors import DataError

logger = logging.getLogger(__name__)


class BatchLoader(DataLoader):
    """A DataLoader whose workers' `DataError`s and timeouts arrive with their own message, not with a traceback."""

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Iterate over batches.

        Raises:
            DataError: from the data set, or because a worker gave nothing for too long.
        """
        try:
            yield from super().__iter__()
        except DataError as error:
            logger.debug("in a loader worker", exc_info=error)
            raise type(error)(str(error).rpartition(f"{DataError.__qualname__}: ")[2].strip()) from None
        except RuntimeError as error:
            if "timed out" not in str(error):
                raise
            raise DataError(
                f"no batch came from a loader worker within {self.timeout:g} s: the storage is too slow or does not "
                "answer. See the log of the workers; or raise data.loader_timeout"
            ) from error


def train_loader(
    config: DataConfig, *, seed: int, tokenize: Tokenize | None, rank_batch_size: int, with_logvar: bool = True
) -> BatchLoader:
    """Build the loader of training data for this rank.

    The samples of each global batch are a function of configuration, data and seed, whatever the world size and the
    number of workers. The world is Streaming's: RANK, WORLD_SIZE and LOCAL_WORLD_SIZE in the environment.

    Args:
        config: the configuration's section `data`.
        seed: seed of the run.
        tokenize: K captions -> int32 [K, L]; not used with latents.
        rank_batch_size: samples per rank and step.
        with_logvar: whether the latents' log-variance is wanted (`objective.posterior: sample`).

    Returns:
        Batches of `rank_batch_size`; its length is the number of whole global batches in an epoch. With `mixing:
        groups` a batch holds whole groups one after the other; where the streams have several sizes, images and
        latents are lists with a tensor for each group.

    Raises:
        ConfigurationError: an epoch is less than a global batch, a stream less than what it has to give to one, or
            the ranks cannot share a batch.
        DataError: streams that are missing, damaged or not what the configuration says.
    """
    num_ranks = World.detect().num_ranks
    # `diffusion.config.checks` has the messages about these.
    assert config.global_batch_size == rank_batch_size * num_ranks, (
        config.global_batch_size,
        rank_batch_size,
        num_ranks,
    )
    sizes = image_sizes(config.streams, config.resolution)
    dataset = TextImageDataset(
        locations=check_training_streams(config, with_logvar=with_logvar),
        representation=config.representation,
        transforms=[
            ImageTransform(size=size, crop=config.crop, horizontal_flip=config.horizontal_flip, seed=seed)
            for size in sizes
        ],
        tokenize=tokenize if config.representation == Representation.images else None,
        seed=seed,
        with_logvar=with_logvar,
        with_text_embeddings=config.text_embeddings,
        choose_caption=True,
        batch_size=rank_batch_size,
        order=order_settings(config, seed),
        num_canonical_nodes=config.num_canonical_nodes,
        predownload=config.predownload,
        cache_limit=config.cache_limit,
        downloads=_downloads(config),
    )
    collate_fn = collate
    if config.mixing is Mixing.groups and len(set(sizes)) > 1:
        assert config.group_size is not None
        collate_fn = CollateGroups(config.group_size)
    options = _loader_options(config)
    return BatchLoader(dataset, batch_size=rank_batch_size, drop_last=True, collate_fn=collate_fn, **options)


def order_settings(config: DataConfig, seed: int) -> OrderSettings:
    """What the order of samples depends on besides the data."""
    return OrderSettings(
        seed=seed,
        global_batch_size=config.global_batch_size,
        num_canonical_nodes=config.num_canonical_nodes,
        mixing=config.mixing,
        group_size=config.group_size,
        shuffle=config.shuffle is not Shuffling.none,
        shuffle_block_size=config.shuffle_block_size if config.shuffle is Shuffling.block else None,
    )


def validation_dataset(
    config: ValidationConfig, data: DataConfig, *, tokenize: Tokenize | None, with_logvar: bool = True
) -> HeldOutData:
    """Open held-out data, read with the representation and sizes of training.

    Args:
        config: the configuration's section `validation`.
        data: the configuration's section `data`.
        tokenize: K captions -> int32 [K, L]; not used with latents.
        with_logvar: whether the latents' log-variance is wanted.

    Raises:
        DataError: streams that are missing, damaged or not what the configuration says.
    """
    samples = TextImageDataset(
        locations=check_validation_streams(config, data, with_logvar=with_logvar),
        representation=data.representation,
        transforms=[ImageTransform(size=size) for size in image_sizes(held_out_streams(config, data), data.resolution)],
        tokenize=tokenize if data.representation == Representation.images else None,
        seed=0,
        with_logvar=with_logvar,
        with_text_embeddings=data.text_embeddings,
        choose_caption=False,
        batch_size=config.device_batch_size,
        downloads=_downloads(data),
    )
    return HeldOutData(samples, config.num_samples)


def validation_loader(
    dataset: HeldOutData, config: ValidationConfig, data: DataConfig, *, rank: int = 0, num_ranks: int = 1
) -> BatchLoader:
    """Build the loader of held-out data for this rank.

    Args:
        dataset: made by `validation_dataset`.
        config: the configuration's section `validation`.
        data: the configuration's section `data`, for its workers.
        rank: number of the rank.
        num_ranks: world size.

    Returns:
        Batches of one stream each, of at most `config.device_batch_size` samples.
    """
    batches = HeldOutBatches(dataset, batch_size=config.device_batch_size, num_ranks=num_ranks, rank=rank)
    return BatchLoader(dataset, batch_sampler=batches, collate_fn=collate, **_loader_options(data))


def check_training_streams(config: DataConfig, *, with_logvar: bool) -> list[StreamLocation]:
    """Check what can be known of the training streams before anything is opened and without other ranks.

    Args:
        config: the configuration's section `data`.
        with_logvar: whether the latents' log-variance is wanted.

    Returns:
        Where the streams lie.

    Raises:
        DataError: streams that are missing, half-written, or encoded otherwise than the configuration says.
    """
    locations = locate_streams(config.remote, config.local, config.streams)
    _check_locations(locations, image_sizes(config.streams, config.resolution), config, with_logvar)
    return locations


def check_validation_streams(config: ValidationConfig, data: DataConfig, *, with_logvar: bool) -> list[StreamLocation]:
    """Check the held-out streams as `check_training_streams` does those of training."""
    streams = held_out_streams(config, data)
    locations = locate_streams(config.remote, config.local, streams, "validation")
    _check_locations(locations, image_sizes(streams, data.resolution), data, with_logvar)
    return locations


def held_out_streams(config: ValidationConfig, data: DataConfig) -> list[StreamConfig]:
    """The streams of held-out data: those that are given, or those with the names and sizes of training's."""
    return config.streams or [StreamConfig(name=stream.name, resolution=stream.resolution) for stream in data.streams]


def _check_locations(
    locations: list[StreamLocation], sizes: list[ImageSize], config: DataConfig, with_logvar: bool
) -> None:
    for location, size in zip(locations, sizes, strict=True):
        check_location(location)
        manifest = find_manifest(location.source, location.store)
        # Data without a manifest, or with one of images, is judged by its columns when it is opened.
        if config.representation == Representation.latents and manifest and manifest.get("kind") == ENCODED:
            encoded = EncodedManifest.from_json(manifest, location.source)
            check_encoded(encoded, where=location.source, size=size, needs_logvar=with_logvar)


def _downloads(config: DataConfig) -> Downloads:
    return Downloads(
        attempts=config.download_retry, timeout=config.download_timeout, validate_hash=config.validate_hash
    )


def _loader_options(config: DataConfig) -> dict[str, Any]:
    options: dict[str, Any] = {"pin_memory": torch.cuda.is_available()}
    if config.num_workers == 0:
        return options
    return options | {
        "num_workers": config.num_workers,
        "prefetch_factor": config.prefetch_factor,
        "timeout": config.loader_timeout,
        "persistent_workers": True,
    }
