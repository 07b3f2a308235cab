"""How the shards of an epoch come to this machine: whole, batch by batch, and with failures that are errors.

In streaming 0.13 a shard that cannot be downloaded or fails its hash is no error: without loader workers the epoch ends
silently, with workers it hangs. A damaged file in the cache is never looked at again; here each shard is hashed once
per node and start, by the process that needs it first. And each thread goes through the
epoch sample by sample, taking a file lock for each; here they go by batches, and each batch asks once for each shard.
When a reader has asked for the last shard of its epoch, it fetches what the next one begins with (a warm-up).
Like `shards.py`, this file touches private parts of `StreamingDataset`; how a file comes is decided in `fetching.py`.
"""

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from time import sleep, time_ns
from typing import Any, cast

import numpy as np
from filelock import FileLock
from streaming import StreamingDataset
from streaming.base.constant import TICK
from streaming.base.dataset import _Iterator, _ShardState

from diffusion.datasets.balanced import Integers
from diffusion.datasets.fetching import GONE, FetchedStream, describe
from diffusion.datasets.sample_ids import Part, WorkerSamples
from diffusion.datasets.stores import shown
from diffusion.datasets.tiers import TierCounts, TierMeter
from diffusion.errors import DataError

logger = logging.getLogger(__name__)

UNCHECKED = max(_ShardState) + 1
"""State of a shard that was in the cache before this start, and that no process of the node has hashed yet."""

_KEPT: ContextVar[Integers | None] = ContextVar("kept", default=None)
"""Shards that must not make room for those that this thread fetches; None is any."""


class _NoRoomError(Exception):
    """All shards on this machine are still needed."""


class FetchingDataset(StreamingDataset):
    """A `StreamingDataset` whose samples are `WorkerSamples`, and that raises one `DataError` for a missing shard.

    Args:
        stream_names: names of the streams, for messages.
        meter: counts what is read.
        kwargs: arguments of `StreamingDataset`.
    """

    def __init__(self, *, stream_names: list[str], meter: TierMeter, **kwargs: Any) -> None:
        self.stream_names, self.meter = stream_names, meter
        self._read_bytes = 0
        self._failure: DataError | None = None
        self._prepared: set[int] = set()
        self._locks: dict[int, FileLock] = {}
        super().__init__(**kwargs)
        self._paths = [str(self.shard_path(number)) for number in range(self.num_shards)]

    @property
    def _cache_filelock(self) -> FileLock:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The lock that this thread took last. Streaming makes one for each shard, in several threads at once."""
        try:
            return self._locks[threading.get_ident()]
        except KeyError:
            raise AttributeError("this thread has taken no lock") from None

    @_cache_filelock.setter
    def _cache_filelock(self, lock: FileLock) -> None:
        self._locks[threading.get_ident()] = lock

    def shard_path(self, shard_id: int) -> Path:
        """Raw file of a shard on this machine."""
        stream = self.streams[self.stream_per_shard[shard_id]]
        return Path(stream.local, stream.split, self.shards[shard_id].file_pairs[0][0].basename)

    def _shard_name(self, shard_id: int) -> str:
        return f"stream '{self.stream_names[self.stream_per_shard[shard_id]]}', shard {self.shard_path(shard_id).name}"

    def _remote(self, shard_id: int) -> str | None:
        return self.streams[self.stream_per_shard[shard_id]].remote

    def _check_sizes(self) -> None:
        """Compare the files' sizes with the index: drop a cached copy that differs, refuse an original that does."""
        is_leader = self._unique_rank_world.is_local_leader
        first_shards = self.shard_offset_per_stream.tolist()
        for stream, begin, num in zip(self.streams, first_shards, self.shards_per_stream.tolist(), strict=True):
            folder = Path(stream.local, stream.split)
            sizes = _file_sizes(folder)
            for shard_id in range(begin, begin + num):
                for info in (info for pair in self.shards[shard_id].file_pairs for info in pair if info is not None):
                    size = sizes.get(info.basename)
                    if size == info.bytes:
                        continue
                    path = folder / info.basename
                    if stream.remote is None:
                        self._refuse_original(shard_id, path, size, info.bytes)
                    elif size is not None and is_leader:
                        logger.warning("%s has %d bytes instead of %d: downloading it again", path, size, info.bytes)
                        self._drop(shard_id, path, info.bytes)
            if is_leader:  # Originals are hashed when Streaming takes them for fetched.
                states = self._shard_states.numpy()[begin : begin + num]
                states[states == _ShardState.LOCAL] = _ShardState.REMOTE if stream.remote is None else UNCHECKED

    def _refuse_original(self, shard_id: int, path: Path, size: int | None, expected: int) -> None:
        """Raise for a damaged file without a remote, unless it is the other form of a compressed shard."""
        if size is None and self.shards[shard_id].compression:
            return
        state = "is missing" if size is None else f"has {size} bytes instead of {expected}"
        raise DataError(f"{path} {state}, and there is no remote to fetch it from: copy or write the data set again")

    def _drop(self, shard_id: int, path: Path, size: int) -> None:
        path.unlink(missing_ok=True)
        if self._shard_states[shard_id] == _ShardState.LOCAL:
            self._shard_states[shard_id] = _ShardState.REMOTE
            self.cache_usage -= size

    def _check_content(self, shard_id: int) -> None:
        """Hash a cached shard that is unchecked, and drop a damaged one; others wait for that as for a download."""
        if self._shard_states[shard_id] != UNCHECKED:
            return
        with FileLock(self._cache_filelock_path):
            if self._shard_states[shard_id] != UNCHECKED:
                return
            self._shard_states[shard_id] = _ShardState.PREPARING
        stream, shard = cast("FetchedStream", self.streams[self.stream_per_shard[shard_id]]), self.shards[shard_id]
        state = _ShardState.REMOTE
        try:
            stream.check(shard)
            state = _ShardState.LOCAL
        except (ValueError, OSError) as error:
            logger.warning("%s; fetching it again from %s", error, shown(self._remote(shard_id) or ""))
            with FileLock(self._cache_filelock_path):
                self.cache_usage -= shard.evict()
        finally:
            self._shard_states[shard_id] = state

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Have a shard on this machine; a failure ends the epoch with a `DataError`."""
        if not blocking and self._is_at_hand(shard_id):
            if self.cache_limit:
                self._shard_access_times[shard_id] = time_ns()
            return
        try:
            self._fetch(shard_id, blocking)
        except Exception as error:  # Whatever ends a background thread would end the epoch without an error.
            failure = self._failed(shard_id, error)
            if blocking:
                raise failure from error
            # In a background thread: raising would leave the other threads waiting. They stop by the event.
            self._failure = failure
            self._event.set()
        else:
            if self._shard_states[shard_id] == _ShardState.LOCAL:
                self._prepared.add(shard_id)

    def _fetch(self, shard_id: int, blocking: bool) -> None:
        """Let Streaming fetch a shard; a failure leaves nothing behind that blocks or misleads another process."""
        self._check_original(shard_id)
        self._check_content(shard_id)
        try:
            super().prepare_shard(shard_id, blocking)
        except BaseException:
            lock = self._locks.get(threading.get_ident())
            if lock is not None and lock.is_locked:
                lock.release(force=True)
            if self._shard_states[shard_id] == _ShardState.PREPARING:
                self._shard_states[shard_id] = _ShardState.REMOTE
            raise

    def _is_at_hand(self, shard_id: int) -> bool:
        """Whether a shard that this worker has prepared is still here; Streaming would take a file lock: 216 us."""
        return shard_id in self._prepared and self._is_here(shard_id)

    def _is_here(self, shard_id: int) -> bool:
        """Whether some worker has prepared a shard that is still here."""
        return self._shard_states[shard_id] == _ShardState.LOCAL and os.access(self._paths[shard_id], os.F_OK)

    def _check_original(self, shard_id: int) -> None:
        """Raise `FileNotFoundError` for a shard that is gone and has no remote: Streaming would try for minutes."""
        if self._remote(shard_id) is None:
            files = [info.basename for pair in self.shards[shard_id].file_pairs for info in pair if info is not None]
            if not any(self.shard_path(shard_id).with_name(name).is_file() for name in files):
                raise FileNotFoundError(GONE)

    def _prepare_thread(self, it: _Iterator) -> None:
        """Fetch shards ahead of what is read, batch by batch."""
        while not self._is_over(it) and it.prepare_index < it.total and it.ready_index < it.total:
            if self.predownload is not None and self.predownload < it.prepare_index - it.yield_index:
                sleep(TICK)
                continue
            part = self._look_for(it, it.prepare_index)
            for shard_id in part.shards:
                self.prepare_shard(shard_id, False)
            it.prepare_index += len(part.sample_ids)
        if not self._is_over(it) and any(stream.remote is not None for stream in self.streams):
            self._warm_up(it)
        it.on_exit()

    def _look_for(self, it: _Iterator, start: int) -> Part:
        """The part that begins at a place; the thread that comes first counts what is here."""
        part = self._work(it).part(start)
        if self._work(it).is_first_look(start):
            cached = [(shard_id, num) for shard_id, num in part.shards.items() if self._remote(shard_id) is not None]
            # A shard that is hashed just now counts: its state is that of one on its way, but its file is there.
            hits = sum(num for shard_id, num in cached if os.access(self._paths[shard_id], os.F_OK))
            self.meter.add(TierCounts(samples=sum(num for _, num in cached), hits=hits))
        return part

    def _warm_up(self, it: _Iterator) -> None:
        """Fetch what the next epoch begins with until this one has been read; only shards that it has done with go.

        A failure is left to the next epoch, which tries again.
        """
        token = _KEPT.set(None)
        try:
            if self.cache_limit:
                _KEPT.set(self.shards_in_use(self._work(it).step(it.yield_index)))
            for shard_id in self.next_shards():
                if self._is_over(it) or it.yield_index >= it.total:
                    return
                if self._remote(shard_id) is not None:
                    self._fetch(shard_id, blocking=False)
        except _NoRoomError:
            logger.debug("no more room for shards of the next epoch")
        except Exception as error:  # noqa: BLE001 Whatever ends a background thread would end the epoch without an error.
            logger.warning("shards of the next epoch are not here yet: %s", describe(error))
        finally:
            _KEPT.reset(token)

    def next_shards(self) -> Sequence[int]:
        """Shards that this reader needs at the beginning of the next epoch, in order."""
        raise NotImplementedError

    def shards_in_use(self, step: int) -> Integers:
        """Shards that this node needs from a step of this reader to the end of the epoch, or soon in the next one."""
        raise NotImplementedError

    def _evict_coldest_shard(self) -> None:
        kept = _KEPT.get()
        free = np.flatnonzero(np.isin(self._shard_states.numpy(), (_ShardState.LOCAL, UNCHECKED)))
        if kept is not None:
            free = np.setdiff1d(free, kept)
        if not len(free):
            raise _NoRoomError("all shards in the cache are needed: raise data.cache_limit")
        self._evict_shard(int(free[self._shard_access_times.numpy()[free].argmin()]))

    def _ready_thread(self, it: _Iterator) -> None:
        """Advance `ready_index` as shards arrive. Streaming's own waits for ever for one that failed elsewhere.

        A shard that another worker tried to fetch in vain is tried here, so that each worker that needs it fails. So is
        one whose file has vanished: a worker that has it open could read on while another one fails.
        """
        while not self._is_over(it) and it.ready_index < it.total:
            if self.predownload is not None and self.predownload < it.ready_index - it.yield_index:
                sleep(TICK)
                continue
            part = self._look_for(it, it.ready_index)
            for shard_id in part.shards:
                while not self._is_here(shard_id) and not self._is_over(it):
                    if self._shard_states[shard_id] == _ShardState.PREPARING:
                        sleep(TICK)
                    else:
                        self.prepare_shard(shard_id, False)
            if self._is_over(it):
                break
            it.ready_index += len(part.sample_ids)
        it.on_exit()

    def _each_sample_id(self, it: _Iterator) -> Iterator[int]:
        """Samples whose shards are here."""
        while not self._is_over(it) and it.yield_index < it.total:
            start = it.yield_index
            if it.ready_index <= start:
                sleep(TICK)
                continue
            part = self._work(it).part(start)
            yield from part.sample_ids
            it.yield_index += len(part.sample_ids)
            self.meter.add(TierCounts(read_bytes=self._read_bytes))
            self._read_bytes = 0
            self._work(it).forget(start)
        it.on_exit()

    def _work(self, it: _Iterator) -> WorkerSamples:
        return cast("WorkerSamples", it.sample_ids)

    def _is_over(self, it: _Iterator) -> bool:
        return it.should_exit() or self._event.is_set()

    def _failed(self, shard_id: int, error: Exception) -> DataError:
        """Describe why a shard is not here."""
        remote, path = self._remote(shard_id), self.shard_path(shard_id)
        return DataError(
            f"{self._shard_name(shard_id)} could not be fetched from {shown(remote) if remote else path.parent}: "
            f"{describe(error)}. "
            + (
                "Check that it is there and whole and that this machine can reach it, then start the same command again"
                if remote
                else "There is no remote: copy or write the data set again"
            )
        )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over this worker's part of the epoch.

        Raises:
            DataError: a shard could not be fetched.
        """
        try:
            yield from super().__iter__()
        except RuntimeError as error:
            if self._failure is None:
                raise
            raise self._failure from error
        if self._failure is not None:
            raise self._failure


def _file_sizes(folder: Path) -> dict[str, int]:
    """Sizes of the files of a folder by name."""
    sizes = {}
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):  # While one rank looks, the node's leader drops what is damaged.
            if entry.is_file():
                sizes[entry.name] = entry.stat().st_size
    return sizes
