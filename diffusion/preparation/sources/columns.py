"""Columns of Arrow tables: which hold images and captions, which become metadata, and records of rows."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pyarrow as pa

from diffusion.errors import DataError, MachineError
from diffusion.preparation.records import Location, Partition, Reason, Record, Rejected, make_record, not_successful
from diffusion.preparation.sources.base import MAX_CAPTIONS, Source, rejected
from diffusion.preparation.sources.reading import UnfitFileError, parent_of, printable, read_below
from diffusion.storage import shown

IMAGE_COLUMNS = ("image", "jpg", "png", "webp", "image_bytes", "image_path", "file_name", "path")
CAPTION_COLUMNS = ("caption", "captions", "text")

BATCH_ROWS = 32
"""Rows that are decoded at once."""


class Columns(NamedTuple):
    """Names of columns of a table."""

    image: str
    caption: str
    metadata: list[str]


def find_columns(path: str, schema: pa.Schema, image: str | None, caption: str | None) -> Columns:
    """Find the columns of images, captions and metadata.

    Args:
        path: the file, for messages.
        schema: its columns.
        image: column of the images: bytes, a struct with `bytes` or `path`, or paths; None for the first of
            IMAGE_COLUMNS that is there.
        caption: column of the captions: text or a list of texts; None for the first of CAPTION_COLUMNS.

    Raises:
        DataError: there is no such column, it has another type, or there are two of a name.
    """
    names, path = schema.names, printable(shown(path))
    listed = printable(", ".join(names))
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{path} has several columns {printable(twice)}; rename them, or take the file out")
    found = []
    for what, given, usual in (("image", image, IMAGE_COLUMNS), ("caption", caption, CAPTION_COLUMNS)):
        name = next((name for name in ([given] if given else usual) if name in names), None)
        if name is None:
            raise DataError(f"{path} has no column {given or ' or '.join(usual)}; it has {listed}; name the {what} "
                            f"column with {what}_column")  # fmt: skip
        found.append(name)
    image_type, caption_type = schema.field(found[0]).type, schema.field(found[1]).type
    if pa.types.is_struct(image_type):
        index = next((at for at in map(image_type.get_field_index, ("bytes", "path")) if at >= 0), -1)
        image_type = pa.null() if index < 0 else image_type.field(index).type
    if not (_is_binary(image_type) or _is_text(image_type)):
        raise DataError(f"{path}: column {found[0]} is {schema.field(found[0]).type}; it must be bytes, a struct with "
                        f"them, or paths; name the image column with image_column; there is {listed}")  # fmt: skip
    if not (_is_text(caption_type) or (_is_list(caption_type) and _is_text(caption_type.value_type))):
        raise DataError(f"{path}: column {found[1]} is {caption_type}; it must be text or a list of texts; name the "
                        f"caption column with caption_column; there is {listed}")  # fmt: skip
    metadata = [field.name for field in schema if field.name not in found and _is_metadata(field.type)]
    return Columns(found[0], found[1], metadata)


class Batch(NamedTuple):
    """Rows of a table, or rows that are lost."""

    start: int
    """Number of the first row in the file."""

    group: int | None
    """Row group of a parquet file, batch of an Arrow file."""

    rows: pa.RecordBatch | None
    """The rows; None if they cannot be read."""

    num_lost: int = 0
    """Rows that cannot be read."""

    detail: str = ""
    """Why."""

    reason: Reason = Reason.DAMAGED_FILE


def scan_batch(source: Source, partition: Partition, batch: Batch) -> Iterator[Record | Rejected]:
    """Yield the records of a batch, and a rejection for each row that is lost."""
    prefix = source.prefix(partition.file)
    base = Location(file=partition.file, version=partition.version, row_group=batch.group)
    if batch.rows is None:
        for row in range(batch.start, batch.start + batch.num_lost):
            yield Rejected(f"{prefix}#{row}", batch.reason, replace(base, row=row), batch.detail)
        return
    columns = find_columns(source.uri(partition.file), batch.rows.schema, source.image_column, source.caption_column)
    for at in range(batch.rows.num_rows):
        row = batch.start + at
        yield _record(source, f"{prefix}#{row}", replace(base, row=row), batch.rows, at, columns)


def _record(
    source: Source, key: str, location: Location, batch: pa.RecordBatch, at: int, columns: Columns
) -> Record | Rejected:
    """Make the record of a row; the image's file is read where the row holds a path."""
    size = sum(_bytes_of(batch.column(name)[at]) for name in columns.metadata)
    if size > source.row_limit():
        return Rejected(key, Reason.TOO_LARGE, location, f"{size} bytes are more than limits.max_metadata_kb")
    metadata = {name: value_of(batch.column(name)[at]) for name in columns.metadata}
    status = metadata.get("status", "success")
    if status not in ("success", None):
        return not_successful(key, status, metadata, location)
    caption = batch.column(columns.caption)[at]
    if _bytes_of(caption) > source.text_limit() * (MAX_CAPTIONS if _is_list(caption.type) else 1):
        detail = f"captions of {_bytes_of(caption)} bytes are more than limits.max_caption_characters"
        return Rejected(key, Reason.TOO_LARGE, location, detail)
    try:
        image, path = _image_of(batch.column(columns.image)[at], source.image_limit())
        if image is None:
            image = _file_of_row(source, location.file, path)
    except UnfitFileError as error:
        return rejected(key, error, location)
    if path:
        metadata["image_path"] = path
    return make_record(key, image, value_of(caption), metadata, location)


def images_of_rows(
    source: Source, file: str, batches: Iterator[Batch], locations: Iterable[Location]
) -> Iterator[bytes]:
    """Yield the images of some rows out of the batches of a table whose first column is that of the images.

    Raises:
        UnfitFileError: one is not there.
    """
    batch: Batch | None = Batch(0, None, None)
    for location in locations:
        row = location.row or 0
        while row >= batch.start + (batch.num_lost if batch.rows is None else batch.rows.num_rows):
            batch = next(batches, None)
            if batch is None:
                raise UnfitFileError(Reason.MISSING_IMAGE, f"there is no row {row}")
        if batch.rows is None:
            raise UnfitFileError(batch.reason, f"row {row}: {batch.detail}")
        image, path = _image_of(batch.rows.column(0)[row - batch.start], source.image_limit())
        yield _file_of_row(source, file, path) if image is None else image


def _image_of(scalar: Any, limit: int) -> tuple[bytes | None, str]:
    """Return the bytes of an image, None if they are in a file, and the path."""
    path = ""
    if scalar.is_valid and pa.types.is_struct(scalar.type):
        kind = scalar.type
        path = value_of(scalar["path"]) or "" if kind.get_field_index("path") >= 0 else ""
        scalar = scalar["bytes"] if kind.get_field_index("bytes") >= 0 else scalar["path"]
        if not scalar.is_valid and path:
            return None, path
    if not scalar.is_valid:
        raise UnfitFileError(Reason.MISSING_IMAGE, "the image is null")
    if _is_text(scalar.type):
        return None, value_of(scalar)
    if (size := _bytes_of(scalar)) > limit:
        raise UnfitFileError(Reason.TOO_LARGE, f"{size} bytes are more than {limit}")
    return scalar.as_py(), path


def _file_of_row(source: Source, file: str, path: str) -> bytes:
    uri = source.uri(file)
    root = parent_of(uri) if source.is_file else source.root
    return read_below(root, parent_of(uri), path, source.image_limit())


def _bytes_of(scalar: Any) -> int:
    """Bytes of a text, of bytes, or of a list of texts; 0 for others."""
    if not scalar.is_valid:
        return 0
    if pa.types.is_dictionary(scalar.type):
        return _bytes_of(scalar.value)
    if _is_list(scalar.type):
        return scalar.values.nbytes
    return scalar.as_buffer().size if _is_text(scalar.type) or _is_binary(scalar.type) else 0


def value_of(scalar: Any) -> Any:
    """Return the Python value of an Arrow scalar; bytes of texts that are not UTF-8 become surrogates."""
    if not scalar.is_valid:
        return None
    if pa.types.is_dictionary(scalar.type):
        return value_of(scalar.value)
    if _is_list(scalar.type):
        return [value_of(entry) for entry in scalar.values]
    if _is_text(scalar.type):
        return scalar.as_buffer().to_pybytes().decode("utf-8", errors="surrogateescape")
    try:
        return scalar.as_py()
    except ValueError:  # Times outside the range of Python's.
        return str(scalar)


def _is_binary(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _is_metadata(kind: pa.DataType) -> bool:
    """Whether a column becomes metadata: texts, lists of texts, numbers, truth values and times do."""
    if _is_text(kind) or (_is_list(kind) and _is_text(kind.value_type)):
        return True
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    return is_number or pa.types.is_boolean(kind) or pa.types.is_temporal(kind)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def raise_if_not_damage(error: Exception) -> None:
    """Raise an error of Arrow again if the disk, the network or the store made it."""
    if isinstance(error, MachineError | DataError) or getattr(error, "errno", None) is not None:
        raise error
