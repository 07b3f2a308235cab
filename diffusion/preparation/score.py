"""Score: columns that models compute from images, and captions that they write, as a parquet file per partition.

`scores/COLUMN/NUMBER.parquet` has the rows of `metadata/NUMBER.parquet` in the same order; rejected images have null.
`scores/captions/NUMBER.parquet` has all captions of each image, and the indices of the generated ones. What is there is
not computed again, unless path, arguments or batch size of the plug-in (or, for a scorer, of the captioner) change:
`scores.json` says for each column what it is made with.

Images are read where they lie, and only if the plug-in looks at them. A worker keeps one batch of them in memory.
"""

import functools
import logging
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import xxhash
from PIL import Image
from tqdm import tqdm

from diffusion import storage
from diffusion.config.loading import to_dict
from diffusion.datasets.images import UndecodableImageError, decode_rgb
from diffusion.errors import ConfigurationError, DataError
from diffusion.preparation.config import CaptionerConfig, CaptionMode, Engine, PrepareConfig
from diffusion.preparation.engine import Workers, run, visible_gpus
from diffusion.preparation.layout import (
    CAPTIONS,
    GENERATED_CAPTIONS,
    LOCATION,
    METADATA,
    SCORES,
    SCORES_RECORD,
    part_name,
    read_schema,
    read_scores_record,
    read_table,
    write_table,
)
from diffusion.preparation.plugins import (
    Config,
    call_plugin,
    clean_score,
    load_plugin,
    merge_captions,
    named_plugins,
)
from diffusion.preparation.records import WITHOUT_CAPTION, Location, Partition
from diffusion.preparation.scan import Scan
from diffusion.preparation.sources import Source

logger = logging.getLogger(__name__)

BATCH_PIXELS = 2**26
"""A batch ends early when it holds so many pixels, 200 MB: memory is bounded whatever the size of images."""

_COLUMNS = ("key", *LOCATION, "xxh128", "captions", "reason")
_CAPTION_TYPES = {"captions": pa.list_(pa.string()), GENERATED_CAPTIONS: pa.list_(pa.int32())}


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A captioner or scorer of a data set."""

    out: str
    key: str
    """In the configuration."""
    plugin: Config
    identity: dict[str, Any]
    is_captioned: bool
    """Whether `scores/captions` has the captions."""

    @property
    def column(self) -> str:
        return CAPTIONS if isinstance(self.plugin, CaptionerConfig) else self.plugin.column

    def uri(self, name: str) -> str:
        return storage.join(self.out, SCORES, self.column, name)


@dataclass(frozen=True, kw_only=True)
class _Task:
    number: int
    source: Source
    partition: Partition


@dataclass(frozen=True, kw_only=True)
class _Result:
    number: int
    num_rows: int
    kind: pa.DataType | None
    """Type of the values; None if all are null: then no file was written."""


def score(config: PrepareConfig, scan: Scan, *, workers: Workers, progress: bool = False) -> None:
    """Run the captioner and each scorer over the partitions that lack their results.

    Args:
        config: captioner and scorers.
        scan: sources and partitions of the data set `config.out`.
        workers: engine and number of workers.
        progress: show a bar for each on stderr.

    Raises:
        ConfigurationError: a plug-in cannot be imported, or its results have the wrong number or type.
        DataError: weights are missing, or an image is not what it was when it was scanned.
        MachineError: a store fails, a worker dies, or one that is to have a GPU has none.
    """
    if config.captioner is None:
        _forget_captions(config.out)
    captions: dict[str, Any] | None = None
    for key, plugin in named_plugins(config):
        identity = _identity(plugin, captions)
        step = _Step(out=config.out, key=key, plugin=plugin, identity=identity, is_captioned=captions is not None)
        _complete(step, scan, workers, progress)
        if isinstance(plugin, CaptionerConfig):
            captions = identity


def _identity(plugin: Config, captions: dict[str, Any] | None) -> dict[str, Any]:
    """What determines the results of a plug-in, beside the images."""
    names = ("path", "arguments", "batch_size", *(["mode"] if isinstance(plugin, CaptionerConfig) else []))
    values = to_dict(plugin)
    return {**{name: values[name] for name in names}, "captions": captions}


def _complete(step: _Step, scan: Scan, workers: Workers, progress: bool) -> None:
    """Write the missing parts of a column."""
    finished = _finished_parts(step)
    numbers = [one.number for one in scan.partitions if part_name(one.number) not in finished]
    if not numbers:
        return
    what = f"{step.column}: {step.plugin.path}"
    where = f"{step.plugin.num_gpus:g} GPUs for each worker" if step.plugin.num_gpus else "on the CPU (num_gpus: 0)"
    logger.info("%s, %d of %d partitions, %s", what, len(numbers), len(scan.partitions), where)
    kind = _kind_of(step, min(finished)) if finished else None
    untyped: dict[int, int] = {}
    is_settled = False
    workers = _on_gpus(workers, step.plugin.num_gpus)
    results = run(workers, functools.partial(_Worker, step), _tasks(scan, numbers), num_gpus=step.plugin.num_gpus)
    for result in tqdm(results, desc=step.column, total=len(numbers), unit=" partitions", disable=not progress):
        if result.kind is None:
            untyped[result.number] = result.num_rows
            continue
        if kind not in (None, result.kind):
            empty = {} if is_settled else _empty_parts(step, finished, result.kind)
            if not empty:
                raise ConfigurationError(
                    f"{what} returned numbers and texts; let it return one of them, and remove {step.uri('')}"
                )
            storage.delete(step.uri(part_name(number)) for number in empty)  # They are written below.
            untyped |= empty
        kind, is_settled = result.kind, True
    # DuckDB reads all files of a column with one type, so a part without any value gets that of the others.
    for number, num_rows in untyped.items():
        _write(step, number, {step.column: pa.nulls(num_rows, kind or pa.float64())})


def _finished_parts(step: _Step) -> set[str]:
    """Names of the parts that are there; those of another identity are deleted."""
    files, record = set(storage.list_files(step.uri(""))), read_scores_record(step.out)
    parts = {name for name in files if re.fullmatch(r"\d+\.parquet", name)}
    if record.get(step.column) == step.identity:
        return parts
    storage.delete(map(step.uri, sorted(files)))
    storage.write_json(storage.join(step.out, SCORES_RECORD), {**record, step.column: step.identity})
    return set()


def _forget_captions(out: str) -> None:
    """Remove what a former captioner wrote: the captions of `scores` take the place of those of the sources."""
    record = read_scores_record(out)
    if record.pop(CAPTIONS, None) is not None:
        folder = storage.join(out, SCORES, CAPTIONS)
        storage.delete(storage.join(folder, name) for name in storage.list_files(folder))
        storage.write_json(storage.join(out, SCORES_RECORD), record)


def _kind_of(step: _Step, name: str) -> pa.DataType:
    return read_schema(step.uri(name)).field(step.column).type


def _empty_parts(step: _Step, names: Iterable[str], kind: pa.DataType) -> dict[int, int]:
    """Return numbers and rows of the parts of another type, if none of them holds a value; otherwise nothing."""
    found: dict[int, int] = {}
    for name in names:
        column = read_table(step.uri(name), [step.column])[step.column]
        if column.type != kind:
            if column.null_count < len(column):
                return {}
            found[int(name[:-8])] = len(column)
    return found


def _on_gpus(workers: Workers, num_gpus: float) -> Workers:
    """Limit processes to those that the GPUs of this machine have room for, as Ray does."""
    if not num_gpus or workers.engine is Engine.ray:
        return workers
    num_visible = len(visible_gpus())
    room = num_visible * int(1 / num_gpus) if num_gpus < 1 else num_visible // math.ceil(num_gpus)
    return replace(workers, number=max(1, min(workers.number, room)))


def _tasks(scan: Scan, numbers: Iterable[int]) -> Iterator[_Task]:
    for number in numbers:
        source, partition = scan.find(number)
        yield _Task(number=number, source=source, partition=partition)


class _Worker:
    """Runs a plug-in over partitions."""

    def __init__(self, step: _Step) -> None:
        self._step = step
        self._plugin = load_plugin(step.plugin, step.key)
        self._reads_images = getattr(self._plugin, "reads_images", True)

    def __call__(self, task: _Task) -> _Result:
        rows = _read(self._step.out, METADATA, task.number, _COLUMNS)
        if self._step.is_captioned:
            captioned = _read(self._step.out, f"{SCORES}/{CAPTIONS}", task.number, ["captions"])
            for row, new in zip(rows, captioned, strict=True):
                row["captions"] = new["captions"]
        if isinstance(self._step.plugin, CaptionerConfig):
            return self._caption(task, rows, self._step.plugin)
        chosen = [i for i, row in enumerate(rows) if row["reason"] == "" or (_may_lack(row) and row["captions"])]
        values: list[Any] = [None] * len(rows)
        for i, value in self._results(task, rows, chosen):
            values[i] = clean_score(value)
        kinds = {type(value) for value in values if value is not None}
        if len(kinds) > 1:
            raise ConfigurationError(f"{self._step.plugin.path} returned numbers and texts; it must return one of them")
        kind = None if not kinds else pa.string() if str in kinds else pa.float64()
        if kind is not None:
            _write(self._step, task.number, {self._step.column: pa.array(values, kind)})
        return _Result(number=task.number, num_rows=len(rows), kind=kind)

    def _caption(self, task: _Task, rows: list[dict[str, Any]], config: CaptionerConfig) -> _Result:
        chosen = [
            i
            for i, row in enumerate(rows)
            if (row["reason"] == "" or _may_lack(row))
            and (config.mode is not CaptionMode.missing or not row["captions"])
        ]
        captions: list[list[str]] = [row["captions"] or [] for row in rows]
        generated: list[list[int] | None] = [None] * len(rows)
        for i, text in self._results(task, rows, chosen):
            captions[i], indices = merge_captions(text, captions[i], config)
            generated[i] = indices or None
        columns = {"captions": captions, GENERATED_CAPTIONS: generated}
        arrays = {name: pa.array(values, _CAPTION_TYPES[name]) for name, values in columns.items()}
        _write(self._step, task.number, arrays)
        return _Result(number=task.number, num_rows=len(rows), kind=_CAPTION_TYPES["captions"])

    def _results(self, task: _Task, rows: list[dict[str, Any]], chosen: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """Yield the plug-in's result for each of the chosen rows, with the number of the row."""
        images: Iterable[bytes | None] = [None] * len(chosen)
        if self._reads_images and chosen:
            locations = [Location(**{name: rows[i][name] for name in LOCATION}) for i in chosen]
            images = task.source.images(task.partition, locations)
        decoded = (
            (i, None if content is None else _decode(rows[i], content))
            for i, content in zip(chosen, images, strict=True)
        )
        for batch in _batches(decoded, self._step.plugin.batch_size):
            captions = [list(rows[i]["captions"] or []) for i, _ in batch]
            results = call_plugin(self._plugin, self._step.plugin, [image for _, image in batch], captions)
            yield from zip([i for i, _ in batch], results, strict=True)


def _may_lack(row: dict[str, Any]) -> bool:
    """Whether an image is rejected only for its caption, and can be decoded."""
    return row["reason"] in WITHOUT_CAPTION and row["xxh128"] is not None


def _decode(row: dict[str, Any], content: bytes) -> Image.Image:
    if xxhash.xxh3_128_hexdigest(content) == row["xxh128"]:
        try:
            return decode_rgb(content)
        except UndecodableImageError as error:
            raise DataError(f"{row['key']} cannot be decoded to its full size: {error}") from error
    raise DataError(f"{row['key']} has changed since it was scanned; restore it, or choose another output folder")


def _batches(
    images: Iterable[tuple[int, Image.Image | None]], size: int
) -> Iterator[list[tuple[int, Image.Image | None]]]:
    batch: list[tuple[int, Image.Image | None]] = []
    num_pixels = 0
    for i, image in images:
        batch.append((i, image))
        num_pixels += image.width * image.height if image else 0
        if len(batch) == size or num_pixels >= BATCH_PIXELS:
            yield batch
            batch, num_pixels = [], 0
    if batch:
        yield batch


def _read(out: str, folder: str, number: int, columns: Sequence[str]) -> list[dict[str, Any]]:
    return read_table(storage.join(out, folder, part_name(number)), columns).to_pylist()


def _write(step: _Step, number: int, columns: dict[str, pa.Array]) -> None:
    write_table(step.uri(part_name(number)), pa.table(columns))
