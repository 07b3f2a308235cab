"""What the sources have in common: files below a folder, comparison with earlier scans, limits of an image."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO, ClassVar, TypeVar

from diffusion import storage
from diffusion.errors import DataError, MachineError
from diffusion.preparation.config import LimitsConfig
from diffusion.preparation.records import (
    Location,
    OutdatedError,
    Partition,
    Partitions,
    Reason,
    Record,
    Rejected,
    key_of,
)
from diffusion.preparation.sources.reading import (
    Entry,
    UnfitFileError,
    file_of,
    list_folder,
    look_at,
    matches,
    name_of,
    open_file,
    printable,
)
from diffusion.storage import shown

MAX_CAPTIONS = 1_000
"""Most captions of an image."""

FEW, MANY, PARTITIONS = 16, 1_024, 64
"""Fewest and most images of a partition, and the number of partitions in between."""


Item = TypeVar("Item")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class FileSource:
    """Files below a folder, or a single one, local or remote."""

    name: str
    """First part of the keys."""

    root: str
    """The folder or the file: an absolute path or a URL."""

    is_file: bool = False
    """Whether `root` is a file."""

    pattern: str | None = None
    """Pattern of the files below the folder; None for all of the kind."""

    image_column: str | None = None
    """Column of the images, None for the usual names; likewise below."""

    caption_column: str | None = None

    limits: LimitsConfig = field(default_factory=LimitsConfig)

    partition_size: int | None = None
    """Images of a partition; None for a function of their number."""

    kind: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]] = ()

    @property
    def path(self) -> str:
        """Where it is, for messages and manifests."""
        return printable(shown(storage.join(self.root, self.pattern) if self.pattern else self.root))

    def description(self) -> dict[str, Any]:
        """What `sources.from_description` makes an equal source of."""
        return {"kind": self.kind, **asdict(self)}

    def uri(self, file: str) -> str:
        """Where a file is; `file` as in a `Location`."""
        return f"{self.root.rstrip('/')}/{name_of(file)}" if file else self.root

    def prefix(self, file: str) -> str:
        """How the keys of a file begin."""
        return f"{self.name}/{key_of(name_of(file))}" if file else self.name

    def files(self) -> dict[str, Entry]:
        """List the files of the kind, sorted, by their names in a `Location`."""
        if self.is_file:
            return {"": look_at(self.root)}
        found = {entry.name: entry for entry in list_folder(self.root)}
        return {file_of(name): found[name] for name in self.takes(sorted(found))}

    def takes(self, names: Sequence[str]) -> list[str]:
        """Choose the files of the source among those below its folder."""
        if self.pattern is None:
            return [name for name in names if name.lower().endswith(self.suffixes)]
        parts = self.pattern.split("/")
        return [name for name in names if matches(name.split("/"), parts)]

    def open(self, file: str, *, buffer_bytes: int | None = None) -> BinaryIO:
        """Open a file of the source."""
        return open_file(self.uri(file), None if self.is_file else self.root, buffer_bytes=buffer_bytes)

    def map(self, function: Callable[[Item], T], items: Iterable[Item]) -> Iterator[T]:
        """Yield what a function returns for each item, in order; several requests at a time where files are remote."""
        return (storage.concurrent_map if storage.is_url(self.root) else map)(function, items)

    @contextmanager
    def reading(self, file: str) -> Iterator[None]:
        """Errors of the disk or the network as a MachineError that names the file."""
        try:
            yield
        except OSError as error:
            if isinstance(error, MachineError | DataError):
                raise
            raise MachineError(f"cannot read {printable(shown(self.uri(file)))}: {error.strerror or error}") from error

    def image_limit(self) -> int:
        """Bytes of the largest image file."""
        return self.limits.max_image_mb * 2**20

    def text_limit(self) -> int:
        """Bytes of the largest .txt: a byte-order mark and four bytes for each character."""
        return 4 * self.limits.max_caption_characters + 3

    def row_limit(self) -> int:
        """Bytes of the largest .json or line of a table."""
        return self.limits.max_metadata_kb * 2**10


def whole_files(source: FileSource, known: Sequence[str]) -> Partitions:
    """Compare a source of one partition per file with what is known."""
    found = [
        Partition(file=file, version=entry.version, num_bytes=entry.size) for file, entry in source.files().items()
    ]
    return compare(found, known)


def compare(found: Sequence[Partition], known: Sequence[str]) -> Partitions:
    """Compare the partitions of a source, one or more for each file, with what is known."""
    versions = known_versions(known)
    return Partitions(
        new=[partition for partition in found if partition.file not in versions],
        gone=sorted(versions.keys() - {partition.file for partition in found}),
        changed=[one for one in found if one.file in versions and one.version != versions[one.file]],
    )


def known_versions(known: Sequence[str]) -> dict[str, str]:
    """Return the version of each file in the metadata of earlier scans."""
    if not known:
        return {}
    import duckdb

    with duckdb.connect() as database:
        rows = database.execute(
            "SELECT file, max(version) FROM read_parquet(?) GROUP BY file ORDER BY file", [list(known)]
        )
        return dict(rows.fetchall())


def size_of_partitions(given: int | None, num_images: int) -> int:
    """Return the images of a partition: a function of the content, so that the bytes do not depend on the workers."""
    return given or min(MANY, max(FEW, -(-num_images // PARTITIONS)))


def check_limits(item: Record | Rejected, limits: LimitsConfig) -> Record | Rejected:
    """Reject a record whose image, captions or metadata are beyond the limits."""
    record = item.record if isinstance(item, Rejected) else item
    if record is None or not (detail := _excess(record, limits)):
        return item
    return Rejected(item.key, Reason.TOO_LARGE, item.location, detail)


def _excess(record: Record, limits: LimitsConfig) -> str:
    if len(record.image) > limits.max_image_mb * 2**20:
        return f"{len(record.image)} bytes are more than limits.max_image_mb"
    if len(record.captions) > MAX_CAPTIONS:
        return f"{len(record.captions)} captions are more than {MAX_CAPTIONS}"
    for caption in record.captions:
        if len(caption) > limits.max_caption_characters:
            return f"a caption of {len(caption)} characters is longer than limits.max_caption_characters"
        if len(caption) > limits.max_word_characters:
            longest = max(map(len, caption.split()))
            if longest > limits.max_word_characters:
                return f"a word of {longest} characters is longer than limits.max_word_characters"
    if record.metadata and len(json.dumps(record.metadata, ensure_ascii=False)) > limits.max_metadata_kb * 2**10:
        return "its metadata are larger than limits.max_metadata_kb"
    return ""


def rejected_file(source: FileSource, partition: Partition, error: UnfitFileError) -> Rejected:
    """Make the rejection of the file of a partition; an OutdatedError if it was there when the source was listed."""
    if error.reason is Reason.MISSING_IMAGE and partition.version:
        raise gone_error(source, partition.file)
    location = Location(file=partition.file, version=partition.version)
    return rejected(source.prefix(partition.file), error, location)


def gone_error(source: FileSource, file: str) -> OutdatedError:
    """Make the error of a file that was listed and is not there any more."""
    return OutdatedError(
        f"{printable(shown(source.uri(file)))} is gone since it was listed; restore it (is the disk mounted?), or "
        "prepare anew with --overwrite"
    )


def rejected(key: str, error: UnfitFileError, location: Location, what: str = "") -> Rejected:
    """Make the rejection of a file."""
    return Rejected(key, error.reason, location, f"{what}: {error.detail}" if what else error.detail)
