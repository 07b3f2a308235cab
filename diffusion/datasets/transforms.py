"""From a decoded image to the pixels that are trained on.

The image is resized to cover the size and the rest is cut off, in one step: the part that is kept is chosen in the
image's own coordinates and resampled with Lanczos (Pillow, antialiased, no prior reduction), which gives the same
pixels as resizing the whole image first and costs less. A random crop or flip is addressed by (seed, epoch, sample).

Shape letters: H, W height and width in pixels.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diffusion.config.data import Crop, ImageSize
from diffusion.datasets.images import resample
from diffusion.randomness import Purpose, random_word

_VERSION = 1
"""Raised whenever the same image would give other pixels: encoded data of another version are refused."""


class Placement(NamedTuple):
    """SDXL's size and crop conditioning of an image (Podell et al. 2023, section 2.2), in pixels and in its order."""

    original_height: int
    original_width: int
    top: int
    """Rows that were cut off above, after resizing."""
    left: int
    """Columns that were cut off on the left, after resizing (and mirroring)."""
    height: int
    width: int


@dataclass(frozen=True, kw_only=True)
class ImageTransform:
    """Resize an image to cover a size, cut off what is beyond it, perhaps mirror it."""

    size: ImageSize
    """Height and width of the result."""

    crop: Crop = Crop.centre
    horizontal_flip: float = 0.0
    """Probability of mirroring."""

    seed: int = 0

    @classmethod
    def square(cls, resolution: int, **options: Any) -> "ImageTransform":
        """The transform to a square: the shorter side is resized to the resolution."""
        return cls(size=ImageSize(resolution, resolution), **options)

    def identity(self) -> str:
        """Name what a deterministic transform does, for the manifest of encoded data."""
        assert self.crop == Crop.centre and self.horizontal_flip == 0, f"{self} has no identity"
        height, width = self.size
        return f"lanczos-centre-crop-{height if height == width else f'{height}x{width}'}-v{_VERSION}"

    def __call__(self, image: Image.Image, *, epoch: int = 0, sample: int = 0) -> NDArray[np.uint8]:
        """Transform an RGB image to uint8 [3, H, W]; epoch and `sample_address` address the random numbers."""
        left, top, width, height = self._part(image.size, epoch, sample)
        box = (left, top, min(left + width, image.width), min(top + height, image.height))
        pixels = np.asarray(resample(image, (self.size.width, self.size.height), Image.Resampling.LANCZOS, box))
        if self._is_mirrored(epoch, sample):
            pixels = pixels[:, ::-1]
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))

    def placement(self, size: tuple[int, int], *, epoch: int = 0, sample: int = 0) -> Placement:
        """Return the size and crop conditioning (SDXL) of an image of a width and height in pixels."""
        left, top, width, height = self._part(size, epoch, sample)
        if self._is_mirrored(epoch, sample):
            left = size[0] - width - left
        top, left = round(top * self.size.height / height), round(left * self.size.width / width)
        return Placement(size[1], size[0], top, left, *self.size)

    def _part(self, size: tuple[int, int], epoch: int, sample: int) -> tuple[float, float, float, float]:
        """Left, top, width and height of the part of an image that is kept, in its own coordinates."""
        width, height = size  # Reduced to the largest part that has the aspect ratio of the result.
        if width * self.size.height <= height * self.size.width:
            height = width * self.size.height / self.size.width
        else:
            width = height * self.size.width / self.size.height
        offset = 0.5  # As a fraction of the room there is.
        if self.crop != Crop.centre:
            offset = random_word(self.seed, Purpose.CROP, epoch, sample) / (2**32 - 1)
        return (size[0] - width) * offset, (size[1] - height) * offset, width, height

    def _is_mirrored(self, epoch: int, sample: int) -> bool:
        threshold = round(self.horizontal_flip * 2**32)
        return threshold > 0 and random_word(self.seed, Purpose.FLIP, epoch, sample) < threshold
