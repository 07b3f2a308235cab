"""The folder of an encoded data set: what of it is finished, what is missing, and how it is finished.

Shards appear one by one, each whole, with a mark below `work.partial`; indexes name them at the end, and the manifest
comes last. What an earlier run finished, and what grew since, is known from `shards.json`.
"""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion.datasets.encoded import DAMAGED, EncodedManifest
from diffusion.datasets.manifest import MANIFEST
from diffusion.datasets.mds import INDEX, read_shards, write_index
from diffusion.errors import ConfigurationError, DataError
from diffusion.files import PARTIAL, publish, read_json, write_json
from diffusion.preparation.encoding.images import Target
from diffusion.preparation.encoding.plan import Output, PreparedPlace, shard_identity
from diffusion.preparation.encoding.writer import Mark
from diffusion.preparation.output_folder import WORK, remove_tree, writing
from diffusion.preparation.withdrawal import KEYS, MARKS

SHARDS = "shards.json"
"""File of an encoded data set: for each `<split>/<bucket>` the prepared shards that it was made from."""

SETTINGS = "encoding.json"
"""File below `work.partial`: the manifest of an encoding that has not ended yet."""

MARK_FOLDER = "shards"
"""Folder below `work.partial`: a mark for each finished shard."""

CHANGING = frozenset({"source", "counts", "sizes"})
"""Entries of a manifest that change when the prepared data grows."""

_ALWAYS_ALLOWED = ("lost+found", KEYS, WORK)


@dataclass(frozen=True, kw_only=True)
class KnownShard:
    """A prepared shard that was encoded before.

    Attributes:
        source: Its identity.
        samples: Its samples.
        parts: Shards that were made from it.
    """

    source: str
    samples: int
    parts: int


@dataclass(frozen=True)
class OutputState:
    """One encoded data set and what was found of it.

    Attributes:
        output: What it is to be.
        known: The shards of the finished data set, by place.
    """

    output: Output
    known: dict[str, list[KnownShard]]

    @property
    def _work(self) -> Path:
        return self.output.folder / WORK

    def enter(self) -> None:
        """Make the folders that shards are written to.

        Raises:
            MachineError: They cannot be made.
        """
        with writing(self.output.folder):
            (self._work / MARK_FOLDER).mkdir(parents=True, exist_ok=True)
            if not (self._work / SETTINGS).exists():
                write_json(self._work / SETTINGS, self.output.manifest.to_json())
            for name in self.output.places:
                if not self.output.folder.joinpath(name).exists():
                    self._partial(name).mkdir(parents=True, exist_ok=True)

    def target(self, number: int, place: PreparedPlace, shard: int) -> Target | None:
        """Return where a prepared shard goes; None if it is encoded already.

        Args:
            number: Number of this data set.
            place: The prepared folder.
            shard: Number of the shard in it.

        Raises:
            DataError: A mark is damaged.
        """
        if shard < len(self.known.get(place.name, [])):
            return None
        path = self._mark(place.name, shard)
        if path.is_file() and Mark.read(path).source == shard_identity(place.shards[shard]):
            return None
        size = self.output.manifest.size_of(place.bucket)
        return Target(output=number, size=size, folder=self._folder(place.name), mark=path)

    def num_damaged(self) -> int:
        """Count the damaged images of the shards that an unfinished run left."""
        return sum(len(Mark.read(path).damaged) for path in (self._work / MARK_FOLDER).glob("*.json"))

    def finish(self, withdrawn: dict[str, list[int]]) -> None:
        """Write the indexes, what is marked, and the manifest last.

        Args:
            withdrawn: Numbers of the withdrawn samples of the prepared data, by place.

        Raises:
            DataError: The number of samples is not that of the prepared data.
            MachineError: The folder cannot be written to.
        """
        folder, manifest = self.output.folder, self.output.manifest
        with writing(folder):
            damaged, shards = _read_numbers(folder / DAMAGED), {}
            hidden = {name: set(numbers) for name, numbers in _read_numbers(folder / MARKS).items()}
            for name, place in self.output.places.items():
                marks = self._publish(name, place)
                shards[name] = [vars(shard) for shard in self.known.get(name, [])]
                first = sum(shard.samples for shard in self.known.get(name, []))
                for mark in marks:
                    shards[name].append({"source": mark.source, "samples": mark.samples, "parts": len(mark.entries)})
                    damaged.setdefault(name, []).extend(first + i for i in mark.damaged)
                    hidden.setdefault(name, set()).update(first + i for i in mark.withdrawn)
                    first += mark.samples
                hidden.setdefault(name, set()).update(i for i in withdrawn.get(name, []) if i < place.num_samples)
            _write_numbers(folder / DAMAGED, damaged)
            _write_numbers(folder / MARKS, hidden)
            if not (folder / SHARDS).is_file() or read_json(folder / SHARDS) != shards:
                write_json(folder / SHARDS, shards)
            if not (folder / MANIFEST).is_file() or read_json(folder / MANIFEST) != manifest.to_json():
                write_json(folder / MANIFEST, manifest.to_json())
            remove_tree(self._work)

    def _publish(self, name: str, place: PreparedPlace) -> list[Mark]:
        """Write the index of a place and give the folder its name; return the marks of its new shards."""
        known = self.known.get(name, [])
        marks = [Mark.read(self._mark(name, shard)) for shard in range(len(known), len(place.shards))]
        folder = self._folder(name)
        if marks:
            old = read_shards(folder)[: sum(shard.parts for shard in known)] if known else []
            entries = [*old, *(entry for mark in marks for entry in mark.entries)]
            found = sum(entry["samples"] for entry in entries)
            if found != place.num_samples or any(
                mark.source != shard_identity(entry)
                for mark, entry in zip(marks, place.shards[len(known) :], strict=True)
            ):
                raise DataError(
                    f"{folder} has {found} samples, and {place.folder} {place.num_samples}, or other shards: did the "
                    "prepared data change meanwhile? Run the command again"
                )
            _remove_strays(folder, entries)
            write_index(folder, entries)
        if folder != self.output.folder / name:
            publish(folder, self.output.folder / name)
        return marks

    def _partial(self, name: str) -> Path:
        return self.output.folder / (name + PARTIAL)

    def _folder(self, name: str) -> Path:
        """The MDS folder of a place: under its name once it was finished, before that a partial one."""
        final = self.output.folder / name
        return final if final.exists() else self._partial(name)

    def _mark(self, name: str, shard: int) -> Path:
        return self._work / MARK_FOLDER / f"{name.replace('/', '.')}.{shard:06}.json"


def look_at(prepared: Path, output: Output) -> OutputState:
    """Look at what lies where a data set is to be written.

    Raises:
        ConfigurationError: It is the prepared data.
        DataError: It is another encoding, of other data, or something else.
    """
    folder = output.folder
    if folder.resolve() == prepared.resolve():
        raise ConfigurationError(f"{folder} is the prepared data: choose another folder for the encoded data")
    found = next((path for path in (folder / MANIFEST, folder / WORK / SETTINGS) if path.is_file()), None)
    if found is None:
        strangers = [] if not folder.is_dir() else [path.name for path in folder.iterdir()]
        if any(not name.startswith(".") and name not in _ALWAYS_ALLOWED for name in strangers):
            raise DataError(f"{folder} is not empty and no encoding: choose another folder, or delete this one")
        return OutputState(output, {})
    there, here = read_json(found), output.manifest.to_json()
    if not isinstance(there, dict) or there.get("kind") != output.manifest.kind:
        raise DataError(f"{folder} is not empty and no encoding: choose another folder, or delete this one")
    there = EncodedManifest.from_json(there, str(folder)).to_json()
    differences = sorted(key for key in here if key not in CHANGING and here[key] != there[key])
    if differences:
        raise DataError(
            f"{folder} holds another encoding ({', '.join(differences)} differ): choose another folder, or delete this "
            "one"
        )
    known = _known(folder, there["counts"]) if found.name == MANIFEST else {}
    _check_same(prepared, output, known)
    return OutputState(output, known)


def _known(folder: Path, counts: dict[str, dict[str, int]]) -> dict[str, list[KnownShard]]:
    """Read the shards of a finished data set, without those of a growth that was not finished."""
    try:
        recorded = {
            name: [KnownShard(**shard) for shard in shards] for name, shards in read_json(folder / SHARDS).items()
        }
    except (TypeError, AttributeError) as error:
        raise DataError(f"{folder / SHARDS} is damaged ({error}): encode the data set anew") from error
    known: dict[str, list[KnownShard]] = {}
    for split, buckets in counts.items():
        for bucket, count in buckets.items():
            shards = iter(recorded.get(f"{split}/{bucket}", []))
            taken = known.setdefault(f"{split}/{bucket}", [])
            while sum(shard.samples for shard in taken) < count:
                shard = next(shards, None)
                if shard is None:
                    raise DataError(f"{folder / SHARDS} does not name all of {split}/{bucket}: encode it anew")
                taken.append(shard)
    return known


def _check_same(prepared: Path, output: Output, known: dict[str, list[KnownShard]]) -> None:
    """Refuse prepared data that is not what a finished data set was made from; erased samples are no difference."""
    for name, shards in known.items():
        place = output.places.get(name)
        there = place.shards if place else []
        if not (output.folder / name / INDEX).is_file():
            raise DataError(f"{output.folder / name} is missing: copy it again, or delete {output.folder}")
        same = len(there) >= len(shards) and all(
            shard.source == shard_identity(entry) or (shard.samples == entry["samples"] and _is_rewritten(entry))
            for shard, entry in zip(shards, there, strict=False)
        )
        if not same:
            raise DataError(
                f"{output.folder} was encoded from other data than {prepared / name} holds now: choose another folder, "
                "or delete this one"
            )


def _is_rewritten(entry: dict[str, Any]) -> bool:
    """Whether samples of a shard were erased: it has a name such as `shard.00003.r1.mds`."""
    return ".r" in entry["raw_data"]["basename"]


def _read_numbers(path: Path) -> dict[str, list[int]]:
    return read_json(path) if path.is_file() else {}


def _write_numbers(path: Path, numbers: dict[str, Any]) -> None:
    """Write numbers by place, if there are some and they are not there yet."""
    content = {name: sorted(set(found)) for name, found in sorted(numbers.items()) if found}
    if content and (not path.is_file() or read_json(path) != content):
        write_json(path, content)


def _remove_strays(folder: Path, entries: Iterable[dict[str, Any]]) -> None:
    """Remove what an index will not name."""
    named = {entry["raw_data"]["basename"] for entry in entries} | {INDEX}
    for path in folder.iterdir():
        if path.name not in named:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
