import gc
import hashlib
import io
import random
import struct
import subprocess
import sys
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageFile, PngImagePlugin

from diffusion.datasets import images
from diffusion.datasets.images import UndecodableImageError, decode_reduced, decode_rgb, resample
from tests.tools.image_files import encode, noise

WHITE, RED = (255, 255, 255), (255, 0, 0)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, depth: int, colour_type: int, rows: bytes, *chunks: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    body = [png_chunk(b"IHDR", header), *chunks, png_chunk(b"IDAT", zlib.compress(rows)), png_chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def pixels(data: bytes) -> list[list[list[int]]]:
    image = decode_rgb(data)
    assert image.mode == "RGB"
    return np.asarray(image).tolist()


def test_rgb_png_is_exact():
    data = noise(7, 5)
    assert np.array_equal(np.asarray(decode_rgb(data)), np.asarray(Image.open(io.BytesIO(data))))


def test_rgba_on_white():
    image = Image.new("RGBA", (3, 1))
    image.putdata([(255, 0, 0, 255), (255, 0, 0, 0), (0, 0, 0, 51)])
    assert pixels(encode(image)) == [[[255, 0, 0], [255, 255, 255], [204, 204, 204]]]


def test_grey_with_alpha_on_white():
    image = Image.new("LA", (2, 1))
    image.putdata([(10, 255), (10, 0)])
    assert pixels(encode(image)) == [[[10, 10, 10], [255, 255, 255]]]


@pytest.mark.parametrize("image_format", ["PNG", "GIF"])
def test_palette_with_transparency_on_white(image_format):
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putdata([0, 1])
    assert pixels(encode(image, image_format, transparency=1)) == [[[255, 0, 0], [255, 255, 255]]]


def test_palette_with_partial_transparency():
    image = Image.new("P", (2, 1))
    image.putpalette([0, 0, 0, 0, 0, 255])
    image.putdata([0, 1])
    assert pixels(encode(image, transparency=bytes([51, 255]))) == [[[204, 204, 204], [0, 0, 255]]]


def test_palette_without_transparency():
    image = Image.new("P", (2, 1))
    image.putpalette([1, 2, 3, 4, 5, 6])
    image.putdata([0, 1])
    assert pixels(encode(image)) == [[[1, 2, 3], [4, 5, 6]]]


def test_png_transparent_colours():
    rgb = png(2, 1, 8, 2, bytes([0, 9, 9, 9, 1, 2, 3]), png_chunk(b"tRNS", struct.pack(">3H", 9, 9, 9)))
    grey = png(2, 1, 8, 0, bytes([0, 9, 77]), png_chunk(b"tRNS", struct.pack(">H", 9)))
    grey16 = png(2, 1, 16, 0, b"\0" + struct.pack(">2H", 900, 32896), png_chunk(b"tRNS", struct.pack(">H", 900)))
    rgb16 = png(
        2, 1, 16, 2, b"\0" + struct.pack(">6H", 0x900, 0x900, 0x900, 0x100, 0x200, 0x300),
        png_chunk(b"tRNS", struct.pack(">3H", 0x900, 0x900, 0x900)),
    )  # fmt: skip
    assert pixels(rgb) == [[[255] * 3, [1, 2, 3]]]
    assert pixels(grey) == [[[255] * 3, [77] * 3]]
    assert pixels(grey16) == [[[255] * 3, [128] * 3]]
    assert pixels(rgb16) == [[[255] * 3, [1, 2, 3]]]


@pytest.mark.parametrize(("bits", "row"), [(2, 0b00_01_11_00), (4, 0b0001_1111)])
def test_transparent_grey_of_few_bits(bits, row):
    data = png(2, 1, bits, 0, bytes([0, row << (bits == 2) * 2 & 255]), png_chunk(b"tRNS", struct.pack(">H", 1)))
    assert pixels(data) == [[[255] * 3, [255] * 3]]
    opaque = png(2, 1, bits, 0, bytes([0, row << (bits == 2) * 2 & 255]))
    assert pixels(opaque) == [[[255 // (2**bits - 1)] * 3, [255] * 3]]


def test_a_dark_transparent_colour_of_sixteen_bits():
    rows = b"\0" + struct.pack(">6H", 0, 0, 200, 0x100, 0x200, 0x300)
    data = png(2, 1, 16, 2, rows, png_chunk(b"tRNS", struct.pack(">3H", 0, 0, 200)))
    assert pixels(data) == [[[255] * 3, [1, 2, 3]]]


def test_sixteen_bits_with_white_as_the_lowest_value():
    samples = np.array([[0, 32896, 65535]], dtype=np.uint16)
    data = encode(Image.fromarray(samples), "TIFF")
    entry = struct.pack("<HHI", 262, 3, 1)  # PhotometricInterpretation
    assert pixels(data.replace(entry + b"\1\0", entry + b"\0\0")) == [[[255] * 3, [127] * 3, [0] * 3]]


def test_long_texts_and_profiles_of_a_png():
    text = PngImagePlugin.PngInfo()
    text.add_text("comment", "x" * 2**21, zip=True)
    assert pixels(encode(Image.new("RGB", (1, 1), RED), pnginfo=text)) == [[[255, 0, 0]]]
    assert pixels(encode(Image.new("RGB", (1, 1), RED), icc_profile=bytes(2**21))) == [[[255, 0, 0]]]


def profile(*, wide: bool) -> bytes:
    """Make an sRGB profile, or swap its red and green primaries, which stands for a wide gamut."""
    data = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    return data.replace(b"rXYZ", b"?XYZ").replace(b"gXYZ", b"rXYZ").replace(b"?XYZ", b"gXYZ") if wide else data


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
def test_colours_are_converted_by_the_profile_where_that_is_asked_for(mode):
    image = Image.new("RGB", (8, 8), (200, 30, 40)).convert(mode)
    plain = pixels(encode(image))
    wide, narrow = (encode(image, icc_profile=profile(wide=wide)) for wide in (True, False))
    assert pixels(wide) == pixels(narrow) == plain
    converted = np.asarray(decode_rgb(wide, convert_to_srgb=True))[0, 0].astype(int)
    assert np.abs(converted - np.array(plain)[0, 0, [1, 0, 2]]).max() <= 2
    assert np.asarray(decode_rgb(narrow, convert_to_srgb=True)).tolist() == plain
    damaged = encode(image, icc_profile=b"no profile")
    assert np.asarray(decode_rgb(damaged, convert_to_srgb=True)).tolist() == plain


def grey_profile() -> bytes:
    """Make a profile of grey levels that are linear in light."""
    tags = [
        (b"wtpt", struct.pack(">4s4x3i", b"XYZ ", 63190, 65536, 54061)),
        (b"kTRC", struct.pack(">4s4xIH2x", b"curv", 1, 256)),
    ]
    header = struct.pack(">4xI4s4s4s12x4s28x3i48x", 0x02400000, b"mntr", b"GRAY", b"XYZ ", b"acsp", 63190, 65536, 54061)
    starts = np.cumsum([128 + 4 + 24, *(len(data) for _, data in tags)])
    table = struct.pack(">I", 2)
    for (name, data), start in zip(tags, starts, strict=False):
        table += struct.pack(">4sII", name, start, len(data))
    content = header + table + b"".join(data for _, data in tags)
    return struct.pack(">I", 4 + len(content)) + content


@pytest.mark.parametrize("kind", ["L", "LA", "L and a transparent value", "I;16", "TIFF of I;16"])
def test_grey_levels_are_converted_by_a_profile_of_grey(kind):
    levels = Image.fromarray(np.array([[0, 10, 50, 255]], np.uint8))
    mask = Image.new("L", levels.size, 255)
    options = {"icc_profile": grey_profile()}
    if kind == "LA":
        mask.putpixel((1, 0), 128)
        data = encode(Image.merge("LA", (levels, mask)), **options)
    elif "I;16" in kind:
        samples = np.asarray(levels).astype(np.uint16) * 257
        data = encode(Image.fromarray(samples), "TIFF" if "TIFF" in kind else "PNG", **options)
    else:
        if kind != "L":
            mask.putpixel((1, 0), 0)
            options["transparency"] = 10
        data = encode(levels, **options)
    source = ImageCms.ImageCmsProfile(io.BytesIO(grey_profile()))
    converted = ImageCms.profileToProfile(levels, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
    assert converted is not None and converted.getpixel((2, 0)) > (100, 100, 100)
    expected = Image.composite(converted, Image.new("RGB", levels.size, WHITE), mask)
    assert np.asarray(decode_rgb(data, convert_to_srgb=True)).tolist() == np.asarray(expected).tolist()


def test_sixteen_bits_are_scaled_not_clipped():
    samples = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)
    expected = [[[0] * 3, [1] * 3, [128] * 3, [255] * 3]]
    assert pixels(encode(Image.fromarray(samples))) == expected
    assert pixels(encode(Image.fromarray(samples), "TIFF")) == expected
    assert pixels(encode(Image.fromarray(samples.astype(np.int32)), "PPM")) == expected
    assert pixels(png(1, 1, 16, 2, b"\0" + struct.pack(">3H", 0, 32896, 65535))) == [[[0, 128, 255]]]


def test_white_of_a_tiff_of_twelve_bits_or_signed():
    entry = struct.Struct("<HHII").pack  # tag, type, count, value
    packed = encode(Image.fromarray(np.array([[0x00, 0x08, 0x08, 0xFF, 0xFF, 0xFF]], np.uint8)), "TIFF")
    packed = packed.replace(entry(256, 4, 1, 6), entry(256, 4, 1, 4))  # ImageWidth
    packed = packed.replace(entry(258, 3, 1, 8), entry(258, 3, 1, 12))  # BitsPerSample
    assert pixels(packed) == [[[0] * 3, [128] * 3, [255] * 3, [255] * 3]]
    samples = np.array([[0, 16448, 32767]], dtype=np.uint16)
    assert pixels(encode(Image.fromarray(samples), "TIFF", tiffinfo={339: 2})) == [[[0] * 3, [128] * 3, [255] * 3]]


def test_wider_samples_are_refused():
    for image in (Image.new("F", (2, 2), 0.5), Image.fromarray(np.full((2, 2), 70000, np.int32))):
        with pytest.raises(UndecodableImageError, match="no defined range") as caught:
            decode_rgb(encode(image, "TIFF"))
        assert caught.value.reason == "undecodable"


def test_cmyk_grey_and_bilevel():
    cmyk = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    assert pixels(encode(cmyk, "TIFF"))[0][0] == [255, 0, 0]
    red = decode_rgb(encode(cmyk, "JPEG", quality=100)).getpixel((4, 4))
    assert all(abs(value - wanted) < 6 for value, wanted in zip(red, RED, strict=True))
    assert pixels(encode(Image.new("L", (1, 1), 99))) == [[[99] * 3]]
    assert pixels(encode(Image.new("1", (1, 1), 1))) == [[[255] * 3]]


def test_the_separate_first_image_of_an_animation_is_not_taken():
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    options = {"save_all": True, "append_images": frames}
    separate = encode(Image.new("RGB", (8, 8)), "PNG", default_image=True, **options)
    with pytest.raises(UndecodableImageError, match="first image"):
        decode_reduced(separate, 8)
    assert decode_reduced(encode(frames[1], "PNG", **options), 8).image.getpixel((0, 0)) == (0, 0, 255)


def test_first_frame_of_an_animation():
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "lime", "blue")]
    for image_format, options in (("GIF", {}), ("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {})):
        data = encode(frames[0], image_format, save_all=True, append_images=frames[1:], **options)
        assert pixels(data)[0][0] == [255, 0, 0], image_format
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    data = encode(clear, "WEBP", save_all=True, append_images=[Image.new("RGBA", (4, 4), "red")], lossless=True)
    assert pixels(data)[0][0] == [255] * 3


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "TIFF", "WEBP", "AVIF"])
def test_exif_orientation(image_format):
    stored = Image.new("RGB", (32, 16))
    stored.paste("red", (0, 0, 16, 16))
    red_at = {1: "left", 2: "right", 3: "right", 4: "left", 5: "top", 6: "top", 7: "bottom", 8: "bottom"}
    for orientation, side in red_at.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        image = decode_rgb(encode(stored, image_format, exif=exif))
        assert image.size == ((32, 16) if orientation < 5 else (16, 32))
        far = (image.width - 3, image.height - 3)
        red = image.getpixel((2, 2) if side in ("left", "top") else far)
        black = image.getpixel(far if side in ("left", "top") else (2, 2))
        assert red[0] > 200 and black[0] < 50, (orientation, red, black)
        assert image.getexif().get(0x0112, 1) == 1, "it would be turned again"


def test_damaged_exif_is_upright():
    data = encode(Image.new("RGB", (8, 4)), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\xff\xff\xff")
    assert decode_rgb(data).size == (8, 4)


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF"])
def test_truncated_is_refused(image_format):
    data = noise(40, 40, image_format=image_format)
    for share in (0.1, 0.5, 0.9):
        with pytest.raises(UndecodableImageError) as caught:
            decode_rgb(data[: int(len(data) * share)])
        assert caught.value.reason == "undecodable"
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 100, b"this is text", b"<svg></svg>", b"\xff\xd8\xff", b"%!PS-Adobe-3.0 EPSF"]
)
def test_no_image_is_refused(data):
    with pytest.raises(UndecodableImageError) as caught:
        decode_rgb(data)
    assert caught.value.reason == "undecodable"
    assert str(caught.value)


def test_damaged_files_never_raise_anything_else():
    rng = random.Random(17)
    exif = Image.Exif()
    exif[0x0112] = 6
    originals = [noise(16, 16, image_format=name) for name in ("PNG", "GIF", "WEBP", "TIFF", "BMP", "JPEG2000", "AVIF")]
    originals += [noise(16, 16, image_format="JPEG", exif=exif), encode(Image.new("P", (9, 9)), transparency=0)]
    refused = 0
    for original in originals:
        for _ in range(60):
            data = bytearray(original)
            for _ in range(rng.randint(1, 6)):
                data[rng.randrange(min(len(data), 120))] = rng.randrange(256)
            refused += bool(verdict(bytes(data)))
    assert 0 < refused < 540


def test_bombs_are_too_large(monkeypatch):
    limit = images.MAX_PIXELS
    bombs = [png(side, side, 1, 0, b"") for side in (int(limit**0.5) + 1, int((2 * limit) ** 0.5) + 2, 2**31 - 1)]
    for bomb in bombs:
        with pytest.raises(UndecodableImageError) as caught:
            decode_rgb(bomb)
        assert caught.value.reason == "too_large"
    monkeypatch.setattr(images, "MAX_BYTES", 10)
    with pytest.raises(UndecodableImageError, match="bytes are more than 10") as caught:
        decode_rgb(noise(4, 4))
    assert caught.value.reason == "too_large"


def test_no_warnings_and_no_lasting_filters():
    palette = encode(Image.new("P", (4, 4)), transparency=bytes([0, 255]))
    gc.collect()  # What other tests have left open would warn when it is collected.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        for data in (palette, noise(4, 4), b"text", noise(40, 40, image_format="TIFF")[:-50]):
            verdict(data)
        assert warnings.filters == before
    assert caught == []


def verdict(data: bytes, decode=decode_rgb) -> str:
    try:
        decode(data)
    except UndecodableImageError as error:
        return error.reason
    return ""


def soft(width: int, height: int) -> Image.Image:
    spots = np.random.default_rng(5).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(spots).resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize(("width", "height", "reduction"), [(63, 40, 1), (64, 40, 2), (40, 130, 4), (1000, 750, 8)])
def test_reduced_by_a_power_of_two_whatever_the_format(width, height, reduction):
    found = []
    for image_format, options in (("JPEG", {"quality": 95}), ("PNG", {}), ("WEBP", {"lossless": True})):
        reduced = decode_reduced(encode(soft(width, height), image_format, **options), 32)
        assert (reduced.width, reduced.height) == (width, height)
        assert reduced.image.size == (-(-width // reduction), -(-height // reduction))
        found.append(np.asarray(reduced.image).astype(float))
    assert max(abs(found[0] - other).mean() for other in found[1:]) < 4
    assert (found[1] == found[2]).all()


def test_a_reduced_image_is_upright():
    exif = Image.Exif()
    exif[0x0112] = 6
    for image_format in ("JPEG", "PNG", "TIFF"):
        reduced = decode_reduced(encode(soft(400, 300), image_format, exif=exif), 32)
        assert (reduced.width, reduced.height) == (300, 400)
        assert reduced.image.height > reduced.image.width


@pytest.mark.parametrize("options", [{}, {"progressive": True}])
def test_reduced_decoding_refuses_what_full_decoding_refuses(options):
    whole, chance = encode(soft(200, 160), "JPEG", quality=90, **options), random.Random(1)
    damaged = [whole[: chance.randrange(len(whole))] for _ in range(150)]
    for _ in range(150):
        flipped = bytearray(whole)
        flipped[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        damaged.append(bytes(flipped))
    verdicts = [verdict(data) for data in damaged]
    assert [verdict(data, lambda data: decode_reduced(data, 16)) for data in damaged] == verdicts
    assert 100 < sum(one == "undecodable" for one in verdicts) < 300


def test_worker_modules_are_light():
    program = (
        "import sys; import diffusion.datasets.images, diffusion.datasets.buckets;"
        "import diffusion.preparation.scan, diffusion.preparation.write, diffusion.preparation.prepare;"
        "print([name for name in ('torch', 'streaming', 'composer', 'ray', 'duckdb') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_resampled_pixels_are_those_of_pillow_11() -> None:
    """The digest was computed with `Image.resize` of Pillow 11.3."""
    rows, columns = np.indices((128, 40))
    pixels = np.stack([rows * 37 + columns * 11, rows * columns, rows * 5 ^ columns * 7], axis=-1).astype(np.uint8)
    digest = hashlib.sha256()
    for size, box in (((16, 16), (0, 44.25, 40, 84.25)), ((20, 50), None), ((64, 100), (1.5, 2, 30, 120))):
        for kind in (Image.Resampling.LANCZOS, Image.Resampling.BOX):
            digest.update(np.asarray(resample(Image.fromarray(pixels), size, kind, box)).tobytes())
    assert digest.hexdigest()[:16] == "c6da0c9eb9ec3538"
