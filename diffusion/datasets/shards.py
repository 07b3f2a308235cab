"""Streaming's data set, with an order that does not know the world, on shared memory that is given back.

Streaming's work array (nodes x ranks x workers x batches x batch size) is made whole by one process of a node, at each
start and epoch: minutes and tens of GB at 790M samples. The order of `datasets/batching.py` is entered at any step
directly, so each worker computes its own slots while it reads: `_get_work` is overridden, and nothing is shared.

Private parts of `StreamingDataset` are touched here and in `shard_fetching.py`, which says how shards come; whose
shared memory is whose is decided in `shared_memory.py`.
"""

import json
import logging
import weakref
from bisect import bisect_right
from collections.abc import Collection, Sequence
from pathlib import Path
from time import time_ns
from typing import Any

import numpy as np
from streaming.base.constant import RESUME
from streaming.base.world import World

from diffusion.datasets.balanced import Integers
from diffusion.datasets.batching import (
    EpochOrder,
    GlobalOrder,
    OrderSettings,
    StreamShape,
    WorkerSlots,
    draws_per_stream,
)
from diffusion.datasets.fetching import FetchedStream, describe
from diffusion.datasets.sample_ids import WorkerSamples
from diffusion.datasets.shard_fetching import FetchingDataset
from diffusion.datasets.shard_files import SampleDecoder, ShardFiles
from diffusion.datasets.shared_memory import MemoryNumber, claim_number, whole_memory
from diffusion.datasets.storage_errors import fetch_errors
from diffusion.datasets.warm_up import LAG, shards_of_steps
from diffusion.distributed import agree
from diffusion.errors import DataError, UserError

logger = logging.getLogger(__name__)

ORDER = "order"
"""Key in the state of what determines the order, as JSON."""


class ShardDataset(FetchingDataset):
    """A data set that reads our order, and raises one `DataError` for a missing or damaged shard.

    Args:
        stream_names: names of the streams, for messages.
        order: what the order depends on; None for data that is read by index only.
        proportions: of the streams; all None is none.
        repeats: of the streams.
        columns: that are read; None is all.
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
        columns: Collection[str] | None = None,
        **kwargs: Any,
    ) -> None:
        self._open(stream_names, **kwargs)
        agree(self._check_sizes)
        self.first_samples: list[int] = self.sample_offset_per_stream.tolist()
        self._first_of_shards: list[int] = self.spanner.shard_bounds[:-1].tolist()
        self._files = ShardFiles(0) if self.cache_limit else ShardFiles()
        self._columns, self._decoders = columns, {}
        self.order = self._make_order(order, proportions, repeats) if order is not None else None

    def _open(self, stream_names: list[str], **kwargs: Any) -> None:
        """Construct Streaming's part, on shared memory that is given back when this data set is collected."""
        folders = [(str(Path(stream.local).resolve()), stream.remote) for stream in kwargs["streams"]]
        caches = [folder for folder, remote in folders if remote is not None]
        self._number = claim_number(caches, [folder for folder, remote in folders if remote is None])
        weakref.finalize(self, MemoryNumber.release, self._number)
        try:
            try:
                is_leader = World.detect().is_local_leader
                agree(lambda: self._fetch_indexes(kwargs["streams"] if is_leader else []))
                agree(lambda: [stream.get_shards(World.detect(), False) for stream in kwargs["streams"]])
                with self._number.chosen():
                    super().__init__(stream_names=stream_names, **kwargs)
            finally:
                self._number.adopt_all(self)
        except UserError:
            self._number.release()
            raise
        except fetch_errors() as error:
            self._number.release()
            raise DataError(f"the streams {', '.join(stream_names)} cannot be opened: {error}") from error
        assert self._shm_prefix_int == self._number.number, (self._shm_prefix_int, self._number.number)

    def _fetch_indexes(self, streams: Sequence[FetchedStream]) -> None:
        """Fetch what the other ranks of a node would only wait `download_timeout` for, however often it is tried."""
        for stream in streams:
            if str(Path(stream.local).resolve()) in self._number.unshared:
                stream.remove_leftovers()
            stream.fetch_index()
            stream.release()

    def close(self) -> None:
        """Give the shared memory back at once; nothing can be read any more."""
        if hasattr(self, "_iterator"):
            self._iterator.exit()
        self._number.release()

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
        assert self.order is not None, "data without an order is read by index"
        step, inside = divmod(sample_in_epoch, self.order.settings.global_batch_size)
        if inside:
            raise DataError(
                f"the data is to be continued at sample {sample_in_epoch} of an epoch, which is not the beginning of a "
                f"global batch of {self.order.settings.global_batch_size}: the checkpoint is of another run"
            )
        # Nobody may ask for the next epoch before the node's first worker has counted this one, after the last barrier.
        self._shared_barrier(self._unique_worker_world.workers_per_node)
        return self._samples(self.order.epoch(epoch), step)

    def _samples(self, order: EpochOrder, first_step: int = 0) -> WorkerSamples:
        """This worker's samples of an epoch, from a step on."""
        world = self._parallel_worker_world
        slots = WorkerSlots(
            order,
            first_step=first_step,
            rank=world.rank,
            num_ranks=world.num_ranks,
            worker=world.worker_of_rank,
            num_workers=world.workers_per_rank,
            ahead=2 * (self.predownload or 0),
        )
        assert self.batch_size is not None
        return WorkerSamples(slots, self.batch_size, self.first_samples, self._first_of_shards)

    def next_shards(self) -> Sequence[int]:
        """Shards of what this worker downloads ahead in the next epoch, in order."""
        assert self.order is not None
        assert self.batch_size is not None
        samples = self._samples(self.order.epoch(self.epoch + 1))
        last = min(len(samples), self._batches_ahead * self.batch_size)
        parts = (samples.part(start) for start in range(0, last, self.batch_size))
        return list(dict.fromkeys(shard_id for part in parts for shard_id in part.shards))

    @property
    def _batches_ahead(self) -> int:
        """Batches that each worker downloads ahead, the one that is asked for included."""
        assert self.batch_size is not None
        return 1 + (self.predownload or 0) // self.batch_size

    def shards_in_use(self, step: int) -> Integers:
        """Shards that this node needs in the rest of the epoch, or downloads ahead in the next one.

        Args:
            step: step that this worker reads.
        """
        assert self.order is not None
        world = self._parallel_worker_world
        steps = {
            self.epoch: range(step - LAG * world.workers_per_rank, self.order.num_steps),
            self.epoch + 1: range(self._batches_ahead * world.workers_per_rank),
        }
        needed = [
            shards_of_steps(
                self.order.epoch(epoch),
                part,
                range(world.node * world.ranks_per_node, (world.node + 1) * world.ranks_per_node),
                world.num_ranks,
                first_samples=self.first_samples,
                first_of_shards=self._first_of_shards,
            )
            for epoch, part in steps.items()
        ]
        return np.concatenate(needed)

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
        before = vars(self).get("_resume_shm")
        with whole_memory():
            super().load_state_dict(state)
        self._number.replace(before, self._resume_shm)

    def _resume(self, world: World, epoch: int) -> tuple[int, int]:
        """The position that was loaded, or the beginning; Streaming's own opens the memory anew and never closes it."""
        content = self._number.read(RESUME)
        if content is None:
            return super()._resume(world, epoch)
        state = json.loads(content.partition(b"\0")[0])
        self._set_shuffle_block_size(world)
        if state["epoch"] < epoch:
            return epoch, 0
        self.num_canonical_nodes = state["num_canonical_nodes"]
        self.shuffle_seed = state["shuffle_seed"]
        self.initial_physical_nodes = state.get("initial_physical_nodes")
        return state["epoch"], state["sample_in_epoch"]

    def _resume_incr_epoch(self) -> tuple[int, int]:
        """Note the epoch; called in each worker at the start of each epoch."""
        epoch, sample_in_epoch = super()._resume_incr_epoch()
        self.epoch = epoch
        return epoch, sample_in_epoch

    def get_item(self, sample_id: int, retry: int = 7) -> dict[str, Any]:
        """Read one sample.

        Raises:
            DataError: its shard cannot be fetched, or its bytes are damaged.
        """
        if hasattr(self, "_event") and self._event.is_set():
            raise RuntimeError("fetching has failed")  # `__iter__` raises the failure.
        shard_id = bisect_right(self._first_of_shards, sample_id) - 1
        index = sample_id - self._first_of_shards[shard_id]
        try:
            data = self._read(shard_id, index, retry)
            return self._decoder(shard_id)(data)
        except (ValueError, IndexError, KeyError) as error:
            remedy = (
                "delete the file, it is fetched again" if self._remote(shard_id) else "copy or write the data set again"
            )
            raise DataError(
                f"{self._paths[shard_id]} is damaged at its sample {index} ({describe(error)}): {remedy}"
            ) from error

    def _read(self, shard_id: int, index: int, retry: int) -> bytes:
        """Read the bytes of a sample; its shard is fetched where it is not here, or was just removed to make room."""
        for _ in range(1 + retry):
            if shard_id not in self._prepared:
                self.prepare_shard(shard_id)
            if shard_id in self._prepared:  # Otherwise another process has tried, in vain.
                try:
                    data = self._files.read(self._paths[shard_id], index)
                except FileNotFoundError:
                    self._prepared.discard(shard_id)
                    continue
                self._read_bytes += len(data)
                if self.cache_limit:
                    self._shard_access_times[shard_id] = time_ns()
                return data
        raise DataError(
            f"{self._shard_name(shard_id)} was removed from the cache {1 + retry} times before it was read: raise "
            "data.cache_limit"
        )

    def _decoder(self, shard_id: int) -> SampleDecoder:
        """What decodes the samples of a shard."""
        stream = int(self.stream_per_shard[shard_id])
        decoder = self._decoders.get(stream)
        if decoder is None:
            shard = self.shards[shard_id]
            layout = (shard.column_names, shard.column_encodings, shard.column_sizes)
            decoder = self._decoders[stream] = SampleDecoder(*layout, self._columns)
        return decoder
