import numpy as np
import pytest
import torch
from PIL import Image

from diffusion.config.data import Crop, ImageSize
from diffusion.datasets.sample_order import sample_address
from diffusion.datasets.transforms import ImageTransform
from diffusion.randomness import Purpose, random_word, random_words
from tests.tools.written_data import smooth_image


def square(image: Image.Image, resolution: int = 16) -> np.ndarray:
    """Resize the whole image, then cut the centre."""
    scale = resolution / min(image.size)
    size = round(image.width * scale), round(image.height * scale)
    resized = image.resize(size, Image.Resampling.LANCZOS)
    left, top = (size[0] - resolution) // 2, (size[1] - resolution) // 2
    return np.asarray(resized.crop((left, top, left + resolution, top + resolution))).transpose(2, 0, 1)


@pytest.mark.parametrize("size", [(64, 32), (32, 64), (32, 32), (16, 48), (128, 32), (16, 16)])
def test_centre_crop_equals_resizing_the_whole_image_and_cutting_the_centre(size: tuple[int, int]) -> None:
    image = smooth_image(0, *size)
    pixels = ImageTransform.square(16)(image)
    assert pixels.shape == (3, 16, 16)
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    np.testing.assert_array_equal(pixels, square(image))
    if size == (16, 16):
        np.testing.assert_array_equal(pixels, np.asarray(image).transpose(2, 0, 1))


@pytest.mark.parametrize("size", [(64, 32), (32, 64), (24, 16), (16, 48), (100, 30)])
def test_an_image_covers_a_rectangle_and_the_rest_is_cut_off(size: tuple[int, int]) -> None:
    height, width = 16, 24
    image = smooth_image(4, *size)
    pixels = ImageTransform(size=ImageSize(height, width))(image)
    assert pixels.shape == (3, height, width)
    scale = max(height / image.height, width / image.width)
    box = (image.width - width / scale) / 2, (image.height - height / scale) / 2
    corners = (*box, image.width - box[0], image.height - box[1])
    expected = image.resize((width, height), Image.Resampling.LANCZOS, box=corners)
    assert np.abs(pixels.astype(int) - np.asarray(expected).transpose(2, 0, 1)).max() <= 1


def test_fine_detail_is_averaged_and_not_aliased() -> None:
    checks = np.indices((128, 160)).sum(0) % 2 * 255
    pixels = ImageTransform.square(16)(Image.fromarray(checks.astype(np.uint8)).convert("RGB"))
    assert np.abs(pixels.astype(int) - 127.5).max() < 3


def test_random_crop_is_a_function_of_seed_epoch_and_sample() -> None:
    image = smooth_image(2, 64, 16)
    transform = ImageTransform.square(16, crop=Crop.random, seed=5)
    first = transform(image, epoch=1, sample=7)
    np.testing.assert_array_equal(first, transform(image, epoch=1, sample=7))
    assert not np.array_equal(first, transform(image, epoch=2, sample=7))
    assert not np.array_equal(first, transform(image, epoch=1, sample=8))
    assert not np.array_equal(first, ImageTransform.square(16, crop=Crop.random, seed=6)(image, epoch=1, sample=7))


@pytest.mark.parametrize(("length", "size"), [(128, ImageSize(32, 32)), (100, ImageSize(32, 48))])
def test_random_crop_reaches_both_ends_of_the_longer_side(length: int, size: ImageSize) -> None:
    """Across in an image of 128 x 32 pixels, down in one of 48 x 100."""
    ramp = np.arange(0, 2 * length, 2, dtype=np.uint8)
    levels = np.tile(ramp, (32, 1)) if size.width == 32 else np.tile(ramp[:, None], (1, 48))
    transform, room = ImageTransform(size=size, crop=Crop.random), length - 32
    image = Image.fromarray(levels).convert("RGB")
    starts = np.array([transform(image, sample=i)[0, 0, 0] for i in range(400)], np.float64) / 2
    assert starts.min() < 2
    assert room - 2 < starts.max() <= room + 0.5
    assert abs(starts.mean() - room / 2) < 3 * room / np.sqrt(12 * 400)


@pytest.mark.parametrize(("crop", "flip"), [(Crop.centre, 0.0), (Crop.random, 0.0), (Crop.random, 1.0)])
@pytest.mark.parametrize("size", [(96, 40), (40, 96), (64, 48), (24, 16)])
def test_the_placement_says_what_was_cut_off(size: tuple[int, int], crop: Crop, flip: float) -> None:
    width, height = size
    transform = ImageTransform(size=ImageSize(16, 24), crop=crop, horizontal_flip=flip, seed=2)
    across = np.broadcast_to(np.linspace(0, 255, width)[None, :], (height, width))
    down = np.broadcast_to(np.linspace(0, 255, height)[:, None], (height, width))
    ramps = Image.fromarray(np.stack([across, down, down], axis=2).astype(np.uint8))
    scale = max(24 / width, 16 / height)
    seen = set()
    for sample in range(20):
        placement = transform.placement(size, epoch=1, sample=sample)
        assert (placement.original_height, placement.original_width) == (height, width)
        assert (placement.height, placement.width) == (16, 24)
        pixels = transform(ramps, epoch=1, sample=sample)[:, 8, 12].astype(float)
        x, y = (placement.left + 12.5) / (width * scale), (placement.top + 8.5) / (height * scale)
        np.testing.assert_allclose(pixels[:2], [255 * (1 - x if flip else x), 255 * y], atol=12)  # Half a pixel is 8.
        seen.add(placement)
    assert (len(seen) > 5) == (crop is Crop.random and scale * max(width / 24, height / 16) > 1.2)


def test_the_placement_of_a_centre_crop() -> None:
    assert ImageTransform.square(512).placement((2048, 1024)) == (1024, 2048, 0, 256, 512, 512)
    assert ImageTransform(size=ImageSize(896, 1152)).placement((1152, 1792)) == (1792, 1152, 448, 0, 896, 1152)


def test_flip_has_its_probability_and_mirrors() -> None:
    image = smooth_image(3, 32, 32)
    plain = ImageTransform.square(16)(image)
    transform = ImageTransform.square(16, horizontal_flip=0.25, seed=1)
    flipped = 0
    for sample in range(400):
        pixels = transform(image, epoch=3, sample=sample)
        is_mirrored = np.array_equal(pixels, plain[:, :, ::-1])
        assert is_mirrored or np.array_equal(pixels, plain)
        flipped += is_mirrored
    assert abs(flipped - 100) < 3 * np.sqrt(400 * 0.25 * 0.75)
    np.testing.assert_array_equal(ImageTransform.square(16, horizontal_flip=1.0)(image), plain[:, :, ::-1])


def test_the_identity_stays_what_it_was_and_only_a_deterministic_transform_has_one() -> None:
    assert ImageTransform.square(256, seed=9).identity() == "lanczos-centre-crop-256-v1"
    assert ImageTransform(size=ImageSize(896, 1152)).identity() == "lanczos-centre-crop-896x1152-v1"
    with pytest.raises(AssertionError):
        ImageTransform.square(256, horizontal_flip=0.5).identity()
    with pytest.raises(AssertionError):
        ImageTransform.square(256, crop=Crop.random).identity()


def test_scalar_random_words_are_those_of_tensors() -> None:
    for stream, index, occurrence in [(0, 0, 0), (3, 123_456_789_012, 5), (1023, 2**40 - 1, 8191)]:
        sample = int(sample_address(stream, index, occurrence))
        for epoch in (0, 1, 2**32 - 1):
            words = random_words(2**32 - 1, Purpose.CROP, torch.tensor([epoch]), torch.tensor([sample]), 1)
            assert random_word(2**32 - 1, Purpose.CROP, epoch, sample) == words.item()
