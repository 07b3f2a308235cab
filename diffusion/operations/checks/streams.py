"""Whether the streams of a data set are there, whole, and what the configuration takes them for."""

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from diffusion import storage
from diffusion.config.data import Representation
from diffusion.datasets.dataset import ENCODED_COLUMNS, PREPARED_COLUMNS
from diffusion.datasets.mds import INDEX, find_wrong_hash
from diffusion.datasets.sample_order import StreamShape
from diffusion.datasets.streams import StreamLocation, check_location, find_manifest
from diffusion.errors import DataError, UserError
from diffusion.operations.checks.verdicts import Verdict, ok, problem, size_text
from diffusion.planning.fleet import FleetStream
from diffusion.storage import is_url, join

NUM_EXAMPLES = 3
"""Damaged files that a verdict names."""


@dataclass(frozen=True, kw_only=True)
class StreamReading:
    """What is known of a stream without opening it."""

    name: str
    source: str
    """Folder or URL of the original."""

    sha256: str
    """Hash of its index, which holds the hashes of the shards."""

    index_bytes: int
    columns: Mapping[str, str]
    """MDS type of each column."""

    samples_per_shard: tuple[int, ...]
    bytes_per_shard: tuple[int, ...]
    """What each shard takes in a cache."""

    damaged: tuple[str, ...] = ()
    """Files of the original that are missing or differ in size; those behind a URL are not looked at."""

    is_deep: bool = False
    """Whether files of the original that differ in hash count as damaged, too."""

    cached_sha256: str | None = None
    """Hash of the index in the cache; None where there is no cache, or none in it."""

    newest: float | None = None
    """Time of the index, in seconds since 1970; None behind a URL."""

    manifest: Mapping[str, Any] | None = None
    """Content of the `manifest.json` of the data set."""

    def fleet_stream(self, draws: int) -> FleetStream:
        """As the planning of fleets takes it, for so many samples of an epoch."""
        shape = StreamShape(name=self.name, samples_per_shard=np.array(self.samples_per_shard, np.int64), draws=draws)
        return FleetStream(shape=shape, bytes_per_shard=np.array(self.bytes_per_shard, np.int64))


def read_stream(location: StreamLocation, timeout: float, *, deep: bool = False) -> StreamReading:
    """Read a stream's index and manifest, and look at its files.

    Args:
        location: where it is.
        timeout: seconds that a download may take.
        deep: hash its files, with a progress bar.

    Raises:
        DataError: it cannot be reached, or is not an MDS folder.
    """
    check_location(location)
    text = _fetch(location, timeout) if is_url(location.source) else _read(location.source)
    where = f"{location.source} (stream '{location.name}')"
    try:
        shards = json.loads(text)["shards"]
        stored = [shard["zip_data"] or shard["raw_data"] for shard in shards]
        files = {str(data["basename"]): (int(data["bytes"]), dict(data["hashes"])) for data in stored}
        samples = tuple(int(shard["samples"]) for shard in shards)
        sizes = tuple(_cached_bytes(shard) for shard in shards)
        columns = dict(zip(shards[0]["column_names"], shards[0]["column_encodings"], strict=True))
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise DataError(f"the {INDEX} of {where} is damaged ({error!r}): copy or write the data set again") from error
    cached = Path(location.local, INDEX)
    is_cached = location.remote is not None and cached.is_file()
    folder = None if is_url(location.source) else Path(location.source)
    damaged: list[str] = []
    if folder is not None:
        for name, (size, hashes) in tqdm(
            files.items(), desc=f"stream {location.name}", unit=" shards", disable=not deep
        ):
            if _size(folder / name) != size or (deep and find_wrong_hash(folder / name, hashes)):
                damaged.append(name)
    return StreamReading(
        name=location.name,
        source=location.source,
        sha256=hashlib.sha256(text).hexdigest(),
        index_bytes=len(text),
        columns=columns,
        samples_per_shard=samples,
        bytes_per_shard=sizes,
        damaged=tuple(damaged),
        is_deep=deep and folder is not None,
        cached_sha256=hashlib.sha256(cached.read_bytes()).hexdigest() if is_cached else None,
        newest=(folder / INDEX).stat().st_mtime if folder else None,
        manifest=find_manifest(location.source, location.access),
    )


def _cached_bytes(shard: Mapping[str, Any]) -> int:
    """Bytes of a shard in a cache: of both forms of a compressed one, which exist together for a moment."""
    return int(shard["raw_data"]["bytes"]) + (int(shard["zip_data"]["bytes"]) if shard["zip_data"] else 0)


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _read(folder: str) -> bytes:
    try:
        return Path(folder, INDEX).read_bytes()
    except OSError as error:
        raise DataError(f"{folder}/{INDEX} cannot be read: {error.strerror}") from error


def _fetch(location: StreamLocation, timeout: float) -> bytes:
    url = join(location.source, INDEX)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, INDEX)
        try:
            storage.download(url, path, access=replace(location.access, attempts=1, timeout=timeout))
        except UserError as error:
            raise DataError(f"{url} cannot be downloaded: {error}. Check address, credentials and network") from error
        return path.read_bytes()


def check_stream(reading: StreamReading, representation: Representation) -> list[Verdict]:
    """All checks of a stream that was read."""
    checks = (check_shards(reading), check_columns(reading, representation), check_manifest(reading), _cache(reading))
    return [verdict for verdict in checks if verdict is not None]


def check_shards(reading: StreamReading) -> Verdict:
    """Are the files there that the index names?"""
    name, num = f"stream {reading.name}", len(reading.samples_per_shard)
    if reading.damaged:
        shown = ", ".join(reading.damaged[:NUM_EXAMPLES]) + (" ..." if len(reading.damaged) > NUM_EXAMPLES else "")
        what = f"{len(reading.damaged)} of {num} shards of {reading.source} are missing or damaged: {shown}"
        return problem(name, what, "copy or write the data set again")
    looked = "all there and whole" if reading.is_deep else "all there (--deep compares their hashes)"
    if is_url(reading.source):
        looked = "not looked at, behind a URL"
    return ok(
        name,
        f"{sum(reading.samples_per_shard):,} samples in {num:,} shards of together "
        f"{size_text(sum(reading.bytes_per_shard))}, {looked}",
    )


def check_columns(reading: StreamReading, representation: Representation) -> Verdict | None:
    """Has it the columns that the configuration reads?"""
    wanted = PREPARED_COLUMNS if representation is Representation.images else ENCODED_COLUMNS
    missing = sorted(wanted - reading.columns.keys())
    if not missing:
        return None
    what = (
        f"{reading.source} has the columns {', '.join(sorted(reading.columns))}, but data.representation is "
        f"{representation.value}, which reads {', '.join(missing)} as well"
    )
    remedy = "set data.representation to what the data is, or write it with scripts/prepare.py and scripts/encode.py"
    return problem(f"stream {reading.name}", what, remedy)


def check_manifest(reading: StreamReading) -> Verdict | None:
    """Is the index the one that the manifest of the data set was written for?"""
    split, bucket = reading.source.rstrip("/").split("/")[-2:]
    manifest = reading.manifest or {}
    entry = manifest.get("splits", {}).get(split, {}).get(bucket)
    count = manifest.get("counts", {}).get(split, {}).get(bucket)
    if isinstance(entry, dict):
        count, same = entry.get("num_samples"), entry.get("sha256") == reading.sha256
    else:
        same = count in (None, sum(reading.samples_per_shard))
    if same:
        return None
    what = f"the index of {reading.source} is not that of the manifest.json above it, which tells of {count} samples"
    return problem(f"stream {reading.name}", what, "copy the data set again, all of it")


def _cache(reading: StreamReading) -> Verdict | None:
    """Is the cached index the present one?"""
    if reading.cached_sha256 in (None, reading.sha256):
        return None
    what = f"the cache of {reading.source} has another index: it was filled before the data set was written anew"
    return problem(f"stream {reading.name}", what, "empty the cache (data.local), or choose another one")


def newest_file(readings: Sequence[StreamReading]) -> float | None:
    """Time of the newest index on this machine; None where there is none."""
    return max([reading.newest for reading in readings if reading.newest is not None], default=None)
