"""Score: columns that models compute from images, and captions that they write, as a parquet file per partition.

`scores/COLUMN/NUMBER.parquet` has the rows of `metadata/NUMBER.parquet` in the same order; rejected images have null.
`scores/captions/NUMBER.parquet` has all captions of each image, and the indices of the generated ones. What is there is
not computed again, unless path, arguments or batch size of the plug-in (or, for a scorer, of the captioner) change, or
the conversion of the images that it sees: `scores.json` says for each column what it is made with.

Images are read where they lie, and only if the plug-in looks at them. A worker keeps one batch of them in memory.
"""

import functools
import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import pyarrow as pa
import xxhash
from PIL import Image

from diffusion import storage
from diffusion.config.loading import to_dict
from diffusion.datasets.images import UndecodableImageError, decode_rgb
from diffusion.errors import ConfigurationError, DataError, first_line, printable
from diffusion.formats.data_set import ANSWERS, METADATA, SCORES, SCORES_RECORD
from diffusion.preparation.chat_captions import (
    ANSWER_TYPE,
    COUNTS,
    Answer,
    ChatCaptioner,
    Journal,
    Outcome,
    count_answer,
    describe_answers,
    image_hashes,
    read_answers,
)
from diffusion.preparation.config import CaptionerConfig, CaptionMode, Engine, PrepareConfig
from diffusion.preparation.engine import Workers, progress_bar, run, visible_gpus
from diffusion.preparation.layout import (
    CAPTIONS,
    GENERATED_CAPTIONS,
    LOCATION,
    file_numbers,
    part_name,
    read_schema,
    read_scores_record,
    read_table,
    write_table,
)
from diffusion.preparation.output import clear_folders, protect_answers
from diffusion.preparation.plugins import (
    Config,
    call_plugin,
    clean_score,
    determining,
    load_plugin,
    merge_captions,
    named_plugins,
    reads_images,
)
from diffusion.preparation.records import WITHOUT_CAPTION, Location, Partition
from diffusion.preparation.scan import Scan, changed_settings
from diffusion.preparation.sources import Source

logger = logging.getLogger(__name__)

BATCH_PIXELS = 2**26
"""A batch ends early when it holds this many pixels, 200 MB: memory is bounded whatever the size of images."""

_OF_THE_IMAGE = (ValueError, TypeError, LookupError, ArithmeticError, AssertionError, RuntimeError)
"""Errors of a plug-in that may be those of one image, unlike a failure of the network or the disk."""

_COLUMNS = ("key", *LOCATION, "xxh128", "captions", "reason")


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A captioner or scorer of a data set."""

    out: str
    key: str
    """In the configuration."""
    plugin: Config
    identity: dict[str, Any]
    """Settings that determine the results, as in `scores.json`."""
    convert_to_srgb: bool

    @property
    def column(self) -> str:
        return CAPTIONS if isinstance(self.plugin, CaptionerConfig) else self.plugin.column

    @property
    def folder(self) -> str:
        return storage.join(self.out, SCORES, self.column)

    def write(self, number: int, columns: dict[str, pa.Array]) -> None:
        write_table(storage.join(self.folder, part_name(number)), pa.table(columns))


class _Result(NamedTuple):
    number: int
    num_rows: int
    kind: pa.DataType | None
    """Type of the values; None if all are null: then no file was written."""
    failed: list[str]
    """Images that the plug-in failed on: their keys, and the errors."""
    answers: Counter[str]
    """Numbers of the answers of a server."""


def score(config: PrepareConfig, scan: Scan, *, workers: Workers, progress: bool = False) -> None:
    """Run the captioner and each scorer over the partitions of `config.out` that lack their results.

    Raises:
        ConfigurationError: a plug-in cannot be imported, or its results have the wrong number or type.
        DataError: weights are missing, or an image is not what it was when it was scanned.
        MachineError: a store fails, a worker dies, or one that is to have a GPU has none.
    """
    if config.captioner is None:
        _remove_captions(config.out)
    captions: dict[str, Any] | None = None
    for key, plugin in named_plugins(config):
        values = determining(to_dict(plugin))
        names = ("path", "arguments", "batch_size", "mode", "chat")
        identity = {**{name: values[name] for name in names if name in values}, "captions": captions}
        if reads_images(plugin, key):
            identity["convert_to_srgb"] = config.convert_to_srgb
        step = _Step(out=config.out, key=key, plugin=plugin, identity=identity, convert_to_srgb=config.convert_to_srgb)
        _run_missing(step, scan, workers, progress)
        if isinstance(plugin, CaptionerConfig):
            captions = identity


def _run_missing(step: _Step, scan: Scan, workers: Workers, progress: bool) -> None:
    """Write the missing parts of a column."""
    finished = _finished_parts(step)
    numbers = [one.number for one in scan.partitions if one.number not in finished]
    if not numbers:
        return
    what, num_gpus = f"{step.column}: {step.plugin.path}", step.plugin.num_gpus
    where = f"{num_gpus:g} GPUs for each worker" if num_gpus else "on the CPU (num_gpus: 0)"
    logger.info("%s, %d of %d partitions, %s", what, len(numbers), len(scan.partitions), where)
    kind = None
    if finished:
        kind = read_schema(storage.join(step.folder, part_name(min(finished)))).field(step.column).type
    untyped: dict[int, int] = {}
    is_settled, failed, answers, start = False, list[str](), Counter[str](), time.monotonic()
    make, tasks = functools.partial(_Worker, step), map(scan.find, numbers)

    def write_untyped() -> None:
        # DuckDB reads all files of a column with one type, so a part without any value gets that of the others.
        while untyped:
            number, num_rows = untyped.popitem()
            step.write(number, {step.column: pa.nulls(num_rows, kind or pa.float64())})

    with progress_bar(step.column, len(numbers), unit=" partitions", shown=progress) as bar:
        for result in run(
            _on_gpus(workers, num_gpus), make, tasks, num_gpus=num_gpus, describe=lambda task: task[0].describe(task[1])
        ):
            bar.update()
            failed += result.failed
            answers += result.answers
            if result.kind is None:
                untyped[result.number] = result.num_rows
                if is_settled:
                    write_untyped()
                continue
            if kind not in (None, result.kind):
                empty = {} if is_settled else _empty_parts(step, finished, result.kind)
                if not empty:
                    raise ConfigurationError(
                        f"{what} returned numbers and texts; let it return one of them, and remove {step.folder}"
                    )
                storage.delete(storage.join(step.folder, part_name(number)) for number in empty)
                untyped |= empty
            kind, is_settled = result.kind, True
    write_untyped()
    if failed:
        logger.warning("%s failed on %d images, which have no value in %s; the first: %s", step.plugin.path,
                       len(failed), step.column, sorted(failed)[0])  # fmt: skip
    if answers:
        logger.info("%s, %.1f images/s", describe_answers(answers), answers["images"] / (time.monotonic() - start))


def _finished_parts(step: _Step) -> set[int]:
    """Numbers of the parts that are there; those of another identity are deleted."""
    record = read_scores_record(step.out)
    there = _completed(record.get(step.column), step.identity)
    if there != step.identity:
        _protect_answers(step.out, there, step.identity)
        clear_folders(step.out, f"{SCORES}/{step.column}", *([ANSWERS] if step.column == CAPTIONS else []))
    if record.get(step.column) != step.identity:
        storage.write_json(storage.join(step.out, SCORES_RECORD), {**record, step.column: step.identity})
    return file_numbers(step.folder)


def _completed(there: dict[str, Any] | None, given: dict[str, Any] | None) -> dict[str, Any] | None:
    """Complete an identity of an earlier version, which does not say if images were converted.

    Taken for not converted, scores are computed again; captions of a server, which cost money, stay.
    """
    if there is None or given is None:
        return there
    converts = bool(there.get("chat")) and given.get("convert_to_srgb")
    added = {"convert_to_srgb": converts} if "convert_to_srgb" in given else {}
    return {**added, **there, "captions": _completed(there.get("captions"), given["captions"])}


def _remove_captions(out: str) -> None:
    """Remove what a former captioner wrote: the captions of `scores` take the place of those of the sources."""
    record = read_scores_record(out)
    if (there := record.pop(CAPTIONS, None)) is not None:
        _protect_answers(out, there, {})
        clear_folders(out, f"{SCORES}/{CAPTIONS}", ANSWERS)
        storage.write_json(storage.join(out, SCORES_RECORD), record)


def _protect_answers(out: str, there: dict[str, Any] | None, given: dict[str, Any]) -> None:
    if there and there.get("chat"):
        changes = changed_settings(there, given) or ["no captioner"]
        protect_answers(out, f"by other settings ({'; '.join(changes)})")


def _empty_parts(step: _Step, numbers: Iterable[int], kind: pa.DataType) -> dict[int, int]:
    """Return numbers and rows of the parts with another column type; none if one of them holds a value."""
    found: dict[int, int] = {}
    for number in numbers:
        column = read_table(storage.join(step.folder, part_name(number)), [step.column])[step.column]
        if column.type != kind:
            if column.null_count < len(column):
                return {}
            found[number] = len(column)
    return found


def _on_gpus(workers: Workers, num_gpus: float) -> Workers:
    """Limit processes to those that the GPUs of this machine have room for, as Ray does."""
    if not num_gpus or workers.engine is Engine.ray:
        return workers
    num_visible = len(visible_gpus())
    room = num_visible * int(1 / num_gpus) if num_gpus < 1 else num_visible // math.ceil(num_gpus)
    return replace(workers, number=max(1, min(workers.number, room)))


class _Worker:
    """Runs a plug-in over partitions, one at a time."""

    def __init__(self, step: _Step) -> None:
        self._step, self._config = step, step.plugin
        self._plugin = load_plugin(step.plugin, step.key)
        self._reads_images = getattr(self._plugin, "reads_images", True)

    def __call__(self, task: tuple[Source, Partition]) -> _Result:
        self._source, self._partition = task
        self._failed, self._answers = list[str](), Counter[str]()
        name = part_name(self._partition.number)
        self._rows = read_table(storage.join(self._step.out, METADATA, name), _COLUMNS).to_pylist()
        if self._step.identity["captions"] is not None:
            captioned = read_table(storage.join(self._step.out, SCORES, CAPTIONS, name), ["captions"])["captions"]
            for row, captions in zip(self._rows, captioned.to_pylist(), strict=True):
                row["captions"] = captions
        columns = self._captions() if isinstance(self._config, CaptionerConfig) else self._scores()
        if columns:
            self._step.write(self._partition.number, columns)
        if isinstance(self._plugin, ChatCaptioner):
            self._journal().remove()
        kind = columns[self._step.column].type if columns else None
        return _Result(self._partition.number, len(self._rows), kind, self._failed, self._answers)

    def _scores(self) -> dict[str, pa.Array]:
        """Return the column of a scorer; nothing if it is empty."""
        chosen = [i for i, row in enumerate(self._rows) if _is_usable(row) and (row["reason"] == "" or row["captions"])]
        values: list[Any] = [None] * len(self._rows)
        for i, value in self._results(chosen):
            values[i] = clean_score(value)
        kinds = {type(value) for value in values if value is not None}
        if len(kinds) > 1:
            raise ConfigurationError(f"{self._config.path} returned numbers and texts; it must return one of them")
        return {self._step.column: pa.array(values, pa.string() if str in kinds else pa.float64())} if kinds else {}

    def _captions(self) -> dict[str, pa.Array]:
        """Return the captions of all images, and the indices of the generated ones."""
        assert isinstance(self._config, CaptionerConfig)
        captions: list[list[str]] = [row["captions"] or [] for row in self._rows]
        generated: list[list[int] | None] = [None] * len(self._rows)
        every = self._config.mode is not CaptionMode.missing
        chosen = [i for i, row in enumerate(self._rows) if _is_usable(row) and (every or not row["captions"])]
        answers: list[dict[str, Any] | None] = [None] * len(self._rows)
        is_chat = isinstance(self._plugin, ChatCaptioner)
        for i, result in self._answered(chosen) if is_chat else self._results(chosen):
            if isinstance(result, Answer):
                answers[i] = asdict(result)
                result = result.texts
            captions[i], indices = merge_captions(result, captions[i], self._config)
            generated[i] = indices or None
        return {
            CAPTIONS: pa.array(captions, pa.list_(pa.string())),
            GENERATED_CAPTIONS: pa.array(generated, pa.list_(pa.int32())),
            **({ANSWERS: pa.array(answers, ANSWER_TYPE)} if is_chat else {}),
        }

    def _journal(self) -> Journal:
        assert isinstance(self._config, CaptionerConfig) and self._config.chat is not None
        return Journal(self._step.out, self._partition.number, self._config.chat.server.concurrency)

    def _answered(self, chosen: Sequence[int]) -> Iterator[tuple[int, Answer]]:
        """Yield a server's answers for the chosen rows; it is not asked again for those in the journal.

        It is asked once for rows of one request. The first of them has the costs.
        """
        rows, journal, numbers = self._rows, self._journal(), dict[str, list[int]]()
        for i in chosen:
            numbers.setdefault(journal.identify(rows[i]), []).append(i)
        known = journal.read(numbers)
        missing = {first: identity for identity, (first, *_) in numbers.items() if identity not in known}

        def spread(identity: str, answer: Answer) -> Iterator[tuple[int, Answer]]:
            first, *copies = numbers[identity]
            yield first, answer
            yield from ((i, replace(answer, **dict.fromkeys((*COUNTS, "dollars"), 0))) for i in copies)

        for identity, answer in known.items():
            yield from spread(identity, answer)
        images = ((i, image, rows[i]["captions"] or []) for i, image in self._decoded([*missing]))
        try:
            for i, answer in self._plugin.stream(images, self._has_captions):
                journal.add(missing[i], answer, *image_hashes(rows[i]))
                self._answers.update(count_answer(answer))
                yield from spread(missing[i], answer)
        finally:
            journal.flush()

    def _has_captions(self) -> bool:
        """Look for captions of the server in the finished parts, and in the journals."""
        for number in sorted(file_numbers(self._step.folder)):
            column = read_table(storage.join(self._step.folder, part_name(number)), [GENERATED_CAPTIONS])[0]
            if column.null_count < len(column):
                return True
        return any(answer.outcome is Outcome.captioned for _, answer in read_answers(self._step.out))

    def _results(self, chosen: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """Yield the plug-in's result for each of the chosen rows, with the number of the row."""
        for batch in _batches(self._decoded(chosen), self._config.batch_size):
            yield from zip([i for i, _ in batch], self._call(batch), strict=True)

    def _decoded(self, chosen: Sequence[int]) -> Iterator[tuple[int, Image.Image | None]]:
        """Yield the numbers of the chosen rows and their images, or None if the plug-in reads none."""
        images: Iterable[bytes | None] = [None] * len(chosen)
        if self._reads_images and chosen:
            locations = [Location(**{name: self._rows[i][name] for name in LOCATION}) for i in chosen]
            images = self._source.images(self._partition, locations)
        for i, content in zip(chosen, images, strict=True):
            yield i, None if content is None else _decode(self._rows[i], content, self._step.convert_to_srgb)

    def _call(self, batch: "_Batch") -> list[Any]:
        """Return the results of a batch; None for an image on which the plug-in fails, if it does not on a plain one.

        A file that one library cannot take would otherwise end the preparation of all.
        """
        captions = [list(self._rows[i]["captions"] or []) for i, _ in batch]
        try:
            return call_plugin(self._plugin, self._config, [image for _, image in batch], captions)
        except _OF_THE_IMAGE as error:
            if type(error).__name__ == "OutOfMemoryError":  # PyTorch's
                raise
            if len(batch) > 1:
                return [self._call([one])[0] for one in batch]
            plain = Image.new("RGB", (512, 512), "grey") if self._reads_images else None
            call_plugin(self._plugin, self._config, [plain], [["a plain image"]])
            self._failed.append(f"{printable(self._rows[batch[0][0]]['key'])}: {first_line(error)}")
            return [None]


def _is_usable(row: dict[str, Any]) -> bool:
    """Return whether an image can be decoded; it may lack its captions."""
    return row["reason"] == "" or (row["reason"] in WITHOUT_CAPTION and row["xxh128"] is not None)


def _decode(row: dict[str, Any], content: bytes, convert_to_srgb: bool) -> Image.Image:
    if xxhash.xxh3_128_hexdigest(content) != row["xxh128"]:
        raise DataError(f"{row['key']} has changed since it was scanned; restore it, or choose another output folder")
    try:
        return decode_rgb(content, convert_to_srgb=convert_to_srgb)
    except UndecodableImageError as error:
        raise DataError(f"{row['key']} cannot be decoded to its full size: {error}") from error


_Batch = list[tuple[int, Image.Image | None]]
"""Numbers of rows, and their images."""


def _batches(images: Iterable[tuple[int, Image.Image | None]], size: int) -> Iterator[_Batch]:
    batch: _Batch = []
    num_pixels = 0
    for i, image in images:
        batch.append((i, image))
        num_pixels += image.width * image.height if image else 0
        if len(batch) == size or num_pixels >= BATCH_PIXELS:
            yield batch
            batch, num_pixels = [], 0
    if batch:
        yield batch
