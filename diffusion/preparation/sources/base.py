"""Base of the sources: files below a folder, comparison with earlier scans, limits of an image."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO, ClassVar

from diffusion import storage
from diffusion.errors import DataError, MachineError, printable
from diffusion.preparation.config import LimitsConfig
from diffusion.preparation.layout import part_name
from diffusion.preparation.records import (
    WITHOUT_CAPTION,
    Location,
    NoColumnsError,
    OutdatedError,
    Partition,
    Partitions,
    Reason,
    Record,
    Rejected,
    bare_record,
    decode_text,
    key_of,
    parse_object,
)
from diffusion.preparation.sources.reading import (
    Entry,
    UnfitFileError,
    file_of,
    list_folder,
    matches,
    name_of,
    open_file,
    stat_file,
)
from diffusion.storage import Item, T, shown

MAX_CAPTIONS = 1_000
"""Most captions of an image."""

LOOKED_AT = 200_000
"""Names by which the kind of a folder is found: a folder of 100 million images is listed once, later."""

NUM_CHECKED = 100
"""Files .json that are searched for a named column."""

FEW, MANY, PARTITIONS, MAX_PARTITIONS = 16, 1_024, 64, 100_000
"""Fewest and most images of a partition, the number of partitions in between, and the most, of more images each."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Images in files below a folder, or in a single file, local or remote; cut into partitions.

    A source is a small value that can be pickled. It holds no open file, no list of its files, and no password (a
    worker finds those in its environment). What a partition yields depends on its content alone.

    A kind of source defines `_scan` and `_images`, and more partitions than one per file with `partitions`.
    """

    name: str
    """First part of the keys."""
    root: str
    """The folder or the file: an absolute path or a URL."""
    is_file: bool = False
    """True if `root` is a file."""
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
    def location(self) -> str:
        """Absolute path or URL, with the pattern."""
        return storage.join(self.root, self.pattern) if self.pattern else self.root

    @property
    def path(self) -> str:
        """Where it is, for messages and manifests."""
        return printable(shown(self.location))

    def describe(self, partition: Partition) -> str:
        """Name a partition in a message."""
        if not partition.file and not self.is_file:
            return f"some files of {self.path} (listed in metadata/{part_name(partition.number)})"
        rows = "" if partition.stop is None else f", rows {partition.start} to {partition.stop - 1}"
        return printable(shown(self.uri(partition.file))) + rows

    def description(self) -> dict[str, Any]:
        """Fields as JSON, of which `sources.from_description` makes an equal source."""
        return {"kind": self.kind, **asdict(self)}

    def check(self) -> None:
        """Check the columns of the files, where they have some; a DataError if one is missing."""

    def check_json(self, contents: Iterable[bytes]) -> None:
        """Check that one of some .json has the named column of captions; a DataError if none has it."""
        seen: dict[str, None] = {}
        for content in contents:
            with suppress(ValueError):
                seen |= dict.fromkeys(parse_object(decode_text(content)))
            if self.caption_column in seen:
                return
        there = printable(f"those of its .json are {', '.join(seen)}") if seen else "it has no .json or table"
        raise (DataError if seen else NoColumnsError)(
            f"{self.path} has no column {self.caption_column}; {there}; correct caption_column, or give it to the "
            "sources that have it"
        )

    def partitions(self, known: Sequence[str] = (), only: Mapping[str, str] | None = None) -> Partitions:
        """Compare the source with the metadata of earlier scans.

        Args:
            known: local parquet files of metadata of this source, as patterns of DuckDB.
            only: versions of the files that may be new; others are skipped. None is all.

        Raises:
            DataError: it is not what it was when it was opened.
            MachineError: it cannot be listed.
        """
        files = self.files().items()
        return compare(
            [Partition(file=name, version=one.version, num_bytes=one.size) for name, one in files], known, only
        )

    def scan(self, partition: Partition) -> Iterator[Record | Rejected]:
        """Yield each image of a partition once, either way, in the same order each time.

        Raises:
            DataError: its file is not there any more.
            MachineError: the disk or the network fails. A damaged file is no error: all that can be read is read, and
                each row that the file promises and that is lost is a rejection.
        """
        try:
            for item in self._scan(partition):
                record = item.record if isinstance(item, Rejected) else item
                is_judged = isinstance(item, Rejected) and item.reason not in WITHOUT_CAPTION
                if record is not None and not is_judged and (detail := _excess(record, self.limits)):
                    bare = bare_record(item.key, record.image, item.location)
                    item = Rejected(item.key, Reason.TOO_LARGE, item.location, detail, bare)
                yield item
        except UnfitFileError as error:
            if error.reason is Reason.MISSING_IMAGE and partition.version:
                raise self.gone_error(partition.file) from error
            location = Location(file=partition.file, version=partition.version)
            yield Rejected(self.prefix(partition.file), error.reason, location, error.detail)

    def lost(self, partition: Partition, position: int) -> Iterator[Rejected]:
        """Yield rejections of what cannot be read from a position on: of each image, where those are known."""
        items = map(json.loads, partition.items[position:]) if partition.items else [vars(partition)]
        for item in items:
            location = Location(file=item["file"], version=item["version"])
            detail = f"reading it ends the process, after {position} images"
            yield Rejected(self.prefix(item["file"]), Reason.DAMAGED_FILE, location, detail)

    def images(self, partition: Partition, locations: Sequence[Location]) -> Iterator[bytes]:
        """Yield the image files of some records of a partition, in the order in which `scan` yields them.

        Each file is read once, from front to back, in ranges of at least 8 MiB (or to its end).

        Raises:
            DataError: one is not there any more.
            MachineError: the disk or the network fails.
        """
        try:
            yield from self._images(partition, locations)
        except UnfitFileError as error:
            name = printable(shown(self.uri(partition.file)))
            raise DataError(f"{name} is not what it was when it was scanned: {error}") from error

    def _scan(self, partition: Partition) -> Iterator[Record | Rejected]:
        """Yield the images of a partition; an UnfitFileError is the rejection of its file, or of what is left of it."""
        raise NotImplementedError

    def _images(self, partition: Partition, locations: Sequence[Location]) -> Iterator[bytes]:
        """Yield the images at some locations; an UnfitFileError if one cannot be read."""
        raise NotImplementedError

    # Files

    def uri(self, file: str) -> str:
        """Where a file is; `file` as in a `Location`."""
        return f"{self.root.rstrip('/')}/{name_of(file)}" if file else self.root

    def prefix(self, file: str) -> str:
        """How the keys of a file begin."""
        return f"{self.name}/{key_of(name_of(file))}" if file else self.name

    def files(self) -> dict[str, Entry]:
        """List the files of the kind, sorted, by their names in a `Location`."""
        if self.is_file:
            return {"": stat_file(self.root)}
        found = {entry.name: entry for entry in list_folder(self.root)}
        return {file_of(name): found[name] for name in self.takes(sorted(found))}

    def takes(self, names: Sequence[str]) -> list[str]:
        """Choose the files of the source among those below its folder."""
        if self.pattern is None:
            return [name for name in names if name.lower().endswith(self.suffixes)]
        parts = self.pattern.split("/")
        return [name for name in names if matches(name.split("/"), parts)]

    @contextmanager
    def open(self, file: str, *, buffer_bytes: int | None = None) -> Iterator[BinaryIO]:
        """Open a file of the source; errors of the disk or the network become a MachineError that names it."""
        uri = self.uri(file)
        try:
            with open_file(uri, None if self.is_file else self.root, buffer_bytes=buffer_bytes) as opened:
                yield opened
        except OSError as error:
            if isinstance(error, MachineError | DataError):
                raise
            raise MachineError(f"cannot read {printable(shown(uri))}: {error.strerror or error}") from error

    def map(self, function: Callable[[Item], T], items: Iterable[Item]) -> Iterator[T]:
        """Yield what a function returns for each item, in order; several requests at a time where files are remote."""
        return (storage.concurrent_map if storage.is_url(self.root) else map)(function, items)

    def gone_error(self, file: str) -> OutdatedError:
        """Make the error of a file that was listed and is not there any more."""
        return OutdatedError(
            f"{printable(shown(self.uri(file)))} is gone since it was listed; restore it (is the disk mounted?), or "
            "prepare again with --overwrite"
        )

    # Limits

    def image_limit(self) -> int:
        """Bytes of the largest image file."""
        return self.limits.max_image_mb * 2**20

    def text_limit(self) -> int:
        """Bytes of the largest .txt: a byte-order mark and four bytes for each character."""
        return 4 * self.limits.max_caption_characters + 3

    def row_limit(self) -> int:
        """Bytes of the largest .json or line of a table."""
        return self.limits.max_metadata_kb * 2**10


def _excess(record: Record, limits: LimitsConfig) -> str:
    """Describe the image, captions or metadata that are beyond the limits; empty if none are."""
    if len(record.image) > limits.max_image_mb * 2**20:
        return f"{len(record.image)} bytes are more than limits.max_image_mb"
    if len(record.captions) > MAX_CAPTIONS:
        return f"{len(record.captions)} captions are more than {MAX_CAPTIONS}"
    if len(record.captions) > 1 and sum(map(len, map(str.encode, record.captions))) > limits.max_captions_kb * 2**10:
        return "its captions together are larger than limits.max_captions_kb"
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


REVISION = r"(shard\.\d+\.\d+)\.r\d+(\.mds)"
"""Pattern of the name of a shard of `prepare` from which samples were erased."""


def rejected_for_texts(
    key: str, reason: Reason, location: Location, detail: str, read: Callable[[], bytes]
) -> Rejected:
    """Reject an image for its texts, with its bytes if they can be read."""
    image = None
    with suppress(UnfitFileError):
        image = read()
    return Rejected(key, reason, location, detail, bare_record(key, image, location))


def unrevised(file: str) -> str:
    """Return the name that a shard of `prepare` had before samples were erased; other names as they are."""
    return re.sub(REVISION, r"\1\2", file)


def compare(found: Sequence[Partition], known: Sequence[str], only: Mapping[str, str] | None) -> Partitions:
    """Compare the partitions of a source, one or more for each file, with the metadata of earlier scans."""
    versions: dict[str, str] = {}
    if known:
        import duckdb

        with duckdb.connect() as database:
            query = "SELECT file, max(version) FROM read_parquet(?, hive_partitioning = false) GROUP BY file"
            rows = database.execute(query, [list(known)]).fetchall()
            versions = {unrevised(file): version for file, version in rows}
    read = {file: version for file, version in versions.items() if version}  # One that cannot be read has no version.
    return Partitions(
        new=[
            one
            for one in found
            if one.file not in read
            and one.version != versions.get(one.file)
            and (only is None or only.get(one.file) == one.version)
        ],
        gone=sorted(read.keys() - {partition.file for partition in found}),
        changed=[one for one in found if one.file in read and one.version != read[one.file]],
    )


def size_of_partitions(given: int | None, num_images: int) -> int:
    """Return the images of a partition: a function of the content, so that the bytes do not depend on the workers."""
    return given or max(min(MANY, max(FEW, -(-num_images // PARTITIONS))), -(-num_images // MAX_PARTITIONS))
