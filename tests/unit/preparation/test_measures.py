import io
from itertools import combinations

import numpy as np
import pytest
from PIL import Image, ImageFilter

from diffusion.datasets.images import decode_reduced, decode_rgb
from diffusion.preparation.measures import REDUCED_SIDE, file_format, jpeg_scans, perceptual_hash, sharpness
from tests.tools.image_files import encode


def drawn(seed: int, width: int = 512, height: int = 384) -> Image.Image:
    """An image of soft spots in different colours."""
    spots = np.random.default_rng(seed).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    return Image.fromarray(spots).resize((width, height), Image.Resampling.BICUBIC)


def measured(image: Image.Image, image_format: str = "PNG", **options) -> dict:
    return measured_file(encode(image, image_format, **options))


def measured_file(data: bytes) -> dict:
    image = decode_reduced(data, REDUCED_SIDE).image
    return {"phash": perceptual_hash(image), "sharpness": sharpness(image)}


def distance(one: dict, other: dict) -> int:
    return (one["phash"] ^ other["phash"]).bit_count()


def test_scans_of_a_jpeg_are_counted_up_to_the_end_of_the_image():
    image = drawn(0, 300, 200)
    assert jpeg_scans(encode(image, "JPEG")) == 1
    progressive = encode(image, "JPEG", progressive=True)
    assert jpeg_scans(progressive) == progressive.count(b"\xff\xda") > 5
    within = encode(image, "JPEG", progressive=True, exif=b"Exif\0\0" + b"\xff\xda\0\2" * 200)
    assert jpeg_scans(within + b"\xff\xda\0\2" * 300) == jpeg_scans(progressive)
    sequential = encode(image, "JPEG")
    again = sequential[sequential.index(b"\xff\xda") : -2]
    assert jpeg_scans(sequential[:-2] + again * 9) == 1, "decoders read no other"
    assert jpeg_scans(encode(image)) == jpeg_scans(b"") == jpeg_scans(b"\xff\xd8") == 0
    for stop in range(0, len(progressive), 97):
        assert jpeg_scans(progressive[:stop]) <= jpeg_scans(progressive)


@pytest.mark.parametrize(
    ("image_format", "name"),
    [("JPEG", "jpeg"), ("PNG", "png"), ("WEBP", "webp"), ("GIF", "gif"), ("BMP", "bmp"), ("TIFF", "tiff"),
     ("JPEG2000", "jpeg2000"), ("PPM", "ppm")],
)  # fmt: skip
def test_the_format_is_that_of_the_content(image_format, name):
    assert file_format(encode(drawn(1, 40, 30), image_format)) == name


def test_a_file_of_no_known_signature():
    assert file_format(b"") == file_format(b"<svg>") == "other"


@pytest.mark.parametrize("size", [(1024, 768), (700, 525), (256, 192), (97, 73), (64, 48)])
def test_resized_and_recompressed_copies_are_near(size):
    for seed in range(8):
        original = measured(drawn(seed))
        for resampling in (Image.Resampling.LANCZOS, Image.Resampling.BICUBIC):
            copy = drawn(seed).resize(size, resampling)
            assert distance(original, measured(copy, "JPEG", quality=70)) <= 4


def test_different_images_are_not_near():
    found = [measured(drawn(seed, 256, 192)) for seed in range(40)]
    assert min(distance(one, other) for one, other in combinations(found, 2)) > 10


def test_colours_are_told_apart():
    shape = Image.new("L", (128, 128), 0)
    shape.paste(255, (30, 40, 100, 110))
    found = []
    for colour in ("#20a020", "#a05020", "#2060c0", "#606060"):
        image = Image.new("RGB", (128, 128), "white")
        image.paste(Image.new("RGB", (128, 128), colour), mask=shape)
        found.append(measured(image))
    assert min(distance(one, other) for one, other in combinations(found, 2)) > 4


@pytest.mark.parametrize("colour", ["white", "black", "#808080", "#c02030"])
def test_a_blank_image_has_the_same_hash_at_every_size(colour):
    sizes = ((1, 1), (2, 3), (40, 40), (512, 300), (1000, 1000))
    assert len({measured(Image.new("RGB", size, colour))["phash"] for size in sizes}) == 1


def test_sharpness_falls_with_blur_and_is_zero_without_detail():
    sharp = Image.fromarray(np.random.default_rng(3).integers(0, 256, (64, 96, 3), dtype=np.uint8))
    sharp = sharp.resize((768, 512), Image.Resampling.NEAREST)
    values = [measured(sharp.filter(ImageFilter.GaussianBlur(radius)))["sharpness"] for radius in (0, 4, 8, 16)]
    assert values == sorted(values, reverse=True)
    assert values[0] > 20 * values[-1]
    assert measured(Image.new("RGB", (300, 300), "red"))["sharpness"] == 0
    assert measured(Image.new("RGB", (2, 900), "red"))["sharpness"] == 0


def test_sharpness_is_the_variance_of_the_laplacian():
    image = Image.fromarray(np.random.default_rng(4).integers(0, 256, (20, 30, 3), dtype=np.uint8))
    grey = np.asarray(image.convert("L")).astype(float)
    laplacian = np.zeros((18, 28))
    for row, column, weight in ((0, 1, 1), (2, 1, 1), (1, 0, 1), (1, 2, 1), (1, 1, -4)):
        laplacian += weight * grey[row : row + 18, column : column + 28]
    assert measured(image)["sharpness"] == pytest.approx(laplacian.var(), abs=1e-3)


@pytest.mark.parametrize("size", [(1, 1), (5000, 3), (3, 5000), (97, 97), (191, 193)])
def test_any_shape_can_be_measured(size):
    assert 0 <= measured(Image.new("RGB", size, "blue"))["sharpness"] < 1


@pytest.mark.emoji
def test_copies_of_real_images_are_near_and_different_ones_are_not(data_folder):
    files = [path.read_bytes() for path in sorted((data_folder / "emoji/folder_512").glob("*.png"))[::3]]
    decoded = [decode_rgb(data) for data in files]
    found = [measured_file(data) for data in files]
    originals = np.array([one["phash"] for one in found], np.uint64)
    for size, quality in ((512, 60), (256, 75), (64, 95)):
        copies = []
        for image in decoded:
            data = io.BytesIO()
            image.resize((size, size), Image.Resampling.LANCZOS).save(data, "JPEG", quality=quality)
            copies.append(measured_file(data.getvalue())["phash"])
        near = np.bitwise_count(originals ^ np.array(copies, np.uint64)) <= 4
        assert near.mean() > 0.97, (size, quality)
    pairs = np.bitwise_count(originals[:, None] ^ originals)[np.triu_indices(len(originals), 1)] <= 4
    assert pairs.mean() < 0.001  # what is left are variants of one drawing
