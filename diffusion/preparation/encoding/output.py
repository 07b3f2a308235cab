"""An encoded data set while it is written: what of it is finished, what is missing, and how it is finished.

Each shard appears whole. Its record, a small file in `work.partial`, holds its entries for the index. At the end the
indexes are made of the records, the manifest is written, and the records are deleted. `shards.json` says what a
finished data set was made from: prepared data that has grown is encoded from there.
"""

import hashlib
import itertools
import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from diffusion import storage
from diffusion.config.data import ImageSize
from diffusion.datasets.bad_images import max_bad
from diffusion.datasets.encoded import EncodedManifest
from diffusion.datasets.transforms import ImageTransform
from diffusion.errors import DataError
from diffusion.formats import data_set
from diffusion.formats.data_set import add_marks, delete_unnamed
from diffusion.formats.shards import SampleDecoder, Shard, check_sizes, read_index, read_shard, write_index
from diffusion.preparation.metadata import key_hash
from diffusion.preparation.output import check_empty, clear_folders
from diffusion.preparation.positions import read_key_hashes
from diffusion.preparation.removed import Removed
from diffusion.storage import MissingFileError, join, shown

CHANGING = frozenset({"source", "counts", "sizes"})
"""Entries of a manifest that change when the prepared data grows."""

_ALLOWED = (data_set.POSITIONS, data_set.REMOVED, data_set.WRITER, data_set.WORK, "lost+found")
"""Names that a folder may hold before anything is encoded."""


@dataclass(frozen=True, kw_only=True)
class EncodingSettings:
    """Settings that determine the encoded shards."""

    batch_size: int
    """Images of a forward pass."""
    precision: str
    """`fp32` or `bf16`."""
    mean_only: bool
    """Leave the log-variance out."""
    max_shard_bytes: int
    """Size above which a shard is cut into several."""
    scores: tuple[str, ...] = ()
    """Names of the scores to store."""
    removed: frozenset[str] = frozenset()
    """Hashes of the keys of removed images."""
    convert_to_srgb: bool = False
    """Convert images by their colour profile."""


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """Encoded shards of a prepared shard."""

    source: str
    """Identity of the prepared shard."""
    samples: int
    shards: list[Shard]
    """Several if the prepared shard was too large for one."""
    damaged: list[int] = field(default_factory=list)
    """Indices, in the prepared shard, of images that cannot be decoded. Of a finished data set, `damaged.json` has
    them."""
    removed_samples: list[int] = field(default_factory=list)
    """Likewise, of samples that were removed."""

    @classmethod
    def read(cls, uri: str) -> "ShardRecord":
        """Read a file of `RECORDS`."""
        values = storage.read_json(uri)
        return cls(shards=[Shard.of(entry) for entry in values.pop("entries")], **values)

    def write(self, uri: str) -> None:
        """Write it."""
        values = vars(self) | {"entries": [shard.entry for shard in self.shards]}
        storage.write_json(uri, {name: value for name, value in values.items() if name != "shards"})


@dataclass(frozen=True, kw_only=True)
class ShardTask:
    """A prepared shard to encode."""

    prepared: str
    """URI of the prepared data set."""
    name: str
    """`<split>/<bucket>`."""
    number: int
    """Its number in its folder."""
    shard: Shard
    """Its entry in the index."""
    removed: frozenset[int]
    """Indices, in the shard, of samples that were removed from the prepared data."""
    targets: dict[str, ImageSize]
    """URIs of the encoded data sets that lack it, and the size of its images there."""

    @property
    def folder(self) -> str:
        """URI of its MDS folder."""
        return join(self.prepared, self.name)


@dataclass(kw_only=True)
class Output:
    """One encoded data set, and what is there of it."""

    uri: str
    manifest: EncodedManifest
    """The manifest of the finished data set."""
    folders: dict[str, list[Shard]]
    """Prepared shards that it is made of, by `<split>/<bucket>`."""
    known: dict[str, list[ShardRecord]] = field(default_factory=dict)
    """Shards of the finished data set, by `<split>/<bucket>`."""
    records: dict[str, list[ShardRecord | None]] = field(default_factory=dict)
    """A record per prepared shard, the known ones first; None if it is not encoded."""
    removed: frozenset[str] = frozenset()
    """Hashes of removed images: `preparation/removed.py`."""

    @property
    def num_samples(self) -> int:
        """Samples of all folders."""
        return sum(sum(buckets.values()) for buckets in self.manifest.counts.values())

    @property
    def num_damaged(self) -> int:
        """Images of the unfinished encoding that cannot be decoded."""
        return sum(len(record.damaged) for records in self.records.values() for record in filter(None, records))

    def lacks(self, name: str, number: int) -> bool:
        """Check if a prepared shard of a `<split>/<bucket>` is meant for this data set, and not encoded yet."""
        return name in self.records and self.records[name][number] is None

    def open(self, prepared: str) -> None:
        """Look at what the claimed folder holds; say what is encoded there, if a shard is missing.

        Raises:
            DataError: It is another encoding, or of other data.
        """
        finished, begun = _read_json(join(self.uri, data_set.MANIFEST)), _read_json(join(self.uri, data_set.SETTINGS))
        self.removed = Removed.read(self.uri)
        if not finished and not begun:
            check_empty(self.uri, _ALLOWED)
        else:
            self._check_same_encoding(finished or begun)
        if finished:
            self.known = _read_known(self.uri, finished["counts"])
            self._check_same_data(prepared)
        self.records = self._read_records()
        if self.num_damaged > max_bad(self.num_samples):  # The damaged ones are encoded again.
            for records in self.records.values():
                records[:] = [record if record and not record.damaged else None for record in records]
        if any(None in records for records in self.records.values()):
            _write_if_changed(join(self.uri, data_set.SETTINGS), asdict(self.manifest))

    def finish(self, removed: dict[str, list[int]]) -> None:
        """Write the indexes, the indices of removed and damaged samples, and the manifest last.

        Args:
            removed: Indices of the removed samples of the prepared data, by `<split>/<bucket>`.

        Raises:
            DataError: A shard is missing.
            MachineError: The folder cannot be written to.
        """
        uri, shards, sources = self.uri, dict[str, list[Shard]](), {}
        marks: dict[str, list[tuple[str, list[int]]]] = {data_set.DAMAGED: [], data_set.REMOVED_SAMPLES: []}
        for name, listed in self._read_records().items():
            records = [record for record in listed if record]
            if len(records) < len(listed):
                raise DataError(f"{shown(join(uri, name))}: a shard is missing; run the command again")
            first = 0
            for record in records:
                marks[data_set.DAMAGED].append((name, [first + i for i in record.damaged]))
                marks[data_set.REMOVED_SAMPLES].append((name, [first + i for i in record.removed_samples]))
                first += record.samples
            marks[data_set.REMOVED_SAMPLES].append((name, [i for i in removed.get(name, []) if i < first]))
            shards[name] = [shard for record in records for shard in record.shards]
            if len(records) > len(self.known.get(name, ())):
                check_sizes(join(uri, name), shards[name])
                write_index(join(uri, name), shards[name])
            sources[name] = [
                {"source": record.source, "samples": record.samples, "parts": len(record.shards)} for record in records
            ]
        for file, found in marks.items():
            add_marks(uri, file, found)
        _write_if_changed(join(uri, data_set.SHARDS), sources)
        _write_if_changed(join(uri, data_set.MANIFEST), asdict(self.manifest))
        delete_unnamed(uri, shards)
        clear_folders(uri, data_set.WORK)

    def _check_same_encoding(self, found: dict[str, Any]) -> None:
        there, here = asdict(EncodedManifest.from_json(found, shown(self.uri))), asdict(self.manifest)
        if all(name.split("/")[1] in self.manifest.sizes for name in self.folders):
            # Images of all buckets have sizes of their own. `resolution` is that of the largest, which may be new.
            side = there["resolution"]
            here |= {"resolution": side, "transform": ImageTransform.square(side).identity()}
        differences = sorted(key for key in here if key not in CHANGING and here[key] != there[key])
        if differences:
            raise DataError(
                f"{shown(self.uri)} holds another encoding ({', '.join(differences)} differ): choose another folder, "
                "or delete this one"
            )

    def _check_same_data(self, prepared: str) -> None:
        """Reject prepared data that is not what the data set was made from; removed samples are no difference."""
        for name, records in self.known.items():
            there = self.folders.get(name, [])
            same = len(there) >= len(records)
            for i, (known, shard) in enumerate(zip(records, there, strict=False)):
                identity = shard_identity(shard)
                is_rewritten = ".r" in shard.raw.name  # As in shard.00003.r1.mds: samples were erased.
                same = same and (known.source == identity or is_rewritten)
                is_last = i == len(records) - 1
                # The keys are read of a rewritten shard, once, and where there are no hashes of a folder's last one.
                if same and (known.source != identity or (is_last and not shard.raw.hashes)):
                    same = self._has_same_keys(join(prepared, name), name, known, shard)
                records[i] = replace(known, source=identity)
            if not same:
                raise DataError(
                    f"{shown(self.uri)} was encoded from other data than {shown(prepared)}/{name} holds now: choose "
                    "another folder, or delete this one"
                )

    def _has_same_keys(self, prepared: str, name: str, known: ShardRecord, shard: Shard) -> bool:
        """Compare the keys of a prepared shard with those that it was encoded with, but for erased samples."""
        hashes = [one for part in known.shards for one in read_key_hashes(self.uri, name, part).to_pylist()]
        decode = SampleDecoder(shard.format, ["key"])
        keys = [decode(sample)["key"] for sample in read_shard(prepared, shard)]
        return len(keys) == len(hashes) and all(
            not key or one in (None, key_hash(key)) for key, one in zip(keys, hashes, strict=True)
        )

    def _read_records(self) -> dict[str, list[ShardRecord | None]]:
        """Read the records of shards that are what the prepared data holds now; one that is not whole is none."""
        folder = join(self.uri, data_set.RECORDS)
        there = storage.list_files(folder)

        def read(named: tuple[str, Shard]) -> ShardRecord | None:
            name, shard = named
            try:
                record = ShardRecord.read(join(folder, name)) if name in there else None
            except (DataError, TypeError, KeyError, ValueError):
                return None
            return record if record and record.source == shard_identity(shard) else None

        records: dict[str, list[ShardRecord | None]] = {}
        for name, listed in self.folders.items():
            shards = [(record_name(name, number), shard) for number, shard in enumerate(listed)]
            known = self.known.get(name, [])
            records[name] = [*known, *storage.concurrent_map(read, shards[len(known) :])]
        return records


def record_name(name: str, number: int) -> str:
    """Name the file of the record of a prepared shard."""
    return f"{name.replace('/', '.')}.{number:06}.json"


def _read_known(uri: str, counts: dict[str, dict[str, int]]) -> dict[str, list[ShardRecord]]:
    """Read the shards of a finished data set, without those of a growth that was not finished."""
    file, known = join(uri, data_set.SHARDS), {}
    try:
        recorded = storage.read_json(file)
        for split, buckets in counts.items():
            for bucket, count in buckets.items():
                name = f"{split}/{bucket}"
                there, shards = iter(read_index(join(uri, name)).shards), iter(recorded.get(name, ()))
                known[name] = []
                while count > 0:
                    one = next(shards)
                    of_shard = [*itertools.islice(there, one["parts"])]
                    known[name].append(ShardRecord(source=one["source"], samples=one["samples"], shards=of_shard))
                    count -= one["samples"]
    except MissingFileError as error:
        raise DataError(f"{shown(uri)} is not whole ({error}): copy it again, or delete it") from error
    except (StopIteration, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{shown(file)} does not name the shards of {shown(uri)} ({error!r}): delete the encoding, and start again"
        ) from error
    return known


def shard_identity(shard: Shard) -> str:
    """Return a hash of a shard's size, samples and hashes: equal for equal content."""
    content = [shard.num_samples, shard.raw.num_bytes, shard.raw.hashes]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _read_json(uri: str) -> dict[str, Any]:
    """Read a JSON object; an empty one if there is no such file."""
    content = storage.read_json(uri, {})
    if not isinstance(content, dict):
        raise DataError(f"{shown(uri)} is damaged: it is no JSON object")
    return content


def _write_if_changed(uri: str, content: dict[str, Any]) -> None:
    if content != _read_json(uri):
        storage.write_json(uri, content)
