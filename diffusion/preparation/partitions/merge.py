"""Finished partitions to an order of samples, and the order to shards: decided by the parent from a few bytes of each.

Within a split and bucket samples are sorted by a hash of seed and key, a full shuffle that knows neither partitions nor
workers, and cut into shards by size. Memory: 22 bytes per kept image, and 17 for its place in the sorted order and in
its folder; where duplicates are looked for, 28 and what `duplicates` needs for that time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from diffusion.datasets.mds import ShardFormat
from diffusion.preparation.config import DuplicatesConfig
from diffusion.preparation.partitions.output import FACTS, INDEX, INDEX_TYPE
from diffusion.preparation.partitions.work import order_of
from diffusion.preparation.records import Reason
from diffusion.preparation.selection.duplicates import find_duplicates


@dataclass(frozen=True)
class KeptIndex:
    """The kept samples of some partitions, one partition after the other.

    Attributes:
        rows: INDEX_TYPE [N].
        starts: int64 [P + 1], the first sample of each partition, and N.
    """

    rows: NDArray[np.void]
    starts: NDArray[np.int64]

    @classmethod
    def read(cls, folders: Sequence[Path]) -> "KeptIndex":
        """Read the indexes of finished partitions."""
        counts = [len(np.load(folder / INDEX, mmap_mode="r")) for folder in folders]
        starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
        rows = np.empty(starts[-1], INDEX_TYPE)
        for folder, start, end in zip(folders, starts[:-1], starts[1:], strict=True):
            rows[start:end] = np.load(folder / INDEX)
        return cls(rows, starts)

    def marked(self, samples: Sequence[Sequence["LeftOut"]]) -> NDArray[np.bool_]:
        """Return bool [N]: true for some samples of each partition."""
        marked = np.zeros(len(self.rows), bool)
        for start, of_partition in zip(self.starts.tolist(), samples, strict=False):
            marked[[start + one.sample for one in of_partition]] = True
        return marked

    def partition_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the partition of each sample."""
        return np.searchsorted(self.starts, samples, side="right") - 1


@dataclass(frozen=True, order=True)
class LeftOut:
    """A sample that is left out although it passed the filters.

    Attributes:
        sample: Its number within its partition.
        reason: `duplicate`, `near_duplicate` or `small_bucket`.
        detail: The reason in more words.
    """

    sample: int
    reason: Reason
    detail: str


@dataclass(frozen=True)
class BucketOrder:
    """The samples of one split and bucket.

    Attributes:
        samples: int64 [n], numbers in the KeptIndex, in their order.
        cuts: Where each shard ends.
    """

    samples: NDArray[np.int64]
    cuts: list[int]


def order_buckets(kept: KeptIndex, left_out: NDArray[np.bool_], shards: ShardFormat) -> dict[int, BucketOrder]:
    """Sort the samples of each place and cut them into shards.

    Args:
        kept: The samples.
        left_out: bool [N], those that are not written.
        shards: Format of the shards, which do not exceed `shard_bytes` unless one sample does.

    Returns:
        For each place number, ascending, the order of its samples.
    """
    empty = shards.num_bytes(0)
    per_sample = shards.num_bytes(1) - empty
    orders = {}
    for place in np.unique(kept.rows["place"][~left_out]):
        samples = np.flatnonzero((kept.rows["place"] == place) & ~left_out)
        samples = samples[np.argsort(kept.rows["order"][samples], kind="stable")]
        sizes = kept.rows["size"][samples].astype(np.int64) + per_sample
        orders[int(place)] = BucketOrder(samples, cut_by_size(sizes, shards.shard_bytes - empty))
    return orders


def cut_by_size(sizes: NDArray[np.int64], limit: int) -> list[int]:
    """Cut a sequence of sizes into the longest runs whose sum is at most a limit, from the front.

    Args:
        sizes: int64 [n], above 0.
        limit: A single size may be above it.

    Returns:
        Where each run ends; the last is n.
    """
    ends, total = np.cumsum(sizes), 0
    cuts: list[int] = []
    while not cuts or cuts[-1] < len(sizes):
        start = cuts[-1] if cuts else 0
        cuts.append(max(int(np.searchsorted(ends, total + limit, side="right")), start + 1))
        total = int(ends[cuts[-1] - 1])
    return cuts


def numbers_in_folders(kept: KeptIndex, orders: dict[int, BucketOrder], first: dict[int, int]) -> NDArray[np.int64]:
    """Return the number of each sample in its MDS folder; -1 for those that are left out.

    Args:
        kept: The samples.
        orders: From `order_buckets`.
        first: Samples that the folder of a place holds already.
    """
    numbers = np.full(len(kept.rows), -1, np.int64)
    for place, order in orders.items():
        numbers[order.samples] = first.get(place, 0) + np.arange(len(order.samples))
    return numbers


def left_out_as_duplicates(
    kept: KeptIndex, folders: Sequence[Path], config: DuplicatesConfig, earlier: Sequence[Path], seed: int
) -> list[list[LeftOut]]:
    """Find duplicates among the kept samples, and of samples of earlier generations, which stay.

    Args:
        kept: The samples.
        folders: Their partitions.
        config: What counts as a duplicate.
        earlier: Tables of facts of the earlier generations.
        seed: Of the order.

    Returns:
        For each partition its samples that are left out, ascending.
    """
    tables = [*earlier, *(folder / FACTS for folder in folders)]
    hashes, counts = _hashes(tables)
    num_old = sum(counts[: len(earlier)])
    settled = np.arange(len(hashes)) < num_old
    order = np.concatenate([_orders(earlier, seed), kept.rows["order"]])
    exact = hashes["exact"] if config.exact else np.arange(len(hashes), dtype=np.uint64)
    distance = config.max_distance if config.near else None
    is_duplicate, of = find_duplicates(order, exact, hashes["phash"], hashes["pixels"], distance, settled)
    starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    dropped = np.flatnonzero(is_duplicate[num_old:]) + num_old
    keys = _keys_of(tables, starts, np.unique(of[dropped]))
    found: list[list[LeftOut]] = [[] for _ in folders]
    for sample, kept_one in zip(dropped.tolist(), of[dropped].tolist(), strict=True):
        table = int(np.searchsorted(starts, sample, side="right")) - 1
        same = bool((hashes["exact"][sample] == hashes["exact"][kept_one]).all())
        reason = Reason.DUPLICATE if same else Reason.NEAR_DUPLICATE
        found[table - len(earlier)].append(LeftOut(sample - int(starts[table]), reason, f"of {keys[kept_one]}"))
    return found


_HASHES = np.dtype([("exact", "<u8", (2,)), ("phash", "<u8"), ("pixels", "<u4")])


def _hashes(tables: Sequence[Path]) -> tuple[NDArray[np.void], list[int]]:
    """Read the hashes of the kept images: _HASHES [N], and how many each table has."""
    parts = []
    for path in tables:
        table = read_kept_rows(path, ["width", "height", "xxh128", "phash"])
        part = np.empty(table.num_rows, _HASHES)
        if table.num_rows:
            words = np.frombuffer(bytes.fromhex("".join(table["xxh128"].to_pylist())), ">u8")
            part["exact"] = words.reshape(-1, 2)
            part["phash"] = np.frombuffer(bytes.fromhex("".join(table["phash"].to_pylist())), ">u8")
            part["pixels"] = table["width"].to_numpy().astype(np.int64) * table["height"].to_numpy()
        parts.append(part)
    return np.concatenate(parts) if parts else np.empty(0, _HASHES), [len(part) for part in parts]


def _orders(tables: Sequence[Path], seed: int) -> NDArray[np.uint64]:
    """Return the place in the shuffled order of the kept images of earlier generations."""
    parts = [
        np.array([order_of(key, seed) for key in read_kept_rows(path, ["key"])["key"].to_pylist()], np.uint64)
        for path in tables
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.uint64)


def _keys_of(tables: Sequence[Path], starts: NDArray[np.int64], samples: NDArray[np.int64]) -> dict[int, str]:
    """Look up the keys of some kept images."""
    keys: dict[int, str] = {}
    which = np.searchsorted(starts, samples, side="right") - 1
    for table in np.unique(which).tolist():
        names = read_kept_rows(tables[table], ["key"])["key"]
        for sample in samples[which == table].tolist():
            keys[sample] = names[sample - int(starts[table])].as_py()
    return keys


def read_kept_rows(path: Path, columns: list[str]):
    """Read columns of the facts of the images that are kept, in their order."""
    present = set(pq.read_schema(path).names)
    table = pq.read_table(path, columns=[name for name in ["reason", *columns] if name in present])
    return table.filter(pc.equal(table["reason"], ""))  # pyright: ignore
