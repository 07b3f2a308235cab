"""Source: MDS folders with a column of images and one of captions; what `prepare` writes, or another tool."""

import functools
import hashlib
import io
import json
import struct
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from diffusion.errors import DataError, first_line, printable
from diffusion.formats.data_set import MANIFEST, REMOVED_SAMPLES, SPLITS
from diffusion.formats.shards import INDEX, STREAMED, SampleDecoder, ShardFormat
from diffusion.preparation.records import (
    Location,
    OutdatedError,
    Partition,
    Partitions,
    Reason,
    Record,
    Rejected,
    decode_text,
    has_text,
    key_of,
    make_record,
)
from diffusion.preparation.sources.base import Source, compare, rejected_for_texts, unrevised
from diffusion.preparation.sources.reading import (
    UnfitFileError,
    file_of,
    list_folder,
    name_of,
    read_file,
    stat_file,
)
from diffusion.preparation.sources.tables import CAPTION_COLUMNS, IMAGE_COLUMNS
from diffusion.storage import join, shown

_JSON_BYTES = 2**30
_AS_THEY_CAME = ("bytes", "jpeg", "png")
_METADATA = ("str", "json", "int", "str_int", "str_float", "str_decimal")
_NUMBERS = ("int", "uint", "float")
_OURS = ("key", "metadata", "width", "height")
"""Columns of prepared data that are no metadata: the last two are measured again."""


class _Columns(NamedTuple):
    image: str
    caption: str
    encodings: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class MDSSource(Source):
    """MDS folders below a folder; each shard is a partition.

    Images of the encodings bytes, jpeg and png come as they were written; of pil, which is no image file, as lossless
    PNG or TIFF. Captions are text or JSON: a text or a list of texts. Texts, numbers and JSON of the other columns are
    metadata; pickled ones are never read. Of a data set that `prepare` wrote, the keys are kept, `metadata` is spread
    out, removed samples are rejected, and partitions keep their names when samples are erased. Each sample that the
    index promises and that cannot be cut out is a rejection. The rest of a key is the key in a prepared data set, else
    folder, `#` and number.
    """

    prepared: str | None = None
    """Where the manifest of `prepare` is; None for a folder of another tool."""

    kind: ClassVar[str] = "mds"

    def check(self) -> None:
        """Check the indexes and columns; a DataError if they are not there."""
        folders = [name_of(file).removesuffix(INDEX).rstrip("/") for file in self.files()]
        for shards in self.map(self._shards, folders):
            for shard in shards.values():
                self._columns(shard)

    def takes(self, names: Sequence[str]) -> list[str]:
        """Choose the indexes of the MDS folders."""
        if self.prepared == self.root:
            names = [name for name in names if name.partition("/")[0] in SPLITS]
        return [f"{folder}/{INDEX}" if folder else INDEX for folder in mds_folders(names)]

    def _shards(self, folder: str) -> Mapping[str, dict[str, Any]]:
        """Return what `_shards_of` does of the index of an MDS folder."""
        uri = join(self.uri(file_of(folder)), INDEX)
        return _shards_of(uri, _version_of(uri))

    def _columns(self, shard: dict[str, Any]) -> _Columns:
        """Find the columns; a DataError if there is none, or not encoded as images or texts."""
        encodings = dict(zip(shard["column_names"], shard["column_encodings"], strict=True))
        listed = printable(", ".join(f"{name} ({encoding})" for name, encoding in encodings.items()))
        found = []
        for what, given, usual, fit in (
            ("image", self.image_column, IMAGE_COLUMNS, (*_AS_THEY_CAME, "pil")),
            ("caption", self.caption_column, CAPTION_COLUMNS, ("str", "json")),
        ):
            name = next((name for name in ([given] if given else usual) if encodings.get(name) in fit), None)
            if name is None:
                raise DataError(
                    f"{self.path} has no column {given or ' or '.join(usual)} encoded as {' or '.join(fit)}; it has "
                    f"{listed}; name the {what} column with {what}_column"
                )
            found.append(name)
        return _Columns(found[0], found[1], encodings)

    def partitions(self, known: Sequence[str] = (), only: Mapping[str, str] | None = None) -> Partitions:
        """Return a partition per shard."""
        versions = {entry.name: entry.version for entry in list_folder(self.root)}
        folders = [name.removesuffix(INDEX).rstrip("/") for name in self.takes(sorted(versions))]
        shards = zip(folders, self.map(self._shards, folders), strict=True)
        return compare([one for folder, listed in shards for one in self._cut(folder, listed, versions)], known, only)

    def _cut(self, folder: str, shards: Mapping[str, Any], versions: Mapping[str, str]) -> Iterator[Partition]:
        """Make the partitions of an MDS folder. `start` is the number of the first sample in the folder."""
        removed = sorted(self._removed_from(folder))
        stop = 0
        for basename, shard in shards.items():
            start, stop = stop, stop + shard["samples"]
            if start == stop:
                continue
            name, stored = (f"{folder}/{one}".lstrip("/") for one in (basename, stored_file(shard)["basename"]))
            gone = removed[bisect_left(removed, start) : bisect_left(removed, stop)]
            state = json.dumps([shard, gone, versions.get(stored)], sort_keys=True).encode()
            version = hashlib.blake2b(state, digest_size=16).hexdigest()
            yield Partition(file=file_of(name), start=start, stop=stop, version=version,
                            num_bytes=stored_file(shard)["bytes"], num_records=shard["samples"])  # fmt: skip

    def _scan(self, partition: Partition) -> Iterator[Record | Rejected]:
        folder = name_of(partition.file).rpartition("/")[0]
        shard = self._shard(partition)
        removed = self._removed_from(folder)
        columns = self._columns(shard)
        promised = range(min(shard["samples"], max(partition.num_bytes, 1)))
        for number, values in self._samples(partition, shard, promised):
            location = Location(file=partition.file, version=partition.version, row=number)
            index = partition.start + number
            if isinstance(values, UnfitFileError):
                yield Rejected(f"{self.prefix(partition.file)}#{number}", values.reason, location, values.detail)
                continue
            if self.prepared is None:
                key = f"{self.prefix(file_of(folder))}#{index}"
            elif values["key"]:
                key = f"{self.name}/{key_of(decode_text(values['key']))}"
            else:  # The sample is erased.
                key = f"{self.prefix(partition.file)}#{number}"
            if index in removed:
                detail = f"removed from {printable(shown(self.prepared or ''))}"
                yield Rejected(key, Reason.REMOVED, location, detail)
            else:
                yield self._record(key, values, columns, location)

    def _images(self, partition: Partition, locations: Sequence[Location]) -> Iterator[bytes]:
        shard = self._shard(partition)
        columns = self._columns(shard)
        for number, values in self._samples(partition, shard, [location.row or 0 for location in locations]):
            if isinstance(values, UnfitFileError):
                raise UnfitFileError(values.reason, f"sample {number}: {values}")
            yield _image_of(columns.encodings[columns.image], values[columns.image])

    def _shard(self, partition: Partition) -> dict[str, Any]:
        """Return what the index says of the shard of a partition."""
        folder, _, basename = name_of(partition.file).rpartition("/")
        shard = self._shards(folder).get(unrevised(basename))
        if shard is None:
            raise OutdatedError(f"{self.path}: the index no longer names {printable(basename)}; restore it, or prepare "
                                "again with --overwrite")  # fmt: skip
        return shard

    def _samples(
        self, partition: Partition, shard: dict[str, Any], numbers: Sequence[int]
    ) -> Iterator[tuple[int, dict[str, bytes] | UnfitFileError]]:
        """Yield the number and the columns of samples, or why there is none."""
        names = tuple(shard["column_names"])
        decode = SampleDecoder(ShardFormat(names, ("bytes",) * len(names), tuple(shard["column_sizes"])))
        limit = self.image_limit() + self.text_limit() + 16 * self.row_limit()
        try:
            folder = name_of(partition.file).rpartition("/")[0]
            with self._opened(file_of(f"{folder}/{stored_file(shard)['basename']}".lstrip("/")), shard) as file:
                offsets, end = _offsets(file, shard, partition.num_bytes)
                for number in numbers:
                    try:
                        yield number, decode(_sample(file, number, offsets, end, limit))
                    except UnfitFileError as error:
                        yield number, error
                    except ValueError as error:
                        yield number, UnfitFileError(Reason.DAMAGED_FILE, str(error))
        except UnfitFileError as error:
            for number in numbers:
                yield number, error

    @contextmanager
    def _opened(self, name: str, shard: dict[str, Any]) -> Iterator["BinaryIO | _Decompressed"]:
        """Open a shard, to be read from front to back."""
        with self.open(name) as file:
            codec = STREAMED.get(str(shard["compression"]).partition(":")[0])
            if not shard["zip_data"]:
                yield file
                return
            if codec:
                yield _Decompressed(file, codec)
                return
            packed = file.read()  # By Snappy, which makes at most some twenty bytes of one.
        from streaming.base.compression import decompress  # Takes seconds.

        try:
            content = decompress(shard["compression"], packed)
        except MemoryError:
            raise
        except Exception as error:  # Each library has its own.
            raise UnfitFileError(Reason.DAMAGED_FILE, f"not {shard['compression']}: {error}") from error
        yield io.BytesIO(content)

    def _record(self, key: str, values: dict[str, bytes], columns: _Columns, location: Location) -> Record | Rejected:
        ours = _OURS if self.prepared is not None else ()

        def read() -> bytes:
            return _image_of(columns.encodings[columns.image], values[columns.image])

        texts_limit = 2 * self.text_limit() + 16 * self.row_limit()
        if large := [name for name in values if name != columns.image and len(values[name]) > texts_limit]:
            detail = f"{printable(large[0])}: {len(values[large[0]])} bytes"
            return rejected_for_texts(key, Reason.TOO_LARGE, location, detail, read)
        try:
            metadata = {
                name: _decode(encoding, values[name])
                for name, encoding in columns.encodings.items()
                if name not in (columns.image, columns.caption, *ours) and _is_metadata(encoding)
            }
            if self.prepared is not None and "metadata" in values:
                metadata |= _decode("json", values["metadata"])
            names = columns.caption, *(() if self.caption_column else CAPTION_COLUMNS)
            texts = [_decode(columns.encodings[name], values[name]) for name in names
                     if columns.encodings.get(name) in ("str", "json")]  # fmt: skip
            captions = next(filter(has_text, texts), texts[0])
        except (ValueError, TypeError, ArithmeticError, LookupError) as error:
            return rejected_for_texts(key, Reason.INVALID_JSON, location, str(error)[:80], read)
        try:
            image = read()
        except UnfitFileError as error:
            return Rejected(key, error.reason, location, error.detail)
        return make_record(key, image, captions, metadata, location)

    def _removed_from(self, folder: str) -> frozenset[int]:
        """Return the numbers of the samples of a folder that were removed."""
        if self.prepared is None:
            return frozenset()
        below = f"{self.root}/{folder}".rstrip("/").removeprefix(self.prepared.rstrip("/")).strip("/")
        return frozenset(_read_object(join(self.prepared, REMOVED_SAMPLES)).get(below, ()))


def prepared_root(folder: str) -> str | None:
    """Return the folder, this one or up to two above, that holds the manifest of `prepare`; None if there is none.

    Raises:
        DataError: the manifest is one of encoded data, which holds no images.
    """
    root = folder.rstrip("/")
    for _ in range(3):
        manifest = _read_object(join(root, MANIFEST))
        if manifest.get("kind") == "prepared":
            return root
        if manifest.get("kind") == "encoded":
            raise DataError(f"{shown(folder)} holds latents, no images; name the prepared data that it was made from")
        root, slash, _ = root.rpartition("/")
        if not slash or root.endswith(":/"):
            break
    return None


def mds_folders(names: Sequence[str]) -> list[str]:
    """Return the MDS folders among files: those with an index and a shard, sorted; `""` is the root itself."""
    with_shard = {name.rpartition("/")[0] for name in names if ".mds" in name.rpartition("/")[2]}
    there = set(names) if with_shard else set()
    return sorted(folder for folder in with_shard if (f"{folder}/{INDEX}" if folder else INDEX) in there)


def _read_object(uri: str) -> dict[str, Any]:
    """Return a JSON file's object, which is not to be changed; an empty one if there is none or it is damaged."""
    return _parsed(uri, _version_of(uri))


def _version_of(uri: str) -> str:
    """Return the version of a file; an empty one if there is none."""
    try:
        return stat_file(uri).version
    except FileNotFoundError:
        return ""


@functools.lru_cache(maxsize=16)
def _parsed(uri: str, version: str) -> dict[str, Any]:
    if not version:
        return {}
    try:
        value = json.loads(read_file(uri, _JSON_BYTES))
    except (ValueError, RecursionError, UnfitFileError):
        return {}
    return value if isinstance(value, dict) else {}


@functools.lru_cache(maxsize=16)
def _shards_of(uri: str, version: str) -> Mapping[str, dict[str, Any]]:
    """Return the entries of an index by their unrevised names; a DataError if it is missing or damaged."""
    where = printable(shown(uri))
    try:
        shards = list(_parsed(uri, version)["shards"])
        named = {unrevised(stored_file(one)["basename"]): one for one in shards}
        for one in shards:
            _ = stored_file(one)["bytes"], one["raw_data"]["bytes"]
            _ = [one[name] for name in ("format", "column_names", "column_encodings", "column_sizes")]
            _ = range(one["samples"])
    except (KeyError, TypeError) as error:
        raise DataError(f"{where} is missing or not the index of an MDS folder; write the folder again") from error
    if any("/" in name for name in named):
        raise DataError(f"{where} names shards in other folders; write the folder again")
    if len(named) < len(shards):
        raise DataError(f"{where} names a shard twice; write the folder again")
    if any(one["format"] != "mds" for one in shards):
        raise DataError(f"{where}: the format is not mds, but {shards[0]['format']!a}; convert it")
    return named


def stored_file(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return name, size and hashes of the file of a shard: of the compressed form if there is one."""
    return entry["zip_data"] or entry["raw_data"]


class _Decompressed:
    """The content of a compressed file, read from front to back; little is held at once."""

    def __init__(self, file: BinaryIO, codec: str) -> None:
        self._file, self._codec, self._position = pa.CompressedInputStream(file, codec), codec, 0
        self._damage = ""

    def read(self, size: int) -> bytes:
        try:
            data = b"" if self._damage else self._file.read(size)
        except OSError as error:
            if error.errno is not None:
                raise
            self._damage = first_line(error)
        if self._damage:
            raise UnfitFileError(Reason.DAMAGED_FILE, f"not {self._codec}: {self._damage}")
        self._position += len(data)
        return data

    def seek(self, position: int) -> None:
        """Go forward to a position, or to the end."""
        while self._position < position and self.read(min(position - self._position, 2**20)):
            pass
        if self._position != position:
            raise UnfitFileError(Reason.DAMAGED_FILE, f"no data at byte {position}")


def _offsets(file: BinaryIO | _Decompressed, shard: dict[str, Any], num_bytes: int) -> tuple[list[int], int]:
    """Return where the samples begin, and the end; and the size of the shard, of which `num_bytes` are stored."""
    num = shard["samples"]
    end = shard["raw_data"]["bytes"] if isinstance(file, _Decompressed) else file.seek(0, 2)
    if num > num_bytes:
        raise UnfitFileError(Reason.DAMAGED_FILE, f"{num_bytes} bytes, which cannot hold {num} samples")
    file.seek(0)
    head = file.read(min(4 * (num + 2), end // 4 * 4))
    numbers = np.frombuffer(head, "<u4").tolist()
    if len(numbers) != num + 2 or numbers[0] != num:
        raise UnfitFileError(Reason.DAMAGED_FILE, f"a shard of {end} bytes, not of the {num} samples of the index")
    return numbers[1:], end


def _sample(file: BinaryIO | _Decompressed, number: int, offsets: Sequence[int], end: int, limit: int) -> bytes:
    """Read the bytes of a sample."""
    if number + 1 >= len(offsets):
        raise UnfitFileError(Reason.MISSING_IMAGE, "there is no such sample")
    start, stop = offsets[number : number + 2]
    if not start <= stop <= end:
        raise UnfitFileError(Reason.DAMAGED_FILE, f"its bytes {start} to {stop} are not in the shard of {end}")
    if stop - start > limit:
        raise UnfitFileError(Reason.TOO_LARGE, f"a sample of {stop - start} bytes")
    file.seek(start)
    data = file.read(stop - start)
    if len(data) < stop - start:
        raise UnfitFileError(Reason.DAMAGED_FILE, f"the shard ends at byte {start + len(data)}")
    return data


def _is_metadata(encoding: str) -> bool:
    """Return whether a column of this encoding becomes metadata."""
    return encoding in _METADATA or (encoding.startswith(_NUMBERS) and ":" not in encoding)


def _decode(encoding: str, data: bytes) -> Any:
    """Return a value; text that is not UTF-8 as surrogates. ValueError if it cannot be decoded."""
    if encoding == "str":
        return data.decode("utf-8", errors="surrogateescape")
    if encoding == "json":
        try:
            return json.loads(data.decode("utf-8", errors="surrogateescape"))
        except RecursionError as error:
            raise ValueError("too deeply nested") from error
    from streaming.base.format.mds.encodings import mds_decode  # Takes seconds.

    value = mds_decode(encoding, data)
    return value.item() if hasattr(value, "item") else value


def _image_of(encoding: str, data: bytes) -> bytes:
    """Return an image file; of one that Streaming wrote as raw pixels (pil) PNG, or TIFF where PNG lacks the mode."""
    if encoding in _AS_THEY_CAME:
        return data
    try:
        width, height = struct.unpack_from("<2I", data)
        if not 0 < width * height <= 8 * len(data):  # Memory is taken for the size that it says.
            raise ValueError(f"{len(data)} bytes, which cannot hold {width} x {height} pixels")
        image, content = _decode("pil", data), io.BytesIO()
        is_png = image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16")
        image.save(content, "PNG" if is_png else "TIFF")
    except (ValueError, OSError, struct.error) as error:
        raise UnfitFileError(Reason.UNDECODABLE, ascii(str(error)[:80])) from error
    return content.getvalue()
