"""An encoded data set while it is written: what of it is finished, what is missing, and how it is finished.

Each shard appears whole. Its mark, a small file in `work.partial`, holds its entry for the index. At the end the
indexes are made of the marks, the manifest is written, and the marks are deleted. `shards.json` says what a finished
data set was made from: prepared data that has grown is encoded from there.
"""

import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from diffusion import storage
from diffusion.datasets.encoded import DAMAGED, EncodedManifest
from diffusion.datasets.manifest import MANIFEST, WORK
from diffusion.datasets.mds import INDEX, read_shards, stored_file, write_index
from diffusion.errors import DataError
from diffusion.files import PARTIAL
from diffusion.preparation.encoding.plan import Output, Target, shard_identity
from diffusion.preparation.layout import REMOVED_SAMPLES
from diffusion.preparation.output import check_empty
from diffusion.preparation.takedown import hash_key, read_removed
from diffusion.storage import MissingFileError, is_url, join, shown

SHARDS = "shards.json"
"""File of an encoded data set: for each `<split>/<bucket>` the prepared shards that it was made from."""

SETTINGS = f"{WORK}/encoding.json"
"""The manifest of an encoding that is not finished."""

MARKS = f"{WORK}/shards"
"""Folder with a mark for each finished shard."""

CHANGING = frozenset({"source", "counts", "sizes"})
"""Entries of a manifest that change when the prepared data grows."""

_ALLOWED = ("lost+found", "removed.json", "withdrawn.txt", "writer.json", WORK)
"""What a folder may hold before anything is encoded."""

MAX_DAMAGED = 10
MAX_DAMAGED_FRACTION = 0.001


@dataclass(frozen=True, kw_only=True)
class Mark:
    """What is known of an encoded shard."""

    source: str
    """Identity of the prepared shard."""
    samples: int
    entries: list[dict[str, Any]]
    """Entries for the index; several if the shard was too large for one."""
    damaged: list[int]
    """Indices, in the prepared shard, of images that cannot be decoded."""
    withdrawn: list[int]
    """Likewise, of samples that were removed."""
    removed: str = ""
    """Identity of the removed keys: a shard that was encoded before a takedown is encoded again."""


@dataclass(frozen=True, kw_only=True)
class KnownShard:
    """A prepared shard that a finished data set was made from."""

    source: str
    """Its identity."""
    samples: int
    parts: int
    """Shards that were made from it."""


@dataclass(frozen=True)
class OutputState:
    """One encoded data set, and what was found of it."""

    output: Output
    known: dict[str, list[KnownShard]]
    """Shards of the finished data set, by `<split>/<bucket>`."""
    marks: dict[tuple[str, int], Mark]
    """Finished shards of an unfinished encoding, by folder and number."""
    removed: frozenset[str]
    """Hashes of the removed keys."""

    @cached_property
    def removed_identity(self) -> str:
        """Identity of the removed keys; empty if there are none."""
        return _identity(self.removed)

    @property
    def num_damaged(self) -> int:
        """Images of the unfinished encoding that cannot be decoded."""
        return sum(len(mark.damaged) for mark in self.marks.values())

    def begin(self) -> None:
        """Write what is encoded, if a shard is missing.

        Raises:
            MachineError: It cannot be written.
        """
        folders = self.output.folders.items()
        if any(self.target(name, number) for name, folder in folders for number in range(len(folder.shards))):
            _write_if_changed(join(self.output.uri, SETTINGS), self.output.manifest.to_json())

    def target(self, name: str, number: int) -> Target | None:
        """Return where a prepared shard goes; None if it is encoded already, or not meant for this data set."""
        if name not in self.output.folders or number < len(self.known.get(name, ())) or (name, number) in self.marks:
            return None
        size = self.output.manifest.size_of(name.partition("/")[2])
        uri = self.output.uri
        mark = join(uri, MARKS, _mark_name(name, number))
        return Target(size=size, folder=join(uri, name), mark=mark, removed=self.removed_identity)

    def finish(self, removed: dict[str, list[int]]) -> None:
        """Write the indexes, the indices of removed and damaged samples, and the manifest last.

        Args:
            removed: Indices of the removed samples of the prepared data, by `<split>/<bucket>`.

        Raises:
            DataError: A shard is missing.
            MachineError: The folder cannot be written to.
        """
        uri, manifest = self.output.uri, self.output.manifest
        damaged, shards = _read_json(join(uri, DAMAGED)), {}
        hidden = {name: set(indices) for name, indices in _read_json(join(uri, REMOVED_SAMPLES)).items()}
        marks = _read_marks(self.output, self.known, self.removed)
        for name, folder in self.output.folders.items():
            known = self.known.get(name, [])
            new = [marks.get((name, number)) for number in range(len(known), len(folder.shards))]
            if None in new:
                raise DataError(f"{shown(join(uri, name))}: a shard is missing; run the command again")
            shards[name] = [vars(shard) for shard in known]
            first = sum(shard.samples for shard in known)
            for mark in filter(None, new):
                shards[name].append({"source": mark.source, "samples": mark.samples, "parts": len(mark.entries)})
                damaged.setdefault(name, []).extend(first + i for i in mark.damaged)
                hidden.setdefault(name, set()).update(first + i for i in mark.withdrawn)
                first += mark.samples
            hidden.setdefault(name, set()).update(i for i in removed.get(name, []) if i < folder.num_samples)
            if new:
                entries = [entry for mark in filter(None, new) for entry in mark.entries]
                _publish_folder(join(uri, name), sum(shard.parts for shard in known), entries)
        for file, indices in ((DAMAGED, damaged), (REMOVED_SAMPLES, hidden)):
            content = {name: sorted(set(found)) for name, found in sorted(indices.items()) if found}
            _write_if_changed(join(uri, file), content)
        _write_if_changed(join(uri, SHARDS), shards)
        _write_if_changed(join(uri, MANIFEST), manifest.to_json())
        storage.delete(join(uri, WORK, name) for name in storage.list_files(join(uri, WORK)))
        if not is_url(uri):
            shutil.rmtree(Path(uri, WORK), ignore_errors=True)
            for partial in Path(uri).glob(f".*{PARTIAL}"):  # Of a killed process.
                partial.unlink(missing_ok=True)


def open_output(prepared: str, output: Output) -> OutputState:
    """Look at what a claimed folder holds of a data set.

    Raises:
        DataError: It is another encoding, or of other data.
    """
    uri = output.uri
    finished = _read_json(join(uri, MANIFEST))
    found = finished or _read_json(join(uri, SETTINGS))
    removed = read_removed(uri)
    if not found:
        names = {name.partition("/")[0] for name in storage.list_files(uri)}
        check_empty(uri, names, _ALLOWED)
        return OutputState(output, {}, {}, removed)
    there, here = EncodedManifest.from_json(found, shown(uri)).to_json(), output.manifest.to_json()
    differences = sorted(key for key in here if key not in CHANGING and here[key] != there[key])
    if differences:
        raise DataError(
            f"{shown(uri)} holds another encoding ({', '.join(differences)} differ): choose another folder, or delete "
            "this one"
        )
    known = _read_known(uri, there["counts"]) if finished else {}
    _check_same(prepared, output, known)
    if not is_url(uri):
        _adopt_partial_folders(output)
    marks = _read_marks(output, known, removed)
    if sum(len(mark.damaged) for mark in marks.values()) > max_damaged(output.num_samples):
        marks = {key: mark for key, mark in marks.items() if not mark.damaged}  # The others are encoded again.
    return OutputState(output, known, marks, removed)


def max_damaged(num_samples: int) -> float:
    """Return how many images of a data set may be damaged before its encoding ends."""
    return max(MAX_DAMAGED, MAX_DAMAGED_FRACTION * num_samples)


def _mark_name(name: str, number: int) -> str:
    return f"{name.replace('/', '.')}.{number:06}.json"


def _identity(removed: frozenset[str]) -> str:
    return hash_key(" ".join(sorted(removed))) if removed else ""


def _read_marks(
    output: Output, known: dict[str, list[KnownShard]], removed: frozenset[str]
) -> dict[tuple[str, int], Mark]:
    """Read the marks of shards that are what the prepared data holds now; one that is not whole is none."""
    folder, of_removed = join(output.uri, MARKS), _identity(removed)
    there = storage.list_files(folder)
    wanted = [
        (name, number)
        for name, prepared in output.folders.items()
        for number in range(len(known.get(name, ())), len(prepared.shards))
        if _mark_name(name, number) in there
    ]

    def read(key: tuple[str, int]) -> Mark | None:
        name, number = key
        try:
            mark = Mark(**storage.read_json(join(folder, _mark_name(name, number))))
        except (DataError, TypeError):
            return None
        is_same = mark.source == shard_identity(output.folders[name].shards[number]) and mark.removed == of_removed
        return mark if is_same else None

    marks = dict(zip(wanted, storage.concurrent_map(read, wanted), strict=True))
    return {key: mark for key, mark in marks.items() if mark}


def _read_known(uri: str, counts: dict[str, dict[str, int]]) -> dict[str, list[KnownShard]]:
    """Read the shards of a finished data set, without those of a growth that was not finished."""
    file = shown(join(uri, SHARDS))
    try:
        content = storage.read_json(join(uri, SHARDS))
        recorded = {name: [KnownShard(**shard) for shard in shards] for name, shards in content.items()}
    except (TypeError, AttributeError) as error:
        raise DataError(f"{file} is damaged ({error}): encode the data set anew") from error
    known: dict[str, list[KnownShard]] = {}
    for split, buckets in counts.items():
        for bucket, count in buckets.items():
            shards = iter(recorded.get(f"{split}/{bucket}", []))
            taken = known.setdefault(f"{split}/{bucket}", [])
            while count > 0:
                shard = next(shards, None)
                if shard is None:
                    raise DataError(f"{file} does not name all of {split}/{bucket}: encode it anew")
                taken.append(shard)
                count -= shard.samples
    return known


def _check_same(prepared: str, output: Output, known: dict[str, list[KnownShard]]) -> None:
    """Reject prepared data that is not what a finished data set was made from; removed samples are no difference."""
    for name, shards in known.items():
        folder = output.folders.get(name)
        there = folder.shards if folder else []
        encoded = join(output.uri, name)
        if not storage.exists(join(encoded, INDEX)):
            raise DataError(f"{shown(encoded)} is missing: copy it again, or delete {shown(output.uri)}")
        same = len(there) >= len(shards) and all(
            shard.source == shard_identity(entry) or (shard.samples == entry["samples"] and _is_rewritten(entry))
            for shard, entry in zip(shards, there, strict=False)
        )
        if not same:
            raise DataError(
                f"{shown(output.uri)} was encoded from other data than {shown(prepared)}/{name} holds now: choose "
                "another folder, or delete this one"
            )


def _is_rewritten(entry: dict[str, Any]) -> bool:
    """Return whether samples of a shard were removed: it has a name such as `shard.00003.r1.mds`."""
    return ".r" in entry["raw_data"]["basename"]


def _adopt_partial_folders(output: Output) -> None:
    """Rename the folders of an encoding that was begun before 0.3: they were named `BUCKET.partial` until the end."""
    for name in output.folders:
        partial = Path(output.uri, name + PARTIAL)
        if partial.is_dir():
            partial.rename(Path(output.uri, name))


def _publish_folder(folder: str, num_known: int, new: list[dict[str, Any]]) -> None:
    """Write the index of an MDS folder, and delete shards that it does not name."""
    entries = [*(read_shards(folder)[:num_known] if num_known else []), *new]
    there = storage.list_files(folder)
    for entry in new:
        name, size = stored_file(entry)["basename"], stored_file(entry)["bytes"]
        if name not in there or there[name].size != size:
            raise DataError(f"{shown(join(folder, name))} is missing or cut off: delete the encoding, and start again")
    named = {INDEX, *(stored_file(entry)["basename"] for entry in entries)}
    storage.delete(join(folder, name) for name in there if name not in named)
    write_index(folder, entries)


def _read_json(uri: str) -> dict[str, Any]:
    """Read a JSON object; an empty one if there is no such file."""
    try:
        content = storage.read_json(uri)
    except MissingFileError:
        return {}
    if not isinstance(content, dict):
        raise DataError(f"{shown(uri)} is damaged: it is no JSON object")
    return content


def _write_if_changed(uri: str, content: dict[str, Any]) -> None:
    if content != _read_json(uri):
        storage.write_json(uri, content)
