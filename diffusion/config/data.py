"""Configuration of the training and validation data."""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from omegaconf import MISSING

from diffusion.config.fields import MAX_SECONDS, bounded, location, parse_size
from diffusion.errors import ConfigurationError

HASHES = {name for name in hashlib.algorithms_available if hasattr(hashlib, name) and not name.startswith("shake_")} | {
    "xxh32",
    "xxh64",
    "xxh3_64",
    "xxh128",
    "xxh3_128",
}
"""Hashes that Streaming knows, except shake, whose length varies."""


class Representation(str, Enum):
    """Representation of the training data."""

    images = "images"
    latents = "latents"


class Crop(str, Enum):
    """Crop of an image whose aspect ratio is not that of the training size."""

    centre = "centre"
    random = "random"


class Mixing(str, Enum):
    """Mixing of streams within an optimizer step."""

    mixed = "mixed"
    bucket = "bucket"
    groups = "groups"


class Shuffling(str, Enum):
    """Shuffling of each epoch."""

    shard = "shard"
    block = "block"
    none = "none"


class ImageSize(NamedTuple):
    """Size of an image in pixels."""

    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.height} x {self.width}"


@dataclass(kw_only=True)
class StreamConfig:
    """One folder of shards, usually one resolution bucket."""

    name: str = location(MISSING)
    """Folder below `remote` and `local` of its section; the name of the stream in logs."""

    remote: str | None = location(None)
    """Location of the shards, if not below `data.remote`: a path or a URI (s3://, gs://, sftp:// ...)."""

    local: str | None = location(None, local=True)
    """Folder of their cache, if not below `data.local`."""

    endpoint_url: str | None = None
    """Address of the S3 store of `remote`; null: `S3_ENDPOINT_URL`, or AWS."""

    profile: str | None = None
    """Profile in the AWS configuration files whose credentials are used; null: the default of boto3."""

    proportion: float | None = bounded(None, above=0)
    """Share of the training mix; for all streams or for none (natural proportions)."""

    repeat: float | None = bounded(None, above=0)
    """Number of times that each sample is seen in an epoch; not together with `proportion`."""

    resolution: list[int] | None = bounded(None, min=1)
    """Height and width of the images in pixels; null: the size in the name of the stream (896x1152), or, if the name
    has none, a square of `data.resolution`."""

    def problems(self, key: str) -> Iterator[str]:
        """Describe wrong relations."""
        if self.proportion is not None and self.repeat is not None:
            yield f"{key} has a proportion and a repeat, which both set the frequency of '{self.name}'. Keep one."
        if self.endpoint_url is not None and not re.match(r"https?://[^/]", self.endpoint_url):
            yield (
                f"{key}.endpoint_url is '{self.endpoint_url}', but must be an address such as "
                "https://objects.example.com."
            )
        if self.resolution is None:
            return
        named = named_size(self.name)
        if len(self.resolution) != 2:
            yield f"{key}.resolution is {self.resolution}, but must be height and width in pixels, as in [896, 1152]."
        elif named is not None and tuple(self.resolution) != named:
            yield (
                f"{key}.resolution is {self.resolution}, but the name '{self.name}' says {named}. Remove the "
                "resolution, or rename the folder."
            )


def _stream_problems(streams: Sequence[StreamConfig], root: str | None, key: str) -> Iterator[str]:
    """Describe wrong relations between streams, whose common remote is `root`."""
    if not streams:
        yield f"{key} is empty. Name at least one folder of shards, as in {key}=[{{name: 256-512}}]."
    for name, count in Counter(stream.name for stream in streams if stream.name != MISSING).items():
        if count > 1:
            yield f"{key} has '{name}' {count} times. Name each stream once; `repeat` makes it more frequent."
    without = [stream.name for stream in streams if stream.proportion is None]
    if 0 < len(without) < len(streams):
        yield f"{key} has no proportion for {', '.join(without)}. Give one to all streams, or to none."
    for index, stream in enumerate(streams):
        remote = stream.remote or root
        given = [name for name in ("endpoint_url", "profile") if getattr(stream, name) is not None]
        if given and (remote is None or not remote.startswith("s3://")):
            yield (
                f"{key}.{index} has {' and '.join(given)}, which belong to an S3 store, but its remote is {remote}. "
                "Set an s3:// remote, or remove them."
            )


def named_size(name: str) -> ImageSize | None:
    """Height and width in pixels from the name of a bucket (`896x1152`); None for any other name."""
    match = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", name)
    return ImageSize(int(match[1]), int(match[2])) if match else None


def image_sizes(streams: Sequence[StreamConfig], resolution: int) -> list[ImageSize]:
    """Sizes of the images of streams, whose own `resolution`, if there is one, is two numbers."""
    square = ImageSize(resolution, resolution)
    return [
        ImageSize(*stream.resolution) if stream.resolution else named_size(stream.name) or square for stream in streams
    ]


@dataclass(kw_only=True)
class DataConfig:
    """Training data."""

    remote: str | None = location(None)
    """Root of the prepared (or encoded) data set: a path or a URI. Null: `local` has the data set."""

    local: str = location(MISSING, local=True)
    """Root of the data set on this machine, or of its cache if `remote` is set."""

    streams: list[StreamConfig] = location(MISSING)
    """The folders that are mixed."""

    representation: Representation = Representation.images
    """`images`: images are decoded and encoded during training. `latents`: `scripts/encode.py` encoded them before."""

    text_embeddings: bool = False
    """Read the text encoder's output from the data instead of computing it; only with `representation: latents` that
    were encoded with `--text-embeddings` (158 kB per caption of SD2)."""

    caption_weights: list[float] | None = bounded(None, min=0, max=1e100)
    """Relative frequencies of an image's first, second ... caption, one of which is drawn in each epoch: `[1, 4]` takes
    the second of two (a captioner's, with `captioner.mode: beside` and one caption of the source) four times of five.
    Captions beyond the last weight are never drawn. Null: all alike."""

    resolution: int = bounded(MISSING, min=1)
    """Side of the square images, in pixels; streams may have a `resolution` of their own."""

    crop: Crop = Crop.centre
    """Crop of an image that was resized to cover its size; `random` only with `representation: images`."""

    horizontal_flip: float = bounded(0.0, min=0, max=1)
    """Probability of mirroring an image; only with `representation: images`."""

    global_batch_size: int = bounded(MISSING, min=1, max=2**32)
    """Samples of one optimizer step over all ranks."""

    mixing: Mixing = Mixing.mixed
    """`mixed`: any streams in one batch, all images of one size. `bucket`: one stream per global batch. `groups`:
    several streams in one batch, cut into groups of one stream. Determines the order of samples."""

    group_size: int | None = bounded(None, min=1)
    """Samples of a group, with `mixing: groups` only. A rank gets whole groups, and the microbatch divides a group.
    Determines the order of samples."""

    shuffle: Shuffling = Shuffling.shard
    """`shard`: shards, and samples within each shard. `block`: samples in blocks of `shuffle_block_size` over several
    shards. `none`: samples come in the order in which they are stored, and those that an epoch drops never come.
    Determines the order of samples."""

    shuffle_block_size: int = bounded(262144, min=1)
    """Samples of a canonical node that `shuffle: block` mixes; without effect otherwise."""

    num_canonical_nodes: int = bounded(128, min=1)
    """Partitions of the data that the order is built from, each with shards of its own: best a multiple of every number
    of nodes that will be used, so that each node reads shards of its own. Determines the order of samples."""

    num_workers: int = bounded(8, min=0)
    """Loader processes per rank; 0 loads in the training process. Does not change the run."""

    prefetch_factor: int = bounded(2, min=1)
    """Batches that each worker prefetches."""

    predownload: int | None = bounded(None, min=1)
    """Samples that each worker downloads ahead, also of the next epoch when this one ends; null: 8 batches."""

    cache_limit: str | None = None
    """Size of the cache per node, such as `500gb` (1 gb is 2^30 bytes); only for streams with a remote. Concurrent
    downloads may exceed it."""

    download_attempts: int = bounded(8, min=1)
    """Attempts for each shard; the pauses between them grow from 0.5 s to 15 s."""

    download_timeout: float = bounded(30.0, above=0, max=MAX_SECONDS)
    """Seconds without a response from the store after which an attempt fails."""

    validate_hash: str | None = None
    """Hash that shards are checked against, such as `xxh64`, after the download and at the first use in a start; null:
    the hash in the index. Without one in the index, only sizes are compared."""

    loader_timeout: float = bounded(540.0, min=0, max=MAX_SECONDS)
    """Seconds without a batch from a worker after which the run ends with an error. Below `trainer.dist_timeout`: the
    rank whose storage is slow reports it before the collectives of the others end. 0: none."""

    @property
    def known_streams(self) -> list[StreamConfig]:
        """Streams; none while they are missing, as beside a plug-in."""
        return self.streams if isinstance(self.streams, list) else []

    @property
    def known_sizes(self) -> list[ImageSize]:
        """Image sizes of the streams, each once; that of `resolution` without streams."""
        square = ImageSize(self.resolution, self.resolution)
        return sorted(set(image_sizes(self.known_streams, self.resolution))) or [square]

    def problems(self, key: str) -> Iterator[str]:
        """Describe wrong relations."""
        if self.caption_weights is not None and not any(self.caption_weights[:1]):
            yield (
                f"{key}.caption_weights is {self.caption_weights}, but the first caption, which may be the only one, "
                "needs a weight above 0. Set one, such as 0.01, or null."
            )
        if isinstance(self.streams, list):
            yield from _stream_problems(self.streams, self.remote, f"{key}.streams")
        yield from self._representation_problems(key)
        yield from self._mixing_problems(key)
        if self.validate_hash is not None and self.validate_hash not in HASHES:
            yield f"{key}.validate_hash is '{self.validate_hash}', an unknown hash. Use xxh64, or null."
        if self.cache_limit is not None:
            try:
                parse_size(self.cache_limit, f"{key}.cache_limit")
            except ConfigurationError as error:
                yield str(error)
            for stream in self.known_streams if self.remote is None else []:
                if stream.remote is None:
                    yield (
                        f"{key}.cache_limit is '{self.cache_limit}', but stream '{stream.name}' has no remote: "
                        f"eviction would delete the only copy. Set {key}.cache_limit=null, or a remote."
                    )

    def _representation_problems(self, key: str) -> Iterator[str]:
        if self.representation is Representation.images:
            if self.text_embeddings:
                yield (
                    f"{key}.text_embeddings is true with {key}.representation images, but embeddings are stored with "
                    f"latents. Set {key}.representation=latents, or {key}.text_embeddings=false."
                )
            return
        remedy = f"Set {key}.representation=images, or change it when encoding."
        if self.crop is Crop.random:
            yield f"{key}.crop is random with {key}.representation latents, whose crop is fixed. {remedy}"
        if self.horizontal_flip > 0:
            yield (
                f"{key}.horizontal_flip is {self.horizontal_flip} with {key}.representation latents: a mirrored latent "
                f"is not the latent of the mirrored image. {remedy}"
            )

    def _mixing_problems(self, key: str) -> Iterator[str]:
        size, group = self.global_batch_size, self.group_size
        if self.mixing is Mixing.groups:
            if group is None or size % group:
                divisors = ", ".join(map(str, legal_world_sizes(size)))
                yield (
                    f"{key}.group_size is {group}, but with {key}.mixing groups must divide {key}.global_batch_size "
                    f"{size}. Use one of {divisors}."
                )
        elif group is not None:
            yield f"{key}.group_size is {group}, but {key}.mixing is {self.mixing.value}. Set {key}.group_size=null."
        are_sizes = all(len(stream.resolution or [0, 0]) == 2 for stream in self.known_streams)
        if self.mixing is Mixing.mixed and are_sizes and len(sizes := self.known_sizes) > 1:
            yield (
                f"{key}.mixing is mixed, but {key}.streams has images of {', '.join(map(str, sizes))} pixels, and a "
                f"batch has one size. Set {key}.mixing=bucket, or {key}.mixing=groups with {key}.group_size."
            )


@dataclass(kw_only=True)
class ValidationConfig:
    """Validation data, with the representation, sizes and centre crop of training."""

    remote: str | None = location(None)
    """Root of the validation set: a path or a URI. Null: `local` has it."""

    local: str = location(MISSING, local=True)
    """Root of the validation set on this machine, or its cache."""

    streams: list[StreamConfig] | None = location(None)
    """The folders to read; null: the names (and sizes) of the training streams."""

    num_samples: int | None = bounded(None, min=1)
    """Number of samples, the first of each stream in proportion to its size; null: all."""

    device_batch_size: int = bounded(16, min=1)
    """Samples per rank and forward pass. Does not change the result."""

    def problems(self, key: str) -> Iterator[str]:
        """Describe wrong relations."""
        if isinstance(self.streams, list):
            yield from _stream_problems(self.streams, self.remote, f"{key}.streams")
            for i, stream in enumerate(self.streams):
                if stream.proportion is not None or stream.repeat is not None:
                    yield f"{key}.streams.{i} has a proportion or repeat, but a sample is seen once. Remove it."


def group_size(data: DataConfig) -> int:
    """Samples that must stay on one rank: a group, or 1 without groups or if a group does not divide the batch."""
    size = data.group_size if data.mixing is Mixing.groups else None
    return size if size is not None and size > 0 and data.global_batch_size % size == 0 else 1


def legal_world_sizes(global_batch_size: int, unit_size: int = 1) -> list[int]:
    """World sizes that give each rank the same number of whole units (groups or samples)."""
    units = global_batch_size // unit_size
    small = [size for size in range(1, math.isqrt(units) + 1) if units % size == 0]
    return sorted({*small, *(units // size for size in small)})


def microbatch_sizes(data: DataConfig, world_size: int) -> list[int]:
    """Possible samples of a forward pass: the divisors of a rank's batch or of a group.

    The world size divides the batch.
    """
    share = max(1, data.global_batch_size // world_size)
    return legal_world_sizes(group_size(data) if data.mixing is Mixing.groups else share)


def microbatch_size(data: DataConfig, limit: int | None, world_size: int) -> int:
    """Samples of a forward pass: the largest of `microbatch_sizes` up to a limit."""
    return max(size for size in microbatch_sizes(data, world_size) if limit is None or size <= limit)
