"""Encoded batches to shards: a thread that makes samples of them and writes each shard whole, with a mark."""

import itertools
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from diffusion.config.data import ImageSize
from diffusion.datasets.mds import ShardFormat, encode_sample, write_shard
from diffusion.errors import DataError
from diffusion.files import read_json, unique_partial, write_json
from diffusion.preparation.encoding.images import Item
from diffusion.preparation.encoding.models import Encoded, EncodingModels
from diffusion.preparation.output_folder import writing

MAX_SHARD_BYTES = 2**30
"""A shard is begun where the prepared data begins one, and here."""

WAITING_BATCHES = 32
"""Encoded batches that may wait to be written."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """What is known of an encoded shard.

    Attributes:
        source: Identity of the prepared shard.
        samples: How many there are.
        entries: Entries for the index; several where the shard was too large for one.
        damaged: Numbers, within the prepared shard, of the samples that are damaged.
        withdrawn: Likewise, of those that were withdrawn when it was encoded.
    """

    source: str
    samples: int
    entries: list[dict[str, Any]]
    damaged: list[int]
    withdrawn: list[int]

    @classmethod
    def read(cls, path: Path) -> "Mark":
        """Read the mark of a shard.

        Raises:
            DataError: It is damaged.
        """
        try:
            return cls(**read_json(path))
        except TypeError as error:
            raise DataError(f"{path} is damaged ({error}): delete it, and run the command again") from error


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Which columns are written.

    Attributes:
        models: What encodes.
        mean_only: Leave the log-variance out.
        max_shard_bytes: Size above which another shard is begun.
    """

    models: EncodingModels
    mean_only: bool
    max_shard_bytes: int = MAX_SHARD_BYTES

    def types(self, size: ImageSize) -> dict[str, str]:
        """Return the MDS type of each column for images of a size."""
        latent = f"ndarray:float16:{','.join(map(str, self.models.latent_shape(size)))}"
        columns = {"latent_mean": latent, "latent_logvar": latent, "token_ids": "ndarray:int32", "key": "str"}
        columns["placement"] = "ndarray:int32:6"
        if self.mean_only:
            del columns["latent_logvar"]
        if self.models.text_encoder is not None:
            columns |= dict.fromkeys(("text_embeddings", "pooled_text_embeddings"), "ndarray:float16")
        return columns


class ShardWriter:
    """Takes encoded batches, each shard's in their order, and writes the shards in a thread of its own.

    Args:
        items: The shards.
        columns: The columns.
        outs: The data sets, for messages.
    """

    def __init__(self, items: Sequence[Item], columns: Columns, outs: Sequence[Path]) -> None:
        self._items = items
        self._columns = columns
        self._outs = outs
        self._open: dict[int, _Shard] = {}
        self._formats: dict[ImageSize, ShardFormat] = {}
        self._queue: queue.Queue[Encoded | None] = queue.Queue(WAITING_BATCHES)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="shard writer", daemon=True)
        self._thread.start()

    def put(self, encoded: Encoded) -> None:
        """Hand over a batch whose tensors can be read; wait while too many are waiting.

        Raises:
            DataError: Latents are not finite.
            MachineError: A shard could not be written.
        """
        if self._failure is not None:
            raise self._failure
        self._queue.put(encoded)

    def finish(self) -> None:
        """Wait until everything is written.

        Raises:
            DataError: Latents are not finite.
            MachineError: A shard could not be written.
        """
        self._queue.put(None)
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        assert not self._open, f"shards without an end: {sorted(self._open)}"

    def abandon(self) -> None:
        """Let the thread end without the shards that are not whole."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (encoded := self._queue.get()) is not None:
            if self._failure is None:
                try:
                    self._add(encoded)
                except Exception as error:  # noqa: BLE001 - raised again where the batches come from
                    self._failure = error

    def _add(self, encoded: Encoded) -> None:
        """Append the samples of a batch to their shard; write it if it is whole."""
        batch = encoded.batch
        item = self._items[batch.item]
        shard = self._open.setdefault(batch.item, _Shard(item))
        assert batch.start == shard.num_samples, (batch.start, shard.num_samples)
        embeddings = self._split_embeddings(encoded)
        blank = {*batch.damaged, *batch.withdrawn}
        shard.damaged += [batch.start + i for i in sorted(batch.damaged)]
        shard.withdrawn += [batch.start + i for i in batch.withdrawn]
        for size, (mean, logvar) in encoded.moments.items():
            means, logvars = mean.numpy(), logvar.numpy()
            finite = np.isfinite(means).all((1, 2, 3)) & np.isfinite(logvars).all((1, 2, 3))
            for i, key in enumerate(batch.keys):
                if not finite[i]:
                    raise DataError(f"the VAE gives no finite float16 latent for '{key}': check its weights")
                keep = np.float16(i not in blank)
                sample: dict[str, Any] = {"token_ids": batch.token_ids[i].numpy(), "key": key}
                sample["placement"] = batch.placements[size][i].numpy()
                sample["latent_mean"] = means[i] if keep else np.zeros_like(means[i])
                if not self._columns.mean_only:
                    sample["latent_logvar"] = logvars[i] if keep else np.zeros_like(logvars[i])
                if embeddings is not None:
                    sample["text_embeddings"], sample["pooled_text_embeddings"] = embeddings[i]
                shard.samples[size].append(encode_sample(sample, self._format(size).columns))
        shard.num_samples += len(batch.keys)
        if shard.num_samples == item.num_samples:
            del self._open[batch.item]
            self._write(shard)

    def _split_embeddings(self, encoded: Encoded) -> list[tuple[np.ndarray, np.ndarray]] | None:
        """Return hidden states [K, L, D] and pooled text [K, P] of each sample."""
        if encoded.embeddings is None:
            return None
        arrays = [part.numpy() for part in encoded.embeddings]
        if not all(np.isfinite(array).all() for array in arrays):
            raise DataError("the text encoder gives embeddings that are not finite in float16: check its weights")
        ends = list(itertools.accumulate(len(ids) for ids in encoded.batch.token_ids))
        return list(zip(*(np.split(array, ends[:-1]) for array in arrays), strict=True))

    def _write(self, shard: "_Shard") -> None:
        """Write a whole shard to each data set that lacks it."""
        item = shard.item
        for target in item.targets:
            with writing(self._outs[target.output]):
                shards, samples = self._format(target.size), shard.samples[target.size]
                sizes = [4 + len(sample) for sample in samples]
                cuts = _cut(sizes, self._columns.max_shard_bytes - shards.num_bytes(0))
                entries = [
                    write_shard(
                        target.folder,
                        item.number,
                        samples[start:end],
                        shards,
                        partial=unique_partial(target.mark),
                        part=part,
                    )
                    for part, (start, end) in enumerate(itertools.pairwise([0, *cuts]))
                ]
                mark = Mark(
                    source=item.source,
                    samples=item.num_samples,
                    entries=entries,
                    damaged=shard.damaged,
                    withdrawn=shard.withdrawn,
                )
                write_json(target.mark, vars(mark))

    def _format(self, size: ImageSize) -> ShardFormat:
        if size not in self._formats:
            types = self._columns.types(size)
            self._formats[size] = ShardFormat(columns=types, shard_bytes=self._columns.max_shard_bytes)
        return self._formats[size]


class _Shard:
    """The samples of a shard that is not whole yet."""

    def __init__(self, item: Item) -> None:
        self.item = item
        self.num_samples = 0
        self.samples: dict[ImageSize, list[bytes]] = {size: [] for size in item.sizes}
        self.damaged: list[int] = []
        self.withdrawn: list[int] = []


def _cut(sizes: Sequence[int], limit: int) -> list[int]:
    """Return where each shard ends, so that none is above a limit unless one sample is."""
    cuts, total = [], 0
    for i, size in enumerate(sizes):
        if total and total + size > limit:
            cuts.append(i)
            total = 0
        total += size
    return [*cuts, len(sizes)]
