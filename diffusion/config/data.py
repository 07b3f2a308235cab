"""Configuration of the training and validation data."""

from dataclasses import dataclass
from enum import Enum

from omegaconf import MISSING


class Representation(str, Enum):
    """What the training data holds."""

    images = "images"
    latents = "latents"


class Crop(str, Enum):
    """Where a square is cut from a picture after its shorter side was resized to the resolution."""

    centre = "centre"
    random = "random"


class Mixing(str, Enum):
    """Which streams meet in one optimizer step."""

    mixed = "mixed"
    bucket = "bucket"
    groups = "groups"


@dataclass(kw_only=True)
class StreamConfig:
    """One folder of shards, usually one resolution bucket."""

    name: str = MISSING
    """Folder below `data.remote` and `data.local`; the stream's name in logs."""

    remote: str | None = None
    """Where the shards lie, if not below `data.remote`: a path or a URL (s3://, gs://, sftp:// ...)."""

    local: str | None = None
    """Where they are cached, if not below `data.local`."""

    proportion: float | None = None
    """Share of the training mix; for all streams or for none (natural proportions)."""

    repeat: float | None = None
    """How often each sample comes in an epoch; not together with `proportion`."""


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
    """`images`: pictures are decoded and encoded while training. `latents`: `scripts/encode.py` did that."""

    resolution: int = MISSING
    """Side of the square pictures, in pixels."""

    crop: Crop = Crop.centre
    """Where the square is cut; `random` only with `representation: images`."""

    horizontal_flip: float = 0.0
    """Probability of mirroring a picture; only with `representation: images`."""

    global_batch_size: int = MISSING
    """Samples of one optimizer step over all ranks."""

    mixing: Mixing = Mixing.mixed
    """`mixed`: any streams in one batch, all pictures of one shape. `bucket`: one stream per global batch. `groups`:
    several streams in one batch, cut into groups of one stream. Part of what determines the order."""

    group_size: int | None = None
    """Samples of a group, with `mixing: groups` only. A rank gets whole groups, and the microbatch divides a group.
    Part of what determines the order."""

    shuffle: bool = True
    """Shuffle the samples of each epoch."""

    shuffle_algorithm: str = "py1s"
    """`py1s` and `py2s` shuffle within each shard, the others in blocks of `shuffle_block_size` over several shards;
    shards are shuffled always. Part of what determines the order."""

    shuffle_block_size: int = 262144
    """Samples of a canonical node that a shuffle in blocks mixes; part of what determines the order."""

    num_canonical_nodes: int = 128
    """Divisions of the data that the order is built from: a multiple of every world size that is ever to be used."""

    num_workers: int = 8
    """Loader processes per rank; 0 loads in the training process. Not part of what determines the run."""

    prefetch_factor: int = 2
    """Batches that each worker holds ready."""

    predownload: int | None = None
    """Samples that each worker downloads ahead; null is 8 batches."""

    cache_limit: str | None = None
    """Bytes of cache per node such as `500gb`; only for streams that have a remote."""

    download_retry: int = 8
    """Attempts for each shard."""

    download_timeout: float = 30.0
    """Seconds that one attempt may take."""

    validate_hash: str | None = None
    """Hash that shards are checked against when they are downloaded, such as `xxh64`."""

    loader_timeout: float = 900.0
    """Seconds without a batch from a worker after which the run ends with an error."""


@dataclass(kw_only=True)
class ValidationConfig:
    """Held-out data, read with the representation, resolution and centre crop of training."""

    remote: str | None = None
    """Root of the held-out set: a path or a URL. Null: `local` holds it."""

    local: str = MISSING
    """Root of the held-out set on this machine, or its cache."""

    streams: list[StreamConfig] | None = None
    """The folders that are read; null: the names of the training streams."""

    num_samples: int | None = None
    """The first so many samples; null is all."""

    device_batch_size: int = 16
    """Samples per rank and forward pass. Does not enter the result."""
