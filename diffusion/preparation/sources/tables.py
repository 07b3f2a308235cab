"""Sources that are tables: which columns hold images and captions, which become metadata, and records of rows."""

import base64
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa

from diffusion.errors import DataError, MachineError, first_line, printable
from diffusion.preparation.measures import file_format
from diffusion.preparation.records import (
    Location,
    Partition,
    Reason,
    Record,
    Rejected,
    has_text,
    is_failed,
    make_record,
    not_successful,
)
from diffusion.preparation.sources.base import MAX_CAPTIONS, Source, rejected_for_texts
from diffusion.preparation.sources.reading import UnfitFileError, read_below
from diffusion.storage import shown

IMAGE_COLUMNS = ("image", "jpg", "png", "webp", "image_bytes", "image_path", "file_name", "path")
CAPTION_COLUMNS = ("caption", "captions", "text", "prompt")

_WRAPPED = (pa.DictionaryScalar, pa.ExtensionScalar)

_MIN_BASE64 = 48
"""Bytes of the smallest image in base64: a shorter text is a path."""

BATCH_ROWS, BATCH_BYTES = 32, 2**25
"""Maximum rows that are held at once, and their size in bytes beyond the first row."""


class Columns(NamedTuple):
    """Names of columns of a table."""

    image: str
    captions: list[str]
    """The first is the column of captions, the others are for rows where it is empty; those are metadata, too."""
    metadata: list[str]


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

    @property
    def stop(self) -> int:
        """Number after that of the last row."""
        return self.start + (self.num_lost if self.rows is None else self.rows.num_rows)


@dataclass(frozen=True, kw_only=True)
class TableSource(Source):
    """Tables with an image, as bytes or as the path of a file, and its captions in each row."""

    def batches(self, partition: Partition, groups: Collection[int | None] | None = None) -> Iterator[Batch]:
        """Yield the rows of a partition; where `groups` are given, the column of images of these groups, or of all."""
        raise NotImplementedError

    def find_columns(self, file: str, schema: pa.Schema) -> Columns:
        """Find the columns of images, captions and metadata; a DataError if one is missing, unfit, or there twice."""
        names, path = schema.names, printable(shown(self.uri(file)))
        listed = printable(", ".join(names))
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise DataError(f"{path} has several columns {printable(twice)}; rename them, or take the file out")
        found = []
        for what, given, usual in (
            ("image", self.image_column, IMAGE_COLUMNS),
            ("caption", self.caption_column, CAPTION_COLUMNS),
        ):
            name = next((name for name in ([given] if given else usual) if name in names), None)
            if name is None:
                raise DataError(f"{path} has no column {given or ' or '.join(usual)}; it has {listed}; name the {what} "
                                f"column with {what}_column")  # fmt: skip
            found.append(name)
        image_type, caption_type = schema.field(found[0]).type, schema.field(found[1]).type
        if pa.types.is_struct(image_type):
            index = next((at for at in map(image_type.get_field_index, ("bytes", "path")) if at >= 0), -1)
            image_type = pa.null() if index < 0 else image_type.field(index).type
        if not (_is_binary(image_type) or _is_text(image_type) or pa.types.is_null(image_type)):
            raise DataError(
                f"{path}: column {found[0]} is {schema.field(found[0]).type}; it must be bytes, a struct with them, or "
                f"paths; name the image column with image_column; there is {listed}"
            )
        if not _is_caption(caption_type):
            raise DataError(f"{path}: column {found[1]} is {caption_type}; it must be text or a list of texts; name "
                            f"the caption column with caption_column; there is {listed}")  # fmt: skip
        others = [] if self.caption_column else [name for name in CAPTION_COLUMNS if name in names]
        captions = [found[1], *(name for name in others if name != found[1] and _is_caption(schema.field(name).type))]
        metadata = [field.name for field in schema if field.name not in found and _is_metadata(field.type)]
        return Columns(found[0], captions, metadata)

    def _scan(self, partition: Partition) -> Iterator[Record | Rejected]:
        prefix = self.prefix(partition.file)
        for batch in self.batches(partition):
            base = Location(file=partition.file, version=partition.version, row_group=batch.group)
            if batch.rows is None:
                for row in range(batch.start, batch.stop):
                    yield Rejected(f"{prefix}#{row}", batch.reason, replace(base, row=row), batch.detail)
                continue
            columns = self.find_columns(partition.file, batch.rows.schema)
            make = partial(self._record, prefix, base, columns, batch.start, batch.rows)
            yield from self.map(make, range(batch.rows.num_rows))

    def _record(
        self, prefix: str, base: Location, columns: Columns, start: int, batch: pa.RecordBatch, at: int
    ) -> Record | Rejected:
        """Make the record of a row; the image's file is read where the row holds a path."""
        key, location = f"{prefix}#{start + at}", replace(base, row=start + at)

        def read() -> tuple[bytes, str]:
            image, path = _image_of(batch.column(columns.image)[at], self.image_limit())
            return self._read(location.file, image), path

        def rejected(detail: str) -> Rejected:
            return rejected_for_texts(key, Reason.TOO_LARGE, location, detail, lambda: read()[0])

        size = sum(_bytes_of(batch.column(name)[at]) for name in columns.metadata)
        if size > self.row_limit():
            return rejected(f"{size} bytes are more than limits.max_metadata_kb")
        metadata = {name: _value_of(batch.column(name)[at]) for name in columns.metadata}
        if is_failed(metadata):
            return not_successful(key, metadata, location)
        captions = [batch.column(name)[at] for name in columns.captions]
        limit, limits = self.text_limit(), "limits.max_caption_characters"  # Longer ones are not decoded.
        caption = next((one for one in captions if _bytes_of(one) > limit or has_text(_value_of(one))), captions[0])
        if _is_list(caption.type):  # Each entry has an end in the buffer.
            limit += self.limits.max_captions_kb * 2**10 + 8 * MAX_CAPTIONS
            limits += " or limits.max_captions_kb"
        if (size := _bytes_of(caption)) > limit:
            return rejected(f"captions of {size} bytes are more than {limits}")
        try:
            image, path = read()
        except UnfitFileError as error:
            return Rejected(key, error.reason, location, error.detail)
        if path and metadata.get("image_path") is None:
            metadata["image_path"] = path
        return make_record(key, image, _value_of(caption), metadata, location)

    def _images(self, partition: Partition, locations: Sequence[Location]) -> Iterator[bytes]:
        yield from self.map(partial(self._read, partition.file), self._images_or_paths(partition, locations))

    def _images_or_paths(self, partition: Partition, locations: Sequence[Location]) -> Iterator[bytes | str]:
        """Yield the images of rows, or where a row holds a path, that; an UnfitFileError if there is neither."""
        batches = self.batches(partition, {location.row_group for location in locations})
        batch: Batch | None = Batch(0, None, None)
        for location in locations:
            row = location.row or 0
            while batch is not None and row >= batch.stop:
                batch = next(batches, None)
            if batch is None or row < batch.start:
                raise UnfitFileError(Reason.MISSING_IMAGE, f"there is no row {row}")
            if batch.rows is None:
                raise UnfitFileError(batch.reason, f"row {row}: {batch.detail}")
            yield _image_of(batch.rows.column(0)[row - batch.start], self.image_limit())[0]

    def _read(self, file: str, image: bytes | str) -> bytes:
        """Return an image, which is read if it is a path in a table; an UnfitFileError if it cannot be read."""
        if isinstance(image, bytes):
            return image
        return read_below(self.uri(file).rpartition("/")[0], image, self.image_limit())


def _image_of(scalar: Any, limit: int) -> tuple[bytes | str, str]:
    """Return the image of a row, or the path of its file, and the path.

    Raises:
        UnfitFileError: there is none, or it has more bytes than `limit`.
    """
    path = ""
    if scalar.is_valid and isinstance(scalar, _WRAPPED):
        scalar = scalar.value
    if scalar.is_valid and pa.types.is_struct(scalar.type):
        kind = scalar.type
        path = _value_of(scalar["path"]) or "" if kind.get_field_index("path") >= 0 else ""
        has_bytes = kind.get_field_index("bytes") >= 0 and (scalar["bytes"].is_valid or not path)
        scalar = scalar["bytes" if has_bytes else "path"]
    if not scalar.is_valid:
        raise UnfitFileError(Reason.MISSING_IMAGE, "the image is null")
    if _is_text(scalar.type):
        path = _value_of(scalar)
        if (image := _decode_base64(path)) is None:
            return path, path
        if len(image) > limit:
            raise UnfitFileError(Reason.TOO_LARGE, f"{len(image)} bytes are more than {limit}")
        return image, ""
    if (size := _bytes_of(scalar)) > limit:
        raise UnfitFileError(Reason.TOO_LARGE, f"{size} bytes are more than {limit}")
    return scalar.as_py(), path


def _decode_base64(text: str) -> bytes | None:
    """Return the image that a text holds in base64, as a data URI or without its head; None for a path."""
    try:
        image = base64.b64decode(text.partition(";base64,")[2] if text.startswith("data:") else text, validate=True)
    except ValueError:
        return None
    return image if len(image) >= _MIN_BASE64 and file_format(image) != "other" else None


def _bytes_of(scalar: Any) -> int:
    """Bytes of a text, of bytes, or of a list of texts; 0 for others."""
    if not scalar.is_valid:
        return 0
    if isinstance(scalar, _WRAPPED):
        return _bytes_of(scalar.value)
    if _is_list(scalar.type):
        return scalar.values.nbytes
    return scalar.as_buffer().size if _is_text(scalar.type) or _is_binary(scalar.type) else 0


def _value_of(scalar: Any) -> Any:
    """Return the Python value of an Arrow scalar; bytes of texts that are not UTF-8 become surrogates."""
    if not scalar.is_valid:
        return None
    if isinstance(scalar, pa.UuidScalar):
        return str(scalar.as_py())
    if isinstance(scalar, _WRAPPED):
        return _value_of(scalar.value)
    if _is_list(scalar.type):
        return [_value_of(entry) for entry in scalar.values]
    if _is_text(scalar.type):
        return scalar.as_buffer().to_pybytes().decode("utf-8", errors="surrogateescape")
    with suppress(ValueError, OverflowError, LookupError):
        return scalar.as_py()
    with suppress(ValueError):  # A time out of the range of Python's types, or finer than these.
        return scalar.cast(pa.string()).as_py()
    return None  # A time of an unknown zone.


def _unwrapped(kind: pa.DataType) -> pa.DataType:
    """Return the type of a dictionary's values, and of an extension type (JSON, for example) that of its storage."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _is_binary(kind: pa.DataType) -> bool:
    kind = _unwrapped(kind)
    is_plain = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    return is_plain or pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind)


def _is_text(kind: pa.DataType) -> bool:
    kind = _unwrapped(kind)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _is_list(kind: pa.DataType) -> bool:
    is_plain = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return is_plain or pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)


def _is_caption(kind: pa.DataType) -> bool:
    """Check that a column can hold captions: texts, lists of texts, or nothing at all, of which the type is null."""
    kind = kind.value_type if _is_list(kind) else kind
    return _is_text(kind) or pa.types.is_null(kind)


def _is_metadata(kind: pa.DataType) -> bool:
    """Return whether a column becomes metadata: texts, UUIDs, lists of texts, numbers, truth values and times do."""
    if _is_text(kind) or kind == pa.uuid() or (_is_list(kind) and _is_text(kind.value_type)):
        return True
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    return is_number or pa.types.is_boolean(kind) or pa.types.is_temporal(kind)


def raise_if_not_damage(error: Exception) -> None:
    """Raise an error of Arrow again if the disk, the network, the store or a lack of memory made it.

    Raises:
        MachineError: memory ran out; or the error itself.
    """
    if isinstance(error, MemoryError):
        raise MachineError(f"memory ran out while a table was read ({first_line(error)}); run the command again, with "
                           "fewer workers or more memory for each") from error  # fmt: skip
    if isinstance(error, MachineError | DataError) or getattr(error, "errno", None) is not None:
        raise error
