"""Source: MDS folders with a column of images and one of captions; what `prepare` writes, or another tool."""

import functools
import hashlib
import io
import itertools
import json
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import xxhash

from diffusion.errors import DataError, MachineError
from diffusion.preparation.records import (
    Partition,
    Reason,
    Record,
    Refused,
    decode_text,
    fingerprint_of,
    key_of,
    make_record,
)
from diffusion.preparation.sources.columns import CAPTION_COLUMNS, IMAGE_COLUMNS
from diffusion.preparation.sources.files import FileSource
from diffusion.preparation.sources.remote_files import join, open_file, read_file, state_of
from diffusion.storage import BLOCK_BYTES, is_url, shown

INDEX = "index.json"
MANIFEST = "manifest.json"
WITHDRAWN = "withdrawn.json"

_AS_THEY_CAME = ("bytes", "jpeg", "png")
_METADATA = ("str", "json", "int", "str_int", "str_float", "str_decimal")
_NUMBERS = ("int", "uint", "float")
_MEASURED_ANEW = ("width", "height")


@dataclass(frozen=True)
class MDSSource(FileSource):
    """One MDS folder or several; each shard is a partition, checked against its hash before it is read.

    Images of the encodings bytes, jpeg and png come as they were written; of pil, which is no image file, as lossless
    PNG or TIFF. Captions are text or JSON: a text or a list of texts. Texts, numbers and JSON of the other columns are
    metadata; pickled ones are never read. Of a data set that `prepare` wrote, the keys are kept, `metadata` is spread
    out, and samples that were withdrawn from it are refused. A damaged shard counts as one refusal more. `files` are
    the MDS folders. The rest of a key is the key in a prepared data set, else folder, `#` and number.

    Attributes:
        prepared: Where the manifest of `prepare` lies; None for a folder of another tool.
        image_column: Column of the images; None for the first of IMAGE_COLUMNS that is there.
        caption_column: Column of the captions; None for the first of CAPTION_COLUMNS that is there.
        num_records: Samples of all folders.
    """

    prepared: str | None = None
    image_column: str | None = None
    caption_column: str | None = None
    num_records: int | None = None
    kind: str = "mds"

    def partitions(self, size: int, known: Sequence[Partition] = ()) -> list[Partition]:
        """Return one partition per shard, whatever the size."""
        there = {partition.items: partition for partition in known}
        found: dict[tuple[str, ...], Partition] = {}
        for below, folder in self.files:
            for shard in read_shards(folder):
                file = _stored(shard)["basename"]
                name = key_of(f"{below}/{file}" if below else file)
                state = fingerprint_of(
                    json.dumps(shard, sort_keys=True), state_of(join(folder, file)), self._withdrawn()
                )
                found[below, file] = Partition(name, (below, file), state, shard["samples"])
        kept = [found[items] for items in there if items in found]
        return [*kept, *(partition for items, partition in found.items() if items not in there)]

    def read(self, partition: Partition | None = None) -> Iterator[Record | Refused]:
        """Yield the samples in the order of the folders and shards."""
        for one in self.partitions(0) if partition is None else [partition]:
            below, file = one.items
            folder, first = dict(self.files)[below], 0
            for shard in read_shards(folder):
                if _stored(shard)["basename"] == file:
                    yield from self._read_shard(below, folder, shard, first)
                first += shard["samples"]

    def _read_shard(self, below: str, folder: str, shard: dict[str, Any], first: int) -> Iterator[Record | Refused]:
        """Yield the samples of a shard, the first of which has the number `first` in its folder."""
        prefix = self.prefix(below)
        file = _stored(shard)["basename"]
        withdrawn = self._withdrawn_from(folder)
        image, caption = find_columns(folder, shard, self.image_column, self.caption_column)
        number = first
        try:
            with _opened(join(folder, file), shard) as opened:
                for values in _samples(opened, shard):
                    key = f"{prefix}#{number}"
                    if self.prepared is not None:
                        key = f"{self.name}/{key_of(decode_text(values['key']))}"
                    if number in withdrawn:
                        yield Refused(key, Reason.WITHDRAWN, f"withdrawn from {shown(self.prepared or folder)}")
                    else:
                        yield self._record(key, values, shard, image, caption)
                    number += 1
        except _DamagedShardError as error:
            yield Refused(f"{prefix}/{key_of(file)}", Reason.DAMAGED_FILE, str(error))
        except OSError as error:
            raise MachineError(f"cannot read {shown(join(folder, file))}: {error.strerror or error}") from error

    def _record(
        self, key: str, values: dict[str, bytes], shard: dict[str, Any], image: str, caption: str
    ) -> Record | Refused:
        """Make the record of a sample."""
        encodings = dict(zip(shard["column_names"], shard["column_encodings"], strict=True))
        ours = ("key", "metadata", *_MEASURED_ANEW) if self.prepared is not None else ()
        try:
            metadata = {
                name: _decode(encoding, values[name])
                for name, encoding in encodings.items()
                if name not in (image, caption, *ours) and _is_metadata(encoding)
            }
            if self.prepared is not None and "metadata" in values:
                metadata |= _decode("json", values["metadata"])
            captions = _decode(encodings[caption], values[caption])
        except ValueError as error:
            return Refused(key, Reason.INVALID_JSON, str(error)[:80])
        if encodings[image] in _AS_THEY_CAME:
            return make_record(key, values[image], captions, metadata)
        try:
            content = _image_file(_decode("pil", values[image]))
        except (ValueError, OSError) as error:
            return Refused(key, Reason.UNDECODABLE, ascii(str(error)[:80]))
        return make_record(key, content, captions, metadata)

    def _withdrawn(self) -> str:
        """Return the state of the list of withdrawn samples."""
        return "" if self.prepared is None else state_of(join(self.prepared, WITHDRAWN))

    def _withdrawn_from(self, folder: str) -> frozenset[int]:
        """Return the numbers of the samples of a folder that were withdrawn."""
        if self.prepared is None:
            return frozenset()
        below = folder.rstrip("/").removeprefix(self.prepared.rstrip("/")).strip("/")
        return frozenset(_read_json(join(self.prepared, WITHDRAWN), self._withdrawn()).get(below, ()))


class _DamagedShardError(ValueError):
    """A shard is not what the index says."""


def check_mds(folder: str, image_column: str | None, caption_column: str | None) -> int:
    """Check that an MDS folder has the columns; return how many samples it has.

    Raises:
        DataError: Its index is missing or damaged, or it lacks a column or has it with another encoding.
    """
    shards = read_shards(folder)
    for shard in shards:
        find_columns(folder, shard, image_column, caption_column)
    return sum(shard["samples"] for shard in shards)


def prepared_root(folder: str) -> str | None:
    """Return the folder, this one or up to two above, that holds the manifest of `prepare`; None if there is none.

    Raises:
        DataError: The manifest is one of encoded data, which holds no images.
    """
    place = folder.rstrip("/")
    for _ in range(3):
        manifest = _read_json(join(place, MANIFEST), state_of(join(place, MANIFEST)))
        if manifest.get("kind") == "prepared":
            return place
        if manifest.get("kind") == "encoded":
            raise DataError(f"{shown(folder)} holds latents, no images; name the prepared data that it was made from")
        place, slash, _ = place.rpartition("/")
        if not slash or place.endswith(":/"):
            break
    return None


def mds_folders(names: Sequence[str]) -> list[str]:
    """Return the MDS folders among files: those with an index and a shard, sorted; `""` is the root itself."""
    with_shard = {name.rpartition("/")[0] for name in names if ".mds" in name.rpartition("/")[2]}
    return sorted(folder for folder in with_shard if (f"{folder}/{INDEX}" if folder else INDEX) in set(names))


def read_shards(folder: str) -> list[dict[str, Any]]:
    """Return what the index of an MDS folder says of its shards.

    Raises:
        DataError: There is no index, or it is damaged.
    """
    place = join(folder, INDEX)
    index = _read_json(place, state_of(place))
    try:
        shards = list(index["shards"])
        for one in shards:
            _ = [_stored(one)[name] for name in ("basename", "bytes")]
            _ = [one[name] for name in ("format", "samples", "column_names", "column_encodings", "column_sizes")]
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{shown(place)} is missing or not the index of an MDS folder; write the folder anew"
        ) from error
    if any("/" in _stored(one)["basename"] for one in shards):
        raise DataError(f"{shown(place)} names shards in other folders; write the folder anew")
    if any(one["format"] != "mds" for one in shards):
        raise DataError(f"{shown(folder)} is not in the format mds, but {shards[0]['format']}; convert it")
    return shards


def find_columns(folder: str, shard: dict[str, Any], image: str | None, caption: str | None) -> tuple[str, str]:
    """Return the names of the columns of images and captions.

    Raises:
        DataError: There is none, or it is not encoded as images or texts.
    """
    encodings = dict(zip(shard["column_names"], shard["column_encodings"], strict=True))
    listed = ", ".join(f"{name} ({encoding})" for name, encoding in encodings.items())
    found = []
    for what, given, usual, fit in (
        ("image", image, IMAGE_COLUMNS, (*_AS_THEY_CAME, "pil")),
        ("caption", caption, CAPTION_COLUMNS, ("str", "json")),
    ):
        name = next((name for name in ([given] if given else usual) if encodings.get(name) in fit), None)
        if name is None:
            raise DataError(
                f"{shown(folder)} has no column {given or ' or '.join(usual)} encoded as {' or '.join(fit)}; "
                f"it has {listed}; name the {what} column with --{what}-column"
            )
        found.append(name)
    return found[0], found[1]


@functools.lru_cache(maxsize=16)
def _read_json(place: str, state: str) -> dict[str, Any]:
    """Return a JSON file's object, which is not to be changed; an empty one if there is none or it is damaged."""
    try:
        value = {} if state == "gone" else json.loads(read_file(place))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _stored(shard: dict[str, Any]) -> dict[str, Any]:
    """Return what the index says of the file of a shard: the compressed one, if it is."""
    return shard["zip_data"] or shard["raw_data"]


@contextmanager
def _opened(place: str, shard: dict[str, Any]) -> Iterator[BinaryIO]:
    """Open a shard after its hash was found right, a remote one by way of a temporary file."""
    with tempfile.TemporaryFile() as copy, open_file(place) as file:
        stored, hasher, size = _stored(shard), _hasher(shard), 0
        while block := file.read(BLOCK_BYTES):
            size += len(block)
            if hasher is not None:
                hasher[0].update(block)
            if is_url(place):
                copy.write(block)
        if size != stored["bytes"] or (hasher is not None and hasher[0].hexdigest() != hasher[1]):
            raise _DamagedShardError("its size or hash is not that in the index; nothing of it was read")
        whole = copy if is_url(place) else file
        whole.seek(0)
        if shard["zip_data"]:
            from streaming.base.compression import decompress  # takes seconds

            whole = io.BytesIO(decompress(shard["compression"], whole.read()))
        yield whole  # pyright: ignore[reportReturnType]


def _hasher(shard: dict[str, Any]) -> tuple[Any, str] | None:
    """Return a hash to be fed, and what it must come to; None if the index holds none."""
    for name, digest in _stored(shard).get("hashes", {}).items():
        if name.startswith("xxh") and name in xxhash.algorithms_available:
            return getattr(xxhash, name)(), digest
        if name in hashlib.algorithms_available:
            return hashlib.new(name), digest
    return None


def _samples(file: BinaryIO, shard: dict[str, Any]) -> Iterator[dict[str, bytes]]:
    """Yield the columns of each sample.

    A shard is the number of samples, their offsets and the end (all uint32, little endian), the columns' types, and the
    samples; a sample is the sizes of its columns of variable size (uint32) and the columns.
    """
    try:
        (num,) = struct.unpack("<I", file.read(4))
        offsets = struct.unpack(f"<{num + 1}I", file.read(4 * (num + 1)))
        for start, stop in itertools.pairwise(offsets):
            file.seek(start)
            yield _columns(file.read(stop - start), shard)
    except struct.error as error:
        raise _DamagedShardError(f"{error}; what came before was read") from error


def _columns(sample: bytes, shard: dict[str, Any]) -> dict[str, bytes]:
    """Cut a sample into its columns."""
    fixed = shard["column_sizes"]
    variable = struct.unpack_from(f"<{fixed.count(None)}I", sample)
    sizes, at = iter(variable), 4 * len(variable)
    columns = {}
    for name, size in zip(shard["column_names"], fixed, strict=True):
        stop = at + (next(sizes) if size is None else size)
        columns[name], at = sample[at:stop], stop
    if at != len(sample):
        raise _DamagedShardError("a sample's size is not the sum of its columns'; what came before was read")
    return columns


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
    from streaming.base.format.mds.encodings import mds_decode  # takes seconds

    value = mds_decode(encoding, data)
    return value.item() if hasattr(value, "item") else value


def _image_file(picture: Any) -> bytes:
    """Return an image as a lossless file: PNG, or TIFF where PNG does not know its mode."""
    content = io.BytesIO()
    picture.save(content, "PNG" if picture.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16") else "TIFF")
    return content.getvalue()
