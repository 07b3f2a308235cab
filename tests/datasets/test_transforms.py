import numpy as np
import pytest
import torch
from PIL import Image

from diffusion.config.data import Crop
from diffusion.datasets.transforms import SquareTransform
from diffusion.randomness import Purpose, random_word, random_words, sample_address
from tests.written_data import picture


def square(image: Image.Image, resolution: int = 16) -> np.ndarray:
    """Resize the whole picture, then cut the centre."""
    scale = resolution / min(image.size)
    size = round(image.width * scale), round(image.height * scale)
    resized = image.resize(size, Image.Resampling.LANCZOS)
    left, top = (size[0] - resolution) // 2, (size[1] - resolution) // 2
    return np.asarray(resized.crop((left, top, left + resolution, top + resolution))).transpose(2, 0, 1)


@pytest.mark.parametrize("size", [(64, 32), (32, 64), (32, 32), (16, 48), (128, 32)])
def test_centre_crop_equals_resizing_the_whole_picture_and_cutting_the_centre(size: tuple[int, int]) -> None:
    image = picture(0, *size)
    pixels = SquareTransform(resolution=16)(image)
    assert pixels.shape == (3, 16, 16)
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    np.testing.assert_array_equal(pixels, square(image))


def test_a_picture_of_the_right_size_keeps_its_pixels() -> None:
    image = picture(1, 16, 16)
    np.testing.assert_array_equal(SquareTransform(resolution=16)(image), np.asarray(image).transpose(2, 0, 1))


def test_fine_detail_is_averaged_and_not_aliased() -> None:
    checks = np.indices((128, 160)).sum(0) % 2 * 255
    pixels = SquareTransform(resolution=16)(Image.fromarray(checks.astype(np.uint8)).convert("RGB"))
    assert np.abs(pixels.astype(int) - 127.5).max() < 3


def test_random_crop_is_a_function_of_seed_epoch_and_sample() -> None:
    image = picture(2, 64, 16)
    transform = SquareTransform(resolution=16, crop=Crop.random, seed=5)
    first = transform(image, epoch=1, sample=7)
    np.testing.assert_array_equal(first, transform(image, epoch=1, sample=7))
    assert not np.array_equal(first, transform(image, epoch=2, sample=7))
    assert not np.array_equal(first, transform(image, epoch=1, sample=8))
    assert not np.array_equal(first, SquareTransform(resolution=16, crop=Crop.random, seed=6)(image, epoch=1, sample=7))


def test_random_crop_covers_the_longer_side_and_only_that() -> None:
    ramp = np.tile(np.arange(0, 256, 2, dtype=np.uint8), (32, 1))
    image = Image.fromarray(ramp).convert("RGB")
    transform = SquareTransform(resolution=32, crop=Crop.random)
    lefts = np.array([transform(image, sample=i)[0, 0, 0] for i in range(400)], np.float64) / 2
    assert lefts.min() < 3
    assert 93 < lefts.max() <= 96.5
    assert abs(lefts.mean() - 48) < 3 * 96 / np.sqrt(12 * 400)


def test_flip_has_its_probability_and_mirrors() -> None:
    image = picture(3, 32, 32)
    plain = SquareTransform(resolution=16)(image)
    transform = SquareTransform(resolution=16, horizontal_flip=0.25, seed=1)
    flipped = 0
    for sample in range(400):
        pixels = transform(image, epoch=3, sample=sample)
        is_mirrored = np.array_equal(pixels, plain[:, :, ::-1])
        assert is_mirrored or np.array_equal(pixels, plain)
        flipped += is_mirrored
    assert abs(flipped - 100) < 3 * np.sqrt(400 * 0.25 * 0.75)
    np.testing.assert_array_equal(SquareTransform(resolution=16, horizontal_flip=1.0)(image), plain[:, :, ::-1])


def test_only_a_deterministic_transform_has_an_identity() -> None:
    assert SquareTransform(resolution=256).identity() == SquareTransform(resolution=256, seed=9).identity()
    assert SquareTransform(resolution=256).identity() != SquareTransform(resolution=512).identity()
    with pytest.raises(AssertionError):
        SquareTransform(resolution=256, horizontal_flip=0.5).identity()
    with pytest.raises(AssertionError):
        SquareTransform(resolution=256, crop=Crop.random).identity()


def test_scalar_random_words_are_those_of_tensors() -> None:
    for stream, index, occurrence in [(0, 0, 0), (3, 123_456_789_012, 5), (1023, 2**40 - 1, 8191)]:
        sample = int(sample_address(stream, index, occurrence))
        for epoch in (0, 1, 2**32 - 1):
            words = random_words(2**32 - 1, Purpose.CROP, torch.tensor([epoch]), torch.tensor([sample]), 1)
            assert random_word(2**32 - 1, Purpose.CROP, epoch, sample) == words.item()
