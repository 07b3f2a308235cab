"""Configuration of `prepare`: from sources to prepared data."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from diffusion.chat import ServerConfig
from diffusion.config.fields import MAX_SECONDS, MAX_SEED, bounded, location
from diffusion.config.secrets import redact
from diffusion.config.training import Plugin
from diffusion.errors import ConfigurationError

STAGES = ("scan", "score", "select", "write")
"""Stages of a preparation, in their order."""


class Engine(str, Enum):
    """Engine of the workers."""

    processes = "processes"
    ray = "ray"


class Missing(str, Enum):
    """Treatment of an image without the value that a filter needs."""

    keep = "keep"
    reject = "reject"


class CaptionMode(str, Enum):
    """Which images are captioned, and what becomes of the captions that they came with."""

    missing = "missing"
    beside = "beside"
    instead = "instead"


@dataclass(kw_only=True)
class AreaConfig:
    """Aspect-ratio buckets of about the same area."""

    side: int = 1024
    """Side of the square of that area, in pixels."""

    step: int = 64
    """Heights and widths are multiples of it."""

    max_ratio: float = 2.0
    """Largest ratio of the longer to the shorter side."""


@dataclass(kw_only=True)
class BucketsConfig:
    """How images are divided; one of `preset`, `edges`, `sizes` and `area`."""

    preset: str | None = None
    """`sd2`: edges 256, 512, 768, 1024. `sdxl`: the aspect ratios of SDXL at 1024 px. Null and nothing else: `sd2`."""

    edges: list[int] | None = None
    """Lowest shorter side of each bucket in pixels, ascending; folders `256-512`, `1024-up`."""

    sizes: list[str] | None = None
    """Aspect-ratio buckets as HEIGHTxWIDTH; folders of the same names."""

    area: AreaConfig | None = None
    """Aspect-ratio buckets generated for one area."""

    upscale: bool = False
    """With aspect-ratio buckets: take images that are smaller than every bucket, too."""

    min_samples: int | None = bounded(None, min=0)
    """With aspect-ratio buckets: fewest training images of a bucket. Images of one that would hold fewer go to the
    nearest other bucket that they cover. Give `data.group_size` of training, or `data.global_batch_size` with
    `data.mixing: bucket`."""

    reject_small: bool = False
    """Reject the images of a bucket that is too small, for the reason `small_bucket`."""


@dataclass(kw_only=True)
class ConditionConfig:
    """A condition on one column."""

    column: str = MISSING
    """A measure, a score, `width`, `height`, or a key of the source's metadata."""

    min: float | None = bounded(None)
    """Smallest value that is kept."""

    max: float | None = bounded(None)
    """Largest value that is kept."""

    one_of: list[Any] | None = None
    """The values that are kept; texts are compared as they are."""

    def problems(self, key: str) -> Iterator[str]:
        """Describe a condition without a column, or without limits or values that can be kept."""
        if self.column in ("", MISSING):
            yield f"{key}.column is missing: give a measure, a score or a key of the metadata"
        elif self.one_of == [] or (self.min is None and self.max is None) == (self.one_of is None):
            yield f"{key} on '{self.column}': give one_of, or min and max or one of them"
        yield from _order_problems(f"{key}.min", self.min, f"{key}.max", self.max)


@dataclass(kw_only=True)
class FiltersConfig:
    """Conditions on the images that are kept. Null or an empty list: no condition."""

    min_shorter_side: int | None = bounded(None, min=1)
    """Pixels."""

    max_aspect_ratio: float | None = bounded(None, min=1)
    """Longer over shorter side."""

    min_aesthetic: float | None = bounded(None)
    """Smallest score in `aesthetic_column`; the published recipe keeps 4.5 and more."""

    aesthetic_column: str = "aesthetic"
    """A scorer's column, or a key of the source's metadata."""

    languages: list[str] | None = None
    """Codes that are kept, such as `en`; compared in lower case."""

    language_column: str = "language"
    """A scorer's column, or a key of the source's metadata."""

    min_caption_characters: int | None = bounded(None, min=1)
    """Minimum of each caption."""

    max_caption_characters: int | None = bounded(None, min=1)
    """Maximum of each caption."""

    min_caption_words: int | None = bounded(None, min=1)
    """Minimum of each caption; words are separated by white space."""

    max_caption_words: int | None = bounded(None, min=1)
    """Maximum of each caption; words are separated by white space."""

    keywords: list[str] = field(default_factory=list)
    """Images are rejected if a caption holds one of these words or phrases, whole and in either case; in
    Korean, and in scripts that do not separate words by spaces, such as Chinese, also as a part of a word."""

    keyword_columns: list[str] = field(default_factory=list)
    """Keys of the source's metadata that are searched for keywords, too."""

    licences: list[str] | None = None
    """Licences that are kept; compared in either case."""

    licence_column: str = "license"
    """Key of the source's metadata."""

    conditions: list[ConditionConfig] = field(default_factory=list)
    """Conditions on any column."""

    missing: Missing = Missing.reject
    """An image without the value that a filter looks at: rejected for the reason `missing_COLUMN`, or kept."""

    def problems(self, key: str) -> Iterator[str]:
        """Describe conditions that no image passes, or that lack a part."""
        for unit in ("characters", "words"):
            low, high = f"min_caption_{unit}", f"max_caption_{unit}"
            yield from _order_problems(f"{key}.{low}", getattr(self, low), f"{key}.{high}", getattr(self, high))
        if not all(word.strip() for word in self.keywords):
            yield f"{key}.keywords holds an empty text, which is in every caption; remove it"
        if self.keyword_columns and not self.keywords:
            yield f"{key}.keyword_columns are given, but {key}.keywords are not; give both"
        for name in ("licences", "languages"):
            if getattr(self, name) == []:
                yield f"{key}.{name} is an empty list, which no image passes; give some, or null"


def _order_problems(low_key: str, low: float | None, high_key: str, high: float | None) -> Iterator[str]:
    if low is not None and high is not None and low > high:
        yield f"{low_key} is {low} and {high_key} is {high}: no image passes both"


@dataclass(kw_only=True)
class _ImagePlugin(Plugin):
    num_gpus: float = bounded(0.0, min=0.0)
    """GPUs of a worker, or the share of one: 0.25 puts four workers on each. With 0 it computes on the CPU."""

    def problems(self, key: str) -> Iterator[str]:
        """Describe secrets in the arguments."""
        if redact(self.arguments) != self.arguments:
            yield f"{key}.arguments holds a secret, but is stored with the data. Read it from an environment variable."


@dataclass(kw_only=True)
class ScorerConfig(_ImagePlugin):
    """A scorer, loaded once per worker."""

    column: str = MISSING
    """Column of its values, for filters and the samples' metadata."""

    batch_size: int = bounded(32, min=1)
    """Images of one call. It determines the values as far as rounding goes."""


CHAT_CAPTIONER = "diffusion.preparation.chat_captions.ChatCaptioner"


@dataclass(kw_only=True)
class ChatCaptionsConfig:
    """Captions by a vision-language model behind a server."""

    server: ServerConfig = field(default_factory=ServerConfig)

    model: str = MISSING
    """Name by which the server knows the model, and by which the data set does."""

    words: list[int] = bounded([12, 50, 150], min=1)
    """Length of each caption, about: an image gets so many captions, in this order."""

    prompt: str = (
        "Describe this image for somebody who has to paint it: what it shows, how many, colours, positions, background,"
        " style, light, and written words as they are. State only what can be seen, without introduction."
    )
    """Request of each image. `{captions}` in it stands for the captions that the image came with. What the answer has
    to look like is added to it."""

    max_side: int = bounded(768, min=32)
    """Longer side in pixels to which images are reduced before they are sent, as JPEG."""

    temperature: float | None = bounded(0.2, min=0)
    """Temperature of the first answer, and at least 0.7 after an unusable one. Null: not sent."""

    max_tokens: int | None = bounded(1024, min=1)
    """Longest answer, in tokens; null: not sent."""

    structured: bool = True
    """Ask the server to keep to the JSON schema (`response_format`). Answers are checked in any case."""

    options: dict[str, Any] = field(default_factory=dict)
    """Further keys of each request, such as `{chat_template_kwargs: {enable_thinking: false}}`."""


@dataclass(kw_only=True)
class CaptionerConfig(_ImagePlugin):
    """A captioner, loaded once per worker."""

    path: str = CHAT_CAPTIONER
    """Import path of a class or function, `package.module.Name`, which is called with `arguments`; by default the
    captioner of `chat`."""

    chat: ChatCaptionsConfig | None = None
    """Captions by a server; null: by the captioner at `path`."""

    mode: CaptionMode = CaptionMode.beside
    """`missing`: caption the images without captions. `beside`: caption all, and keep the captions that they have.
    `instead`: caption all, and drop the captions that they have."""

    batch_size: int = bounded(8, min=1)
    """Images of one call. It determines the captions as far as rounding goes."""

    def problems(self, key: str) -> Iterator[str]:
        """Describe what is missing or given twice, and secrets."""
        yield from super().problems(key)
        if (self.chat is None) != (self.path != CHAT_CAPTIONER):
            yield f"{key}: give one of `path`, a captioner of this machine, and `chat`, a server."
        if self.chat is not None and not self.chat.words:
            yield f"{key}.chat.words is empty, but gives the length of each caption. Set it to [50]."
        if self.chat is not None and redact(self.chat.options) != self.chat.options:
            yield f"{key}.chat.options holds a secret, but is stored with the data. Use {key}.chat.server.key_variable."


@dataclass(kw_only=True)
class DuplicatesConfig:
    """Which images count as the same over all sources; the largest of them is kept."""

    exact: bool = True
    """The same bytes."""

    near: bool = True
    """Resized and recompressed copies, found by perceptual hash."""

    max_distance: int = bounded(4, min=0, max=16)
    """Largest number of the 64 bits of the perceptual hash in which near duplicates differ. The search takes 6 times as
    long at 6 and 200 times at 10."""


@dataclass(kw_only=True)
class LimitsConfig:
    """Limits of a single image; beyond one it is rejected as `too_large`."""

    max_decoded_mb: int = bounded(640, min=1, max=2048)
    """Memory in MiB of the decoded image, at 4 bytes a pixel: 640 are 167 megapixels. A worker takes up to three times
    that; with transparency or a colour profile, five times; of an animated WebP, six times."""

    max_decoding_seconds: int = bounded(120, min=1, max=MAX_SECONDS)
    """CPU time of decoding the image; beyond it the worker is ended and the image rejected as `undecodable`. Likewise
    of reading it from its file, where the rest of the file or partition is rejected as `damaged_file`. It needs two
    `workers` or more, and not Ray. Choose it far above what sound images take on any of your machines."""

    max_image_mb: int = bounded(512, min=1, max=512)
    """Size of the image file in MiB."""

    max_jpeg_scans: int = bounded(100, min=1)
    """Scans of a progressive JPEG: each is decoded over the whole image."""

    max_caption_characters: int = bounded(20_000, min=1)
    """Characters of each caption."""

    max_captions_kb: int = bounded(256, min=1)
    """Size in KiB of the captions of an image together, where there are several."""

    max_word_characters: int = bounded(1_000, min=1)
    """Characters without white space in a caption: tokenizers take time by their square."""

    max_metadata_kb: int = bounded(256, min=1)
    """Size in KiB of what the source knows of an image beside captions, as JSON; also of its .json or table row."""


@dataclass(kw_only=True)
class RayConfig:
    """Use of a Ray cluster, with `engine: ray`."""

    address: str | None = None
    """Address of the cluster; null: `RAY_ADDRESS`, else a cluster of this machine."""

    concurrency: int | None = bounded(None, min=1)
    """Actors; null: as many as the cluster has CPUs (or GPUs, where each actor has some)."""

    remote_args: dict[str, Any] = field(default_factory=dict)
    """Resources and options of each actor, as of `ray.remote`: `num_cpus`, `num_gpus`, `memory`, `resources`."""


@dataclass(kw_only=True)
class SourceConfig:
    """A source with settings of its own."""

    path: str = MISSING
    """Folder, file, quoted pattern, URL or `hf-dataset:NAME`."""

    image_column: str | None = None
    """Column of the images in a table; null: the usual names."""

    caption_column: str | None = None
    """Column of the captions in a table; null: the usual names."""

    def __post_init__(self) -> None:
        if not self.path.strip():  # Else it would be the working directory.
            raise ConfigurationError("sources: a path is empty. Give a folder, a file, a quoted pattern or a URL")
        self.path = os.path.expanduser(self.path)  # noqa: PTH111 - it may be a URL


@dataclass(kw_only=True)
class PrepareConfig:
    """A preparation."""

    sources: list[Any] = MISSING
    """Folders, tar and parquet files, quoted patterns of them, and the other kinds of sources; or mappings with the
    keys of `SourceConfig`: `path`, `image_column`, `caption_column`."""

    out: str = location(MISSING)
    """Folder to write: a path, or `s3://bucket/prefix`."""

    engine: Engine = Engine.processes
    """`processes`: of this machine. `ray`: of a Ray cluster. It does not determine the data."""

    workers: int | None = bounded(None, min=1)
    """Processes; null: one per core. It does not determine the data."""

    ray: RayConfig = field(default_factory=RayConfig)

    partition_size: int | None = bounded(None, min=1)
    """Images of a partition, where the source can be cut freely (a folder of images, a table); null: 1,024, or fewer
    in a small source."""

    buckets: BucketsConfig = field(default_factory=BucketsConfig)

    validation_fraction: float = bounded(0.0, min=0.0, below=1.0)
    """Share of the images for validation; whether an image is one depends on its key and the seed."""

    seed: int = bounded(17, min=0, max=MAX_SEED)
    """Seed of the order and of the choice of validation images."""

    shard_mb: float = bounded(256.0, above=0, below=2048)
    """Size of a shard in MiB."""

    window_mb: float = bounded(1024.0, above=0)
    """Images in MiB that are shuffled together: a worker holds so many in memory, or in `scratch`. It determines the
    order. Larger windows mix more partitions of the sources in each shard."""

    scratch: str | None = location(None, local=True)
    """Folder of a fast disk for the images of a window; null: memory."""

    compression: str | None = None
    """Compression of the shards, such as `zstd`; null: none, which suits images."""

    hashes: list[str] = field(default_factory=lambda: ["xxh64"])
    """Hashes of the shards in their index."""

    image_column: str | None = None
    """Column of the images, or of their file names, in tables of all sources; null: the usual names."""

    caption_column: str | None = None
    """Column of the captions in tables of all sources, or key in .json files; null: the usual names."""

    limits: LimitsConfig = field(default_factory=LimitsConfig)

    convert_to_srgb: bool = True
    """Convert images to sRGB by their ICC profile (Display P3, Adobe RGB) whenever they are decoded; the files stay as
    they came. Data that an earlier version prepared stays without it when it grows."""

    captioner: CaptionerConfig | None = None
    """Writes captions, before any image is scored; null: none."""

    scorers: list[ScorerConfig] = field(default_factory=list)
    """Write columns for filters: aesthetic scores, languages, your own."""

    filters: FiltersConfig = field(default_factory=FiltersConfig)

    where: str | None = None
    """Condition in SQL (DuckDB) on the columns of the metadata and of scorers, and on the keys of the sources'
    metadata: `aesthetic >= 4.5 and language = 'en'`. Images for which it is not true are rejected as `where`."""

    duplicates: DuplicatesConfig | None = None
    """Null: duplicates are kept."""

    def __post_init__(self) -> None:
        self.out = self.out and os.path.expanduser(self.out)  # noqa: PTH111 - likewise
        self.scratch = self.scratch and os.path.expanduser(self.scratch)  # noqa: PTH111

    def problems(self, key: str) -> Iterator[str]:
        """Describe what is wrong on this machine."""
        if self.out is not None and self.out.startswith("~"):
            yield f"out is {self.out}, but there is no such user. Write the path in full."
        if self.scratch is not None and not Path(self.scratch).is_dir():
            yield f"scratch is {self.scratch}, but there is no such folder. Make it, or choose another one."
