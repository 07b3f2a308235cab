"""Sources to prepared data: every picture decoded once, sorted into buckets, shuffled, written as MDS.

Two passes. The first reads the sources, decodes in parallel, and appends what is kept to one temporary file per split
and bucket. The second writes each as MDS in the order of a hash of seed and key: a full shuffle with 16 bytes of memory
per picture (8 more while a bucket is sorted) that knows neither the number of workers nor the order of the sources. The
temporary files need as much disk as the pictures, are read at random places, and are removed bucket by bucket.
"""

import hashlib
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from diffusion.datasets.buckets import DEFAULT_EDGES, bucket_names, bucket_of, parse_edges
from diffusion.datasets.images import Verdict
from diffusion.datasets.manifest import (
    MANIFEST,
    BucketEntry,
    Example,
    PreparedManifest,
    PrepareSettings,
    RefusedEntry,
    SourceEntry,
)
from diffusion.datasets.mds import DEFAULT_SHARD_BYTES, check_shard_bytes, read_index, write_mds
from diffusion.errors import ConfigurationError, DataError
from diffusion.preparation.examine import examine_records
from diffusion.preparation.output_folder import SPLITS, claim, writing
from diffusion.preparation.records import Reason, Record, Refused, Source, clean_text
from diffusion.preparation.sources import open_sources
from diffusion.preparation.spill import Spill

logger = logging.getLogger(__name__)

COLUMNS = {
    "image": "bytes",
    "captions": "json",
    "width": "int32",
    "height": "int32",
    "key": "str",
    "metadata": "json",
}
"""MDS type of each column of a prepared sample."""

TRAIN, VALIDATION = SPLITS
NUM_EXAMPLES = 5
"""Refused pictures of each reason that the manifest names."""


@dataclass
class Tally:
    """Counts over all sources: seen is kept and refused together."""

    seen: Counter[str] = field(default_factory=Counter)
    """By name of the source."""
    kept: Counter[str] = field(default_factory=Counter)
    """By name of the source."""
    refused: Counter[str] = field(default_factory=Counter)
    """By reason."""
    examples: dict[str, list[Example]] = field(default_factory=dict)
    """By reason, the first few."""

    def keep(self, source: str) -> None:
        """Count a picture that is kept."""
        self.seen[source] += 1
        self.kept[source] += 1

    def refuse(self, source: str, refused: Refused) -> None:
        """Count a picture that is refused."""
        self.seen[source] += 1
        self.refused[refused.reason.value] += 1
        examples = self.examples.setdefault(refused.reason.value, [])
        if len(examples) < NUM_EXAMPLES:
            examples.append(Example(key=refused.key, detail=clean_text(refused.detail)))

    def by_reason(self) -> dict[str, RefusedEntry]:
        """Return the refusals for the manifest, sorted by reason."""
        return {
            reason: RefusedEntry(count=self.refused[reason], examples=self.examples[reason])
            for reason in sorted(self.refused)
        }


def prepare(
    sources: Sequence[str | Path],
    out: str | Path,
    *,
    edges: Iterable[int | str] = DEFAULT_EDGES,
    validation_fraction: float = 0.0,
    seed: int = 17,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    num_workers: int | None = None,
    image_column: str | None = None,
    caption_column: str | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> PreparedManifest:
    """Write a prepared data set; the layout and the columns are those of docs/architecture.md.

    The bytes written are a function of the content of the sources and of the other arguments, without `num_workers`.

    Args:
        sources: Folders of pictures, WebDataset tars, parquet files; see `diffusion.preparation.sources`.
        out: The folder to write; it must be new, empty, or left half-written by an earlier run.
        edges: Lowest shorter side of each bucket in pixels, ascending; smaller pictures are refused.
        validation_fraction: Share of the keys that is held out, 0 <= fraction < 1; whether a key is, depends on it and
            on the seed only.
        seed: Seed of the order and of the choice of held-out pictures, 0 <= seed < 2^32.
        shard_bytes: Size above which a new shard is begun.
        num_workers: Processes that decode; None for one per available core.
        image_column: Column of the images in parquet files; None for the usual names.
        caption_column: Column of the captions in parquet files; None for the usual names.
        overwrite: Replace a finished data set in `out`.
        progress: Show bars on stderr.

    Returns:
        The manifest; that of the finished data set, and nothing is written, if `out` holds it already with the same
        sources and settings.

    Raises:
        ConfigurationError: A setting is out of range.
        DataError: A source is missing or unknown, no picture was kept, or `out` holds something else.
        MachineError: `out` cannot be written to, the disk is full, or a worker died.
    """
    settings = PrepareSettings(
        edges=list(parse_edges(edges)),
        validation_fraction=float(validation_fraction),
        seed=seed,
        shard_bytes=shard_bytes,
        image_column=image_column,
        caption_column=caption_column,
    )
    num_workers = _available_cores() if num_workers is None else num_workers
    _check(settings, num_workers, out)
    out = Path(out).absolute()
    opened = open_sources(sources, image_column=image_column, caption_column=caption_column)
    _check_apart(opened, out)
    if (out / MANIFEST).exists() and not overwrite:
        return _finished(out, settings, opened)
    with claim(out, PreparedManifest.KIND, overwrite=overwrite) as work:
        tally, spills = _sort_into_spills(opened, settings, out, work, num_workers, progress)
        if not sum(tally.kept.values()):
            raise DataError(f"no picture was kept; {_in_words(tally)}")
        splits = _write_splits(spills, settings, out, progress)
        manifest = PreparedManifest(
            sources=[
                SourceEntry(
                    name=source.name,
                    kind=source.kind,
                    path=clean_text(source.path),
                    seen=tally.seen[source.name],
                    kept=tally.kept[source.name],
                )
                for source in opened
            ],
            settings=settings,
            columns=COLUMNS,
            seen=tally.seen.total(),
            kept=tally.kept.total(),
            refused=tally.by_reason(),
            splits=splits,
        )
        assert manifest.seen == manifest.kept + tally.refused.total(), "every picture is accounted for"
        with writing(out):
            manifest.write(out)
    return manifest


def is_held_out(key: str, fraction: float, seed: int) -> bool:
    """Return whether a key is held out; what a smaller fraction holds out, a larger one does, too."""
    return _hash(key, "held out", seed) < fraction * 2**64


def order_of(key: str, seed: int) -> int:
    """Return the number, below 2^64, by which the samples of a bucket are sorted."""
    return _hash(key, "order", seed)


def _hash(key: str, purpose: str, seed: int) -> int:
    """Return 64 random bits of a key."""
    digest = hashlib.blake2b(key.encode(), digest_size=8, person=purpose.encode(), salt=seed.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little")


def _check(settings: PrepareSettings, num_workers: int, out: str | Path) -> None:
    """Refuse settings that are out of range."""
    if not 0 <= settings.validation_fraction < 1:
        raise ConfigurationError(
            f"validation fraction: {settings.validation_fraction}; it must be at least 0 and below 1"
        )
    if not 0 <= settings.seed < 2**32:
        raise ConfigurationError(f"seed: {settings.seed}; it must be at least 0 and below 2^32")
    if num_workers < 1:
        raise ConfigurationError(f"workers: {num_workers}; it must be 1 or more")
    if "://" in str(out):
        raise ConfigurationError(f"output: {out} is a URL; write to a local folder and copy it there")
    check_shard_bytes(settings.shard_bytes)


def _check_apart(sources: Sequence[Source], out: Path) -> None:
    """Refuse an output inside a source, or the reverse."""
    for source in sources:
        place, target = Path(source.path).resolve(), out.resolve()
        if place == target or (place.is_dir() and target.is_relative_to(place)) or place.is_relative_to(target):
            raise DataError(f"the output {out} and the source {source.path} lie in one another; choose another output")


def _finished(out: Path, settings: PrepareSettings, sources: Sequence[Source]) -> PreparedManifest:
    """Return the manifest of a finished data set if it is the one asked for."""
    manifest = PreparedManifest.read(out)
    there = [(entry.name, entry.kind, entry.path) for entry in manifest.sources]
    asked = [(source.name, source.kind, clean_text(source.path)) for source in sources]
    if there != asked or manifest.settings != settings:
        what = "from other sources" if there != asked else f"with other settings ({manifest.settings})"
        raise DataError(f"{out} was prepared {what}; choose another folder, or replace it with --overwrite")
    logger.info("%s is finished already; nothing was done (--overwrite prepares it anew)", out)
    return manifest


def _sort_into_spills(
    sources: Sequence[Source], settings: PrepareSettings, out: Path, work: Path, num_workers: int, progress: bool
) -> tuple[Tally, dict[tuple[str, str], Spill]]:
    """Read and decode everything; put what is kept into one spill per split and bucket."""
    tally, spills = Tally(), {}
    totals = [source.num_records for source in sources]
    total = None if None in totals else sum(number or 0 for number in totals)
    try:
        with _bar("decoding", total, progress) as bar:
            for source in sources:
                for batch in examine_records(source.read(), num_workers):
                    for record, verdict in batch:
                        refused = record if isinstance(record, Refused) else _refusal(record, verdict, settings.edges)
                        if refused is not None:
                            tally.refuse(source.name, refused)
                            continue
                        assert isinstance(record, Record) and verdict is not None
                        with writing(out):
                            _spill(record, verdict, settings, work, spills)
                        tally.keep(source.name)
                    bar.update(len(batch))
                    bar.set_postfix(refused=tally.refused.total(), refresh=False)
        with writing(out):
            for spill in spills.values():
                spill.close()
    except BaseException:
        for spill in spills.values():
            spill.abandon()
        raise
    return tally, spills


def _refusal(record: Record, verdict: Verdict | None, edges: Sequence[int]) -> Refused | None:
    """Return why a decoded record is refused, or None."""
    assert verdict is not None, "each record was decoded"
    if verdict.reason:
        return Refused(record.key, Reason(verdict.reason), verdict.detail)
    if bucket_of(min(verdict.width, verdict.height), edges) is None:
        return Refused(record.key, Reason.TOO_SMALL, f"{verdict.width} x {verdict.height}")
    return None


def _spill(
    record: Record, verdict: Verdict, settings: PrepareSettings, work: Path, spills: dict[tuple[str, str], Spill]
) -> None:
    """Append a sample to the spill of its split and bucket."""
    split = VALIDATION if is_held_out(record.key, settings.validation_fraction, settings.seed) else TRAIN
    bucket = bucket_of(min(verdict.width, verdict.height), settings.edges)
    assert bucket is not None, "small pictures were refused"
    if (split, bucket) not in spills:
        spills[split, bucket] = Spill(work / f"{split}-{bucket}")
    fields = {
        "captions": record.captions,
        "width": verdict.width,
        "height": verdict.height,
        "key": record.key,
        "metadata": record.metadata,
    }
    spills[split, bucket].add(order_of(record.key, settings.seed), record.image, fields)


def _write_splits(
    spills: dict[tuple[str, str], Spill], settings: PrepareSettings, out: Path, progress: bool
) -> dict[str, dict[str, BucketEntry]]:
    """Write each spill as an MDS folder and remove it."""
    splits: dict[str, dict[str, BucketEntry]] = {}
    with _bar("writing", sum(map(len, spills.values())), progress) as bar:
        for split, bucket in _in_order(spills, settings.edges):
            spill, folder = spills[split, bucket], out / split / bucket
            with writing(out):
                with write_mds(folder, COLUMNS, shard_bytes=settings.shard_bytes) as writer:
                    for sample in spill.samples():
                        writer.write(sample)
                        bar.update()
                spill.remove()
            index = read_index(folder)
            assert index.num_samples == len(spill), "every sample was written"
            splits.setdefault(split, {})[bucket] = BucketEntry(
                num_samples=index.num_samples,
                num_shards=index.num_shards,
                num_bytes=index.num_bytes,
                sha256=index.sha256,
            )
    return splits


def _in_order(spills: Iterable[tuple[str, str]], edges: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Yield split and bucket of the spills that there are: training first, buckets ascending."""
    present = set(spills)
    for split in SPLITS:
        for bucket in bucket_names(edges):
            if (split, bucket) in present:
                yield split, bucket


def _bar(what: str, total: int | None, progress: bool) -> tqdm:
    """Return a progress bar; where stderr is a file it adds a line now and then only."""
    interval = 0.2 if sys.stderr.isatty() else 30.0
    return tqdm(desc=what, total=total, unit=" pictures", mininterval=interval, disable=not progress)


def _available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_words(tally: Tally) -> str:
    """Return the refusals in words, with an example of each reason."""
    reasons = [
        f"{entry.count} refused as {reason} (as {entry.examples[0].key}: {entry.examples[0].detail or reason})"
        for reason, entry in tally.by_reason().items()
    ]
    return "; ".join(reasons) or "the sources hold none"
