"""Opening and reading data is as fast as docs/performance.md says, beside its limits on the same machine."""

import pytest

from benchmarks.data import measure_image_loading, measure_latent_loading, measure_opening

pytestmark = pytest.mark.slow


def test_latents_load_faster_than_with_a_stock_loader() -> None:
    measured = measure_latent_loading(num_samples=2048, rounds=8)
    assert measured["ratio_cpu"] >= 1.5, measured


def test_images_load_about_as_fast_as_they_decode() -> None:
    measured = measure_image_loading(num_samples=96, rounds=8)
    assert measured["ratio_cpu"] >= 0.6, measured


def test_first_batch_of_790_million_samples() -> None:
    measured = measure_opening(num_shards=80_000, num_streams=40)
    assert measured["cpu_seconds"] < 10, measured
    assert measured["mebibytes"] < 500, measured
    # An index of each stream, the shards of the first batch, and what was fetched ahead by then.
    assert measured["requests"] <= 40 + 8 * 16, measured
