import time
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streaming import MDSWriter

from diffusion.datasets.sample_order import GlobalOrder, OrderSettings, RankOrder
from diffusion.errors import ConfigurationError, DataError
from diffusion.planning.downloads import World, traffic
from verification import simulate_fleet
from verification.simulate_fleet import hash_steps, main, read_stream, synthetic_streams


def settings(**options: Any) -> OrderSettings:
    defaults: dict[str, Any] = {"seed": 1, "global_batch_size": 256, "num_canonical_nodes": 128}
    return OrderSettings(**(defaults | options))


def test_synthetic_streams():
    streams = synthetic_streams(790_000_000, 7, sample_bytes=8600)
    assert sum(stream.shape.num_samples for stream in streams) == 790_000_000
    for stream, next_one in pairwise(streams):
        assert next_one.shape.num_samples / stream.shape.num_samples == pytest.approx(2 / 3, abs=1e-6)
    assert all((stream.bytes_per_shard <= 2**28).all() and (stream.bytes_per_shard > 0).all() for stream in streams)


def test_a_stream_is_read_from_its_index(tmp_path: Path):
    with MDSWriter(out=str(tmp_path / "a"), columns={"text": "str"}, size_limit=200) as writer:
        for i in range(50):
            writer.write({"text": f"number {i}"})
    stream = read_stream(tmp_path / "a")
    files = sorted((tmp_path / "a").glob("*.mds"))
    assert stream.shape.num_samples == stream.shape.draws == 50
    assert stream.bytes_per_shard.tolist() == [file.stat().st_size for file in files]
    with pytest.raises(DataError, match="nothing"):
        read_stream(tmp_path / "nothing")


def test_other_steps_have_another_hash():
    order = GlobalOrder([one.shape for one in synthetic_streams(10_000, 3, sample_bytes=1)], settings())
    one, other = (
        hash_steps(order, World(num_nodes=1, ranks_per_node=8), epoch=1, start=start, stop=start + 7, num_workers=2)
        for start in (4, 5)
    )
    assert one != other


@pytest.mark.parametrize("block", [None, 3000])
@pytest.mark.parametrize("num_nodes", [1, 4, 16])
def test_traffic_against_the_samples_that_are_read(block: int | None, num_nodes: int):
    streams = synthetic_streams(400_000, 3, sample_bytes=10, shard_bytes=2000)
    options = settings(global_batch_size=512, num_canonical_nodes=32, shuffle_block_size=block)
    order = GlobalOrder([stream.shape for stream in streams], options)
    epoch = order.epoch(0)
    slots = epoch.slots(0, order.num_steps)
    shards_of_nodes, bytes_at, bytes_at_first = [], [], []
    for node in np.split(np.arange(512), num_nodes):
        first, last = {}, {}
        for stream, one in enumerate(streams):
            ends = np.cumsum(one.shape.samples_per_shard)
            chosen = slots.stream[:, node] == stream
            steps, shards = np.nonzero(chosen)[0], np.searchsorted(ends, slots.index[:, node][chosen], side="right")
            for step, shard in zip(steps.tolist(), shards.tolist(), strict=True):
                first.setdefault((stream, shard), step)
                last[stream, shard] = step
        shards_of_nodes.append(len(first))
        in_use = np.zeros(order.num_steps + 1)
        for (stream, shard), step in first.items():
            in_use[step] += streams[stream].bytes_per_shard[shard]
            in_use[last[stream, shard] + 1] -= streams[stream].bytes_per_shard[shard]
        bytes_at.append(np.cumsum(in_use).max())
        bytes_at_first.append(in_use[0])
    result = traffic(streams, epoch, World(num_nodes=num_nodes, ranks_per_node=8), images_per_second=1000.0)
    total = sum(len(stream.bytes_per_shard) for stream in streams)
    assert result.shards_in_use == total
    # What is fetched twice by a node that keeps nothing: shards that two of its lanes share, and those that were cut.
    assert sum(shards_of_nodes) <= result.shards_fetched < sum(shards_of_nodes) + 3 * 32 * 2
    assert result.cache_bytes < 1.15 * max(bytes_at)
    assert result.first_bytes >= max(bytes_at_first)
    mean = result.shards_per_node * 2000 / (order.num_steps * 512 / 1000)
    assert result.bytes_per_second == pytest.approx(mean, rel=0.05)
    assert result.peak_bytes_per_second >= 0


def test_the_order_of_790_million_samples_takes_less_than_2_seconds_and_30_mb():
    shapes = [stream.shape for stream in synthetic_streams(790_000_000, 7, sample_bytes=8600)]

    def first_batch() -> None:
        order = GlobalOrder(shapes, settings(global_batch_size=2048))
        RankOrder(order, rank=64, num_ranks=128).slots(1, order.num_steps // 2).addresses()

    seconds = []
    for _ in range(3):
        began = time.process_time()
        first_batch()
        seconds.append(time.process_time() - began)
    assert min(seconds) < 2
    tracemalloc.start()
    first_batch()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 30e6


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    options = ["--synthetic", "2e4", "--streams", "3", "--sample-kb", "2000", "--global-batch-size", "256",
               "--worlds", "1x8", "2x16"]  # fmt: skip
    main(options)
    text = capsys.readouterr().out
    assert "78 steps of 256 in an epoch; 128 lanes" in text
    assert "2 x 16" in text and "global batches are equal in all worlds" in text
    monkeypatch.setattr(simulate_fleet, "hash_steps", lambda order, world, **_: str(world))
    with pytest.raises(SystemExit, match="1"):
        main(options)
    with pytest.raises(DataError):
        main([str(tmp_path)])
    with pytest.raises(ConfigurationError, match="global_batch_size"):
        main(["--synthetic", "1000", "--streams", "2"])
