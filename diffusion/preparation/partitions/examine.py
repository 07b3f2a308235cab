"""Records decoded, measured, captioned, scored and filtered, a bounded number of images in memory at a time."""

import functools
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from PIL import Image

from diffusion.config.loading import from_dict, to_dict
from diffusion.datasets.buckets import Buckets
from diffusion.datasets.images import UndecodableImageError, decode_reduced, decode_rgb
from diffusion.preparation.config import CaptionerConfig, FiltersConfig, PrepareConfig, ScorerConfig
from diffusion.preparation.partitions.output import Facts
from diffusion.preparation.records import Reason, Record, Refused
from diffusion.preparation.selection.filters import Filter, SampleFacts, build_filters
from diffusion.preparation.selection.measures import REDUCED_SIDE, measure
from diffusion.preparation.selection.plugins import Plugins, load_plugins

_BATCH_IMAGES = 64
_BATCH_PIXELS = 2**26
"""About 200 MB of decoded images wait for the plug-ins."""


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What is done with each image.

    Attributes:
        buckets: The division into buckets.
        captioner: Writes captions; None for none.
        scorers: Write columns.
        filters: What is kept.
    """

    buckets: Buckets
    captioner: CaptionerConfig | None = None
    scorers: list[ScorerConfig] = field(default_factory=list)
    filters: FiltersConfig = field(default_factory=FiltersConfig)

    def tools(self) -> tuple[Plugins, list[Filter]]:
        """Load plug-ins and filters, once per process.

        Raises:
            ConfigurationError: One cannot be loaded.
        """
        config = PrepareConfig(sources=[], out="", captioner=self.captioner, scorers=self.scorers, filters=self.filters)
        return _load(json.dumps(to_dict(config), sort_keys=True))


@dataclass
class Examined:
    """One image and what became of it.

    Attributes:
        record: The record, with the captions and the metadata that will be stored; None if the source had none.
        facts: What is known of it; `reason` and `detail` are not filled in.
        refused: Why it is refused; None if it is kept.
    """

    record: Record | None
    facts: Facts
    refused: Refused | None = None


def examine_records(records: Iterable[Record | Refused], examination: Examination) -> Iterator[Examined]:
    """Examine what a source yields.

    Images wait for each other only where plug-ins take them in batches: at most 64, or 64 million pixels and one
    image more.

    Args:
        records: Records, and refusals, which are passed on.
        examination: What is done.

    Yields:
        Each record and refusal, in the order given.

    Raises:
        ConfigurationError: A plug-in or filter cannot be loaded, or returned something else than it should.
    """
    _silence_decoders()
    plugins, filters = examination.tools()
    has_plugins = plugins.captioner is not None or bool(plugins.scorers)
    waiting: list[tuple[Examined, Image.Image | None]] = []
    num_pixels = 0
    for record in records:
        one, picture = _decode(record, examination.buckets, plugins.takes_missing_captions, has_plugins)
        if not has_plugins:
            yield _filter(one, filters)
            continue
        waiting.append((one, picture))
        num_pixels += picture.width * picture.height if picture else 0
        if len(waiting) >= _BATCH_IMAGES or num_pixels >= _BATCH_PIXELS:
            yield from _annotate(waiting, plugins, filters)
            waiting, num_pixels = [], 0
    yield from _annotate(waiting, plugins, filters)


@functools.cache
def _silence_decoders() -> None:
    """Keep Pillow's messages about damaged files off the stderr of a process that configures no logging."""
    logging.getLogger("PIL").addHandler(logging.NullHandler())


@functools.lru_cache(maxsize=2)
def _load(config: str) -> tuple[Plugins, list[Filter]]:
    loaded = from_dict(PrepareConfig, json.loads(config), "the settings")
    return load_plugins(loaded), build_filters(loaded.filters)


def _decode(
    record: Record | Refused, buckets: Buckets, takes_missing_captions: bool, full: bool
) -> tuple[Examined, Image.Image | None]:
    """Decode and measure an image and find its bucket; `full` returns it, too, at its full size if it has a bucket."""
    refused = None
    if isinstance(record, Refused):
        if record.record is None:
            return Examined(None, Facts(record.key), record), None
        refused, record = record, record.record
    facts = Facts(record.key, num_bytes=len(record.image), caption_length=_mean_length(record.captions))
    if refused is not None and not takes_missing_captions:
        return Examined(record, facts, refused), None
    try:
        reduced = decode_reduced(record.image, REDUCED_SIDE)
        bucket = buckets.of(reduced.width, reduced.height) or ""
        picture = decode_rgb(record.image) if full and bucket else None
    except UndecodableImageError as error:
        return Examined(record, facts, Refused(record.key, Reason(error.reason), str(error))), None
    facts.width, facts.height = reduced.width, reduced.height
    facts.values = measure(record, reduced)
    facts.bucket = bucket
    if not bucket:
        refused = Refused(record.key, Reason.TOO_SMALL, f"{reduced.width} x {reduced.height}")
    return Examined(record, facts, refused), picture


def _annotate(
    waiting: list[tuple[Examined, Image.Image | None]], plugins: Plugins, filters: list[Filter]
) -> Iterator[Examined]:
    """Run the plug-ins over a batch, then the filters."""
    chosen = [(one, one.record, picture) for one, picture in waiting if picture is not None and one.record is not None]
    pictures, captions = [picture for _, _, picture in chosen], [record.captions for _, record, _ in chosen]
    annotations = plugins.annotate(pictures, captions) if chosen else []
    for (one, record, _), annotation in zip(chosen, annotations, strict=True):
        one.record = replace(record, captions=annotation.captions, metadata=record.metadata | annotation.metadata)
        one.facts.caption_length = _mean_length(annotation.captions)
        one.facts.values |= annotation.metadata
        if annotation.captions:
            one.refused = None
    for one, _ in waiting:
        yield _filter(one, filters)


def _filter(one: Examined, filters: list[Filter]) -> Examined:
    """Apply the filters to an image that is not refused yet; the first that refuses it gives the reason."""
    if one.refused is not None:
        return one
    assert one.record is not None, "what is not refused has a record"
    sample = SampleFacts(
        key=one.record.key,
        width=one.facts.width,
        height=one.facts.height,
        captions=one.record.captions,
        metadata=one.record.metadata | one.facts.values,
    )
    for one_filter in filters:
        detail = one_filter.refuse(sample)
        if detail is not None:
            one.refused = Refused(one.record.key, one_filter.name, detail)
            break
    return one


def _mean_length(captions: list[str]) -> int:
    """Return the mean number of characters, rounded down; 0 if there is no caption."""
    return sum(map(len, captions)) // len(captions) if captions else 0
