"""Loaders: the global order of training, cut into the batches of one rank; and held-out data by index."""

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from streaming.base.world import World
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from diffusion.config.data import DataConfig, Representation, StreamConfig, ValidationConfig
from diffusion.datasets.batch import BatchKey
from diffusion.datasets.batching import OrderSettings
from diffusion.datasets.encoded import ENCODED, EncodedManifest, check_encoded
from diffusion.datasets.locations import StreamLocation, check_location, find_manifest, locate_streams
from diffusion.datasets.streams import Sample, TextImageDataset, Tokenize
from diffusion.datasets.transforms import SquareTransform
from diffusion.errors import DataError

logger = logging.getLogger(__name__)

SHUFFLES_WITHIN_SHARDS = ("py1s", "py2s")
"""Values of `data.shuffle_algorithm` under which `data.shuffle_block_size` has no effect."""


def collate(samples: list[Sample]) -> dict[BatchKey, Tensor]:
    """Stack the entries of samples: [...] each -> [B, ...].

    Raises:
        DataError: they have several shapes.
    """
    batch = {}
    for key in samples[0]:
        try:
            batch[key] = torch.from_numpy(np.stack([sample[key] for sample in samples]))
        except ValueError as error:
            shapes = sorted({np.shape(sample[key]) for sample in samples})
            raise DataError(
                f"one batch holds {key.value} of the shapes {', '.join(map(str, shapes))}, and such batches "
                "are not supported: prepare or encode all streams with one shape"
            ) from error
    return batch


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
            raise DataError(str(error).rpartition(f"{DataError.__qualname__}: ")[2].strip()) from None
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
        groups` a batch holds whole groups one after the other.

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
    dataset = TextImageDataset(
        locations=check_training_streams(config, with_logvar=with_logvar),
        representation=config.representation,
        transform=SquareTransform(
            resolution=config.resolution, crop=config.crop, horizontal_flip=config.horizontal_flip, seed=seed
        ),
        tokenize=tokenize if config.representation == Representation.images else None,
        seed=seed,
        with_logvar=with_logvar,
        choose_caption=True,
        batch_size=rank_batch_size,
        order=order_settings(config, seed),
        num_canonical_nodes=config.num_canonical_nodes,
        predownload=config.predownload,
        cache_limit=config.cache_limit,
        **_download_options(config),
    )
    return BatchLoader(dataset, batch_size=rank_batch_size, drop_last=True, **_loader_options(config))


def order_settings(config: DataConfig, seed: int) -> OrderSettings:
    """What the order of samples depends on besides the data."""
    return OrderSettings(
        seed=seed,
        global_batch_size=config.global_batch_size,
        num_canonical_nodes=config.num_canonical_nodes,
        mixing=config.mixing,
        group_size=config.group_size,
        shuffle=config.shuffle,
        shuffle_block_size=None if config.shuffle_algorithm in SHUFFLES_WITHIN_SHARDS else config.shuffle_block_size,
    )


class ValidationDataset(Dataset):
    """Held-out samples by index: the same at each index for every world size; centre crop and first caption.

    Args:
        samples: the streams, one after the other.
        num_samples: only the first so many; None is all.
    """

    def __init__(self, samples: TextImageDataset, num_samples: int | None = None) -> None:
        self._samples = samples
        self._num_samples = min(samples.size, samples.size if num_samples is None else num_samples)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"{index} of {len(self)} samples")
        return self._samples[index]


def validation_dataset(
    config: ValidationConfig, data: DataConfig, *, tokenize: Tokenize | None, with_logvar: bool = True
) -> ValidationDataset:
    """Open held-out data, read with the representation and resolution of training.

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
        transform=SquareTransform(resolution=data.resolution),
        tokenize=tokenize if data.representation == Representation.images else None,
        seed=0,
        with_logvar=with_logvar,
        choose_caption=False,
        batch_size=config.device_batch_size,
        **_download_options(data),
    )
    return ValidationDataset(samples, config.num_samples)


def validation_loader(
    dataset: ValidationDataset, config: ValidationConfig, data: DataConfig, *, sampler: Sampler | None
) -> BatchLoader:
    """Build the loader of held-out data for this rank.

    Args:
        dataset: made by `validation_dataset`.
        config: the configuration's section `validation`.
        data: the configuration's section `data`, for its workers.
        sampler: this rank's share of the indices; None is all, in order.

    Returns:
        Batches of `config.device_batch_size`, the last one perhaps smaller.
    """
    return BatchLoader(dataset, batch_size=config.device_batch_size, sampler=sampler, **_loader_options(data))


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
    _check_locations(locations, config, with_logvar)
    return locations


def check_validation_streams(config: ValidationConfig, data: DataConfig, *, with_logvar: bool) -> list[StreamLocation]:
    """Check the held-out streams as `check_training_streams` does those of training."""
    streams = config.streams or [StreamConfig(name=stream.name) for stream in data.streams]
    locations = locate_streams(config.remote, config.local, streams)
    _check_locations(locations, data, with_logvar)
    return locations


def _check_locations(locations: list[StreamLocation], config: DataConfig, with_logvar: bool) -> None:
    for location in locations:
        check_location(location)
        manifest = find_manifest(location.source)
        # Data without a manifest, or with one of pictures, is judged by its columns when it is opened.
        if config.representation == Representation.latents and manifest and manifest.get("kind") == ENCODED:
            encoded = EncodedManifest.from_json(manifest, location.source)
            check_encoded(encoded, where=location.source, resolution=config.resolution, needs_logvar=with_logvar)


def _download_options(config: DataConfig) -> dict[str, Any]:
    return {
        "download_retry": config.download_retry,
        "download_timeout": config.download_timeout,
        "validate_hash": config.validate_hash,
    }


def _loader_options(config: DataConfig) -> dict[str, Any]:
    options: dict[str, Any] = {"collate_fn": collate, "pin_memory": torch.cuda.is_available()}
    if config.num_workers == 0:
        return options
    return options | {
        "num_workers": config.num_workers,
        "prefetch_factor": config.prefetch_factor,
        "timeout": config.loader_timeout,
        "persistent_workers": True,
    }
