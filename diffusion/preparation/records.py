"""What a source yields: records, and refusals of what could not become one."""

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from diffusion.datasets.images import MAX_BYTES
from diffusion.errors import MachineError


class Reason(str, Enum):
    """Why an image was refused; the value is the key in the manifest."""

    MISSING_CAPTION = "missing_caption"
    EMPTY_CAPTION = "empty_caption"
    INVALID_UTF8 = "invalid_utf8"
    MISSING_IMAGE = "missing_image"
    UNREADABLE = "unreadable"
    UNDECODABLE = "undecodable"
    TOO_LARGE = "too_large"
    TOO_SMALL = "too_small"
    DUPLICATE_KEY = "duplicate_key"
    NOT_SUCCESSFUL = "not_successful"
    INVALID_JSON = "invalid_json"
    DAMAGED_FILE = "damaged_file"
    DUPLICATE = "duplicate"
    NEAR_DUPLICATE = "near_duplicate"
    SMALL_BUCKET = "small_bucket"
    WITHDRAWN = "withdrawn"


def reason_text(reason: Reason | str) -> str:
    """Return a reason as the manifest names it."""
    return reason.value if isinstance(reason, Reason) else reason


@dataclass(frozen=True)
class Record:
    """One image with its captions.

    Attributes:
        key: Unique over all sources: the name of the source, a slash, and the place in the source.
        image: The image file as it came.
        captions: At least one; each non-empty, stripped, encodable as UTF-8.
        metadata: Whatever else the source knew; fit for JSON.
    """

    key: str
    image: bytes
    captions: list[str]
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Refused:
    """One image that a source could not make a record of.

    Attributes:
        key: As the record's would have been.
        reason: Why; a `Reason`, or the name of a filter.
        detail: A few words for the person who looks at the examples.
        record: Where only the caption is missing: the record without captions, which a captioner can complete.
    """

    key: str
    reason: Reason | str
    detail: str = ""
    record: Record | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Partition:
    """A part of a source that one worker reads on its own, in one pass.

    Attributes:
        id: Name within the source: of two partitions of one source no two are equal, and that of a partition stays when
            the source grows. Short and made of what the partition holds (a tar's name, a file and its first row).
        items: What `Source.read` needs to find it again in another process: names of files below the source, numbers
            as text. It is stored as JSON with the data set, so no secret may be in it.
        fingerprint: Changes when what it holds changes, and is found without reading the images: names, sizes and
            times of modification (`file_state`), or the version that a store gives. Where it differs from the one of
            the last run, the partition is read again and compared in full, so it may change needlessly.
        num_records: How many records and refusals it will yield; None if that is not known beforehand.
    """

    id: str
    items: tuple[str, ...]
    fingerprint: str
    num_records: int | None = None


class Source(Protocol):
    """A place that records are read from, cut into partitions.

    A source is a small value that can be pickled: it is sent to the workers, and each reads whole partitions. It holds
    no open file, and no password (a worker finds those in its environment). What a partition yields depends on the
    content of the partition alone: keys are unique over the source by construction, without a look at the others.
    """

    @property
    def name(self) -> str:
        """First part of the keys."""
        ...

    @property
    def kind(self) -> str:
        """`folder`, `webdataset`, `parquet`, ..."""
        ...

    @property
    def path(self) -> str:
        """Where it is, as the manifest names it; without passwords."""
        ...

    @property
    def num_records(self) -> int | None:
        """How many records and refusals it will yield; None if that is not known beforehand."""
        ...

    def partitions(self, size: int, known: Sequence[Partition] = ()) -> list[Partition]:
        """Cut the source into partitions that hold every image exactly once.

        The cut is a function of the content of the source and of the arguments.

        Args:
            size: Images that a partition should hold where the source can be cut freely (the files of a folder, the
                rows of a table); a tar is one partition whatever it holds.
            known: Partitions of an earlier run, when the source held less. They are returned as they are now: with the
                same id and items, and a fingerprint of what is there today. One whose files are gone is left out. What
                they do not hold becomes new partitions, whatever `size` they were cut with.

        Returns:
            The known ones that are still there, in the order given, then the new ones in the order of their content
            (that of `read` without a partition, where nothing is known).

        Raises:
            DataError: The source is not what it was when it was opened.
            MachineError: It cannot be listed.
        """
        ...

    def only(self, partition: Partition) -> "Source":
        """Return a source of the same keys that is small when pickled, and of which only this partition will be read.

        For a source that is small anyway it is the source itself; one that lists its files leaves the others out.
        """
        ...

    def read(self, partition: Partition | None = None) -> Iterator[Record | Refused]:
        """Yield each image of a partition once, either way, in the same order each time; None: of all of them.

        Raises:
            MachineError: The disk or the network fails. A damaged file is no error: it is a refusal.
        """
        ...


def file_state(path: str | Path) -> str:
    """Return size and time of modification of a file, for fingerprints; `gone` where there is none."""
    try:
        status = os.stat(path)  # noqa: PTH116 - three times per image; making a Path takes ten times as long
    except OSError:
        return "gone"
    return f"{status.st_size} {status.st_mtime_ns}"


def fingerprint_of(*parts: str) -> str:
    """Return a short hash of texts: equal for equal lists of texts."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()


def make_record(key: str, image: bytes, captions: Any, metadata: dict[str, Any]) -> Record | Refused:
    """Check captions and make a record.

    Args:
        key: Key of the record.
        image: The image file.
        captions: A text, a list of texts, or nothing; undecodable bytes as surrogates (`surrogateescape`). Blank
            entries of a list are left out.
        metadata: Anything; what JSON cannot hold becomes text or None.

    Returns:
        The record, or the refusal if there is no caption, none that is not blank, or one is not valid UTF-8.
    """
    listed = captions if isinstance(captions, list) else [captions]
    texts = [text for text in listed if isinstance(text, str)]
    metadata = {clean_text(str(name)): fit_for_json(metadata[name]) for name in metadata}
    bare = Record(key, image, [], metadata)
    if not texts:
        others = ", ".join(ascii(caption) for caption in listed if caption is not None)
        return Refused(key, Reason.MISSING_CAPTION, f"no text: {others[:80]}" if others else "null or not given", bare)
    if any(has_surrogates(text) for text in texts):
        return Refused(key, Reason.INVALID_UTF8, ascii(next(text for text in texts if has_surrogates(text))[:80]))
    stripped = [text.strip() for text in texts]
    captions = [text for text in stripped if text]
    if not captions:
        return Refused(key, Reason.EMPTY_CAPTION, record=bare)
    return Record(key, image, captions, metadata)


def read_bytes(path: str) -> bytes:
    """Read a file.

    Raises:
        OSError: It cannot be read.
    """
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - likewise
        return file.readall()


def read_image(path: str, key: str) -> bytes | Refused:
    """Read an image file; a refusal if it is not there or may not be read.

    Raises:
        MachineError: The disk or the network fails.
    """
    try:
        return unfit_file(path, key) or read_bytes(path)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return Refused(key, Reason.MISSING_IMAGE, "there is no such file")
    except PermissionError:
        return Refused(key, Reason.UNREADABLE, "no permission to read the file")
    except OSError as error:
        raise MachineError(f"cannot read {path}: {error.strerror}") from error


def unfit_file(path: str, key: str) -> Refused | None:
    """Return a refusal for what is not to be read whole: a pipe or device, which could last for ever, or too large.

    Raises:
        OSError: It cannot be looked at.
    """
    status = os.stat(path)  # noqa: PTH116 - as in file_state
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return Refused(key, Reason.UNREADABLE, "it is a pipe, a socket or a device, not a file")
    if status.st_size > MAX_BYTES:
        return Refused(key, Reason.TOO_LARGE, f"{status.st_size} bytes are more than {MAX_BYTES}")
    return None


def decode_text(data: bytes) -> str:
    """Decode UTF-8 with or without a byte-order mark; bytes that are not UTF-8 become surrogates."""
    return data.decode("utf-8-sig", errors="surrogateescape")


def has_surrogates(text: str) -> bool:
    """Return whether a text cannot be encoded as UTF-8."""
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def clean_text(text: str) -> str:
    """Return the text with surrogates written out as escapes."""
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8") if has_surrogates(text) else text


def key_of(name: str) -> str:
    """Return a file or member name as a key; one that is not UTF-8 is escaped and gets a hash of its bytes."""
    if not has_surrogates(name):
        return name
    # the digest keeps a name that holds the escape literally apart from the name that holds the byte
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{clean_text(name)}~{digest}"


def fit_for_json(value: Any) -> Any:
    """Return the value with what JSON cannot hold replaced: text for unknown types, None for NaN and infinity."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, dict):
        return {clean_text(str(name)): fit_for_json(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [fit_for_json(entry) for entry in value]
    return clean_text(str(value))


def parse_object(text: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ValueError: It is not JSON, or JSON but not an object.
    """
    try:
        parsed = json.loads(text)
    except RecursionError as error:
        raise ValueError("too deeply nested") from error
    if not isinstance(parsed, dict):
        raise ValueError("not a JSON object")
    return parsed
