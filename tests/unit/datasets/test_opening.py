import pytest

from benchmarks.opening import measure_opening


@pytest.mark.slow
@pytest.mark.parametrize("num_streams", [1, 40])
def test_what_a_rank_needs_before_its_first_batch_of_790_million_samples(num_streams: int) -> None:
    measured = measure_opening(80_000, num_streams)
    assert measured["cpu_seconds"] < 10, measured
    assert measured["mebibytes"] < 500, measured
    # An index of each stream, the shards of the first batch, and what was fetched ahead by then.
    assert measured["requests"] <= num_streams + 8 * 16, measured
