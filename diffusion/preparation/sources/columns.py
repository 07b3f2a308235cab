"""Columns of Arrow tables: which hold images and captions, which become metadata, and their values in Python."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa

from diffusion.errors import DataError, MachineError
from diffusion.preparation.records import Reason, Record, Refused, make_record
from diffusion.preparation.sources.remote_files import join, parent_of, read_remote_image
from diffusion.storage import is_url, shown

IMAGE_COLUMNS = ("image", "jpg", "png", "webp", "image_bytes", "image_path", "file_name", "path")
CAPTION_COLUMNS = ("caption", "captions", "text")


class Row(NamedTuple):
    """A row of a table."""

    batch: pa.RecordBatch
    at: int
    """Number within the batch."""

    image: str
    """Name of the column of images."""

    caption: str
    """Name of the column of captions."""


def find_columns(place: str, schema: pa.Schema, image: str | None, caption: str | None) -> tuple[str, str]:
    """Return the names of the columns of images and captions.

    Args:
        place: The file, for messages.
        schema: Its columns.
        image: Column of the images: bytes, a struct with `bytes` or `path`, or the path or URL of an image; None for
            the first of IMAGE_COLUMNS that is there.
        caption: Column of the captions: text or a list of texts; None for the first of CAPTION_COLUMNS that is there.

    Raises:
        DataError: There is no such column, or it has another type.
    """
    found = []
    for what, given, usual in (("image", image, IMAGE_COLUMNS), ("caption", caption, CAPTION_COLUMNS)):
        name = next((name for name in ([given] if given else usual) if name in schema.names), None)
        if name is None:
            raise DataError(
                f"{place} has no column {given or ' or '.join(usual)}; it has {', '.join(schema.names)}; "
                f"name the {what} column with --{what}-column"
            )
        found.append(name)
    image_type, caption_type = schema.field(found[0]).type, schema.field(found[1]).type
    if pa.types.is_struct(image_type):
        index = next((at for at in map(image_type.get_field_index, ("bytes", "path")) if at >= 0), -1)
        image_type = pa.null() if index < 0 else image_type.field(index).type
    if not (_is_binary(image_type) or _is_text(image_type)):
        raise DataError(
            f"{place}: column {found[0]} is {schema.field(found[0]).type}; it must be bytes, a struct with "
            f"them, or paths; name the image column with --image-column; there is {', '.join(schema.names)}"
        )
    if not (_is_text(caption_type) or (_is_list(caption_type) and _is_text(caption_type.value_type))):
        raise DataError(
            f"{place}: column {found[1]} is {caption_type}; it must be text or a list of texts; "
            f"name the caption column with --caption-column; there is {', '.join(schema.names)}"
        )
    return found[0], found[1]


def metadata_columns(schema: pa.Schema, image: str, caption: str) -> list[str]:
    """Return the names of the columns that become metadata: text, lists of texts, numbers, truth values and times."""
    return [field.name for field in schema if field.name not in (image, caption) and _is_metadata(field.type)]


def records_of_rows(place: str, prefix: str, first: int, rows: Iterator[Row]) -> Iterator[Record | Refused]:
    """Yield the records of rows; a damaged file counts as one refusal more.

    Args:
        place: The file, a path or a URL.
        prefix: How the keys begin; `#` and the number of the row come behind it.
        first: Number of the first row.
        rows: What is read from the file.

    Raises:
        MachineError: The disk, the network or a store fails.
    """
    number = first
    try:
        for row in rows:
            yield record_of_row(f"{prefix}#{number}", row, parent_of(place))
            number += 1
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise MachineError(f"cannot read {shown(place)}: {error.strerror or error}") from error
        yield Refused(f"{prefix}#{number}", Reason.DAMAGED_FILE, f"{first_line(error)}; what came before was read")


def record_of_row(key: str, row: Row, folder: str) -> Record | Refused:
    """Make the record of a row; it reads the image's file where the row holds a path.

    Args:
        key: Key of the record.
        row: The row.
        folder: Where relative paths begin: the folder or URL that the table lies in.

    Raises:
        MachineError: The disk, the network or a store fails.
    """
    batch, at, image, caption = row
    metadata = {name: value_of(batch.column(name)[at]) for name in metadata_columns(batch.schema, image, caption)}
    content = value_of(batch.column(image)[at])
    path = content.get("path") if isinstance(content, dict) else content if isinstance(content, str) else None
    content = content.get("bytes") if isinstance(content, dict) else content
    if path is not None:
        metadata["image_path"] = shown(path)
    if metadata.get("status") not in (None, "success"):
        return Refused(key, Reason.NOT_SUCCESSFUL, ascii(f"{metadata['status']}: {metadata.get('error_message')}"[:80]))
    if not isinstance(content, bytes):
        if not path:
            return Refused(key, Reason.MISSING_IMAGE, "the row holds neither bytes nor a path")
        content = read_remote_image(path if is_url(path) else join(folder, path), key)
        if isinstance(content, Refused):
            return content
    return make_record(key, content, value_of(batch.column(caption)[at]), metadata)


def value_of(scalar: Any) -> Any:
    """Return the Python value of an Arrow scalar; bytes of texts that are not UTF-8 become surrogates."""
    kind = scalar.type
    if not scalar.is_valid:
        return None
    if pa.types.is_dictionary(kind):
        return value_of(scalar.value)
    if _is_list(kind):
        return [value_of(entry) for entry in scalar.values]
    if pa.types.is_struct(kind):
        return {name: value_of(scalar[name]) for name in ("bytes", "path") if kind.get_field_index(name) >= 0}
    if _is_text(kind):
        return scalar.as_buffer().to_pybytes().decode("utf-8", errors="surrogateescape")
    try:
        return scalar.as_py()
    except ValueError:  # times outside the range of Python's
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
    """Return whether a column of this type becomes metadata."""
    if _is_text(kind) or (_is_list(kind) and _is_text(kind.value_type)):
        return True
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    return is_number or pa.types.is_boolean(kind) or pa.types.is_temporal(kind)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(error).splitlines() or [type(error).__name__])[0]
