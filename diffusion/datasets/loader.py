"""Loaders: this rank's share of each global batch in training, and the validation batches of this rank.

Shape letters: R ranks, B samples of a batch on one rank.
"""

import hashlib
import logging
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from diffusion import distributed
from diffusion.config.data import (
    DataConfig,
    Mixing,
    Representation,
    ValidationConfig,
    image_sizes,
)
from diffusion.config.fields import parse_size
from diffusion.datasets.batch import BatchKey, Sample, collate
from diffusion.datasets.dataset import TextImageDataset, Tokenize, TrainingDataset, TrainingSteps
from diffusion.datasets.encoded import ENCODED, EncodedManifest, check_encoded
from diffusion.datasets.sample_order import order_settings, sample_address
from diffusion.datasets.streams import (
    Files,
    StreamLocation,
    check_location,
    find_manifest,
    locate_streams,
    validation_streams,
)
from diffusion.datasets.transforms import ImageTransform
from diffusion.errors import DataError, UserError
from diffusion.storage import Access, shown

logger = logging.getLogger(__name__)


class BatchLoader(DataLoader):
    """A DataLoader whose workers are forked, and their `UserError`s and timeouts arrive without a traceback."""

    def __init__(self, *arguments: Any, num_workers: int = 0, **options: Any) -> None:
        context = "fork" if num_workers else None  # Python 3.14 would pickle the data set by default.
        super().__init__(*arguments, num_workers=num_workers, multiprocessing_context=context, **options)

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Iterate over batches; a UserError comes from the data set, or because a worker gave nothing for too long."""
        try:
            yield from super().__iter__()
        except UserError as error:
            logger.debug("in a loader worker", exc_info=error)
            raise type(error)(str(error).rpartition(f"{type(error).__qualname__}: ")[2].strip()) from None
        except RuntimeError as error:
            if "timed out" not in str(error):
                raise
            raise DataError(
                f"no batch came from a loader worker within {self.timeout:g} s: the storage is too slow or does not "
                "answer. See the log of the workers; or raise data.loader_timeout"
            ) from error


def stop_workers(loader: Iterable | None) -> None:
    """Stop the workers of a loader: with pinned memory, torch 2.11 waits 5 s for each at the end of the process."""
    if isinstance(loader, DataLoader) and loader._iterator is not None:
        iterator: Any = loader._iterator
        loader._iterator = None
        iterator._shutdown_workers()


def train_loader(
    config: DataConfig,
    *,
    seed: int,
    tokenize: Tokenize | None,
    with_logvar: bool = True,
    score_names: Sequence[str] = (),
    files: Files | None = None,
) -> BatchLoader:
    """Build the loader of training data for this rank (`diffusion.distributed`).

    The samples of each global batch are a function of configuration, data and seed, whatever the world size and the
    number of workers.

    Args:
        config: the configuration's section `data`.
        seed: seed of the run.
        tokenize: K captions -> int32 [K, L]; not used with latents.
        with_logvar: whether the latents' log-variance is wanted (`objective.posterior: sample`).
        score_names: scores that are wanted (`model.score_conditioning`).
        files: manifests and marks of the streams, if they have been read.

    Returns:
        Batches of this rank; its length is the number of whole global batches in an epoch. With `mixing: groups` a
        batch holds whole groups one after the other; where the streams have several sizes, images and latents are
        lists with a tensor for each group.

    Raises:
        ConfigurationError: an epoch is less than a global batch, a stream less than what it has to give to one, or
            the ranks cannot share a batch.
        DataError: streams that are missing, damaged or not what the configuration says.
    """
    rank, num_ranks = distributed.rank(), distributed.world_size()
    dataset = TrainingDataset(
        order=order_settings(config, seed),
        predownload=config.predownload,
        transforms=[
            ImageTransform(size=size, crop=config.crop, horizontal_flip=config.horizontal_flip, seed=seed)
            for size in image_sizes(config.streams, config.resolution)
        ],
        choose_caption=True,
        caption_weights=config.caption_weights,
        cache_limit=None if config.cache_limit is None else parse_size(config.cache_limit, "data.cache_limit"),
        **_data_options(config, None, tokenize, with_logvar, score_names, files),
    )
    has_several_sizes = config.mixing is Mixing.groups and len(config.known_sizes) > 1
    collate_fn = partial(collate, group_size=config.group_size if has_several_sizes else None)
    steps = TrainingSteps(dataset, rank=rank, num_ranks=num_ranks)
    return BatchLoader(dataset, batch_sampler=steps, collate_fn=collate_fn, **_loader_options(config))


class ValidationDataset(Dataset):
    """Validation samples by index: the same at each index for every world size; centre crop and first caption.

    Of `num_samples` in all, or of all without it, each stream gives its first ones, in proportion to its samples.
    """

    def __init__(self, samples: TextImageDataset, num_samples: int | None = None) -> None:
        self.samples = samples
        self.stream_names = samples.stream_names
        total = samples.num_samples
        wanted = total if num_samples is None else min(num_samples, total)
        ends = [round(wanted * first / total) for first in [*samples.first_samples, total]]
        self.parts = [range(*pair) for pair in pairwise(ends)]
        """Indices of the samples of each stream."""

    @property
    def stream_names_with_samples(self) -> list[str]:
        """Names of the streams by their number; empty for one of which nothing is taken."""
        return [name if part else "" for name, part in zip(self.stream_names, self.parts, strict=True)]

    def identity(self) -> str:
        """Hash of the sizes and hashes of the shards in the indices, and of what was removed."""
        streams = zip(self.samples.streams, self.samples.substitutes, strict=True)
        content = [
            ([(shard.raw.entry, shard.num_samples) for shard in stream.index.shards], substitutes.absent)
            for stream, substitutes in streams
        ]
        return hashlib.sha256(repr(content).encode()).hexdigest()[:16]

    def addresses(self) -> NDArray[np.int64]:
        """Addresses of all samples."""
        of_streams = [
            sample_address(stream, np.arange(len(part), dtype=np.int64)) for stream, part in enumerate(self.parts)
        ]
        return np.concatenate(of_streams)

    def __len__(self) -> int:
        return self.parts[-1].stop

    def __getitem__(self, index: int) -> Sample:
        """Read a sample; `~index` is a copy of it that is not counted."""
        is_counted = index >= 0
        number = index if is_counted else ~index
        if number >= len(self):
            raise IndexError(f"{number} of {len(self)} samples")
        stream = bisect_right([part.stop for part in self.parts], number)
        sample = self.samples.read(stream, number - self.parts[stream].start)
        return sample | {BatchKey.IS_COUNTED: np.bool_(is_counted)}


class ValidationBatches(DistributedSampler):
    """Indices of the batches of one rank.

    A batch holds samples of one stream. All ranks have the same number of batches, of the same sizes, since sharded
    models compute together; where samples do not suffice for that, batches are filled up with copies that are not
    counted. Composer requires a `DistributedSampler`, and drops samples beyond `total_size` as padding: there are none.
    """

    def __init__(self, data: ValidationDataset, *, batch_size: int, num_ranks: int, rank: int) -> None:
        super().__init__(data, num_replicas=num_ranks, rank=rank, shuffle=False)
        self.total_size = len(data)
        self._batches = [
            share_of(part[start : start + batch_size * num_ranks], num_ranks, rank)
            for part in data.parts
            for start in range(0, len(part), batch_size * num_ranks)
        ]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return iter(self._batches)


def share_of(indices: Sequence[int], num_ranks: int, rank: int) -> list[int]:
    """Every `num_ranks`-th index, and a copy (`~index`) of the last one where other ranks have one more."""
    share = list(indices[rank::num_ranks])
    num = -(-len(indices) // num_ranks)
    return share if len(share) == num else [*share, ~indices[-1]]


def validation_dataset(
    config: ValidationConfig,
    data: DataConfig,
    *,
    tokenize: Tokenize | None,
    with_logvar: bool = True,
    score_names: Sequence[str] = (),
    files: Files | None = None,
) -> ValidationDataset:
    """Open the validation data, read with the representation and sizes of training, as by `train_loader`."""
    sizes = image_sizes(validation_streams(config, data), data.resolution)
    samples = TextImageDataset(
        transforms=[ImageTransform(size=size) for size in sizes],
        seed=0,
        choose_caption=False,
        **_data_options(data, config, tokenize, with_logvar, score_names, files),
    )
    return ValidationDataset(samples, config.num_samples)


def validation_loader(
    dataset: ValidationDataset, config: ValidationConfig, data: DataConfig, *, rank: int = 0, num_ranks: int = 1
) -> BatchLoader:
    """Build the loader of validation data for a rank: batches of one stream, of `config.device_batch_size` at most."""
    batches = ValidationBatches(dataset, batch_size=config.device_batch_size, num_ranks=num_ranks, rank=rank)
    return BatchLoader(dataset, batch_sampler=batches, collate_fn=collate, **_loader_options(data))


def _data_options(
    data: DataConfig,
    validation: ValidationConfig | None,
    tokenize: Tokenize | None,
    with_logvar: bool,
    score_names: Sequence[str],
    files: Files | None,
) -> dict[str, Any]:
    """Return the arguments of `TextImageDataset` that training and validation share."""
    return {
        "locations": check_locations(data, validation, with_logvar=with_logvar, score_names=score_names, files=files),
        "representation": data.representation,
        "tokenize": tokenize if data.representation == Representation.images else None,
        "with_logvar": with_logvar,
        "with_text_embeddings": data.text_embeddings,
        "score_names": score_names,
        "hash_kind": data.validate_hash,
        "rank": distributed.rank(),
        "num_ranks": distributed.world_size(),
    }


def check_locations(
    data: DataConfig,
    validation: ValidationConfig | None = None,
    *,
    with_logvar: bool,
    score_names: Sequence[str] = (),
    files: Files | None = None,
) -> list[StreamLocation]:
    """Locate the streams of training, or those of validation, and check them before they are opened.

    Only what is known without the model and other ranks is checked.

    Raises:
        DataError: streams that are missing, half-written, or encoded otherwise than the configuration says.
    """
    access = Access(attempts=data.download_attempts, timeout=data.download_timeout)
    root, streams, section = data, data.streams, "data"
    if validation is not None:
        root, streams, section = validation, validation_streams(validation, data), "validation"
    locations = locate_streams(root.remote, root.local, streams, section, access=access, files=files)
    for location, size in zip(locations, image_sizes(streams, data.resolution), strict=True):
        check_location(location)
        manifest = find_manifest(location)
        # Data without a manifest, or with one of images, is judged by its columns when it is opened.
        if data.representation == Representation.latents and manifest and manifest.get("kind") == ENCODED:
            where = shown(location.source)
            encoded = EncodedManifest.from_json(manifest, where)
            check_encoded(encoded, where=where, size=size, needs_logvar=with_logvar, score_names=score_names)
    return locations


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
