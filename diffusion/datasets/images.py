"""Bytes of an image file to an RGB image: the one way in which preparation, encoding and training decode.

The image is what a viewer shows on a white page: upright by its EXIF (or else XMP) orientation, transparency composited
on white, 16-bit samples scaled to 8 bits, the first frame of an animation. Colour profiles are applied if that is asked
for, which is part of a data set's identity.
"""

import functools
import io
import struct
import warnings
import zlib
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageCms, ImageFile, PngImagePlugin

FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "JPEG2000", "AVIF", "PPM")
"""Formats that are opened. Those that run other programs or have no signature (EPS, WMF, TGA ...) are rejected."""

EXTENSIONS = frozenset(
    f".{name}"
    for name in (
        *("jpg", "jpeg", "jpe", "jfif", "mpo", "png", "apng", "webp", "gif", "bmp", "dib", "tif", "tiff"),
        *("jp2", "j2k", "jpx", "avif", "ppm", "pgm", "pbm", "pnm"),
    )
)
"""File name extensions, lower case, that are taken for an image; the content decides how it is decoded."""

MAX_BYTES = 512 * 2**20
"""Largest image file, in bytes."""

BYTES_PER_PIXEL = 4
"""Memory that Pillow takes for a pixel of a decoded image."""

MAX_PIXELS = 2**29
"""Pixels of the largest image: 2 GiB."""

_PNG_TEXT_BYTES = 2**26
"""Texts and profile of a PNG, decompressed."""

_BITS, _PHOTOMETRIC, _SAMPLE_FORMAT = 258, 262, 339
_MIN_IS_WHITE, _SIGNED = 0, (2,)
_ORIENTATION = 0x0112
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)
_DECODER_ERRORS = (
    *(OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError, AttributeError, ArithmeticError),
    *(RuntimeError, struct.error, zlib.error),
)
"""Exceptions of Pillow's decoders on damaged or hostile files."""


_GREY_STEPS = {"L;2": 85, "L;4": 17}
"""Levels of 256 between those of grey images with few bits."""

_MAX_PROFILE_BYTES = 2**22
"""Profiles of printers have 3 MB."""

_TOLERANCE = 4
"""Levels of 256 by which a profile may differ from sRGB to be taken for it: its variants do by 1 to 3."""

_PROFILE_MODES = ("RGB", "L", "CMYK")


class UndecodableImageError(ValueError):
    """An image that cannot be decoded to RGB."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        """`undecodable` or `too_large`."""


class Reduced(NamedTuple):
    """An image that was decoded at a fraction of its size, upright."""

    image: Image.Image
    """Mode RGB."""
    width: int
    """Pixels at the full size, like `height`."""
    height: int


def decode_rgb(data: bytes, *, convert_to_srgb: bool = False) -> Image.Image:
    """Decode an image file to a loaded image of mode RGB, 8 bits per channel, converted to sRGB if it is to be.

    Raises:
        UndecodableImageError: the data is empty, truncated, damaged, of an unknown format or mode, or too large.
    """
    return _decode(data, None, MAX_PIXELS, convert_to_srgb).image


def decode_reduced(data: bytes, side: int, max_pixels: int = MAX_PIXELS) -> Reduced:
    """Decode an image file at 1/2, 1/4 or 1/8 of its size; still the whole file is read and checked.

    A JPEG is reduced by its decoder (which spares the rest of the inverse transform), others by averages of squares of
    pixels: nearly the same. Errors are those of `decode_rgb`, for the same files, and one for animated PNGs whose first
    image is no frame: browsers show the animation, `decode_rgb` the image.

    Args:
        data: the whole file.
        side: the longer side does not become shorter than so many pixels.
        max_pixels: an image that has more is too large; before it is decoded.
    """
    return _decode(data, side, max_pixels, False)


def resample(
    image: Image.Image,
    size: tuple[int, int],
    kind: Image.Resampling,
    box: tuple[float, float, float, float] | None = None,
) -> Image.Image:
    """Resize the part of an image within a box (left, top, right, bottom; None: all) to a width and height.

    Rows are resampled before columns. The order decides how 8-bit values between them are rounded, and Pillow chooses
    it by the sizes since version 13: pixels, and encoded data with them, would depend on the version.
    """
    left, top, right, bottom = box or (0, 0, *image.size)
    rows = image.resize((size[0], image.height), kind, box=(left, 0, right, image.height))
    return rows.resize(size, kind, box=(0, top, size[0], bottom))


def _decode(data: bytes, side: int | None, max_pixels: int, convert_to_srgb: bool) -> Reduced:
    if not data:
        raise UndecodableImageError("undecodable", "the file is empty")
    if len(data) > MAX_BYTES:
        raise UndecodableImageError("too_large", f"{len(data)} bytes are more than {MAX_BYTES}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(io.BytesIO(_with_alpha(data)), formats=_formats()) as image:
                full = image.size
                if full[0] * full[1] > max_pixels:
                    raise UndecodableImageError("too_large", f"{full[0]} x {full[1]} pixels, more than {max_pixels}")
                if side is not None and getattr(image, "default_image", False):
                    raise ValueError("an animated PNG whose first image is not of the animation; write it without it")
                _scale_transparent_colour(image)
                reduction = 1 if side is None else _reduction(max(full), side)
                if reduction > 1:
                    image.draft("RGB", (max(full[0] // reduction, 1), max(full[1] // reduction, 1)))  # JPEG only
                is_reduced = image.size != full
                image.load()
                width, height = full if is_reduced else image.size  # a TIFF is turned when it is loaded
                orientation = _orientation(image)
                rgb = _to_rgb(image, image.info.get("icc_profile") if convert_to_srgb else None)
                if reduction > 1 and not is_reduced:
                    rgb = rgb.reduce(reduction)
        except UndecodableImageError:
            raise
        except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
            raise UndecodableImageError("too_large", str(error)) from error
        except _DECODER_ERRORS as error:
            message = str(error).split("<_io.BytesIO", maxsplit=1)[0].strip()
            raise UndecodableImageError("undecodable", message or type(error).__name__) from error
    if orientation in _TRANSPOSE:
        rgb = rgb.transpose(_TRANSPOSE[orientation])
    if orientation in _SIDEWAYS:
        width, height = height, width
    return Reduced(rgb, width, height)


def _reduction(longer: int, side: int) -> int:
    reduction = 1  # At most 8, as by JPEG decoders.
    while reduction < 8 and longer >= 2 * reduction * side:
        reduction *= 2
    return reduction


@functools.cache
def _formats() -> tuple[str, ...]:
    """Return the formats that Pillow can open; its limits become those of this module."""
    Image.init()
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS
    PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY = _PNG_TEXT_BYTES
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _orientation(image: Image.Image) -> int:
    """Return the orientation of a loaded image (EXIF, or else XMP); 1 (upright) where that is missing or damaged."""
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except _DECODER_ERRORS:
        return 1
    return orientation if isinstance(orientation, int) else 1


def _with_alpha(data: bytes) -> bytes:
    """Set the flag of an animated WebP that it has transparency: Pillow shows the canvas in black without it."""
    if data[:4] == b"RIFF" and data[8:16] == b"WEBPVP8X" and len(data) > 20 and data[20] & 0x02:
        return data[:20] + bytes([data[20] | 0x10]) + data[21:]
    return data


def _to_rgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """Convert a loaded image of any mode to RGB, transparency on white."""
    if image.mode == "I" or image.mode.startswith("I;16"):
        return _to_srgb(_sixteen_bits_to_grey(image), profile)
    if image.mode == "F":
        raise ValueError("floating-point samples have no defined range")
    if image.has_transparency_data:
        rgba = image if image.mode == "RGBA" else image.convert("RGBA")
        colours = image.getchannel("L") if image.mode in ("L", "LA") else rgba
        page = Image.new("RGB", image.size, "white")
        page.paste(_to_srgb(colours, profile), mask=rgba.getchannel("A"))
        return page
    rgb = _to_srgb(image, profile)
    rgb.info.clear()  # the orientation in it is applied by the caller and must not be applied again
    return rgb


def _sixteen_bits_to_grey(image: Image.Image) -> Image.Image:
    """Scale grey samples of 16 bits (in a TIFF: or 12, or signed) to 0 to 255, a transparent value to white."""
    samples, tags = np.asarray(image), getattr(image, "tag_v2", {})
    bits, is_signed = tags.get(_BITS), tags.get(_SAMPLE_FORMAT) == _SIGNED
    white = 4095 if bits == (12,) else 32767 if bits == (16,) and is_signed else 65535
    if samples.min() < 0 or samples.max() > white:
        raise ValueError("negative and 32-bit samples have no defined range")
    levels = ((np.arange(white + 1) * 255 + white // 2) // white).astype(np.uint8)
    if tags.get(_PHOTOMETRIC) == _MIN_IS_WHITE:
        levels = levels[::-1]
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        levels[transparent] = 255
    grey, step = np.empty(samples.shape, np.uint8), max(1, 2**20 // image.width)
    for start in range(0, len(samples), step):  # Indices take 8 bytes each.
        grey[start : start + step] = levels[samples[start : start + step]]
    return Image.fromarray(grey)


def _scale_transparent_colour(image: Image.Image) -> None:
    """Bring the transparent colour of a PNG that is not loaded yet to the 8 bits that Pillow decodes it to."""
    colour = image.info.get("transparency")
    if image.format != "PNG" or not isinstance(image, ImageFile.ImageFile) or not image.tile:
        return
    bits = image.tile[0].args
    if bits == "RGB;16B" and isinstance(colour, tuple):
        image.info["transparency"] = tuple(value >> 8 for value in colour)
    elif bits in _GREY_STEPS and isinstance(colour, int):
        image.info["transparency"] = colour * _GREY_STEPS[bits]


# Colours by an ICC profile, such as Display P3 of phones or Adobe RGB of cameras.


def _to_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """Convert an image to RGB, by its profile if it has one that differs from sRGB and fits."""
    image = image if image.mode in _PROFILE_MODES else image.convert("RGB")
    transform = _transform(profile, image.mode) if profile and len(profile) <= _MAX_PROFILE_BYTES else None
    if transform is None:
        return image.convert("RGB")
    converted = ImageCms.applyTransform(image, transform)
    assert converted is not None
    return converted


@functools.lru_cache(maxsize=32)
def _transform(profile: bytes, mode: str) -> Any:
    """Return the transform of a profile; None if it is sRGB, damaged, or one of another mode."""
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        transform = ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB")
        samples = _samples(mode)
        converted = ImageCms.applyTransform(samples, transform)
        assert converted is not None
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return None
    difference = np.asarray(converted).astype(int) - np.asarray(samples.convert("RGB"))
    return transform if np.abs(difference).max() > _TOLERANCE else None


def _samples(mode: str) -> Image.Image:
    """Return an image of colours that are spread over all of a mode."""
    bands = len(Image.new(mode, (1, 1)).getbands())
    levels = np.linspace(0, 255, 9 if bands > 1 else 256).round().astype(np.uint8)
    colours = np.stack(np.meshgrid(*[levels] * bands), axis=-1).reshape(1, -1, bands)
    return Image.fromarray(colours[..., 0] if bands == 1 else colours, mode)
