"""Source: tar files in the WebDataset layout, as img2dataset writes them."""

import bz2
import gzip
import lzma
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, BinaryIO, ClassVar

from diffusion.datasets.images import EXTENSIONS
from diffusion.errors import DataError
from diffusion.preparation.records import Location, Partition, Partitions, Reason, Record, Rejected, key_of
from diffusion.preparation.sources.base import (
    FileSource,
    check_limits,
    rejected,
    rejected_file,
    whole_files,
)
from diffusion.preparation.sources.reading import UnfitFileError, printable
from diffusion.preparation.sources.samples import Sample, record_of

_HEADER_BYTES = 2**20
"""Largest extended header (long names, PAX)."""

_CHUNK_BYTES = 2**20
_COMPRESSIONS: tuple[tuple[bytes, Any], ...] = ((b"\x1f\x8b", gzip), (b"BZh", bz2), (b"\xfd7zXZ\0", lzma))
_TXT, _JSON = "txt", "json"


class _DamageError(Exception):
    """From here on a tar cannot be read."""


class _HeaderError(_DamageError):
    """Something else stands where a member should begin; the members before it are whole."""


@dataclass(frozen=True, kw_only=True)
class WebDatasetSource(FileSource):
    """One tar or several; the members of a sample share the name up to the first dot, and lie together.

    Of two samples of a name in a tar the first is taken and the second rejected; likewise the second image of a sample.
    Hard links to earlier members are read (not in a compressed tar), symbolic ones are rejected. What lies before
    damage is read, and the damage is one rejection: an early end, no end mark (a block of zeros), or something else
    than zeros behind it, as in tars that were joined by `cat`. The rest of a key is the tar's path and the name of the
    sample.
    """

    kind: ClassVar[str] = "webdataset"
    suffixes: ClassVar[tuple[str, ...]] = (".tar", ".tar.gz", ".tgz")

    def partitions(self, known: Sequence[str] = ()) -> Partitions:
        """Return a partition per tar."""
        return whole_files(self, known)

    def scan(self, partition: Partition) -> Iterator[Record | Rejected]:
        """Yield the samples in the order of the members."""
        prefix, seen = self.prefix(partition.file), set[str]()
        location = Location(file=partition.file, version=partition.version)
        try:
            with self.reading(partition.file), self.open(partition.file) as file:
                for found in _samples(_Stream(file), self):
                    key = f"{prefix}/{key_of(found.stem)}"
                    place = location if found.span is None else replace(location, **found.span)
                    if found.stem in seen:
                        detail = "its members do not lie together, or another has its name"
                        yield Rejected(f"{key}#{found.start}", Reason.DUPLICATE_KEY, place, detail)
                        continue
                    seen.add(found.stem)
                    if found.problem is not None:
                        yield rejected(key, found.problem, place)
                    else:
                        yield check_limits(record_of(key, found, place), self.limits)
                    for extension in found.more_images:
                        detail = "another image of its sample"
                        yield Rejected(f"{key}.{key_of(extension)}", Reason.DUPLICATE_KEY, location, detail)
        except UnfitFileError as error:
            yield rejected_file(self, partition, error)
        except _DamageError as error:
            yield Rejected(prefix, Reason.DAMAGED_FILE, location, f"{error}; what came before was read")

    def images(self, partition: Partition, locations: Sequence[Location]) -> Iterator[bytes]:
        """Yield the images at some offsets."""
        name = printable(self.uri(partition.file))
        try:
            with self.reading(partition.file), self.open(partition.file) as file:
                stream = _Stream(file)
                for location in locations:
                    assert location.offset is not None and location.length is not None
                    yield stream.read_at(location.offset, location.length)
        except (UnfitFileError, _DamageError) as error:
            raise DataError(f"{name} is not what it was when it was scanned: {error}") from error


class _Stream:
    """The decompressed bytes of a tar: a plain one by ranges, a compressed one forwards only."""

    def __init__(self, file: BinaryIO) -> None:
        head = file.read(6)
        file.seek(0)
        module = next((module for magic, module in _COMPRESSIONS if head.startswith(magic)), None)
        self.is_plain = module is None
        self._size = file.seek(0, 2) if module is None else None
        file.seek(0)
        self._file: Any = file if module is None else module.open(file)
        self._position = 0

    def tell(self) -> int:
        return self._position

    def read(self, size: int) -> bytes:
        """Read a header."""
        if size > _HEADER_BYTES:
            raise _HeaderError(f"an extended header of {size} bytes before byte {self._position}")
        return self._read(size)

    def _read(self, size: int) -> bytes:
        parts, wanted = [], size
        try:
            while wanted and (part := self._file.read(wanted)):
                parts.append(part)
                wanted -= len(part)
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise _DamageError(f"{error} behind byte {self._position}") from error
        except OSError as error:
            if error.errno is not None:
                raise
            raise _DamageError(f"{error} behind byte {self._position}") from error
        self._position += size - wanted
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def seek(self, position: int) -> None:
        """Go to a position, if the tar reaches so far."""
        if self._size is not None:
            if position > self._size:
                raise _DamageError(f"unexpected end of data at byte {self._size}")
            self._file.seek(position)
            self._position = position
            return
        if position < self._position:
            raise _DamageError("an image lies before the one that was read last")
        while self._position < position:
            if not self._read(min(_CHUNK_BYTES, position - self._position)):
                raise _DamageError(f"unexpected end of data at byte {self._position}")

    def read_at(self, offset: int, size: int) -> bytes:
        """Read a range that must be there."""
        self.seek(offset)
        if self._size is not None and offset + size > self._size:
            raise _DamageError(f"unexpected end of data at byte {self._size}")
        data = self._read(size)
        if len(data) < size:
            raise _DamageError(f"unexpected end of data at byte {self._position}")
        return data

    def check_end(self) -> None:
        """Check that there are zeros only: otherwise the end mark is a hole, or other tars were appended."""
        end = self._position
        while rest := self._read(_CHUNK_BYTES):
            if rest.strip(b"\0"):
                raise _HeaderError(f"goes on behind an end mark at byte {end - tarfile.BLOCKSIZE}")


def _headers(stream: _Stream) -> Iterator[tarfile.TarInfo]:
    """Yield the headers of a tar; the caller reads the data in between.

    `tarfile.TarFile` itself takes damage for the end of the tar, and in a stream reads up to whatever size is claimed.
    """
    tar: Any = SimpleNamespace(fileobj=stream, offset=0, encoding="utf-8", errors="surrogateescape", pax_headers={})
    while True:
        stream.seek(tar.offset)
        try:
            yield tarfile.TarInfo.fromtarfile(tar)
        except tarfile.EOFHeaderError:  # pyright: ignore[reportAttributeAccessIssue]
            stream.check_end()
            return
        except tarfile.EmptyHeaderError as error:  # pyright: ignore[reportAttributeAccessIssue]
            raise _HeaderError(f"ends without an end mark at byte {stream.tell()}") from error
        except (tarfile.TarError, ValueError, IndexError, OverflowError) as error:
            raise _HeaderError(f"{error} at byte {tar.offset}") from error


@dataclass
class _Found(Sample):
    """A sample of a tar."""

    start: int = 0
    """Byte of its first header."""

    span: dict[str, int] | None = None
    """Offset and length of the image."""

    problem: UnfitFileError | None = None
    """Why a member was not read."""

    more_images: list[str] = field(default_factory=list)
    """Extensions of the images behind the first."""


def _samples(stream: _Stream, source: FileSource) -> Iterator[_Found]:
    """Yield the samples up to damage, whose error is raised; a sample that ends in it is dropped."""
    sample: _Found | None = None
    spans: dict[str, tuple[int, int]] = {}
    try:
        for member in _headers(stream):
            name = member.name.removeprefix("./")
            if member.isdir() or name.rpartition("/")[2].startswith("."):
                continue
            folder, _, base = name.rpartition("/")
            stem, _, extension = base.partition(".")
            stem = f"{folder}/{stem}" if folder else stem
            if sample is None or stem != sample.stem:
                if sample is not None:
                    yield sample
                sample = _Found(stem, start=member.offset)
            _add(sample, extension.lower(), stream, member, spans, source)
    except _HeaderError:
        if sample is not None:
            yield sample
        raise
    if sample is not None:
        yield sample


def _add(
    sample: _Found,
    extension: str,
    stream: _Stream,
    member: tarfile.TarInfo,
    spans: dict[str, tuple[int, int]],
    source: FileSource,
) -> None:
    """Read a member into its sample if it is of use there."""
    is_image = f".{extension}" in EXTENSIONS
    if is_image and (sample.image is not None or sample.span is not None):
        sample.more_images.append(extension)
        return
    if not (is_image or extension in (_TXT, _JSON)):
        sample.others.append(extension)
        return
    try:
        offset, size = _span(member, stream, spans)
        limit = source.image_limit() if is_image else source.text_limit() if extension == _TXT else source.row_limit()
        if size > limit:
            raise UnfitFileError(Reason.TOO_LARGE, f"{size} bytes are more than {limit}")
    except UnfitFileError as error:
        sample.problem = UnfitFileError(error.reason, f".{extension}: {error.detail}")
        return
    spans[member.name] = (offset, size)
    data = stream.read_at(offset, size)
    if is_image:
        sample.image, sample.span = data, {"offset": offset, "length": size}
    elif extension == _TXT:
        sample.text = data
    else:
        sample.json = data


def _span(member: tarfile.TarInfo, stream: _Stream, spans: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """Return offset and length of the data of a member."""
    if member.islnk() and member.linkname in spans and stream.is_plain:
        return spans[member.linkname]
    if member.islnk():
        what = "to no earlier image or caption" if stream.is_plain else "in a compressed tar"
        raise UnfitFileError(Reason.UNREADABLE, f"a hard link {what}")
    if not member.isreg() or member.issparse():
        raise UnfitFileError(Reason.UNREADABLE, "a symbolic link, a device or a sparse file")
    return member.offset_data, member.size
