import pytest

from benchmarks.loading import measure_image_loading, measure_latent_loading

pytestmark = pytest.mark.slow


def test_latents_load_faster_than_with_a_stock_loader() -> None:
    measured = measure_latent_loading(num_samples=2048, rounds=8, webdataset=False)
    assert measured["ratio_to_stock"] >= 1.5, measured


def test_images_load_about_as_fast_as_they_decode() -> None:
    measured = measure_image_loading(num_samples=96, rounds=8)
    assert measured["ratio_to_bare"] >= 0.6, measured
