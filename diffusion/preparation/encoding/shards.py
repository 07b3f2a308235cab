"""Prepared shards to encoded shards, in one process: read, decoded by loader workers, encoded, written.

Batches are cut from each prepared shard from its front: the batch that a sample is in, and so the rounding of its
latent, does not depend on which process encodes which shard. While a shard is encoded, the next one is read, and the
one before is written.
"""

import itertools
import os
import signal
from collections import defaultdict, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from diffusion import storage
from diffusion.config.data import ImageSize
from diffusion.datasets.dataset import Tokenize, read_scores
from diffusion.datasets.images import UndecodableImageError, decode_rgb
from diffusion.datasets.loader import BatchLoader
from diffusion.datasets.transforms import ImageTransform, Placement
from diffusion.errors import DataError
from diffusion.formats.data_set import RECORDS
from diffusion.formats.shards import SampleDecoder, ShardFormat, encode_sample, encode_shard, read_shard, shard_name
from diffusion.launch import end_with_parent
from diffusion.models.tokenizers import num_full
from diffusion.preparation.encoding.models import Encoded, Encoder, EncodingModels
from diffusion.preparation.encoding.output import EncodingSettings, ShardRecord, ShardTask, record_name, shard_identity
from diffusion.preparation.metadata import removal_hash
from diffusion.preparation.positions import write_keys
from diffusion.storage import join, shown

PREFETCH_FACTOR = 4
"""Batches that each loader worker holds ready."""

WAITING_BATCHES = 32
"""Encoded batches that may wait to be written."""

_COLUMNS = ("image", "captions", "key")


class EncodedShard(NamedTuple):
    """A prepared shard that is encoded and written."""

    num_samples: int
    damaged: list[str]
    """Sentences, one for each image that cannot be decoded."""
    num_captions: int
    num_full: int
    """Captions that take all tokens: longer ones are cut."""


class Piece(NamedTuple):
    """Consecutive samples of a prepared shard."""

    task: ShardTask
    start: int
    """Index of the first sample in the shard."""
    samples: list[bytes]


class ImageBatch(NamedTuple):
    """A piece with its images decoded; images of blank samples (removed, or damaged) are black."""

    task: ShardTask
    start: int
    images: dict[ImageSize, Tensor]
    """For each size uint8 [B, 3, height, width]."""
    placements: dict[ImageSize, Tensor]
    """For each size int32 [B, 6], see `Placement`."""
    token_ids: Tensor
    """int32 [K, L] of the captions of all samples. A tensor of each sample would be a file descriptor of each."""
    num_captions: list[int]
    """Captions of each sample, K in all."""
    scores: Tensor
    """float32 [B, S]."""
    keys: list[str]
    damaged: dict[int, str]
    """Index in the batch of each image that cannot be decoded, and why."""
    removed: list[int]
    """Indices in the batch of the samples that are removed."""


def encode_shards(
    tasks: Iterable[ShardTask], models: EncodingModels, settings: EncodingSettings, *, device: str, num_workers: int
) -> Generator[EncodedShard, None, None]:
    """Encode shards and write them; the next one is taken and read while one is encoded.

    Yields:
        The shards, in their order, when they are written.

    Raises:
        DataError: A prepared shard is missing or damaged, or latents are not finite.
        MachineError: A shard cannot be read or written.
    """
    encoder, assembler = Encoder(models, device, settings.precision), _Assembler(models, settings)
    options: dict[str, Any] = {"prefetch_factor": PREFETCH_FACTOR} if num_workers else {}
    loader = BatchLoader(
        _DecodedImages(models.tokenize, settings),
        batch_size=None,
        sampler=_pieces(tasks, settings.batch_size),  # pyright: ignore[reportArgumentType]
        num_workers=num_workers,
        pin_memory=encoder.device.type == "cuda",
        worker_init_fn=partial(_end_with_parent, os.getpid()),
        **options,
    )
    writer = ThreadPoolExecutor(1)
    waiting: deque[Future[list[EncodedShard]]] = deque()
    try:
        for batch in loader:
            encoded = encoder.start(batch.images, batch.token_ids)
            waiting.append(writer.submit(assembler.add, batch._replace(images={}), encoded))
            while waiting and (waiting[0].done() or len(waiting) > WAITING_BATCHES):
                yield from waiting.popleft().result()
        for future in waiting:
            yield from future.result()
    finally:
        writer.shutdown(cancel_futures=True)


def _pieces(tasks: Iterable[ShardTask], batch_size: int) -> Iterator[Piece]:
    """Read shards, each while the one before is encoded, and cut them into batches."""
    current: tuple[ShardTask, Future[list[bytes]]] | None = None
    with ThreadPoolExecutor(1) as reader:
        for task in itertools.chain(tasks, [None]):
            following = None if task is None else (task, reader.submit(read_shard, task.folder, task.shard))
            if current is not None:
                samples = current[1].result()
                for start in range(0, len(samples), batch_size):
                    yield Piece(current[0], start, samples[start : start + batch_size])
            current = following


def _end_with_parent(parent: int, _worker: int) -> None:
    end_with_parent(signal.SIGKILL, parent)


class _DecodedImages(Dataset):
    """Decodes and transforms pieces, which are its indices."""

    def __init__(self, tokenize: Tokenize, settings: EncodingSettings) -> None:
        self._tokenize, self._removed, self._scores = tokenize, settings.removed, settings.scores
        self._convert_to_srgb = settings.convert_to_srgb

    def __getitem__(self, piece: Piece) -> ImageBatch:
        task = piece.task
        wanted = (*_COLUMNS, "metadata") if self._scores else _COLUMNS
        decode_sample = SampleDecoder(task.shard.format, wanted)
        transforms = {size: ImageTransform(size=size) for size in task.targets.values()}
        images: dict[ImageSize, list[np.ndarray]] = {size: [] for size in transforms}
        placements: dict[ImageSize, list[Placement]] = {size: [] for size in transforms}
        token_ids, scores, keys, removed = [], [], [], []
        damaged: dict[int, str] = {}
        for i, data in enumerate(piece.samples):
            sample = decode_sample(data)
            captions, image = sample["captions"], None
            if piece.start + i in task.removed or (self._removed and removal_hash(sample["key"]) in self._removed):
                removed.append(i)  # An erased sample has no metadata.
                captions, found = [""], np.full(len(self._scores), np.nan, np.float32)
            else:
                found = read_scores(sample.get("metadata", {}), self._scores)
                try:
                    image = decode_rgb(sample["image"], convert_to_srgb=self._convert_to_srgb)
                except UndecodableImageError as error:
                    damaged[i] = str(error)
            for size, transform in transforms.items():
                images[size].append(np.zeros((3, *size), np.uint8) if image is None else transform(image))
                placements[size].append(transform.placement((size.width, size.height) if image is None else image.size))
            token_ids.append(self._tokenize(captions).astype(np.int32))
            scores.append(found)
            keys.append(sample["key"])
        return ImageBatch(
            task,
            piece.start,
            {size: torch.from_numpy(np.stack(arrays)) for size, arrays in images.items()},
            {size: torch.tensor(of_size, dtype=torch.int32) for size, of_size in placements.items()},
            torch.from_numpy(np.concatenate(token_ids)),
            list(map(len, token_ids)),
            torch.from_numpy(np.stack(scores)),
            keys,
            damaged,
            removed,
        )


class _Assembler:
    """Collects the encoded batches of each shard, which come in their order, and writes it when it is whole."""

    def __init__(self, models: EncodingModels, settings: EncodingSettings) -> None:
        self._models, self._settings = models, settings
        self._formats: dict[ImageSize, ShardFormat] = {}

    def add(self, batch: ImageBatch, encoded: Encoded) -> list[EncodedShard]:
        """Append the samples of a batch; return their shard if that is whole, and written now."""
        if batch.start == 0:
            self._shard = _Shard(batch.task)
        shard = self._shard
        assert batch.start == shard.num_samples, (batch.start, shard.num_samples)
        encoded.wait()
        token_ids, embeddings = _split(batch, batch.token_ids), _split_embeddings(batch, encoded)
        blank = {*batch.damaged, *batch.removed}
        for size, moments in encoded.moments.items():
            arrays = [moment.numpy() for moment in moments if moment is not None]
            finite = np.logical_and.reduce([np.isfinite(array).all((1, 2, 3)) for array in arrays])
            for i, key in enumerate(batch.keys):
                if not finite[i]:
                    raise DataError(f"the VAE gives no finite float16 latent for '{key}': check its weights")
                sample: dict[str, Any] = {"token_ids": token_ids[i], "key": key}
                sample["scores"] = batch.scores[i].numpy()
                sample["placement"] = batch.placements[size][i].numpy()
                for name, array in zip(("latent_mean", "latent_logvar"), arrays, strict=False):
                    sample[name] = np.zeros_like(array[i]) if i in blank else array[i]
                if embeddings is not None:
                    sample["text_embeddings"], sample["pooled_text_embeddings"] = embeddings[i]
                shard.samples[size].append(encode_sample(sample, self._format(size).columns))
        shard.keys += batch.keys
        shard.num_samples += len(batch.keys)
        shard.num_captions += len(batch.token_ids)
        shard.num_full += num_full(batch.token_ids, self._models.empty_ids)
        for i, reason in batch.damaged.items():
            where = f"{shown(batch.task.folder)}, key '{batch.keys[i]}'"
            shard.damaged[batch.start + i] = f"{where} cannot be decoded ({reason}), and could be when it was prepared"
        shard.removed += [batch.start + i for i in batch.removed]
        if shard.num_samples < batch.task.shard.num_samples:
            return []
        for dataset, size in shard.task.targets.items():
            self._write(shard, dataset, size)
        return [EncodedShard(shard.num_samples, list(shard.damaged.values()), shard.num_captions, shard.num_full)]

    def _write(self, shard: "_Shard", dataset: str, size: ImageSize) -> None:
        """Write a whole shard to a data set, and then its record."""
        task, shards, samples, written = shard.task, self._format(size), shard.samples[size], []
        cuts = _cut([4 + len(sample) for sample in samples], self._settings.max_shard_bytes - shards.num_bytes(0))
        for part, (start, end) in enumerate(itertools.pairwise([0, *cuts])):
            name = shard_name(task.number, part=part)
            content, one = encode_shard(samples[start:end], name, shards)
            storage.write(join(dataset, task.name, name), content)
            write_keys(dataset, task.name, one, shard.keys[start:end])
            written.append(one)
        record = ShardRecord(
            source=shard_identity(task.shard),
            samples=shard.num_samples,
            shards=written,
            damaged=sorted(shard.damaged),
            removed_samples=shard.removed,
        )
        record.write(join(dataset, RECORDS, record_name(task.name, task.number)))

    def _format(self, size: ImageSize) -> ShardFormat:
        if size not in self._formats:
            latent = f"ndarray:float16:{','.join(map(str, self._models.latent_shape(size)))}"
            columns = {"latent_mean": latent, "token_ids": "ndarray:int32", "key": "str"}
            columns["placement"] = "ndarray:int32:6"
            if self._settings.scores:
                columns["scores"] = f"ndarray:float32:{len(self._settings.scores)}"
            if not self._settings.mean_only:
                columns["latent_logvar"] = latent
            if self._models.text_encoder is not None:
                columns |= dict.fromkeys(("text_embeddings", "pooled_text_embeddings"), "ndarray:float16")
            self._formats[size] = ShardFormat.of(columns, shard_bytes=self._settings.max_shard_bytes)
        return self._formats[size]


@dataclass
class _Shard:
    """A shard that is not whole yet."""

    task: ShardTask
    num_samples: int = 0
    keys: list[str] = field(default_factory=list)
    samples: dict[ImageSize, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    damaged: dict[int, str] = field(default_factory=dict)
    removed: list[int] = field(default_factory=list)
    num_captions: int = 0
    num_full: int = 0


def _split_embeddings(batch: ImageBatch, encoded: Encoded) -> list[tuple[np.ndarray, np.ndarray]] | None:
    """Return hidden states [K, L, D] and pooled text [K, P] of each sample."""
    if encoded.embeddings is None:
        return None
    if not all(np.isfinite(tensor.numpy()).all() for tensor in encoded.embeddings):
        raise DataError("the text encoder gives embeddings that are not finite in float16: check its weights")
    return list(zip(*(_split(batch, tensor) for tensor in encoded.embeddings), strict=True))


def _split(batch: ImageBatch, of_captions: Tensor) -> list[np.ndarray]:
    """Cut an array of all captions by sample."""
    return np.split(of_captions.numpy(), np.cumsum(batch.num_captions)[:-1])


def _cut(sizes: Sequence[int], limit: int) -> list[int]:
    """Return where each shard ends, so that none exceeds a limit unless one sample does."""
    cuts, total = [], 0
    for i, size in enumerate(sizes):
        if total and total + size > limit:
            cuts.append(i)
            total = 0
        total += size
    return [*cuts, len(sizes)]
