"""What comes from the store and what from the disk, and shards of the next epoch that are fetched ahead."""

import shutil
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusion.datasets.shards import ShardDataset
from diffusion.datasets.warm_up import shards_of_steps

from diffusion.config.data import Representation
from diffusion.datasets.batch import BatchKey
from diffusion.datasets.cache import TierCounts
from diffusion.datasets.dataset import TextImageDataset
from diffusion.datasets.loader import BatchLoader, train_loader
from diffusion.datasets.sample_order import GlobalOrder, OrderSettings, StreamShape, rank_slots
from diffusion.errors import DataError
from tests.tools.written_data import data_config, write_encoded

NUM_STEPS, LAG = 80, 16
"""Steps of an epoch, and of its end whose shards no warm-up may take away."""


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """640 samples in shards of 4 kB, about 11 in each."""
    return write_encoded(tmp_path_factory.mktemp("remote"), {"a": NUM_STEPS * 8})


def open_loader(local: Path, remote: Path | None, **options: Any) -> BatchLoader:
    defaults: dict[str, Any] = {"representation": Representation.latents, "num_canonical_nodes": 1, "predownload": 8}
    config = data_config(local, "a", remote=None if remote is None else str(remote), **(defaults | options))
    return train_loader(config, seed=3, tokenize=None, rank_batch_size=config.global_batch_size)


def dataset_of(loader: BatchLoader) -> TextImageDataset:
    assert isinstance(loader.dataset, TextImageDataset)
    return loader.dataset


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait for what happens in the background."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def shard_sizes(remote: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in remote.glob("a/*.mds")}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_is_fetched_read_and_found(tmp_path: Path, remote: Path, num_workers: int) -> None:
    loader = open_loader(tmp_path, remote, num_workers=num_workers)
    meter, sizes = dataset_of(loader).meter, shard_sizes(remote)
    assert meter.read() == TierCounts()
    list(loader)
    first = meter.read()
    assert (first.samples, first.fetched_shards, first.fetched_bytes) == (640, len(sizes), sum(sizes.values()))
    # Each shard is missing when it is first looked for, and there when a later batch takes more of it.
    assert 0 < first.samples - first.hits < 640
    # All but 4 bytes a sample and what a shard says of itself.
    assert 0.5 * first.fetched_bytes < first.read_bytes < first.fetched_bytes - 4 * 640
    list(loader)
    second = meter.read().since(first)
    assert second == TierCounts(samples=640, hits=640, read_bytes=first.read_bytes)
    again = open_loader(tmp_path, remote)
    list(again)
    assert dataset_of(again).meter.read() == second


def test_shards_that_a_node_needs() -> None:
    sizes = [np.full(12, 10), np.full(5, 30)]
    shapes = [StreamShape(name=str(k), samples_per_shard=part, draws=int(part.sum())) for k, part in enumerate(sizes)]
    order = GlobalOrder(shapes, OrderSettings(seed=1, global_batch_size=8, num_canonical_nodes=4)).epoch(2)
    firsts = {"first_samples": [0, 120], "first_of_shards": [*range(0, 120, 10), *range(120, 270, 30)]}
    for ranks in (range(2), range(2, 4)):
        expected = set()
        for step in range(order.num_steps - 5, order.num_steps):
            for rank in ranks:
                read = rank_slots(order, step, rank=rank, num_ranks=4)
                for stream, index in zip(read.stream.tolist(), read.index.tolist(), strict=True):
                    expected.add(index // 10 if stream == 0 else 12 + index // 30)
        steps = range(order.num_steps - 5, order.num_steps + 9)
        assert shards_of_steps(order, steps, ranks, 4, **firsts).tolist() == sorted(expected)
    assert len(shards_of_steps(order, range(-9, 0), range(4), 4, **firsts)) == 0
    assert len(shards_of_steps(order, range(order.num_steps), range(4), 4, **firsts)) == 17


def test_originals_are_read_and_never_looked_for(remote: Path) -> None:
    loader = open_loader(remote, None)
    list(loader)
    counts = dataset_of(loader).meter.read()
    assert counts.read_bytes > 0
    assert counts == TierCounts(read_bytes=counts.read_bytes)


def limit_of(remote: Path, num_shards: int) -> str:
    """A cache limit of so many shards, beside the index, which counts as well."""
    index = (remote / "a" / "index.json").stat().st_size
    return f"{index + num_shards * max(shard_sizes(remote).values())}b"


def shards_of(loader: BatchLoader, epoch: int, steps: range) -> set[int]:
    """Shards that some steps of an epoch read."""
    dataset = dataset_of(loader)
    assert dataset.order is not None
    samples = dataset.order.epoch(epoch).slots(steps.start, steps.stop).index.ravel().tolist()
    ends = dataset.samples_per_shard.cumsum().tolist()
    return {bisect_right(ends, sample) for sample in samples}


def local_shards(loader: BatchLoader) -> set[int]:
    return {int(path.name.split(".")[1]) for path in Path(dataset_of(loader).streams[0].local).glob("*.mds")}


def read(batches: Iterator[Any], num: int) -> list[list[int]]:
    return [batch[BatchKey.SAMPLE].tolist() for batch in islice(batches, num)]


@pytest.mark.parametrize("num_shards", [24, 16])
def test_the_next_epoch_begins_with_shards_that_are_here(
    tmp_path: Path, remote: Path, monkeypatch: pytest.MonkeyPatch, num_shards: int
) -> None:
    limit = limit_of(remote, num_shards)
    loader = open_loader(tmp_path, remote, cache_limit=limit)
    meter, batches = dataset_of(loader).meter, iter(loader)
    epochs = [read(batches, NUM_STEPS - 3)]
    end, beginning = shards_of(loader, 0, range(NUM_STEPS - LAG, NUM_STEPS)), shards_of(loader, 1, range(2))
    assert not beginning <= local_shards(loader), "not by chance"
    assert len(end | beginning) <= num_shards, "there is room"
    epochs[0] += read(batches, 2)  # Then the last shard was asked for, and not all has been read.
    wait_until(lambda: end | beginning <= local_shards(loader))
    epochs[0] += read(batches, 2)
    before = meter.read()
    batches = iter(loader)
    epochs.append(read(batches, 1))
    first = meter.read().since(before)
    assert first.hits == first.samples > 0
    epochs[1] += read(batches, NUM_STEPS)

    monkeypatch.setattr(ShardDataset, "_warm_up", lambda dataset, it: None)
    other = open_loader(tmp_path / "other", remote, cache_limit=limit)
    assert [read(iter(other), NUM_STEPS + 1) for _ in range(2)] == epochs
    assert [len(epoch) for epoch in epochs] == [NUM_STEPS] * 2


def test_without_room_the_next_epoch_waits(tmp_path: Path, remote: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    fetch = ShardDataset._fetch

    def note(dataset: ShardDataset, shard_id: int, blocking: bool) -> None:
        try:
            fetch(dataset, shard_id, blocking)
        except Exception as error:
            tried.append(type(error).__name__)
            raise

    monkeypatch.setattr(ShardDataset, "_fetch", note)
    loader = open_loader(tmp_path, remote, cache_limit=limit_of(remote, 6))
    batches = iter(loader)
    read(batches, NUM_STEPS - 1)
    wait_until(lambda: bool(tried))
    assert shards_of(loader, 0, range(NUM_STEPS - 2, NUM_STEPS)) <= local_shards(loader)
    assert not shards_of(loader, 1, range(2)) <= local_shards(loader)
    assert tried == ["_NoRoomError"]
    assert len(read(batches, 2)) == 1
    assert len(read(iter(loader), NUM_STEPS + 1)) == NUM_STEPS


def test_a_store_that_fails_in_the_warm_up_ends_the_next_epoch(
    tmp_path: Path, remote: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = tmp_path / "remote"
    shutil.copytree(remote, copy)
    loader = open_loader(tmp_path / "cache", copy, cache_limit=limit_of(remote, 24))
    batches = iter(loader)
    read(batches, NUM_STEPS - 3)
    for number in shards_of(loader, 1, range(2)) - shards_of(loader, 0, range(NUM_STEPS - LAG, NUM_STEPS)):
        (copy / "a" / f"shard.{number:05}.mds").unlink()
    read(batches, 2)
    wait_until(lambda: "shards of the next epoch are not here yet: FileNotFoundError" in caplog.text)
    assert len(read(batches, 2)) == 1
    with pytest.raises(DataError, match="could not be fetched"):
        read(iter(loader), NUM_STEPS)
