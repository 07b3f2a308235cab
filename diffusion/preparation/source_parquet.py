"""Source: parquet files with the bytes of an image and a caption in each row."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from diffusion.errors import DataError, MachineError
from diffusion.preparation.records import Reason, Record, Refused, key_of, make_record

IMAGE_COLUMNS = ("image", "jpg", "image_bytes")
CAPTION_COLUMNS = ("caption", "captions", "text")
_BATCH_ROWS = 32
_BUFFER_BYTES = 2**20


@dataclass(frozen=True)
class ParquetSource:
    """One parquet file or several, streamed a few rows at a time.

    Columns of text, numbers, truth values and times other than image and caption are metadata, and so is the `path` of
    an image struct, as `image_path`. A file that is damaged counts as one refusal more.

    Attributes:
        name: First part of the keys; the rest is the file's path below `path`, `#` and the number of the row.
        path: The file, the folder or the pattern, as it was given.
        files: For each file its name in the keys and where it is.
        image_column: Column of the image bytes; None for the first of IMAGE_COLUMNS that is there.
        caption_column: Column of the caption or list of captions; None for the first of CAPTION_COLUMNS that is there.
        num_records: Rows of all files.
    """

    name: str
    path: str
    files: tuple[tuple[str, str], ...]
    image_column: str | None = None
    caption_column: str | None = None
    num_records: int | None = None
    kind: str = "parquet"

    def read(self) -> Iterator[Record | Refused]:
        """Yield the rows in the order of the files."""
        for below, file in self.files:
            prefix = f"{self.name}/{key_of(below)}" if below else self.name
            row = 0
            try:
                for image, captions, metadata in _rows(Path(file), self.image_column, self.caption_column):
                    yield _record(f"{prefix}#{row}", image, captions, metadata)
                    row += 1
            except pa.ArrowException as error:
                yield Refused(
                    f"{prefix}#{row}", Reason.DAMAGED_FILE, f"{_first_line(error)}; what came before was read"
                )
            except OSError as error:
                if error.errno is not None:
                    raise MachineError(f"cannot read {file}: {error.strerror or error}") from error
                yield Refused(
                    f"{prefix}#{row}", Reason.DAMAGED_FILE, f"{_first_line(error)}; what came before was read"
                )


def check_parquet(path: Path, image_column: str | None, caption_column: str | None) -> int:
    """Check that a file is parquet and has the columns; return how many rows it has.

    Raises:
        DataError: It is damaged, or lacks a column or has it with another type; the message names those that it has.
    """
    try:
        with pq.ParquetFile(path) as file:
            _find_columns(path, file.schema_arrow, image_column, caption_column)
            return file.metadata.num_rows
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path} cannot be read as parquet: {_first_line(error)}; fetch it again or take it out"
        ) from error


def _find_columns(path: Path, schema: pa.Schema, image: str | None, caption: str | None) -> tuple[str, str]:
    """Return the names of the columns of images and captions."""
    found = []
    for what, given, usual in (("image", image, IMAGE_COLUMNS), ("caption", caption, CAPTION_COLUMNS)):
        name = next((name for name in ([given] if given else usual) if name in schema.names), None)
        if name is None:
            raise DataError(
                f"{path} has no column {given or ' or '.join(usual)}; it has {', '.join(schema.names)}; "
                f"name the {what} column with --{what}-column"
            )
        found.append(name)
    image_type, caption_type = schema.field(found[0]).type, schema.field(found[1]).type
    if pa.types.is_struct(image_type):
        index = image_type.get_field_index("bytes")
        image_type = pa.null() if index < 0 else image_type.field(index).type
    if not _is_binary(image_type):
        raise DataError(
            f"{path}: column {found[0]} is {schema.field(found[0]).type}; it must be binary or a struct with bytes; "
            f"name the image column with --image-column; there is {', '.join(schema.names)}"
        )
    if not (_is_text(caption_type) or (_is_list(caption_type) and _is_text(caption_type.value_type))):
        raise DataError(
            f"{path}: column {found[1]} is {caption_type}; it must be text or a list of texts; "
            f"name the caption column with --caption-column; there is {', '.join(schema.names)}"
        )
    return found[0], found[1]


def _rows(path: Path, image: str | None, caption: str | None) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """Yield image bytes or None, captions and metadata of each row."""
    with pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
        schema = file.schema_arrow
        image, caption = _find_columns(path, schema, image, caption)
        scalars = [field.name for field in schema if field.name not in (image, caption) and _is_scalar(field.type)]
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=[image, caption, *scalars], use_threads=False):
            for row in range(batch.num_rows):
                metadata = {name: _value(batch.column(name)[row]) for name in scalars}
                content = _value(batch.column(image)[row])
                if isinstance(content, dict):
                    if content.get("path") is not None:
                        metadata["image_path"] = content["path"]
                    content = content["bytes"]
                yield content, _value(batch.column(caption)[row]), metadata


def _record(key: str, image: bytes | None, captions: Any, metadata: dict[str, Any]) -> Record | Refused:
    """Make the record of a row."""
    if image is None:
        return Refused(key, Reason.MISSING_IMAGE, "the row holds no bytes")
    return make_record(key, image, captions, metadata)


def _value(scalar: Any) -> Any:
    """Return the Python value of an Arrow scalar; bytes of texts that are not UTF-8 become surrogates."""
    kind = scalar.type
    if not scalar.is_valid:
        return None
    if pa.types.is_dictionary(kind):
        return _value(scalar.value)
    if _is_list(kind):
        return [_value(entry) for entry in scalar.values]
    if pa.types.is_struct(kind):
        return {name: _value(scalar[name]) for name in ("bytes", "path") if kind.get_field_index(name) >= 0}
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


def _is_scalar(kind: pa.DataType) -> bool:
    """Return whether a column of this type becomes metadata."""
    if _is_text(kind):
        return True
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    return is_number or pa.types.is_boolean(kind) or pa.types.is_temporal(kind)


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(error).splitlines() or [type(error).__name__])[0]
