"""Configuration of `prepare`: from sources to prepared data."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING

from diffusion.config.training import Plugin


class Engine(str, Enum):
    """What runs the workers."""

    processes = "processes"
    ray = "ray"


class Missing(str, Enum):
    """What a filter does with an image that lacks the value it looks at."""

    keep = "keep"
    refuse = "refuse"


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
    """Aspect-ratio buckets of one area, made up."""

    upscale: bool = False
    """With aspect-ratio buckets: take images that are smaller than every bucket, too."""

    min_samples: int | None = None
    """With aspect-ratio buckets: fewest training images of a bucket. Images of one that would hold fewer go to the
    nearest other bucket that they cover. Give `data.group_size` of training, or `data.global_batch_size` with
    `data.mixing: bucket`."""

    refuse_small: bool = False
    """Refuse the images of a bucket that is too small, for the reason `small_bucket`."""


@dataclass(kw_only=True)
class ConditionConfig:
    """A condition on one column."""

    column: str = MISSING
    """A measure, a score, `width`, `height`, or a key of the source's metadata."""

    min: float | None = None
    """Smallest value that is kept."""

    max: float | None = None
    """Largest value that is kept."""

    one_of: list[Any] | None = None
    """The values that are kept; texts are compared as they are."""


@dataclass(kw_only=True)
class FiltersConfig:
    """What is kept. Null or an empty list: not asked."""

    min_shorter_side: int | None = None
    """Pixels."""

    max_aspect_ratio: float | None = None
    """Longer over shorter side."""

    min_aesthetic: float | None = None
    """Smallest score in `aesthetic_column`; the published recipe keeps 4.5 and more."""

    aesthetic_column: str = "aesthetic"
    """A scorer's column, or a key of the source's metadata."""

    languages: list[str] | None = None
    """Codes that are kept, such as `en`; compared in lower case."""

    language_column: str = "language"
    """A scorer's column, or a key of the source's metadata."""

    min_caption_characters: int | None = None
    """Of each caption."""

    max_caption_characters: int | None = None
    """Of each caption."""

    min_caption_words: int | None = None
    """Of each caption; words are separated by white space."""

    max_caption_words: int | None = None
    """Of each caption; words are separated by white space."""

    keywords: list[str] = field(default_factory=list)
    """Images are refused if a caption holds one of these words or phrases, whole and in either case."""

    keyword_columns: list[str] = field(default_factory=list)
    """Keys of the source's metadata in which keywords are looked for, too."""

    licences: list[str] | None = None
    """Licences that are kept; compared in either case."""

    licence_column: str = "license"
    """Key of the source's metadata."""

    conditions: list[ConditionConfig] = field(default_factory=list)
    """Conditions on any column."""

    predicates: list[Plugin] = field(default_factory=list)
    """Filters of your own: objects that are called with a `SampleFacts` and return why it is refused, or None."""

    missing: Missing = Missing.refuse
    """An image without the value that a filter looks at: refused for the reason `missing_COLUMN`, or kept."""


@dataclass(kw_only=True)
class ScorerConfig(Plugin):
    """A scorer, loaded once per worker."""

    column: str = MISSING
    """Where its values go: a key of the sample's metadata."""

    batch_size: int = 32
    """Images of one call. Part of what determines the values, as far as rounding goes."""


@dataclass(kw_only=True)
class CaptionerConfig(Plugin):
    """A captioner, loaded once per worker."""

    mode: CaptionMode = CaptionMode.beside
    """`missing`: caption the images that come without. `beside`: caption all, beside what they have. `instead`:
    caption all, and drop what they have."""

    batch_size: int = 8
    """Images of one call. Part of what determines the captions, as far as rounding goes."""


@dataclass(kw_only=True)
class DuplicatesConfig:
    """Which images count as the same over all sources; the largest of them is kept."""

    exact: bool = True
    """The same bytes."""

    near: bool = True
    """Resized and recompressed copies, found by perceptual hash."""

    max_distance: int = 4
    """Largest number of the 64 bits of the perceptual hash in which near duplicates differ."""


@dataclass(kw_only=True)
class PrepareConfig:
    """A preparation."""

    sources: list[str] = MISSING
    """Folders, tar and parquet files, quoted patterns of them, and the other kinds of sources."""

    out: str = MISSING
    """Folder to write."""

    engine: Engine = Engine.processes
    """`processes`: of this machine. `ray`: of a Ray cluster. Not part of what determines the data."""

    workers: int | None = None
    """Workers; null: one per core. Not part of what determines the data."""

    partition_size: int = 1024
    """Images that one worker takes at a time, where the source does not say. Not part of what determines the data."""

    buckets: BucketsConfig = field(default_factory=BucketsConfig)

    validation_fraction: float = 0.0
    """Share that is held out."""

    seed: int = 17
    """Of the order and of the choice of held-out images."""

    shard_mb: int = 256
    """Size of a shard in MiB."""

    compression: str | None = None
    """Compression of the shards, such as `zstd`; null: none, which suits images."""

    hashes: list[str] = field(default_factory=lambda: ["xxh64"])
    """Hashes of the shards in their index."""

    image_column: str | None = None
    """Column of the images in parquet files; null: the usual names."""

    caption_column: str | None = None
    """Column of the captions in parquet files; null: the usual names."""

    captioner: CaptionerConfig | None = None
    """Writes captions, before anything is scored; null: none."""

    scorers: list[ScorerConfig] = field(default_factory=list)
    """Write columns that filters can look at: aesthetic scores, languages, your own."""

    filters: FiltersConfig = field(default_factory=FiltersConfig)

    duplicates: DuplicatesConfig | None = None
    """Null: duplicates are kept."""
