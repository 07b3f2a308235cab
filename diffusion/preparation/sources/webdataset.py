"""Source: tar files in the WebDataset layout, as img2dataset writes them."""

import bz2
import gzip
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from types import SimpleNamespace
from typing import Any, BinaryIO, ClassVar

from diffusion.datasets.images import EXTENSIONS
from diffusion.preparation.records import (
    Location,
    NoColumnsError,
    Partition,
    Reason,
    Record,
    Rejected,
    bare_record,
    key_of,
    record_of_files,
)
from diffusion.preparation.sources.base import NUM_CHECKED, Source
from diffusion.preparation.sources.reading import UnfitFileError

_HEADER_BYTES = 2**20
"""Maximum bytes of the headers of a member, extended ones (long names, PAX) included."""

_MAX_NAME = 4_096
"""Maximum characters of the path of a member, as file systems have it."""

_MAX_NAMES = 2**20
"""Maximum characters of the names of the members of a sample together."""

_GLOBAL_CHARACTERS = 2**16
"""Maximum characters of the global headers (PAX) of a tar, which Python keeps until its end."""

_MAX_PARTS = 16
"""Maximum number of images with further dots in their names, held until their sample ends."""

_COMPRESSIONS: tuple[tuple[bytes, Any], ...] = ((b"\x1f\x8b", gzip), (b"BZh", bz2), (b"\xfd7zXZ\0", lzma))


class _DamageError(UnfitFileError):
    """From here on a tar cannot be read."""

    def __init__(self, detail: str) -> None:
        super().__init__(Reason.DAMAGED_FILE, f"{detail}; what came before was read")


class _HeaderError(_DamageError):
    """Something else stands where a member should begin; the members before it are whole."""


@dataclass
class _Sample:
    """The members of a sample, or those of them that share more of the name."""

    stem: str
    """Path and name, up to the first dot; of a part, up to the last."""
    start: int
    """Byte of its first header."""
    contents: dict[str, bytes] = field(default_factory=dict)
    """The first image, as `image`, `txt` and `json`."""
    span: tuple[int, int] | None = None
    """Offset and length of the image."""
    problem: UnfitFileError | None = None
    """Why a member was not read."""
    image: str = ""
    """Extension of the first image, read or not."""
    another: str = ""
    """Extension of an image after the first, which is all that this one holds; empty for a sample."""
    others: list[str] = field(default_factory=list)
    """Extensions of other members."""


@dataclass(frozen=True, kw_only=True)
class WebDatasetSource(Source):
    """One tar or several; the members of a sample share the name up to the first dot, and lie together.

    Where names go on after that dot, as `cat.v2.jpg` does, an image with a .txt or .json of the same name up to the
    last dot is a sample of its own. Without one it is an image of the sample, or where that has neither an image nor a
    caption, a sample without a caption.

    Of two samples of a name in a tar the first is taken and the second rejected; likewise the second image of a sample.
    A sample with several .txt or .json is rejected.
    Hard links to earlier members are read (not in a compressed tar), symbolic ones are rejected. What lies before
    damage is read, and the damage is one rejection: an early end, no end mark (a block of zeros), or something else
    than zeros after it, as in tars that were joined by `cat`. The rest of a key is the tar's path and the name of the
    sample.
    """

    kind: ClassVar[str] = "webdataset"
    suffixes: ClassVar[tuple[str, ...]] = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")

    def check(self) -> None:
        """Check that a named column is a key of a .json of the first file; a DataError if it is none."""
        if self.image_column:
            raise NoColumnsError(f"{self.path}: images of tars are members, no column {self.image_column}; leave "
                                 "image_column out, or give it to the sources that have it")  # fmt: skip
        if self.caption_column:
            self.check_json(self._json())

    def _json(self) -> Iterator[bytes]:
        """Yield the .json of the first samples of the first file, as far as it can be read."""
        with suppress(UnfitFileError), self.open(next(iter(self.files()))) as file:
            samples = (found for found in self._samples(_Stream(file)) if not found.another)
            for found in islice(samples, NUM_CHECKED):
                if "json" in found.contents:
                    yield found.contents["json"]

    def _scan(self, partition: Partition) -> Iterator[Record | Rejected]:
        """Yield the samples in the order of the members."""
        prefix, seen = self.prefix(partition.file), dict[str, int]()
        of_tar = Location(file=partition.file, version=partition.version)
        with self.open(partition.file) as file:
            for found in self._samples(_Stream(file)):
                key = f"{prefix}/{key_of(found.stem)}"
                offset, length = found.span or (None, None)
                location = replace(of_tar, offset=offset, length=length)
                bare = bare_record(key, found.contents.get("image"), location)
                is_again = (seen.get if found.another else seen.setdefault)(found.stem, found.start) != found.start
                key = f"{key}#{found.start}" if is_again else key
                if found.another:
                    key, detail = f"{key}.{key_of(found.another)}", "another image of its sample"
                    yield Rejected(key, Reason.DUPLICATE_KEY, location, detail, bare)
                elif is_again:
                    detail = "its members do not lie together, or another has its name"
                    yield Rejected(key, Reason.DUPLICATE_KEY, location, detail, bare)
                elif found.problem is not None:
                    yield Rejected(key, found.problem.reason, location, found.problem.detail, bare)
                else:
                    detail = ascii(f"besides: .{', .'.join(found.others)}")[1:-1] if found.others else ""
                    image, text, values = map(found.contents.get, ("image", "txt", "json"))
                    yield record_of_files(key, image, text, values, location, detail, self.caption_column)

    def _images(self, partition: Partition, locations: Sequence[Location]) -> Iterator[bytes]:
        with self.open(partition.file) as file:
            stream = _Stream(file)
            for location in locations:
                if location.offset is None or location.length is None:
                    raise UnfitFileError(Reason.MISSING_IMAGE, "a rejection without an image")
                yield stream.read_at(location.offset, location.length)

    def _samples(self, stream: "_Stream") -> Iterator[_Sample]:
        """Yield the samples up to damage, whose error is raised; a sample whose data is damaged is dropped."""
        sample = _Sample("", 0)
        part, parts, num_characters = sample, list[_Sample](), 0
        spans: dict[str, tuple[int, int]] = {}
        try:
            for member in _headers(stream):
                name = member.name.removeprefix("./")
                if member.isdir() or name.rpartition("/")[2].startswith("."):
                    continue
                folder, slash, base = name.rpartition("/")
                stem, _, extensions = base.partition(".")
                stem = folder + slash + stem
                if stem != sample.stem:
                    yield from _finish(sample, parts)
                    sample, parts, num_characters = _Sample(stem, member.offset), [], 0
                num_characters += len(name)
                if num_characters > _MAX_NAMES:
                    raise _HeaderError(f"{_MAX_NAMES} characters of names of one sample before byte {member.offset}")
                middle, _, extension = extensions.rpartition(".")
                extension = extension.lower()
                kind = extension if extension in ("txt", "json") else "image" if f".{extension}" in EXTENSIONS else ""
                part = sample
                if not kind:
                    sample.others.append(extensions.lower())
                    continue
                if middle:
                    held = [one for one in parts if one.stem == f"{stem}.{middle}"]
                    part = held[0] if held else _Sample(f"{stem}.{middle}", member.offset)
                    if not held:
                        if len(parts) == _MAX_PARTS:
                            yield from _detach(sample, parts.pop(0))
                        parts.append(part)
                if is_another := kind == "image" and part.image != "":
                    part = _Sample(part.stem, part.start, another=extension)
                self._add(part, kind, extension, stream, member, spans)
                if is_another:
                    yield part
        except _DamageError as error:
            if not isinstance(error, _HeaderError):
                parts = [one for one in parts if one is not part]
                sample = _Sample(sample.stem, sample.start) if part is sample else sample
            yield from _finish(sample, parts)
            raise
        yield from _finish(sample, parts)

    def _add(
        self,
        sample: _Sample,
        kind: str,
        extension: str,
        stream: "_Stream",
        member: tarfile.TarInfo,
        spans: dict[str, tuple[int, int]],
    ) -> None:
        """Read an image, caption or metadata into its sample."""
        if kind == "image":
            sample.image = extension
        try:
            offset, size = _span(member, stream, spans)
            limit = self.image_limit() if kind == "image" else self.text_limit() if kind == "txt" else self.row_limit()
            if size > limit:
                raise UnfitFileError(Reason.TOO_LARGE, f"{size} bytes are more than {limit}")
            if kind in sample.contents:
                raise UnfitFileError(Reason.DUPLICATE_KEY, "several of its sample")
        except UnfitFileError as error:
            sample.problem = UnfitFileError(error.reason, f".{extension}: {error.detail}")
            return
        spans[member.name] = (offset, size)
        sample.contents[kind] = stream.read_at(offset, size)
        if kind == "image":
            sample.span = (offset, size)


def _detach(sample: _Sample, part: _Sample) -> list[_Sample]:
    """Return a part that is a sample of its own or another image; the members of others are added to the sample."""
    middle = part.stem.removeprefix(f"{sample.stem}.")
    if part.problem or (part.image and (len(part.contents) > 1 or not (sample.image or sample.contents))):
        return [part]
    if part.image and sample.image:
        return [replace(part, stem=sample.stem, start=sample.start, another=f"{middle}.{part.image}")]
    if part.image:
        sample.image, sample.span = f"{middle}.{part.image}", part.span
        sample.contents |= part.contents
    sample.others += [f"{middle}.{kind}" for kind in part.contents if kind != "image"]
    return []


def _finish(sample: _Sample, parts: Sequence[_Sample]) -> list[_Sample]:
    """Return a sample and what its parts are without it, in the order of their images."""
    finished = [one for part in parts for one in _detach(sample, part)]
    if sample.contents or sample.problem or (sample.others and not finished):
        finished.append(sample)
    return sorted(finished, key=lambda one: one.span or (one.start, 0))


class _Stream:
    """The decompressed bytes of a tar."""

    def __init__(self, file: BinaryIO) -> None:
        head = file.read(6)
        module = next((module for magic, module in _COMPRESSIONS if head.startswith(magic)), None)
        self.is_plain = module is None
        self._size = file.seek(0, 2) if self.is_plain else 2**62
        file.seek(0)
        self._file: Any = file if module is None else module.open(file)
        self.tell = self._file.tell
        self.num_header_bytes = 0

    def read(self, size: int) -> bytes:
        """Read a header."""
        self.num_header_bytes += size
        if size < 0 or self.num_header_bytes > _HEADER_BYTES:
            raise _HeaderError(f"an extended header of {size} bytes before byte {self.tell()}")
        return self._do(self._file.read, size)

    def seek(self, position: int) -> None:
        """Go forward to a position, if the tar reaches so far."""
        reached = self._do(self._file.seek, min(position, self._size))
        if reached < position:
            raise _DamageError(f"unexpected end of data at byte {reached}")

    def read_at(self, offset: int, size: int) -> bytes:
        """Read a range that must be there."""
        self.seek(offset)
        data = self._do(self._file.read, size)
        if len(data) < size:
            raise _DamageError(f"unexpected end of data at byte {self.tell()}")
        return data

    def check_end(self) -> None:
        """Check that there are zeros only: otherwise the end mark is a hole, or other tars were appended."""
        end = self.tell()
        while rest := self._do(self._file.read, _HEADER_BYTES):
            if rest.strip(b"\0"):
                raise _HeaderError(f"goes on after an end mark at byte {end - tarfile.BLOCKSIZE}")

    def _do(self, function: Callable[[int], Any], argument: int) -> Any:
        """Call a function of the file; damage of the compression is a `_DamageError`."""
        try:
            return function(argument)
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise _DamageError(f"{error} after byte {self.tell()}") from error


def _headers(stream: _Stream) -> Iterator[tarfile.TarInfo]:
    """Yield the headers of a tar; the caller reads the data in between.

    `tarfile.TarFile` itself takes damage for the end of the tar, and in a stream reads up to whatever size is claimed.
    """
    tar: Any = SimpleNamespace(fileobj=stream, offset=0, encoding="utf-8", errors="surrogateescape", pax_headers={})
    while True:
        stream.seek(tar.offset)
        stream.num_header_bytes = 0
        try:
            member = tarfile.TarInfo.fromtarfile(tar)
        except tarfile.EOFHeaderError:  # pyright: ignore[reportAttributeAccessIssue]
            stream.check_end()
            return
        except tarfile.EmptyHeaderError as error:  # pyright: ignore[reportAttributeAccessIssue]
            raise _HeaderError(f"ends without an end mark at byte {stream.tell()}") from error
        except (tarfile.TarError, ValueError, IndexError, OverflowError) as error:
            raise _HeaderError(f"{error} at byte {tar.offset}") from error
        except RecursionError as error:
            raise _HeaderError(f"too many extended headers at byte {tar.offset}") from error
        if member.size < 0:
            raise _HeaderError(f"a member of {member.size} bytes at byte {member.offset}")
        if max(len(member.name), len(member.linkname)) > _MAX_NAME:
            raise _HeaderError(f"a name of {len(member.name)} characters at byte {member.offset}")
        if sum(len(name) + len(value) for name, value in tar.pax_headers.items()) > _GLOBAL_CHARACTERS:
            raise _HeaderError(f"global headers of more than {_GLOBAL_CHARACTERS} characters at byte {member.offset}")
        yield member


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
