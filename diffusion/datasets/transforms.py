"""From a decoded picture to the square of pixels that is trained on.

The shorter side is resized to the resolution and a square is cut out, in one step: the square is chosen in the
picture's own coordinates and resampled with Lanczos (Pillow, antialiased, no prior reduction), which gives the same
pixels as resizing the whole picture first and costs less. A random crop or flip is addressed by (seed, epoch, sample).

Shape letters: R resolution in pixels.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diffusion.config.data import Crop
from diffusion.randomness import Purpose, random_word

_VERSION = 1
"""Raised whenever the same picture would give other pixels: encoded data of another version are refused."""


@dataclass(frozen=True, kw_only=True)
class SquareTransform:
    """Resize the shorter side to the resolution, cut a square, perhaps mirror it."""

    resolution: int
    """Side of the square (R)."""

    crop: Crop = Crop.centre
    """Where the square is cut."""

    horizontal_flip: float = 0.0
    """Probability of mirroring."""

    seed: int = 0
    """Seed of the run; unused by a deterministic transform."""

    @property
    def is_deterministic(self) -> bool:
        """Whether the pixels are a function of the picture alone."""
        return self.crop == Crop.centre and self.horizontal_flip == 0

    def identity(self) -> str:
        """Name what a deterministic transform does, for the manifest of encoded data."""
        assert self.is_deterministic, f"{self} has no identity"
        return f"lanczos-centre-crop-{self.resolution}-v{_VERSION}"

    def __call__(self, picture: Image.Image, *, epoch: int = 0, sample: int = 0) -> NDArray[np.uint8]:
        """Transform one picture.

        Args:
            picture: RGB.
            epoch: epoch that the random numbers are addressed by.
            sample: address of the sample (`diffusion.randomness.sample_address`).

        Returns:
            uint8 [3, R, R].
        """
        side = min(picture.size)
        offset = self._offset(epoch, sample)
        left, top = (picture.width - side) * offset, (picture.height - side) * offset
        square = picture.resize(
            (self.resolution, self.resolution), Image.Resampling.LANCZOS, box=(left, top, left + side, top + side)
        )
        pixels = np.asarray(square)
        if self._is_mirrored(epoch, sample):
            pixels = pixels[:, ::-1]
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))

    def _offset(self, epoch: int, sample: int) -> float:
        """Offset of the square along the longer side, as a fraction of the room there is."""
        if self.crop == Crop.centre:
            return 0.5
        return random_word(self.seed, Purpose.CROP, epoch, sample) / (2**32 - 1)

    def _is_mirrored(self, epoch: int, sample: int) -> bool:
        threshold = round(self.horizontal_flip * 2**32)
        return threshold > 0 and random_word(self.seed, Purpose.FLIP, epoch, sample) < threshold
