"""Streaming's data set, with an order that does not know the world, and with failures that are errors.

Streaming's work array (nodes x ranks x workers x batches x batch size) is made whole by one process of a node, at each
start and epoch: minutes and tens of GB at 790M samples. The order of `datasets/batching.py` is entered at any step
directly, so each worker computes its own slots while it reads: `_get_work` is overridden, and nothing is shared.

In streaming 0.13 a shard that cannot be downloaded or fails its hash is no error: without loader workers the epoch ends
silently, with workers it hangs. A damaged file in the cache is never looked at again. Everything here that touches
private parts of `StreamingDataset` is in this file.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
from streaming import StreamingDataset
from streaming.base.constant import TICK
from streaming.base.dataset import _Iterator, _ShardState
from torch import distributed

from diffusion.datasets.batching import GlobalOrder, OrderSettings, StreamShape, WorkerSlots, draws_per_stream
from diffusion.errors import DataError
from diffusion.randomness import NUM_INDEX_BITS, NUM_OCCURRENCE_BITS

logger = logging.getLogger(__name__)

ORDER = "order"
"""Key in the state of what determines the order, as JSON."""


class SampleId(int):
    """Streaming's number of a sample, with the address of the slot that it fills."""

    address: int


class _SampleIds(Sequence[int]):
    """A worker's part of an epoch as Streaming reads it."""

    def __init__(self, slots: WorkerSlots, first_samples: list[int]) -> None:
        self._slots = slots
        self._first_samples = first_samples

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, place: int) -> SampleId:  # pyright: ignore[reportIncompatibleMethodOverride]
        address = self._slots[place]
        stream, index = address >> (NUM_INDEX_BITS + NUM_OCCURRENCE_BITS), address & ((1 << NUM_INDEX_BITS) - 1)
        sample_id = SampleId(self._first_samples[stream] + index)
        sample_id.address = address
        return sample_id


class ShardDataset(StreamingDataset):
    """A `StreamingDataset` that reads our order, and raises one `DataError` for a missing or damaged shard.

    Args:
        stream_names: names of the streams, for messages.
        order: what the order depends on; None for data that is read by index only.
        proportions: of the streams; all None is none.
        repeats: of the streams.
        kwargs: arguments of `StreamingDataset`; `streams` is required, and with an order `batch_size`.

    Raises:
        ConfigurationError: the streams do not give a global batch (or a group).
        DataError: they cannot be opened, or an original is damaged.
    """

    epoch = 0
    """Epoch that is being iterated over; known in the process that reads (a loader worker)."""

    def __init__(
        self,
        *,
        stream_names: list[str],
        order: OrderSettings | None = None,
        proportions: Sequence[float | None] = (),
        repeats: Sequence[float | None] = (),
        **kwargs: Any,
    ) -> None:
        self.stream_names = stream_names
        self._failure: DataError | None = None
        self._prepared: set[int] = set()
        try:
            super().__init__(**kwargs)
        except (OSError, RuntimeError, ValueError) as error:
            raise DataError(f"the streams {', '.join(stream_names)} cannot be opened: {error}") from error
        self._check_sizes()
        for stream in self.streams:
            # A connection that loader workers inherited by fork would be shared by all of them.
            stream._downloader.clean_up()
        self.first_samples: list[int] = self.sample_offset_per_stream.tolist()
        self.order = self._make_order(order, proportions, repeats) if order is not None else None

    def _make_order(
        self, settings: OrderSettings, proportions: Sequence[float | None], repeats: Sequence[float | None]
    ) -> GlobalOrder:
        draws = draws_per_stream(self.samples_per_stream.tolist(), proportions, repeats)
        sizes = np.split(self.samples_per_shard, self.shard_offset_per_stream[1:])
        order = GlobalOrder(
            [
                StreamShape(name=name, samples_per_shard=shards, draws=num)
                for name, shards, num in zip(self.stream_names, sizes, draws, strict=True)
            ],
            settings,
        )
        slots = order.rank_range(self._parallel_rank_world.rank, self._parallel_rank_world.num_ranks)
        assert len(slots) == self.batch_size, (slots, self.batch_size)
        self.length = order.num_steps * len(slots)
        if self._unique_rank_world.rank == 0:
            dropped = ", ".join(
                f"{num} of {stream.draws} of '{stream.name}'"
                for stream, num in zip(order.streams, order.epoch(0).dropped, strict=True)
                if num
            )
            logger.info(
                "an epoch has %d global batches of %d; dropped: %s (others in each epoch)",
                order.num_steps,
                settings.global_batch_size,
                dropped or "nothing",
            )
        return order

    def _get_work(self, epoch: int, sample_in_epoch: int) -> Any:
        """This worker's samples in our order, instead of its part of an array that one process made for the node."""
        if self.order is None:
            return super()._get_work(epoch, sample_in_epoch)
        step, inside = divmod(sample_in_epoch, self.order.settings.global_batch_size)
        if inside:
            raise DataError(
                f"the data is to be continued at sample {sample_in_epoch} of an epoch, which is not the beginning of a "
                f"global batch of {self.order.settings.global_batch_size}: the checkpoint is of another run"
            )
        # Nobody may ask for the next epoch before the node's first worker has counted this one, after the last barrier.
        self._shared_barrier(self._unique_worker_world.workers_per_node)
        world = self._parallel_worker_world
        slots = WorkerSlots(
            self.order.epoch(epoch),
            first_step=step,
            rank=world.rank,
            num_ranks=world.num_ranks,
            worker=world.worker_of_rank,
            num_workers=world.workers_per_rank,
            ahead=2 * (self.predownload or 0),
        )
        return _SampleIds(slots, self.first_samples)

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        """Streaming's state, and what determines the order."""
        state = super().state_dict(num_samples, from_beginning)
        return state if self.order is None else state | {ORDER: json.dumps(self.order.fingerprint())}

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        """Continue at a position, in the order that it was reached in.

        Raises:
            DataError: the order would be another one now.
        """
        state = dict(obj)
        there = json.loads(state.pop(ORDER, "{}"))
        if self.order is not None:
            here = self.order.fingerprint()
            if not there:
                raise DataError(
                    "the checkpoint does not say in which order its samples came, so it cannot be continued in the "
                    "middle of the data: start a new run from its weights (init_from.checkpoint)"
                )
            changes = [
                f"{name} (was {there.get(name)}, is {here.get(name)})"
                for name in sorted(here.keys() | there.keys())
                if here.get(name) != there.get(name)
            ]
            if changes:
                raise DataError(
                    f"the samples would come in another order than in the run that is continued: {'; '.join(changes)}. "
                    "Set these back, or start a new run from its weights (init_from.checkpoint)"
                )
        super().load_state_dict(state)

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
        for shard_id, shard in enumerate(self.shards):
            for info in (info for pair in shard.file_pairs for info in pair if info is not None):
                path = self.shard_path(shard_id).with_name(info.basename)
                size = path.stat().st_size if path.is_file() else None
                if size == info.bytes:
                    continue
                if self._remote(shard_id) is None:
                    self._refuse_original(shard_id, path, size, info.bytes)
                elif size is not None and is_leader:
                    logger.warning("%s has %d bytes instead of %d: downloading it again", path, size, info.bytes)
                    self._drop(shard_id, path, info.bytes)
        if distributed.is_available() and distributed.is_initialized():
            distributed.barrier()

    def _refuse_original(self, shard_id: int, path: Path, size: int | None, expected: int) -> None:
        """Raise for a damaged file without a remote, unless it is the other form of a compressed shard."""
        if size is None and self.shards[shard_id].compression:
            return
        state = "is missing" if size is None else f"has {size} bytes instead of {expected}"
        raise DataError(f"{path} {state}, and there is no remote to fetch it from: copy or write the data set again")

    def _drop(self, shard_id: int, path: Path, size: int) -> None:
        path.unlink()
        if self._shard_states[shard_id] == _ShardState.LOCAL:
            self._shard_states[shard_id] = _ShardState.REMOTE
            self.cache_usage -= size

    def _resume_incr_epoch(self) -> tuple[int, int]:
        """Note the epoch; called in each worker at the start of each epoch."""
        epoch, sample_in_epoch = super()._resume_incr_epoch()
        self.epoch = epoch
        return epoch, sample_in_epoch

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Have a shard on this machine; a failure ends the epoch with a `DataError`."""
        if not blocking and shard_id in self._prepared and self._shard_states[shard_id] == _ShardState.LOCAL:
            return  # Streaming takes a file lock for each sample here: 216 us. Reading finds a deleted file by itself.
        try:
            super().prepare_shard(shard_id, blocking)
        except Exception as error:
            failure = self._failed(shard_id, error)
            if blocking:
                raise failure from error
            # In a background thread: raising would leave the other threads waiting. They stop by the event.
            self._failure = failure
            self._event.set()
        else:
            if not self.cache_limit and self._shard_states[shard_id] == _ShardState.LOCAL:
                self._prepared.add(shard_id)

    def _ready_thread(self, it: _Iterator) -> None:
        """Advance `ready_index` as shards arrive. Streaming's own waits for ever for one that failed elsewhere.

        A shard that another worker tried to fetch in vain is tried here, so that each worker that needs it fails.
        """
        while not self._is_over(it) and it.ready_index < it.total:
            if self.predownload is not None and self.predownload < it.ready_index - it.yield_index:
                sleep(TICK)
                continue
            sample_id = it.sample_ids[it.ready_index]
            if sample_id != -1:
                shard_id, _ = self.spanner[sample_id]
                while (state := self._shard_states[shard_id]) != _ShardState.LOCAL and not self._is_over(it):
                    if state == _ShardState.REMOTE:
                        self.prepare_shard(shard_id, False)
                    else:
                        sleep(TICK)
            it.ready_index += 1
        it.on_exit()

    def _is_over(self, it: _Iterator) -> bool:
        return it.should_exit() or self._event.is_set()

    def _failed(self, shard_id: int, error: Exception) -> DataError:
        """Leave nothing behind that blocks or misleads another process, and describe the failure."""
        if self._cache_filelock.is_locked:
            self._cache_filelock.release(force=True)
        remote, path = self._remote(shard_id), self.shard_path(shard_id)
        if remote is not None and isinstance(error, ValueError):  # A wrong hash.
            for info in (info for pair in self.shards[shard_id].file_pairs for info in pair if info is not None):
                path.with_name(info.basename).unlink(missing_ok=True)
        if self._shard_states[shard_id] == _ShardState.PREPARING:
            self._shard_states[shard_id] = _ShardState.REMOTE
        return DataError(
            f"{self._shard_name(shard_id)} could not be fetched from {remote or path.parent}: "
            f"{type(error).__name__}: {error}. Check that it is there and whole and that this machine can reach it, "
            "then start the same command again"
        )

    def get_item(self, sample_id: int, retry: int = 7) -> dict[str, Any]:
        """Read one sample.

        Raises:
            DataError: its shard cannot be fetched, or its bytes are damaged.
        """
        try:
            return super().get_item(sample_id, retry)
        except (ValueError, IndexError, KeyError) as error:
            shard_id, index = self.spanner[sample_id]
            remedy = (
                "delete the file, it will be fetched again" if self._remote(shard_id) else "write the data set again"
            )
            raise DataError(
                f"{self.shard_path(shard_id)} is damaged at its sample {index} "
                f"({type(error).__name__}: {error}): {remedy}"
            ) from error

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
