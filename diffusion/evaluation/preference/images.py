"""Images as raters get them: pixels only, in one format, and the images of attention checks."""

import io
from pathlib import Path

import numpy as np
import xxhash
from PIL import Image, ImageOps

from diffusion.errors import DataError

NOISE = -1
BLANK = -2
"""In place of a model's number: no image of a model, but noise, or one grey."""

_GREY = 128


def served_image(path: Path) -> bytes:
    """Encode an image anew as an RGB PNG: the same pixels, and nothing else of the file.

    Raises:
        DataError: the file is no image.
    """
    return _png(_decoded(path))


def check_image(model: int, path: Path, seed: int) -> bytes:
    """Make the meaningless image of an attention check, PNG, as large as the image beside it.

    Args:
        model: NOISE or BLANK.
        path: the image beside it.
        seed: of the noise.
    """
    width, height = _decoded(path).size
    if model == BLANK:
        return _png(Image.new("RGB", (width, height), (_GREY, _GREY, _GREY)))
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return _png(Image.fromarray(pixels))


def checksum(path: Path) -> str:
    """Checksum of a file's bytes, hexadecimal.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        return xxhash.xxh3_128_hexdigest(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _decoded(path: Path) -> Image.Image:
    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{path}: cannot be decoded as an image: {error}") from error


def _png(image: Image.Image) -> bytes:
    """Encode pixels alone: an image made of them has none of the text or profile that came with the file."""
    buffer = io.BytesIO()
    Image.fromarray(np.asarray(image)).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()
