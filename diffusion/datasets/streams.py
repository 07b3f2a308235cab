"""The streams of a data set: where they lie, what is checked before they are opened, and the marks beside them.

A stream is an MDS folder, usually one bucket. `manifest.json` lies one or two folders above it. Beside the manifest,
`withdrawn.json` and `damaged.json` name samples that are not used: images that were removed, or that could not be
encoded. Such a sample keeps its index, so that the order of the others does not change; the next usable sample of its
stream is read in its place. That depends on the marks alone: images and their latents get the same substitutes.
"""

import logging
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from diffusion import storage
from diffusion.config.data import DataConfig, StreamConfig, ValidationConfig
from diffusion.config.schema import Config
from diffusion.distributed import is_first_rank
from diffusion.errors import ConfigurationError, DataError, MachineError
from diffusion.files import read_json
from diffusion.formats.data_set import (
    DAMAGED,
    MANIFEST,
    REMOVED_SAMPLES,
    SCAN,
    SPLITS,
    TRAIN,
    VALIDATION,
    WORK,
    has_srgb_conversion,
    is_data_set,
)
from diffusion.formats.shards import INDEX
from diffusion.storage import FIRST_CONTACT, Access, ForbiddenFileError, is_url, join, shown

logger = logging.getLogger(__name__)

MARKS = (REMOVED_SAMPLES, DAMAGED)
"""Files beside `manifest.json` that name unusable samples."""

Files = Mapping[tuple[str | None, str], Any]
"""Contents of manifests and marks by endpoint and URI; only of those that exist."""


@dataclass(frozen=True, kw_only=True)
class StreamLocation:
    """One stream with its paths joined."""

    name: str
    remote: str | None
    local: str
    section: str = "data"
    """Section of the configuration whose `streams` name it."""

    proportion: float | None = None
    repeat: float | None = None
    access: Access = field(default_factory=Access)
    """Access to the store of the remote."""
    files: Files | None = field(default=None, compare=False, repr=False)
    """Manifests and marks above the stream that `read_files` has read; None: they are read when they are needed."""

    @property
    def source(self) -> str:
        """Folder or URL of the original."""
        return self.remote or self.local


def validation_streams(config: ValidationConfig, data: DataConfig) -> list[StreamConfig]:
    """The streams of the validation data: those that are given, or those with the names and sizes of training's."""
    return config.streams or [StreamConfig(name=stream.name, resolution=stream.resolution) for stream in data.streams]


def locate_streams(
    root_remote: str | None,
    root_local: str,
    streams: Sequence[StreamConfig],
    section: str = "data",
    *,
    access: Access | None = None,
    files: Files | None = None,
) -> list[StreamLocation]:
    """Join the roots of a data set with its streams.

    Without a remote root, the local one holds the data set. Attempts and time-out of downloads are those of `access`;
    endpoint and profile are those of each stream. `files` are manifests and marks that have been read.
    """
    locations = []
    for stream in streams:
        local = stream.local or str(Path(root_local, stream.name))
        remote = stream.remote or (join(root_remote, stream.name) if root_remote else None)
        if remote is not None:
            remote = remote.removeprefix("file://")
            with suppress(OSError):  # One of them does not exist.
                if Path(remote).samefile(local):
                    remote = None  # An original is never treated as a cached copy.
        locations.append(
            StreamLocation(
                name=stream.name,
                remote=remote,
                local=local,
                section=section,
                proportion=stream.proportion,
                repeat=stream.repeat,
                access=replace(access or Access(), endpoint_url=stream.endpoint_url, profile=stream.profile),
                files=files,
            )
        )
    return locations


def located_streams(config: Config) -> list[tuple[StreamConfig, StreamLocation]]:
    """Locate the streams of `data`, unless a plug-in takes their place, and `validation`, without those at `???`."""
    data, validation, sections = config.data, config.validation, {}
    if config.plugins.train_dataset is None and isinstance(data.streams, list):
        sections["data"] = data, data.streams
    if validation is not None and (validation.streams or isinstance(data.streams, list)):
        sections["validation"] = validation, validation_streams(validation, data)
    return [
        pair
        for section, (root, streams) in sections.items()
        if MISSING not in (root.local, root.remote)
        for pair in zip(streams, locate_streams(root.remote, root.local, streams, section), strict=True)
    ]


def check_separate_caches(locations: Iterable[StreamLocation]) -> None:
    """Raise a ConfigurationError if streams of different sources have one local folder: one would read the other's."""
    first: dict[Path, StreamLocation] = {}
    for location in locations:
        other = first.setdefault(Path(location.local).resolve(), location)
        if _origin(location) != _origin(other):
            names = [f"{shown(one.source)} ({one.section} stream '{one.name}')" for one in (other, location)]
            raise ConfigurationError(
                f"{location.local} is the local folder of {' and '.join(names)}. Give each a folder of its own "
                "(data.local, validation.local, or `local` of a stream)"
            )


def _origin(location: StreamLocation) -> tuple[str, str | None]:
    source = location.source
    return (source, location.access.endpoint_url) if is_url(source) else (str(Path(source).resolve()), None)


def check_location(location: StreamLocation) -> None:
    """Check that a stream is there and whole, and that its cache is no original.

    What lies behind a URL is checked when its index is fetched.

    Raises:
        ConfigurationError: the cache is an original.
        DataError: the stream is missing or unfinished.
    """
    if not is_url(location.source):
        _check_folder(location)
    split = Path(location.local).resolve().parent
    if location.remote is not None and split.name in SPLITS and is_data_set(split.parent):
        raise ConfigurationError(
            f"{location.local} belongs to the data set {split.parent}, and as the cache of {shown(location.remote)} "
            f"would be overwritten. Set another {location.section}.local, or remove {location.section}.remote to read "
            "what is there"
        )


def _check_folder(location: StreamLocation) -> None:
    folder = Path(location.source).absolute()
    if not (folder / INDEX).is_file():
        remedy = _remedy(location, folder)
        raise DataError(f"{folder} (stream '{location.name}') is not an MDS folder, it has no {INDEX}: {remedy}")
    roots = folder.parents[:2]
    if not any((root / MANIFEST).is_file() for root in roots):
        for root in roots:
            if (root / WORK).exists() or (root / SCAN).exists():
                raise DataError(
                    f"{root} is unfinished (it has no {MANIFEST}): run the command that writes it (prepare or "
                    "encode) again; it continues where it was stopped"
                )
        if is_first_rank():
            _warn_of_another_tool(folder)


def _remedy(location: StreamLocation, folder: Path) -> str:
    """Name the keys by which streams that lie near a missing one are read."""
    section, root = location.section, folder.parent
    split = TRAIN if section == "data" else VALIDATION
    near = (root, root / split, root.parent, root.parent / split, *sorted(root.glob(f"*/{split}")))
    for parent in near if folder.name == location.name else ():
        if names := sorted(path.parent.name for path in parent.glob(f"*/{INDEX}")):
            keys = [] if parent == root else [f"{section}.{'remote' if location.remote else 'local'}={parent}"]
            if location.name not in names:
                streams = ", ".join(f"{{name: {name}}}" for name in names)
                keys.append(f"{section}.streams='[{streams}]' (a bucket without images has no folder)")
            return f"to read what is there, set {' and '.join(keys)}"
    return (
        f"run scripts/prepare.py (and scripts/encode.py for latents), or correct {section}.local, {section}.remote and "
        f"{section}.streams"
    )


@cache
def _warn_of_another_tool(folder: Path) -> None:
    """Warn once: a run checks its streams before networks are built, and again when it opens them."""
    logger.warning("%s has no %s beside or above it: taken for an MDS folder of another tool", folder, MANIFEST)


def read_files(locations: Iterable[StreamLocation]) -> Files:
    """Read the manifests and marks above streams, each once, for `locate_streams`; a DataError says what fails."""
    files: dict[tuple[str | None, str], Any] = {}
    for location in locations:
        for root, _ in _folders_above(location.source):
            for name in (MANIFEST, *MARKS):
                key = location.access.endpoint_url, join(root, name)
                if key not in files:
                    files[key] = _read_json(key[1], location.access)
    return {key: content for key, content in files.items() if content is not None}


def find_manifest(location: StreamLocation) -> dict[str, Any] | None:
    """Read the `manifest.json` above a stream, such as `ROOT/train/256-512`; None where there is none.

    Raises:
        DataError: it cannot be read.
    """
    return next((content for _, content in _find_above(location, MANIFEST)), None)


def converts_to_srgb(location: StreamLocation) -> bool:
    """Return whether a manifest asks for the images of a stream to be converted to sRGB."""
    settings = (find_manifest(location) or {}).get("settings")
    return isinstance(settings, dict) and has_srgb_conversion(settings)


def _find_above(location: StreamLocation, name: str) -> Iterator[tuple[str, Any]]:
    """Find a JSON file one and two folders above a stream.

    Yields:
        The stream's path below that folder, such as `train/256-512`, and the file's content.
    """
    access, files = location.access, location.files
    for root, below in _folders_above(location.source):
        uri = join(root, name)
        content = _read_json(uri, access) if files is None else files.get((access.endpoint_url, uri))
        if content is not None:
            yield below, content


def _folders_above(source: str) -> Iterator[tuple[str, str]]:
    """The folders one and two above a stream, each with the stream's path below it."""
    if not is_url(source):
        folder = Path(source).absolute()
        for parent in folder.parents[:2]:
            yield str(parent), folder.relative_to(parent).as_posix()
        return
    for up in (1, 2):
        root, *below = source.rstrip("/").rsplit("/", up)
        if not root.endswith((":", "/")):
            yield root, "/".join(below)


def _read_json(uri: str, access: Access) -> Any:
    """Read a JSON file; None if it does not exist."""
    if not is_url(uri):
        return read_json(Path(uri)) if Path(uri).is_file() else None
    try:
        return storage.read_json(uri, None, replace(access, attempts=1, timeout=FIRST_CONTACT))
    except ForbiddenFileError as error:
        raise DataError(
            f"access to {shown(uri)} is denied, so whether it names images that are not to be used is unknown. "
            "Allow reading it and listing its bucket (s3:GetObject and s3:ListBucket): without that, access to a "
            "file that does not exist is denied, too"
        ) from error
    except MachineError as error:
        raise DataError(f"{error}. Check data.remote, and that this machine can reach it") from error


class Substitutes:
    """The unusable samples of a stream, and what is read in their place.

    Raises:
        DataError: indices beyond the stream, or no sample is usable.
    """

    def __init__(self, num_samples: int, absent: Iterable[int] = (), name: str = "") -> None:
        self.num_samples = num_samples
        self._absent = array("q", sorted(set(absent)))
        if self._absent and not 0 <= self._absent[0] <= self._absent[-1] < num_samples:
            raise DataError(
                f"stream '{name}' has {num_samples} samples, but sample {self._absent[-1]} is marked in "
                f"{' or '.join(MARKS)}: the marks are those of another data set"
            )
        if num_samples and len(self._absent) == num_samples:
            raise DataError(
                f"all {num_samples} samples of stream '{name}' are marked as unusable: take it out of data.streams"
            )

    def __len__(self) -> int:
        """Number of unusable samples."""
        return len(self._absent)

    @property
    def absent(self) -> list[int]:
        """Indices of the unusable samples, ascending."""
        return self._absent.tolist()

    def substitute_of(self, index: int) -> int:
        """Index of the sample that is read for an index: itself where it is usable."""
        position = bisect_left(self._absent, index)
        while position < len(self._absent) and self._absent[position] == index:
            position, index = position + 1, index + 1
            if index == self.num_samples:
                position = index = 0
        return index


def find_substitutes(location: StreamLocation, num_samples: int) -> Substitutes:
    """Find the substitutes of a stream by the marks beside it; a DataError if they are not those of this stream."""
    return Substitutes(num_samples, find_marked(location), location.name)


def find_marked(location: StreamLocation) -> list[int]:
    """Find the samples that are marked beside a data set; a DataError if the marks cannot be read."""
    absent: list[int] = []
    for name in MARKS:
        for stream, marks in _find_above(location, name):
            indices = marks.get(stream, []) if isinstance(marks, dict) else None
            if not isinstance(indices, list) or not all(type(index) is int for index in indices):
                where = shown(location.source)
                raise DataError(f"{name} beside {where} is damaged: for '{stream}' it has no list of numbers")
            absent += indices
    return absent
