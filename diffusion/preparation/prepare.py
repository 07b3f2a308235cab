"""Sources to prepared data in four stages: scan, score, select, write (docs/architecture.md)."""

import json
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from diffusion import storage
from diffusion.config.fields import check_sections
from diffusion.config.loading import to_dict
from diffusion.distributed import num_cores
from diffusion.errors import DataError
from diffusion.formats import data_set
from diffusion.formats.data_set import PreparedManifest
from diffusion.preparation.chat_captions import restore_answers
from diffusion.preparation.config import STAGES, PrepareConfig
from diffusion.preparation.engine import Workers
from diffusion.preparation.explain import explain
from diffusion.preparation.layout import CAPTIONS, file_numbers, part_name
from diffusion.preparation.output import claim, clear_folders, clear_result
from diffusion.preparation.plugins import check_plugins, determining, load_plugin
from diffusion.preparation.records import Partition, SettingsError
from diffusion.preparation.removed import read_keys
from diffusion.preparation.scan import (
    Scan,
    Scanner,
    ScanTask,
    Taken,
    changed_settings,
    open_configured,
    scan_sources,
)
from diffusion.preparation.score import score
from diffusion.preparation.select import Selection, check_kept, read_selection, select
from diffusion.preparation.select import check as check_selection
from diffusion.preparation.takedown import reject_scanned, take_down
from diffusion.preparation.write import discard_growth, shard_format, write
from diffusion.reports.tables import text_table

logger = logging.getLogger(__name__)

_NOT_OF_THE_DATA = ("sources", "out", "engine", "workers", "ray", "scratch")
"""Keys that do not determine the data. Sources are compared by the scan."""

_PARTITIONS = 16
"""Partitions of a source, spread over it, of which a dry run takes images."""


def prepare(
    config: PrepareConfig,
    *,
    stages: Sequence[str] = STAGES,
    removed: Path | None = None,
    overwrite: bool = False,
    only: Taken | None = None,
    report: bool = True,
    progress: bool = False,
) -> PreparedManifest | None:
    """Run stages of a preparation; the layout of the result is that of docs/architecture.md.

    The data is a function of the sources, of what they held at each run before, and of the settings; not of workers,
    engine or interruptions. An unfinished preparation is continued. A finished one gets what the sources hold in
    addition, as a generation of its own.

    Args:
        config: the configuration.
        stages: some of `STAGES`.
        removed: file of keys that are never to be in the data set; samples that are there already are marked as
            removed.
        overwrite: replace a finished data set, by the stage select; the metadata and scores that still fit are kept.
        only: files that the data set grows by; other new files wait, and changes to files that were already scanned are
            ignored. None: all, and a file that is gone or has changed is an error.
        report: write `report.html` and `report.json`; after a growth by some files when a tenth is not in them yet.
        progress: show bars on stderr.

    Returns:
        The manifest; None unless `write` is one of the stages.

    Raises:
        ConfigurationError: a setting is wrong.
        DataError: a source is missing, unknown, or has changed in what was read before; no image was kept; `out` holds
            something else, or a data set of other settings.
        MachineError: a file cannot be read or written, or a worker died.
    """
    check_settings(config)
    if not storage.is_url(config.out):
        config = replace(config, out=str(Path(config.out).absolute()))  # Workers run elsewhere.
    out = config.out
    settings = _settings(config)
    workers = Workers(engine=config.engine, number=config.workers or num_cores(), ray=config.ray)
    keys = set[str]() if removed is None else read_keys(removed)
    with claim(out, PreparedManifest.KIND):
        finished = None if overwrite else PreparedManifest.find(out)
        if finished is not None and "convert_to_srgb" not in finished.settings:
            config = replace(config, convert_to_srgb=False)
            del settings["convert_to_srgb"]  # It stays data of an earlier version.
        if finished is not None and (differences := changed_settings(finished.settings, settings)):
            raise SettingsError(
                f"{storage.shown(out)} was prepared with other settings ({', '.join(differences)}); choose another "
                "folder, or replace it with --overwrite"
            )
        if keys:
            _take_down(out, keys)
        captioner = config.captioner
        if captioner and captioner.chat and "score" in stages and _lacks_captions(out):
            load_plugin(captioner, "captioner")  # No server there: before hours of scanning.
        if "scan" in stages:
            scan = scan_sources(config, workers=workers, progress=progress, overwrite=overwrite, only=only)
        else:
            scan = Scan.read(out)
        if "score" in stages:
            score(config, scan, workers=workers, progress=progress)
        if "select" in stages:
            if finished is None:
                scan = _begin_anew(config, scan)
                if keys:
                    reject_scanned(out, keys)
            num_finished = len(finished.generations) if finished else 0
            select(out, config, scan, finished=num_finished, progress=progress)
        if "write" not in stages:
            return None
        manifest = write(out, scan, settings, workers, scratch=config.scratch, progress=progress)
        if manifest == finished:
            logger.info("%s is finished, and its sources hold no more (--overwrite replaces it)", storage.shown(out))
        elif captioner and "score" in stages:
            clear_folders(out, data_set.ANSWERS)
        if report and ((only is None and manifest != finished) or _is_report_due(out, manifest)):
            from diffusion.preparation.report import write_report  # Plotting takes a second to import.

            write_report(out, scan, scratch=config.scratch)
    return manifest


def check_settings(config: PrepareConfig) -> None:
    """Raise a ConfigurationError if a setting is wrong; sources are not read."""
    check_sections(config)
    check_plugins(config)
    check_selection(config)
    shard_format(vars(config)).check()


def _settings(config: PrepareConfig) -> dict[str, Any]:
    settings = {name: value for name, value in to_dict(config).items() if name not in _NOT_OF_THE_DATA}
    if settings["captioner"] is not None:
        settings["captioner"] = determining(settings["captioner"])
    settings["scorers"] = [determining(scorer) for scorer in settings["scorers"]]
    return settings


def _lacks_captions(out: str) -> bool:
    """Return whether a partition is not captioned yet, or nothing is scanned."""
    if not storage.exists(storage.join(out, data_set.SCAN)):
        return True
    captioned = file_numbers(storage.join(out, data_set.SCORES, CAPTIONS))
    return any(one.number not in captioned for one in Scan.read(out).partitions)


def _is_report_due(out: str, manifest: PreparedManifest) -> bool:
    """Check whether the report is missing, or shows less than nine tenths of the images."""
    shown = storage.read_json(storage.join(out, data_set.REPORT_NUMBERS), None)
    return shown is None or 10 * sum(shown[name]["images"] for name in ("kept", "rejected")) < 9 * manifest.seen


def _take_down(out: str, keys: set[str]) -> None:
    """Remove images from a claimed data set, which may stay as it is, even with `overwrite`."""
    if not storage.exists(storage.join(out, data_set.MANIFEST)):
        reject_scanned(out, keys)
        return
    for key in take_down(out, keys, is_claimed=True).copies:
        logger.warning("a copy of a removed image is left: %s", json.dumps(key))


def _begin_anew(config: PrepareConfig, scan: Scan) -> Scan:
    """Remove a finished data set but for metadata and scores; what is not finished is one generation."""
    out, anew = config.out, replace(scan, partitions=[replace(one, generation=0) for one in scan.partitions])
    is_replaced = storage.exists(storage.join(out, data_set.MANIFEST))
    if is_replaced:
        check_kept(out, config, anew)  # A mistake is found before anything is removed.
        logger.info("%s is replaced", storage.shown(out))
    # Marks without a manifest are left by a removal that was stopped.
    if is_replaced or anew != scan or storage.exists(storage.join(out, data_set.REMOVED_SAMPLES)):
        clear_result(out)
        anew.write(out)
    return anew


def discard_unfinished(out: str) -> bool:
    """Remove what was scanned, scored, selected and written since the data set was last finished, if anything was.

    Captions of a server may have cost money: images that are scanned again as before get them from `answers/restored`.
    `scan.json`, by which the rest is known, is written last, so that another call can continue.
    """
    with claim(out, PreparedManifest.KIND):
        if not storage.exists(storage.join(out, data_set.SCAN)):
            return False
        scan, manifest = Scan.read(out), PreparedManifest.find(out)
        finished = len(manifest.generations) if manifest else 0
        first_task = read_selection(out, finished - 1).stop if finished else 0
        later = [one for one in scan.partitions if one.generation >= finished]
        if not later:
            return False
        discard_growth(out, finished, later[-1].generation + 1, first_task)
        restore_answers(out, [one.number for one in later])
        names = {part_name(one.number) for one in later}
        scores = storage.list_files(storage.join(out, data_set.SCORES))
        storage.delete(storage.join(out, data_set.SCORES, name) for name in scores if name.rpartition("/")[2] in names)
        clear_folders(out, data_set.PACKED)
        storage.delete(storage.join(out, data_set.METADATA, name) for name in names)
        replace(scan, partitions=scan.partitions[: -len(later)]).write(out)
        clear_folders(out, data_set.LISTINGS)
    return True


def explain_selection(config: PrepareConfig) -> str:
    """Table of how many images each condition rejects, over the metadata that are there; nothing is written."""
    check_sections(config)
    costs = explain(config.out, config, Scan.read(config.out))
    rows = [("condition", "rejects alone", "rejects first", "remaining")]
    rows += [(condition or "scan", *map(str, numbers)) for condition, *numbers in costs]
    return "\n".join(text_table(rows))


def preview(config: PrepareConfig, number: int) -> Selection:
    """Scan, score and select some images of each source; nothing is written but a temporary folder.

    `out` is ignored, and so is `buckets.min_samples`, which a few images do not reach.

    Raises:
        ConfigurationError: a setting is wrong.
        DataError: a source is missing or unknown, or has no images.
        MachineError: a source cannot be read.
    """
    check_settings(config)
    sources = open_configured(config, anew=True)
    with TemporaryDirectory(prefix="preview-", dir=config.scratch) as out:
        config = replace(config, out=out, buckets=replace(config.buckets, min_samples=None, reject_small=False))
        scanner = Scanner(out, to_dict(config.limits))
        scanned: list[Partition] = []
        for index, source in enumerate(sources):
            partitions, left = _spread(source.partitions().checked().new)[:number], number
            for i, partition in enumerate(partitions):
                partition = replace(partition, number=len(scanned), source=index)
                few = math.ceil(left / (len(partitions) - i))
                left -= scanner(ScanTask(source, partition, limit=few))[0]
                scanned.append(partition)
        if not scanned:
            raise DataError(f"the sources hold no images: {', '.join(source.path for source in sources)}")
        scan = Scan(sources, scanned)
        if config.captioner and config.captioner.chat:
            url = storage.shown(config.captioner.chat.server.url)
            logger.warning("%s is asked for captions of these images; its answers are not kept", url)
        score(config, scan, workers=Workers())
        return select(out, config, scan)


def _spread(partitions: Iterable[Partition]) -> list[Partition]:
    """Choose partitions at equal distances from a stream of unknown length."""
    chosen: list[Partition] = []
    step = 1
    for i, partition in enumerate(partitions):
        if i % step == 0:
            chosen.append(partition)
        if len(chosen) == 2 * _PARTITIONS:
            chosen, step = chosen[::2], 2 * step
    return [chosen[i * len(chosen) // _PARTITIONS] for i in range(_PARTITIONS)] if len(chosen) > _PARTITIONS else chosen
