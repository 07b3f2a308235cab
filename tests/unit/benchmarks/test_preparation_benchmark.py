import pytest

from benchmarks.driver import measure_driver
from benchmarks.preparation import measure_mixing


def test_larger_windows_mix_more_and_a_full_shuffle_most():
    options = {"num_partitions": 64, "images_per_partition": 200, "image_bytes": 1000, "shard_bytes": 100_000}
    one, eight, full = measure_mixing(**options, windows=(1, 8, None), batch_size=128, num_steps=4)
    assert one["partitions_of_shard"] < 4 < 7 < eight["partitions_of_shard"] <= 16 < 40 < full["partitions_of_shard"]
    assert full["partitions_of_shard"] == pytest.approx(64 * (1 - (1 - 1 / 64) ** 100), rel=0.05)
    assert full["partitions_of_batch_shard"] == pytest.approx(64 * (1 - (1 - 1 / 64) ** 128), rel=0.1)
    assert one["partitions_of_batch_shard"] <= one["partitions_of_batch_block"]
    assert one["shards"] > full["shards"]


def test_the_driver_of_a_scan_is_measured():
    assert measure_driver(20)["partitions"] == 20
