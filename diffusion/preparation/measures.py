"""Measures of an image, taken while it is decoded: hashes that identify copies, sharpness, file format.

Everything but the hash of the file is computed from an image that was decoded at a fraction of its size, at a tenth of
what decoding costs.
"""

import functools
import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diffusion.datasets.images import decode_reduced, resample

REDUCED_SIDE = 96
"""Longer side in pixels of the grey image that sharpness is measured on; smaller ones are not enlarged."""

HASH_SIDE = 32
"""Side in pixels of the image that the perceptual hash is made of."""

_GREY_LEVEL = HASH_SIDE**2 * 2**24
"""One level of 256 over the whole image, in the units of the transform."""

_BRIGHTNESS_TOLERANCE = _GREY_LEVEL // 8
_COLOUR_TOLERANCE = _GREY_LEVEL

_SCAN, _END, _SEQUENTIAL, _PROGRESSIVE = b"\xda", b"\xd9", (b"\xc0", b"\xc1"), b"\xc2"
_HUFFMAN = b"\xc4"
_HOLE_BYTES = 512
"""Bytes of a sector of a disk; smooth gradients make some hundred zeros."""

_FLAT = range(0, 0xF0, 0x10)
"""Values that end a block, or several of a progressive JPEG, or say that the level stays."""

_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)
"""In the data of a scan: the end of it."""

_GREY = ((128, 128, 128), (64, 64, 64))
"""Colours that a JPEG decoder gives to blocks without data; the second is that of CMYK."""

_MORE_DATA = bytes(range(1, 255)) * 4
"""Data of a scan that change each block without data."""

_SIGNATURES = (
    (b"\xff\xd8\xff", "jpeg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF8", "gif"),
    (b"BM", "bmp"),
    (b"II*\0", "tiff"),
    (b"MM\0*", "tiff"),
    (b"II+\0", "tiff"),
    (b"MM\0+", "tiff"),
    (b"\0\0\0\x0cjP  ", "jpeg2000"),
    (b"\xff\x4f\xff\x51", "jpeg2000"),
)


def jpeg_scans(data: bytes) -> int:
    """Count the scans of a JPEG file up to the end of its first image; 0 for other files.

    A sequential JPEG whose first scan has all components has one: decoders read no other.
    """
    scans, num_components = 0, None
    for marker, segment, _ in _jpeg_segments(data):
        if marker in _SEQUENTIAL:
            num_components = segment[5:6]
        if marker == _SCAN:
            scans += 1
            if segment[:1] == num_components:
                return scans
    return scans


def _jpeg_segments(data: bytes) -> Iterator[tuple[bytes, bytes, int]]:
    """Yield marker, content and end of the segments of a JPEG file's first image."""
    position = 2 if data[:2] == b"\xff\xd8" else len(data)
    while (position := data.find(b"\xff", position)) >= 0:  # Decoders skip other bytes between segments.
        marker = data[position + 1 : position + 2]
        if marker in (b"", _END):
            return
        if marker in (b"\xff", b"\0"):
            position += 1
            continue
        end = position + 2 + int.from_bytes(data[position + 2 : position + 4], "big")
        yield marker, data[position + 4 : end], end
        position = _end_of_scan(data, end) if marker == _SCAN else end


def _end_of_scan(data: bytes, start: int) -> int:
    found = _MARKER.search(data, start)
    return found.start() if found else len(data)


def is_truncated(data: bytes, rgb: Image.Image, max_pixels: int) -> bool:
    """Check that a file is a JPEG of which a part was lost, though its decoder says nothing.

    It has no end marker after its first scan, a progressive one lacks scans, zeros stand in a scan
    where they mean anything but a flat area (as a copy over a failing disk leaves them), or its decoder still wants
    data before that marker: where a corner has the grey of missing data, more data change the image.

    `rgb` is the image that `decode_reduced` made of the file at `REDUCED_SIDE`.
    """
    if data[:3] != b"\xff\xd8\xff":
        return False
    start = next((end for marker, _, end in _jpeg_segments(data) if marker == _SCAN), None)
    if start is None:  # Decoders find no scan, either.
        return False
    end = data.find(b"\xff" + _END, start)
    if end < 0 or _lacks_scans(data) or _has_hole(data):
        return True
    right, bottom = rgb.width - 1, rgb.height - 1
    if not any(rgb.getpixel(corner) in _GREY for corner in ((0, 0), (right, 0), (0, bottom), (right, bottom))):
        return False
    longer = decode_reduced(data[:end] + _MORE_DATA + data[end:], REDUCED_SIDE, max_pixels).image
    return longer.tobytes() != rgb.tobytes()


def _lacks_scans(data: bytes) -> bool:
    """Check that a progressive JPEG lacks scans: some coefficients of a component, or the last bits of some."""
    missing = set[tuple[int, int]]()
    for marker, segment, _ in _jpeg_segments(data):
        if marker in _SEQUENTIAL:
            return False
        if marker == _PROGRESSIVE:
            missing = {(component, number) for component in segment[6::3] for number in range(64)}
        if marker == _SCAN and len(segment) > 3:
            first, last, bits = segment[-3:]
            if not bits & 15:  # Bits that a later scan refines.
                missing -= {(component, number) for component in segment[1:-3:2] for number in range(first, last + 1)}
    return bool(missing)


def _has_hole(data: bytes) -> bool:
    """Check that a scan of a JPEG holds zeros that encode no flat area.

    The code of zeros is that of the first value of a Huffman table. A flat area needs a difference of 0 and an end of
    the block from it; the last bits of coefficients, which a later scan refines, may be zeros anywhere.
    """
    if bytes(_HOLE_BYTES) not in data:
        return False
    values = dict[int, int]()
    for marker, segment, start in _jpeg_segments(data):
        while marker == _HUFFMAN and len(segment) > 17:
            values[segment[0]] = segment[17]
            segment = segment[17 + sum(segment[1:17]) :]
        if marker != _SCAN or len(segment) <= 3:
            continue
        scan = data[start : _end_of_scan(data, start)].rstrip(b"\0")  # Zeros before the next marker are padding.
        if bytes(_HOLE_BYTES) in scan:
            first, last, bits = segment[-3:]
            tables = [table >> 4 for table in segment[2:-3:2] if first == 0]
            tables += [16 | table & 15 for table in segment[2:-3:2] if last > 0]
            if not bits >> 4 and any(values.get(table, 0) not in _FLAT for table in tables):
                return True
    return False


def file_format(data: bytes) -> str:
    """Return the format of an image file from its first bytes; `other` for what has no signature that is known here."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    if data[4:8] == b"ftyp":
        return "avif"
    if data[:1] == b"P" and data[1:2].isdigit():
        return "ppm"
    return next((name for signature, name in _SIGNATURES if data.startswith(signature)), "other")


def perceptual_hash(rgb: Image.Image) -> int:
    """Hash what an RGB image looks like: copies that were resized or recompressed differ in a few of 64 bits.

    Brightness makes 48 bits: of the discrete cosine transform of 32 x 32 values, the lowest frequencies are compared
    with their median (pHash: Zauner 2010). Colour makes 16, so that a green heart is not a brown one:
    whether each of the 8 lowest frequencies of Cb and Cr is above a small value. The bits of the brightness are the
    high ones. The arithmetic is exact: the hash is the same on every machine.
    """
    transform, bright, coloured = _frequencies()
    small = resample(rgb, (HASH_SIDE, HASH_SIDE), Image.Resampling.BOX).convert("YCbCr")
    values = np.frombuffer(small.tobytes(), np.uint8).reshape(HASH_SIDE, HASH_SIDE, 3)
    values = values.transpose(2, 0, 1).astype(np.float64)
    spectrum = transform @ values @ transform.T
    frequencies = spectrum[0][bright]
    middle = np.sort(frequencies)[len(frequencies) // 2 - 1 : len(frequencies) // 2 + 1].sum()
    bits = [2 * frequencies > middle + 2 * _BRIGHTNESS_TOLERANCE]
    bits += [spectrum[channel, :3, :3][coloured] > _COLOUR_TOLERANCE for channel in (1, 2)]
    return int.from_bytes(np.packbits(np.concatenate(bits)).tobytes(), "big")


def sharpness(rgb: Image.Image) -> float:
    """Return the variance of the Laplacian (four neighbours) in squared grey values of 256, at `REDUCED_SIDE`.

    Images below 3 px have 0.
    """
    grey, shrink = rgb.convert("L"), max(rgb.size) / REDUCED_SIDE
    if shrink > 1:
        size = max(round(rgb.width / shrink), 1), max(round(rgb.height / shrink), 1)
        grey = resample(grey, size, Image.Resampling.BOX)
    pixels = np.frombuffer(grey.tobytes(), np.uint8).reshape(grey.height, grey.width).astype(np.int16)
    if min(pixels.shape) < 3:
        return 0.0
    laplacian = pixels[:-2, 1:-1] + pixels[2:, 1:-1]
    laplacian += pixels[1:-1, :-2]
    laplacian += pixels[1:-1, 2:]
    laplacian -= pixels[1:-1, 1:-1] * np.int16(4)
    wide = laplacian.astype(np.int32).ravel()
    return float(wide @ wide) / wide.size - (float(wide.sum()) / wide.size) ** 2


@functools.cache
def _frequencies() -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]:
    """The discrete cosine transform (DCT-II) times 2^12, in whole numbers, and the frequencies that are compared.

    Products of it with 32 x 32 bytes stay below 2^53: sums are exact in any order.

    Returns:
        float64 [8, 32]; the 48 frequencies of brightness, bool [8, 8]; the 8 of each colour, bool [3, 3].
    """
    places = (np.arange(HASH_SIDE) + 0.5) * np.pi / HASH_SIDE
    transform = np.rint(2**12 * np.cos(np.arange(8)[:, None] * places))
    sums = np.add.outer(np.arange(8), np.arange(8))
    return transform, (sums >= 1) & (sums <= 9), sums[:3, :3] >= 1
