"""Colours by an ICC profile, such as Display P3 of phones or Adobe RGB of cameras, converted to sRGB."""

import functools
import io
from typing import Any

import numpy as np
from PIL import Image, ImageCms

_MAX_PROFILE_BYTES = 2**22
"""Profiles of printers have 3 MB."""

_TOLERANCE = 4
"""Levels of 256 by which a profile may differ from sRGB to be taken for it: its variants do by 1 to 3."""

_MODES = ("RGB", "L", "CMYK")


def to_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """Convert an image to RGB, by its profile if it has one that differs from sRGB and fits."""
    image = image if image.mode in _MODES else image.convert("RGB")
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
