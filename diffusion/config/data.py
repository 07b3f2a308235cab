"""Configuration of the training and validation data."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from omegaconf import MISSING


class Representation(str, Enum):
    """What the training data holds."""

    images = "images"
    latents = "latents"


class Crop(str, Enum):
    """Which part of an image is kept where its aspect ratio is not that of the size trained at."""

    centre = "centre"
    random = "random"


class Mixing(str, Enum):
    """Which streams meet in one optimizer step."""

    mixed = "mixed"
    bucket = "bucket"
    groups = "groups"


class Shuffling(str, Enum):
    """What is shuffled in each epoch."""

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

    name: str = MISSING
    """Folder below `data.remote` and `data.local`; the stream's name in logs."""

    remote: str | None = None
    """Where the shards lie, if not below `data.remote`: a path or a URL (s3://, gs://, sftp:// ...)."""

    local: str | None = None
    """Where they are cached, if not below `data.local`."""

    endpoint_url: str | None = None
    """Address of the S3 store of this stream's remote; null is that of `S3_ENDPOINT_URL`, or AWS."""

    profile: str | None = None
    """Profile of the AWS configuration files with the credentials for it; null is what boto3 finds."""

    proportion: float | None = None
    """Share of the training mix; for all streams or for none (natural proportions)."""

    repeat: float | None = None
    """How often each sample comes in an epoch; not together with `proportion`."""

    resolution: list[int] | None = None
    """Height and width of its images in pixels; null is that of its name (896x1152), or where the name says none, a
    square of `data.resolution`."""


def named_size(name: str) -> ImageSize | None:
    """Height and width in pixels that a bucket's name says (`896x1152`); None for any other name."""
    match = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", name)
    return ImageSize(int(match[1]), int(match[2])) if match else None


def image_sizes(streams: Sequence[StreamConfig], resolution: int) -> list[ImageSize]:
    """Size of the images of each stream.

    Args:
        streams: the streams; `diffusion.config.checks` has checked that a `resolution` is two numbers.
        resolution: `data.resolution`.
    """
    square = ImageSize(resolution, resolution)
    return [
        ImageSize(*stream.resolution) if stream.resolution else named_size(stream.name) or square for stream in streams
    ]


@dataclass(kw_only=True)
class DataConfig:
    """Training data."""

    remote: str | None = None
    """Root of the prepared (or encoded) data set: a path or a URL. Null: `local` holds it already."""

    local: str = MISSING
    """Root of the data set on this machine, or of its cache where `remote` is given."""

    streams: list[StreamConfig] = MISSING
    """The folders that are mixed."""

    representation: Representation = Representation.images
    """`images`: images are decoded and encoded while training. `latents`: `scripts/encode.py` did that."""

    text_embeddings: bool = False
    """Take the text encoder's output from the data instead of running it; only with `representation: latents` that were
    encoded with `--text-embeddings` (158 kB per caption of SD2)."""

    resolution: int = MISSING
    """Side of the square images, in pixels; streams may have a `resolution` of their own."""

    crop: Crop = Crop.centre
    """What is cut from an image that was resized to cover its size; `random` only with `representation: images`."""

    horizontal_flip: float = 0.0
    """Probability of mirroring an image; only with `representation: images`."""

    global_batch_size: int = MISSING
    """Samples of one optimizer step over all ranks."""

    mixing: Mixing = Mixing.mixed
    """`mixed`: any streams in one batch, all images of one size. `bucket`: one stream per global batch. `groups`:
    several streams in one batch, cut into groups of one stream. Part of what determines the order."""

    group_size: int | None = None
    """Samples of a group, with `mixing: groups` only. A rank gets whole groups, and the microbatch divides a group.
    Part of what determines the order."""

    shuffle: Shuffling = Shuffling.shard
    """`shard`: shards, and samples within each shard. `block`: samples in blocks of `shuffle_block_size` over several
    shards. `none`: samples come in the order in which they are stored. Part of what determines the order."""

    shuffle_block_size: int = 262144
    """Samples of a canonical node that `shuffle: block` mixes; without effect otherwise."""

    num_canonical_nodes: int = 128
    """Divisions of the data that the order is built from, each with shards of its own: best a multiple of every number
    of nodes that is ever to be used, so that each node reads shards of its own. Part of what determines the order."""

    num_workers: int = 8
    """Loader processes per rank; 0 loads in the training process. Not part of what determines the run."""

    prefetch_factor: int = 2
    """Batches that each worker holds ready."""

    predownload: int | None = None
    """Samples that each worker downloads ahead, of the next epoch as well when this one ends; null is 8 batches."""

    cache_limit: str | None = None
    """Bytes of cache per node such as `500gb`; only for streams that have a remote. Shards that are being downloaded at
    the same time may exceed it."""

    download_retry: int = 8
    """Attempts for each shard, at least 1; the pauses between them grow from 1 s to 30 s."""

    download_timeout: float = 30.0
    """Seconds without an answer from the store after which an attempt has failed."""

    validate_hash: str | None = None
    """Hash that shards are checked against, such as `xxh64`, when they are downloaded and when they are first opened in
    a start; null: the one that the index holds. Without any in the index sizes are compared only."""

    loader_timeout: float = 900.0
    """Seconds without a batch from a worker after which the run ends with an error."""


@dataclass(kw_only=True)
class ValidationConfig:
    """Held-out data, read with the representation, sizes and centre crop of training."""

    remote: str | None = None
    """Root of the held-out set: a path or a URL. Null: `local` holds it."""

    local: str = MISSING
    """Root of the held-out set on this machine, or its cache."""

    streams: list[StreamConfig] | None = None
    """The folders that are read; null: the names (and sizes) of the training streams."""

    num_samples: int | None = None
    """So many samples, the first of each stream in proportion to what it holds; null is all."""

    device_batch_size: int = 16
    """Samples per rank and forward pass. Does not enter the result."""
