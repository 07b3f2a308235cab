"""The shards of a stream on this machine: originals, or a cache of shards that are fetched when they are needed.

Processes share nothing but files, so any number of ranks, loader workers and jobs may use one cache, and a process may
be killed at any moment:

- A shard is fetched and hashed under a lock of its own (flock on `.locks/NAME` in the stream's folder, which the kernel
  releases). It is fetched to a file beside it, which gets its name when its size and hash are those of the index.
- The file of the lock holds the failure of the last check if there was one, and is dated by it: hosts that share a
  cache compare times by the clock of its file system only. A process that waited for a failed attempt of another one
  fails with its message. A shard that has been checked since this process opened the stream is not hashed again: a
  node hashes each shard once in a start. A copy found damaged is fetched again; damage after that check is a DataError.
- The index of a cache is compared with the original at the start of training (`replace_index`).
- Uncompressed originals have no such files: each rank hashes those that it reads. A damaged original is an error.
- With a size limit, the least recently used shards are evicted (a shard's modification time is that of its last use).
  A process that has one open reads on; one that finds it gone fetches it again.
"""

import json
import logging
import mmap
import multiprocessing
import os
import re
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from diffusion import storage
from diffusion.datasets.streams import StreamLocation
from diffusion.errors import ConfigurationError, DataError, MachineError, UserError
from diffusion.files import PARTIAL, atomic_path, file_system_time, lock, unique_partial
from diffusion.formats.shards import (
    INDEX,
    SampleDecoder,
    Shard,
    ShardFile,
    ShardFiles,
    ShardIndex,
    decompress,
)
from diffusion.storage import join, shown

logger = logging.getLogger(__name__)

LOCKS = ".locks"
"""Folder in that of a stream: the locks of its shards, with the outcome of their last check."""

EVICTION = "eviction"

LEFTOVER_SECONDS = 3600.0
"""Age from which an unfinished copy counts as left by a killed process, here or on another machine."""

READ_ATTEMPTS = 8
"""Fetches of a shard that is evicted each time before it is read."""

_NUM_LOCKS = 8
"""Shards of an original that the workers of a rank hash at a time."""

_LEFTOVER = re.compile(rf"\..+\.[0-9]+-[0-9a-f]+{re.escape(PARTIAL)}")
"""Name of an unfinished copy (`diffusion.files.unique_partial`)."""


class TierCounts(NamedTuple):
    """Counts of a rank's reads since its data was opened."""

    samples: int = 0
    """Samples of streams that have a remote."""

    hits: int = 0
    """Samples of these streams whose shard was in the cache when the loader first looked for it."""

    fetched_shards: int = 0
    """Files that this rank fetched from the store, for itself or for others of its node."""

    fetched_bytes: int = 0
    read_bytes: int = 0
    """Bytes of samples, from the disk."""

    def since(self, before: "TierCounts") -> "TierCounts":
        """Return the difference to an earlier count."""
        return TierCounts(*(now - then for now, then in zip(self, before, strict=True)))


class TierMeter:
    """Counts over the loader workers of a rank, in memory that they inherit."""

    def __init__(self) -> None:
        self._numbers = multiprocessing.Array("q", len(TierCounts._fields))

    def add(self, counts: TierCounts) -> None:
        """Add what was read."""
        with self._numbers.get_lock():
            for position, number in enumerate(counts):
                self._numbers[position] += number

    def read(self) -> TierCounts:
        """All that was added."""
        with self._numbers.get_lock():
            return TierCounts(*self._numbers)


class CacheLimit:
    """Keeps the caches of a job on this machine below a size: shards, indexes and unfinished copies.

    Shards that several processes fetch at the same time may exceed it.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._shards: dict[Path, frozenset[str]] = {}

    def add(self, folder: Path, index: ShardIndex) -> None:
        """Add a cache; only the files that its index names are ever removed."""
        self._shards[folder] = frozenset(file.name for shard in index.shards for file in shard.files)

    def make_room(self, num_bytes: int) -> None:
        """Evict the least recently used shards until so many bytes fit, as far as possible."""
        with lock(_lock_path(next(iter(self._shards)), EVICTION)):
            files = [(folder, *found) for folder in self._shards for found in files_of_cache(folder)]
            excess = sum(found.st_size for _, _, found in files) + num_bytes - self.num_bytes
            for folder, name, found in sorted(files, key=lambda file: file[2].st_mtime_ns):
                if excess <= 0:
                    return
                if name in self._shards[folder] and _remove(folder, name):
                    excess -= found.st_size


def files_of_cache(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """List the files of a cache but the locks, by their names below it."""
    for parent, folders, names in os.walk(folder):
        if LOCKS in folders:
            folders.remove(LOCKS)
        for name in names:
            path = Path(parent, name)
            with suppress(FileNotFoundError):  # Another process has removed or renamed it.
                yield path.relative_to(folder).as_posix(), path.stat()


def replace_index(folder: Path, index: bytes) -> None:
    """Replace the index of a cache unless it is the same; remove the files that are not those of the new one.

    Raises:
        ConfigurationError: the folder holds other data, and was never used as a cache.
        MachineError: it cannot be replaced.
    """
    path = folder / INDEX
    try:
        before = path.read_bytes()
        if before == index:
            return
        old, new = _files_by_name(before), _files_by_name(index)
        changed = [name for name in old if old[name] != new.get(name)]
        if changed and len(changed) == len(old) and not (folder / LOCKS).is_dir():
            raise ConfigurationError(
                f"{folder} holds no shard of the data set, and as its cache would be overwritten. Set another "
                "data.local, delete the folder if it is an old copy, or remove data.remote to read what is there"
            )
        logger.info("%s is replaced by that of the data set, which has changed", path)
        with atomic_path(path, partial=unique_partial(path)) as partial:
            partial.write_bytes(index)
            for name in changed if new else ():  # One that is empty is wrong.
                _remove(folder, name)
    except OSError as error:
        raise MachineError(
            f"{path} is of another version of the data set, and cannot be replaced: {error.strerror}. Choose another "
            "cache (data.local)"
        ) from error


def _files_by_name(index: bytes) -> dict[str, ShardFile]:
    """Return the files of an index; none of a damaged one, which is reported when it is opened."""
    with suppress(ValueError, KeyError, TypeError, OverflowError):
        return {file.name: file for shard in ShardIndex(index).shards for file in shard.files}
    return {}


def _remove(folder: Path, name: str) -> bool:
    """Remove a shard, unless a process is fetching it."""
    try:
        with lock(_lock_path(folder, name), timeout=0):
            (folder / name).unlink(missing_ok=True)
            return True
    except TimeoutError:
        return False


def _lock_path(folder: Path, name: str) -> Path:
    path = folder / LOCKS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


class StreamShards:
    """The shards of one stream, on this machine when they are read.

    Args:
        location: where the stream lies, checked.
        hash_kind: hash that shards are compared with; None is one that the index gives, if it gives any.
        limit: of the cache; None is none.
        meter: counts what is fetched.
        columns: columns that are read; None is all.
        files: reads the shards of several streams.

    Raises:
        DataError: its index cannot be fetched or read.
    """

    def __init__(
        self,
        location: StreamLocation,
        *,
        hash_kind: str | None = None,
        limit: CacheLimit | None = None,
        meter: TierMeter | None = None,
        columns: Collection[str] | None = None,
        files: ShardFiles | None = None,
    ) -> None:
        self.name, self.remote, self.folder = location.name, location.remote, Path(location.local)
        self._access, self._hash_kind, self._columns = location.access, hash_kind, columns
        self._limit, self._meter = limit if self.remote else None, meter or TierMeter()
        self.index = self._open_index()
        has_notes = self.remote is not None or any(shard.packed is not None for shard in self.index.shards)
        self._opened = file_system_time(self.folder) if has_notes else time.time()
        if self._limit is not None:
            self._limit.add(self.folder, self.index)
        # One byte for each shard, shared with the workers that this process forks: 1 once it has been checked.
        self._checked = mmap.mmap(-1, len(self.index.shards))
        self._rank_locks = [multiprocessing.Lock() for _ in range(_NUM_LOCKS)]
        self._files = files or ShardFiles()
        self._paths: dict[int, str] = {}
        self._decoders: dict[int, SampleDecoder] = {}
        self._read_bytes = 0

    def path(self, shard: int) -> Path:
        """Raw file of a shard on this machine."""
        return self.folder / self.index.shards[shard].raw.name

    def is_here(self, shard: int) -> bool:
        """Return whether a shard is on this machine."""
        return self.path(shard).exists()

    def check_sizes(self, part: slice) -> None:
        """Raise a DataError if some shards of an original are missing, or do not have the size that the index gives."""
        if self.remote is not None:  # A copy is checked when it is first read.
            return
        for shard in self.index.shards[part]:
            present = [file for file in shard.files if (self.folder / file.name).is_file()]
            if not present:  # One form of a compressed shard is enough.
                raise DataError(f"{self.folder / shard.raw.name} is missing, and there is no remote. {_REWRITE}")
            for file in present:
                path = self.folder / file.name
                if (size := path.stat().st_size) != file.num_bytes:
                    raise DataError(
                        f"{path} has {size} bytes instead of {file.num_bytes}, and there is no remote. {_REWRITE}"
                    )

    def ensure(self, shard: int) -> None:
        """Have a shard on this machine, whole, or raise a DataError; several threads may ask."""
        path = self.path(shard)
        if self._checked[shard] and path.exists():
            if self._limit is not None:
                with suppress(OSError):  # Another process has just removed it.
                    os.utime(path)
            return
        try:
            self._make_whole(shard)
        except (UserError, OSError) as error:
            what = f"read: {error}. {_REWRITE}"
            if self.remote is not None:
                what = f"fetched from {shown(self.remote)}: {error}. {_CHECK}"
            raise DataError(f"stream '{self.name}', shard {path.name} could not be {what}") from error

    def read(self, index: int) -> dict[str, Any]:
        """Read the wanted columns of a sample; a DataError if its shard cannot be fetched, or its bytes are damaged."""
        shard, inside = self.index.locate(index)
        for _ in range(READ_ATTEMPTS):
            path = self._paths.get(shard) or self._present_path(shard)
            try:
                data = self._files.read(path, inside)
                self._read_bytes += len(data)
                return self._decoder(self.index.shards[shard])(data)
            except FileNotFoundError:  # Removed to make room.
                self._paths.pop(shard)
            except (ValueError, IndexError, KeyError) as error:
                remedy = _REWRITE if self.remote is None else "Delete the file: it is fetched again"
                what = f"{type(error).__name__}: {error}"
                raise DataError(f"{path} is damaged at its sample {inside} ({what}). {remedy}") from error
        raise DataError(
            f"stream '{self.name}', shard {self.path(shard).name} was removed from the cache {READ_ATTEMPTS} times "
            "before it was read: raise data.cache_limit"
        )

    def end_batch(self) -> int:
        """Look for the files anew in the next batch; with a limit, close them, so that they can make room.

        Returns:
            Bytes of samples that this process has read since the last call.
        """
        self._paths.clear()
        if self._limit is not None:
            self._files.close()
        num_bytes, self._read_bytes = self._read_bytes, 0
        return num_bytes

    def close(self) -> None:
        """Close all files."""
        self._files.close()
        self._paths.clear()

    def _present_path(self, shard: int) -> str:
        path = str(self.path(shard))
        if not os.access(path, os.F_OK):  # An open file would be read on although it is gone.
            self._files.forget(path)
        self.ensure(shard)
        self._paths[shard] = path
        return path

    def _decoder(self, shard: Shard) -> SampleDecoder:
        decoder = self._decoders.get(id(shard.format))
        if decoder is None:
            decoder = self._decoders[id(shard.format)] = SampleDecoder(shard.format, self._columns)
        return decoder

    def _open_index(self) -> ShardIndex:
        path = self.folder / INDEX
        if self.remote is not None:
            self._remove_leftovers()
            try:
                if not path.exists():
                    with lock(_lock_path(self.folder, INDEX)):
                        if not path.exists():
                            storage.download(join(self.remote, INDEX), path, access=self._access)
            except (UserError, OSError) as error:
                raise DataError(
                    f"{shown(self.remote)}/{INDEX} cannot be fetched: {error}. Check data.remote, and that this "
                    "machine can reach it"
                ) from error
        try:
            index = ShardIndex(storage.retry(str(path), path.read_bytes))
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            remedy = _REWRITE if self.remote is None else "Delete it: it is fetched again"
            raise DataError(f"{path} cannot be read ({type(error).__name__}: {error}). {remedy}") from error
        if index.num_samples == 0:
            raise DataError(f"{path} holds no samples: take the stream out of the configuration, or write it again")
        return index

    def _remove_leftovers(self) -> None:
        """Remove unfinished copies that killed processes left."""
        with suppress(OSError):
            for name, found in files_of_cache(self.folder):
                if _LEFTOVER.fullmatch(Path(name).name) and time.time() - found.st_mtime > LEFTOVER_SECONDS:
                    (self.folder / name).unlink(missing_ok=True)

    def _make_whole(self, shard: int) -> None:
        """Check a shard that is here, and fetch one that is not, or is damaged; one process of the node does so."""
        before = _read_note(self.folder / LOCKS / self.index.shards[shard].raw.name)
        with self._locked(shard) as note:
            if self._checked[shard] and self.is_here(shard):
                return
            checked, failure = found = _read_note(note)
            if failure is not None and found != before:
                raise DataError(failure)
            if failure is not None or checked < self._opened or not self.is_here(shard):
                try:
                    self._check_or_fetch(self.index.shards[shard])
                except Exception as error:
                    _write_note(note, str(error))
                    raise
                _write_note(note, None)
            self._checked[shard] = 1

    @contextmanager
    def _locked(self, shard: int) -> Iterator[int | None]:
        """Lock a shard, for the node if its folder has locks, else for this rank; yield the file of the lock."""
        entry, descriptor = self.index.shards[shard], None
        with ExitStack() as stack:
            if self.remote is not None or entry.packed is not None:
                with suppress(OSError):  # A cache that is whole may be read-only.
                    descriptor = stack.enter_context(lock(_lock_path(self.folder, entry.raw.name)))
            if descriptor is None:
                stack.enter_context(self._rank_locks[shard % _NUM_LOCKS])
            yield descriptor

    def _check_or_fetch(self, entry: Shard) -> None:
        try:
            damage = storage.retry(
                str(self.folder / entry.raw.name), lambda: entry.raw.find_damage(self.folder, self._hash_kind)
            )
        except FileNotFoundError:
            if self.remote is None and entry.packed is None:
                raise
        else:
            if damage is None:
                return
            if self.remote is None:
                raise DataError(damage)
            logger.warning("%s; fetching it again from %s", damage, shown(self.remote))
        if entry.packed is not None:
            self._unpack(entry, entry.packed)
        else:
            self._copy(entry.raw, entry.cached_bytes)

    def _copy(self, file: ShardFile, num_bytes: int) -> None:
        """Fetch a file from the remote, and make room for so many bytes before."""
        assert self.remote is not None
        if self._limit is not None:
            self._limit.make_room(num_bytes)
        (self.folder / file.name).unlink(missing_ok=True)
        uri, digest = join(self.remote, file.name), file.digest(self._hash_kind)
        storage.download(uri, self.folder / file.name, size=file.num_bytes, digest=digest, access=self._access)
        self._meter.add(TierCounts(fetched_shards=1, fetched_bytes=file.num_bytes))

    def _unpack(self, entry: Shard, packed: ShardFile) -> None:
        """Make the raw file of a compressed shard; the compressed one may be here."""
        path = self.folder / packed.name
        damage = packed.find_damage(self.folder, self._hash_kind) if path.exists() else f"{path} is missing"
        if damage is not None:
            if self.remote is None:
                raise DataError(damage)
            self._copy(packed, entry.cached_bytes)
        raw = self.folder / entry.raw.name
        content = decompress(path.read_bytes(), entry, str(path))
        with atomic_path(raw, partial=unique_partial(raw), durable=False) as partial:
            partial.write_bytes(content)
        if self.remote is not None:
            path.unlink()


_REWRITE = "Copy or write the data set again"
_CHECK = (
    "Check that it is there and whole, that this machine can reach it, and that the disk of the cache has room "
    "(data.cache_limit), then start the same command again"
)


def _read_note(file: Path | int | None) -> tuple[float, str | None]:
    """Read when a shard was checked last, and how that failed, from the file of its lock, open or not."""
    if file is not None:
        with (
            suppress(OSError, ValueError),  # There is none; it is empty, or cut off.
            open(file, "rb", buffering=0, closefd=isinstance(file, Path)) as note,
        ):
            note.seek(0)
            _, failure = json.loads(note.read())
            return os.fstat(note.fileno()).st_mtime, failure
    return 0.0, None


def _write_note(descriptor: int | None, failure: str | None) -> None:
    if descriptor is not None:
        with suppress(OSError):  # On a full disk the next process checks the shard again.
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps([time.time(), failure]).encode(), 0)  # Earlier versions read the time.
