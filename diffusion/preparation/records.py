"""Records of a source: images with their captions, and rejections."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from diffusion.errors import DataError


class OutdatedError(DataError):
    """Sources or settings differ from those of an earlier scan; `--overwrite` prepares the data set again."""


class SettingsError(OutdatedError):
    """A data set was made with other settings or of other sources; what is there of it stays."""


class NoColumnsError(DataError):
    """A column is named, and a source has no table or .json that could have it."""


class NothingKeptError(DataError):
    """A data set has no image, or all are rejected."""


class Reason(str, Enum):
    """Why an image was rejected; the value is the name in metadata and manifests. Filters add names of their own."""

    MISSING_CAPTION = "missing_caption"
    EMPTY_CAPTION = "empty_caption"
    INVALID_UTF8 = "invalid_utf8"
    MISSING_IMAGE = "missing_image"
    UNREADABLE = "unreadable"
    UNDECODABLE = "undecodable"
    TOO_LARGE = "too_large"
    TOO_SMALL = "too_small"
    NOT_SUCCESSFUL = "not_successful"
    INVALID_JSON = "invalid_json"
    DAMAGED_FILE = "damaged_file"
    DUPLICATE_KEY = "duplicate_key"
    DUPLICATE = "duplicate"
    NEAR_DUPLICATE = "near_duplicate"
    SMALL_BUCKET = "small_bucket"
    REMOVED = "removed"


MAX_DEPTH = 100
"""Deepest nesting of JSON."""

WITHOUT_CAPTION = (Reason.MISSING_CAPTION, Reason.EMPTY_CAPTION)
"""Reasons that a captioner can fix: such images are decoded and measured."""


@dataclass(frozen=True, kw_only=True)
class Location:
    """Location of an image in its source."""

    file: str
    """Path of the file below the source; empty where the source is the file."""
    version: str = ""
    """Changes with the content of the file: size and time, or what a store gives."""
    offset: int | None = None
    """First byte in the file (in the decompressed stream of a compressed one); None where an image is no such range."""
    length: int | None = None
    """Bytes from there."""
    row_group: int | None = None
    """Row group of a parquet file, batch of an Arrow file."""
    row: int | None = None
    """Row of the file, or sample of the shard, from 0."""


@dataclass(frozen=True)
class Record:
    """One image with its captions."""

    key: str
    """Unique over all sources: the name of the source, a slash, and the path in the source."""
    image: bytes
    """The image file as it came."""
    captions: list[str]
    """At least one; each non-empty, stripped, encodable as UTF-8. Empty within a `Rejected` only."""
    metadata: dict[str, Any]
    """Whatever else the source knew; fit for JSON."""
    location: Location


@dataclass(frozen=True)
class Rejected:
    """One image (or one file, or several rows of it) that could not become a record."""

    key: str
    reason: Reason
    location: Location
    detail: str = ""
    """A few words for the person who looks at the examples."""
    record: Record | None = field(default=None, repr=False)
    """The image, if it was read: a takedown keeps its bytes out of later growths."""


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A part of a source that one worker reads on its own, from front to back.

    A partition is a function of the content of the source, never of the number of workers.
    """

    number: int = -1
    """Counted over all sources and generations; names its files (`part_name`). The scan gives it, as the two below."""

    source: int = 0
    """Number of its source."""

    generation: int = 0
    """Growth that it came with."""

    file: str = ""
    """The file below the source that it lies in; empty for a partition of a folder of images."""
    start: int = 0
    """First row of a table."""
    stop: int | None = None
    """Row after the last; None is the end of the file."""
    version: str = ""
    """Version of the file."""
    num_bytes: int = 0
    """Bytes to read, about."""
    num_records: int | None = None
    """Records and rejections; None if that is not known beforehand."""
    items: tuple[str, ...] = ()
    """Files of a folder of images for `Source.scan`, as JSON. The driver does not keep them: it writes
    them to a file, from which the worker reads them back (`diffusion.preparation.scan`)."""


class Problem(NamedTuple):
    """A file, such as a table, that cannot be used."""

    file: str
    """Name as in a `Location`."""
    version: str
    error: DataError


@dataclass(frozen=True, kw_only=True)
class Partitions:
    """Content of a source, compared with what was read of it before."""

    new: Iterable[Partition]
    """A stream: a source may have 100,000 of them, with 100 million images."""
    gone: Sequence[str] = ()
    """Files that were read before and do not exist any more."""
    changed: Sequence[Partition] = ()
    """Files that were read before and have another version now, as partitions to be read and compared."""
    problems: Sequence[Problem] = ()
    """Files of which nothing is listed. Ingestion goes on without them; elsewhere the first is an error (`checked`)."""

    def checked(self) -> "Partitions":
        """Return itself; raise the error of the first file that cannot be used."""
        for problem in self.problems:
            raise problem.error
        return self


def bare_record(key: str, image: bytes | None, location: Location) -> Record | None:
    """Make the record of a rejected image, without its texts; None if it was not read."""
    return None if image is None else Record(key, image, [], {}, location)


def make_record(
    key: str, image: bytes, captions: Any, metadata: Mapping[str, Any], location: Location
) -> Record | Rejected:
    """Check captions and make a record.

    The captions are a text, a list of texts, or nothing; undecodable bytes are surrogates (`surrogateescape`). Blank
    entries of a list are dropped. What JSON cannot hold of the metadata becomes text or None. Without a caption, with
    one that is not valid UTF-8, and with metadata that are nested too deeply, the image is rejected.
    """
    listed = captions if isinstance(captions, list) else [captions]
    texts = [text for text in listed if isinstance(text, str)]
    try:
        metadata = {clean_text(str(name)): fit_for_json(metadata[name]) for name in metadata}
    except RecursionError as error:
        return Rejected(key, Reason.INVALID_JSON, location, str(error), bare_record(key, image, location))
    bare = Record(key, image, [], metadata, location)
    if not texts:
        others = ", ".join(ascii(caption) for caption in listed if caption is not None)
        detail = f"no text: {others[:80]}" if others else "null or not given"
        return Rejected(key, Reason.MISSING_CAPTION, location, detail, bare)
    if undecodable := next((text for text in texts if has_surrogates(text)), None):
        return Rejected(key, Reason.INVALID_UTF8, location, ascii(undecodable[:80]), bare_record(key, image, location))
    captions = [text.strip() for text in texts if has_text(text)]
    if not captions:
        return Rejected(key, Reason.EMPTY_CAPTION, location, record=bare)
    return Record(key, image, captions, metadata, location)


def record_of_files(
    key: str,
    image: bytes | None,
    text: bytes | None,
    values: bytes | None,
    location: Location,
    detail: str = "",
    caption_column: str | None = None,
) -> Record | Rejected:
    """Make the record of an image with a .txt and a .json of the same name: members of a tar, or files of a folder.

    The caption is the .txt; without one, `caption`, `text` or `prompt` of the .json. All entries of a list `captions`
    in the .json come with it. With a `caption_column`, the caption is that key of the .json; without one, the .txt. The
    other entries of the .json are metadata. An image that img2dataset could not download is a rejection, and so is a
    missing one, with `detail`.
    """
    metadata: dict[str, Any] = {}
    if values is not None:
        try:
            metadata = parse_object(decode_text(values))
        except ValueError as error:
            return Rejected(key, Reason.INVALID_JSON, location, str(error)[:80], bare_record(key, image, location))
    if is_failed(metadata):
        return not_successful(key, metadata, location)
    if image is None:
        return Rejected(key, Reason.MISSING_IMAGE, location, detail)
    used = (caption_column,) if caption_column else ("captions", "caption", "text")
    rest = {name: metadata[name] for name in metadata if name not in used}
    return make_record(key, image, _captions(text, metadata, caption_column), rest, location)


def is_failed(metadata: Mapping[str, Any]) -> bool:
    """Check for an image that img2dataset could not download; other columns named `status` say nothing of that."""
    return str(metadata.get("status")).startswith("failed_to_")


def not_successful(key: str, metadata: Mapping[str, Any], location: Location) -> Rejected:
    """Make the rejection of an image that img2dataset could not download."""
    return Rejected(
        key, Reason.NOT_SUCCESSFUL, location, ascii(f"{metadata['status']}: {metadata.get('error_message')}"[:80])
    )


def _captions(text: bytes | None, metadata: dict[str, Any], column: str | None) -> list[Any]:
    if column is not None:
        named = metadata.get(column)
        named = named if has_text(named) or text is None else decode_text(text)
        return named if isinstance(named, list) else [named]
    listed = metadata.get("captions")
    listed = listed if isinstance(listed, list) else [listed]
    if text is not None:
        first = decode_text(text)
        return [first, *(caption for caption in listed if caption != first.strip())]
    if any(isinstance(caption, str) for caption in listed):
        return listed
    found = [metadata[name] for name in ("caption", "text", "prompt") if metadata.get(name) is not None]
    single = next(filter(has_text, found), found[0] if found else None)
    return single if isinstance(single, list) else [single]


def has_text(captions: Any) -> bool:
    """Check that a text, or one of a list, is more than white space and characters without a width."""
    listed = captions if isinstance(captions, list) else [captions]
    return any(any(map(str.isprintable, text.replace(" ", ""))) for text in listed if isinstance(text, str))


def decode_text(data: bytes) -> str:
    """Decode UTF-8 with or without a byte-order mark; bytes that are not UTF-8 become surrogates."""
    return data.decode("utf-8-sig", errors="surrogateescape")


def has_surrogates(text: str) -> bool:
    """Return whether a text cannot be encoded as UTF-8."""
    return not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text)


def clean_text(text: str) -> str:
    """Write surrogates out as escapes."""
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8") if has_surrogates(text) else text


def key_of(name: str) -> str:
    """Make a key of a file or member name; one that is not UTF-8 is escaped and gets a hash of its bytes."""
    if not has_surrogates(name):
        return name
    # The hash distinguishes a name with the byte from a name with the literal escape.
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{clean_text(name)}~{digest}"


def fit_for_json(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Replace what JSON cannot hold: text for unknown types, None for NaN and infinity.

    Raises:
        RecursionError: it is nested deeper than `depth`. Python's own limit depends on the caller.
    """
    if depth < 0:
        raise RecursionError("too deeply nested")
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, dict):
        return {clean_text(str(name)): fit_for_json(entry, depth - 1) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [fit_for_json(entry, depth - 1) for entry in value]
    return clean_text(str(value))


def parse_object(text: str) -> dict[str, Any]:
    """Parse a JSON object; a ValueError if it is none."""
    try:
        parsed = json.loads(text)
        if text.count("[") + text.count("{") > MAX_DEPTH:
            fit_for_json(parsed)
    except RecursionError as error:
        raise ValueError("too deeply nested") from error
    if not isinstance(parsed, dict):
        raise ValueError("not a JSON object")
    return parsed
