"""Copies of training images, altered in several ways: `python -m tests.tools.altered_copies PREPARED OUT`."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from diffusion.evaluation.images import PreparedSamples
from diffusion.launch import CommandParser, run_command


def recompressed(image: Image.Image) -> Image.Image:
    """The image after JPEG at quality 60."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=60)
    return Image.open(buffer).convert("RGB")


def shifted(image: Image.Image, pixels: int) -> Image.Image:
    """The image, moved down and to the right; the colour of its corner comes in."""
    moved = Image.new("RGB", image.size, image.getpixel((0, 0)))
    moved.paste(image, (pixels, pixels))
    return moved


def recoloured(image: Image.Image) -> Image.Image:
    """The image with another hue (by 11 degrees), 10 % less saturation and 5 % less brightness."""
    hue, saturation, value = np.moveaxis(np.asarray(image.convert("HSV")).astype(float), -1, 0)
    changed = np.stack([(hue + 8) % 256, saturation * 0.9, value * 0.95], axis=-1)
    return Image.fromarray(changed.astype(np.uint8), "HSV").convert("RGB")


ALTERED: dict[str, Callable[[Image.Image], Image.Image]] = {
    "same": lambda image: image,
    "jpeg": recompressed,
    "shifted": lambda image: shifted(image, 2),
    "recoloured": recoloured,
}


NUM_IMAGES = 300


def main() -> None:
    """Write a folder of images for each alteration."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("prepared", type=Path, help="prepared data")
    parser.add_argument("out", type=Path, help="new folder")
    arguments = parser.parse_args()
    samples, out = PreparedSamples(arguments.prepared / "train"), arguments.out
    for name, alter in ALTERED.items():
        (out / name).mkdir(parents=True)
        for i in np.linspace(0, len(samples) - 1, NUM_IMAGES).astype(int):
            alter(samples.keyed_image(int(i))[1]).save(out / name / f"{i:05d}.png")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
