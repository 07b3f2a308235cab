"""Sources to prepared data: every image decoded once, sorted into buckets, shuffled, written as MDS.

Two passes, each made of independent items that any worker takes and that are finished whole or not at all. The first
works on the partitions of the sources (`partition_work`). Then duplicates and the order are decided over all of them
(`merge`), and the second pass writes the shards (`merge_shards`). A run that was stopped at any moment continues with
the items that are missing. The files between need as much disk as the images, and are removed at the end.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diffusion.config.loading import to_dict
from diffusion.datasets.buckets import DEFAULT_EDGES, EdgeBuckets, SizeBuckets, parse_edges
from diffusion.datasets.manifest import MANIFEST, PreparedManifest, PrepareSettings
from diffusion.datasets.mds import DEFAULT_HASHES, DEFAULT_SHARD_BYTES, ShardFormat
from diffusion.errors import ConfigurationError, DataError, MachineError
from diffusion.preparation.config import (
    BucketsConfig,
    CaptionerConfig,
    DuplicatesConfig,
    Engine,
    FiltersConfig,
    PrepareConfig,
    ScorerConfig,
)
from diffusion.preparation.output_folder import WORK, claim, local_folder, start_over, writing
from diffusion.preparation.partitions.engine import Workers, available_cores, started
from diffusion.preparation.partitions.examine import Examination
from diffusion.preparation.partitions.plan import (
    Part,
    Plan,
    check_unchanged,
    described,
    in_generation,
    read_parts,
    survey,
)
from diffusion.preparation.partitions.preview import Preview, preview
from diffusion.preparation.partitions.run import Run
from diffusion.preparation.partitions.work import COLUMNS, content_of, is_held_out, order_of
from diffusion.preparation.records import Source, fingerprint_of
from diffusion.preparation.selection.duplicates import check_distance
from diffusion.preparation.selection.presets import build_buckets
from diffusion.preparation.sources.opening import open_sources
from diffusion.preparation.withdrawal import KEYS, add_keys, read_keys, withdraw

__all__ = ["COLUMNS", "is_held_out", "order_of", "prepare", "prepare_from", "preview_of"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class History:
    """What earlier runs made.

    Attributes:
        manifest: Manifest of the finished data set; None if there is none.
        parts: Partitions that it holds; None if it does not name them.
    """

    manifest: PreparedManifest | None = None
    parts: list[Part] | None = field(default_factory=list)

    @property
    def num_generations(self) -> int:
        """Runs that added to the data set."""
        return len(self.manifest.generations) if self.manifest else 0


def prepare(
    sources: Sequence[str | Path],
    out: str | Path,
    *,
    edges: Iterable[int | str] = DEFAULT_EDGES,
    buckets: BucketsConfig | None = None,
    validation_fraction: float = 0.0,
    seed: int = 17,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    compression: str | None = None,
    hashes: Sequence[str] = DEFAULT_HASHES,
    num_workers: int | None = None,
    engine: str = "processes",
    partition_size: int = 1024,
    image_column: str | None = None,
    caption_column: str | None = None,
    captioner: CaptionerConfig | None = None,
    scorers: Sequence[ScorerConfig] = (),
    filters: FiltersConfig | None = None,
    duplicates: DuplicatesConfig | None = None,
    withdrawn: Path | None = None,
    overwrite: bool = False,
    report: bool = False,
    progress: bool = False,
) -> PreparedManifest:
    """Write a prepared data set; the layout and the columns are those of docs/architecture.md.

    The samples written are a function of the content of the sources, of those that were there at each run before, and
    of the settings; not of workers, engine, size of partitions or interruptions. (Plug-ins take images in batches
    within a partition: the size of partitions matters as far as their rounding goes.)

    Args:
        sources: Folders of images, WebDataset tars, parquet files and others; see
            `diffusion.preparation.sources.opening`.
        out: The folder to write: new, empty, left half-written by an earlier run, which is continued, or finished: then
            what the sources hold in addition is added behind what is there, as a generation of its own.
        edges: Lowest shorter side of each bucket in pixels, ascending; smaller images are refused.
        buckets: The division into buckets, in place of `edges`.
        validation_fraction: Share of the keys that is held out, 0 <= fraction < 1; whether a key is, depends on it and
            on the seed only.
        seed: Seed of the order and of the choice of held-out images, 0 <= seed < 2^32.
        shard_bytes: Size above which a new shard is begun.
        compression: Of the shards, such as `zstd:3`.
        hashes: Hashes of each shard in the index.
        num_workers: Workers; None for one per available core.
        engine: `processes` of this machine, or `ray`.
        partition_size: Images that a worker takes at a time, where the source does not say.
        image_column: Column of the images in parquet files; None for the usual names.
        caption_column: Column of the captions in parquet files; None for the usual names.
        captioner: Writes captions.
        scorers: Write columns of the metadata.
        filters: What is kept.
        duplicates: Which images count as the same; None keeps all.
        withdrawn: File of keys, one per line, that are never to be in the data set; those that are there already are
            marked as in `diffusion.preparation.withdrawal`.
        overwrite: Replace a finished data set in `out`; what was withdrawn from it stays out.
        report: Write `report.html` and `report.json`, too.
        progress: Show bars on stderr.

    Returns:
        The manifest; that of the finished data set, and nothing is written, if it holds all that the sources do.

    Raises:
        ConfigurationError: A setting is out of range.
        DataError: A source is missing, unknown, or has changed in what was read before; no image was kept, or `out`
            holds something else.
        MachineError: `out` cannot be written to, the disk is full, or a worker died.
    """
    division = EdgeBuckets(parse_edges(edges)) if buckets is None else build_buckets(buckets)
    filters = filters or FiltersConfig()
    settings = PrepareSettings(
        edges=list(division.edges) if isinstance(division, EdgeBuckets) else [],
        validation_fraction=float(validation_fraction),
        seed=seed,
        shard_bytes=shard_bytes,
        image_column=image_column,
        caption_column=caption_column,
        sizes=division.names if isinstance(division, SizeBuckets) else [],
        upscale=isinstance(division, SizeBuckets) and division.upscale,
        min_samples=division.min_samples if isinstance(division, SizeBuckets) else 0,
        refuse_small=isinstance(division, SizeBuckets) and division.refuse_small,
        compression=compression,
        hashes=list(hashes),
        captioner=None if captioner is None else to_dict(captioner),
        scorers=[to_dict(one) for one in scorers],
        filters=to_dict(filters) if filters != FiltersConfig() else {},
        duplicates=None if duplicates is None else to_dict(duplicates),
    )
    examination = Examination(buckets=division, captioner=captioner, scorers=list(scorers), filters=filters)
    workers = Workers(_engine(engine), available_cores() if num_workers is None else num_workers)
    _check(settings, partition_size, duplicates)
    examination.tools()  # a plug-in that cannot be loaded is told before any work
    out = local_folder(out).absolute()
    opened = open_sources(sources, image_column=image_column, caption_column=caption_column)
    _check_apart(opened, out)
    keys = read_keys(withdrawn) if withdrawn is not None else set()
    history = History()
    if (out / MANIFEST).exists() and not overwrite:
        history = _history(out, settings, opened)
        if keys:
            withdraw(out, keys)
        if not _has_grown(out, history, opened, partition_size, workers):
            return _finished(out, history)
    with claim(out, PreparedManifest.KIND, overwrite=overwrite, grow=history.manifest is not None) as work:
        _check_still(out, history)
        with writing(out):
            add_keys(out, keys)
            plan = _plan(out, work, settings, opened, history, partition_size)
        run = Run(
            plan=plan,
            settings=settings,
            sources=opened,
            examination=examination,
            duplicates=duplicates,
            manifest=history.manifest,
            earlier=history.parts or [],
            out=out,
            work=work / plan.identity,
            report=report,
            progress=progress,
        )
        with started(workers) as call:
            return run.complete(call)


def prepare_from(
    config: PrepareConfig,
    *,
    withdrawn: Path | None = None,
    overwrite: bool = False,
    report: bool = False,
    progress: bool = False,
) -> PreparedManifest:
    """Write a prepared data set as a configuration says; see `prepare`."""
    return prepare(
        config.sources,
        config.out,
        buckets=config.buckets,
        validation_fraction=config.validation_fraction,
        seed=config.seed,
        shard_bytes=config.shard_mb * 2**20,
        compression=config.compression,
        hashes=config.hashes,
        num_workers=config.workers,
        engine=config.engine.value,
        partition_size=config.partition_size,
        image_column=config.image_column,
        caption_column=config.caption_column,
        captioner=config.captioner,
        scorers=config.scorers,
        filters=config.filters,
        duplicates=config.duplicates,
        withdrawn=withdrawn,
        overwrite=overwrite,
        report=report,
        progress=progress,
    )


def preview_of(config: PrepareConfig, number: int) -> list[Preview]:
    """Try a configuration on a few images of each source; nothing is written.

    Args:
        config: The configuration; `out` is not looked at.
        number: Images of each source, at most.

    Raises:
        ConfigurationError: A setting is out of range.
        DataError: A source is missing or unknown.
        MachineError: A source cannot be read.
    """
    examination = Examination(
        buckets=build_buckets(config.buckets),
        captioner=config.captioner,
        scorers=config.scorers,
        filters=config.filters,
    )
    sources = open_sources(config.sources, image_column=config.image_column, caption_column=config.caption_column)
    return preview(sources, examination, number, config.partition_size)


def _engine(name: str) -> Engine:
    """Return the engine of a name."""
    try:
        return Engine(name)
    except ValueError as error:
        raise ConfigurationError(f"engine: {name!r}; it is one of {', '.join(one.value for one in Engine)}") from error


def _check(settings: PrepareSettings, partition_size: int, duplicates: DuplicatesConfig | None) -> None:
    """Refuse settings that are out of range."""
    if not 0 <= settings.validation_fraction < 1:
        raise ConfigurationError(
            f"validation fraction: {settings.validation_fraction}; it must be at least 0 and below 1"
        )
    if not 0 <= settings.seed < 2**32:
        raise ConfigurationError(f"seed: {settings.seed}; it must be at least 0 and below 2^32")
    if partition_size < 1:
        raise ConfigurationError(f"partition size: {partition_size}; it must be 1 or more")
    if duplicates is not None:
        check_distance(duplicates.max_distance)
    ShardFormat(
        columns=COLUMNS,
        shard_bytes=settings.shard_bytes,
        hashes=tuple(settings.hashes),
        compression=settings.compression,
    ).check()


def _check_apart(sources: Sequence[Source], out: Path) -> None:
    """Refuse an output inside a source, or the reverse."""
    for source in sources:
        if "://" in source.path:
            continue
        place, target = Path(source.path).resolve(), out.resolve()
        if place == target or (place.is_dir() and target.is_relative_to(place)) or place.is_relative_to(target):
            raise DataError(f"the output {out} and the source {source.path} lie in one another; choose another output")


def _history(out: Path, settings: PrepareSettings, sources: Sequence[Source]) -> History:
    """Read a finished data set and check that it can be what is asked for."""
    manifest = PreparedManifest.read(out)
    parts = read_parts(out, len(manifest.generations))
    there = [[entry.name, entry.kind, entry.path] for entry in manifest.sources]
    asked = described(sources)
    fits = there == (asked if parts is None else asked[: len(there)])
    if not fits or manifest.settings != settings:
        what = (
            "with other settings (" + _differences(manifest.settings, settings) + ")" if fits else "from other sources"
        )
        raise DataError(f"{out} was prepared {what}; choose another folder, or replace it with --overwrite")
    return History(manifest=manifest, parts=parts)


def _differences(there: PrepareSettings, asked: PrepareSettings) -> str:
    """Return the settings that differ, in words."""
    differing = [name for name in vars(asked) if getattr(there, name) != getattr(asked, name)]
    return ", ".join(f"{name}: {getattr(there, name)}, not {getattr(asked, name)}" for name in differing)


def _has_grown(out: Path, history: History, sources: Sequence[Source], size: int, workers: Workers) -> bool:
    """Return whether the sources hold more than the data set; refuse them if they hold less or something else."""
    if history.parts is None:
        return False
    now, new = survey(sources, size, history.parts)

    def contents(parts: list[Part]) -> list[str]:
        if not parts:
            return []
        logger.info("%d partitions look changed; they are read again and compared", len(parts))
        by_name = {source.name: source for source in sources}
        with started(workers) as call:
            tasks = [(by_name[part.source].only(part.partition), part) for part in parts]
            found = dict(call(content_of, tasks))
        return [found[part.number] for part in parts]

    check_unchanged(out, history.parts, now, contents)
    return bool(new)


def _finished(out: Path, history: History) -> PreparedManifest:
    """Return the manifest of a data set to which nothing is added."""
    assert history.manifest is not None, "it is finished"
    if (out / WORK).exists():
        with claim(out, PreparedManifest.KIND, grow=True) as work:
            start_over(out, work)
    logger.info("%s is finished already; nothing was done (--overwrite prepares it anew)", out)
    return history.manifest


def _check_still(out: Path, history: History) -> None:
    """Refuse a data set that another process finished in the meantime."""
    now = PreparedManifest.read(out) if (out / MANIFEST).exists() else None
    if now != history.manifest:
        raise MachineError(f"another process has written to {out} in the meantime; run the command again")


def _plan(
    out: Path, work: Path, settings: PrepareSettings, sources: Sequence[Source], history: History, size: int
) -> Plan:
    """Return the plan that an earlier run left, if it is still right; otherwise make one, and remove what is there."""
    known = history.parts or []
    keys = read_keys(out / KEYS) if (out / KEYS).is_file() else set()
    now, new = survey(sources, size, known)
    plan = Plan(
        generation=history.num_generations,
        settings=to_dict(settings),
        sources=described(sources),
        parts=in_generation(new, history.num_generations),
        withdrawn=fingerprint_of(*sorted(keys)),
    )
    for path in sorted(work.glob("*/plan.json")):
        left = Plan.read(path)
        same = [
            getattr(left, name) == getattr(plan, name) for name in ("generation", "settings", "sources", "withdrawn")
        ]
        if not all(same):
            continue
        now, newer = survey(sources, size, [*known, *left.parts])
        if now[len(known) :] == left.parts:
            logger.info("%s was left half-written; going on", out)
            if newer:
                logger.warning("the sources have grown since; run the command once more to add that, too")
            return left
    if any(work.iterdir()):
        logger.info("%s was left half-written, of other sources or settings; starting over", out)
        start_over(out, work)
    (work / plan.identity).mkdir()
    plan.write(work / plan.identity)
    return plan
