"""How fast `prepare` is beside a loop that only decodes and copies."""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.timing import ratios, timed
from diffusion.datasets.images import decode_rgb
from diffusion.preparation.prepare import prepare


def measure_preparing(*, num_images: int = 1000, side: int = 512, rounds: int = 3) -> dict[str, Any]:
    """Time `prepare` with one worker and the bare loop in turn.

    Bare: each JPEG of a folder is read, decoded once and appended to one file. `prepare` is everything: listing,
    decoding (at a fraction of the size, which can make it faster than the bare loop), measures, the order, shards on
    the disk, facts, manifest; without plug-ins, near-duplicates and report. What comes once per process, imports above
    all, is taken apart: a preparation of a single image before the others.

    Args:
        num_images: JPEG images that look like photographs to a decoder (smooth, with some noise).
        side: Their side in pixels.
        rounds: Times that each is measured; the median of the ratios of neighbours counts.

    Returns:
        `ratio` (rate of `prepare` over the bare one), `ratios`, and the same of processor time (`timing.ratios`);
        `prepared_per_second` and `bare_per_second` (images, the best of the rounds); `start_seconds` and
        `start_cpu_seconds`; and the settings.
    """
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        _write_images(root / "images", num_images, side)
        _write_images(root / "one", 1, side)
        start = timed(lambda: prepare([root / "one"], root / "first", num_workers=1))
        bare, ours = [], []
        for number in range(rounds):
            bare.append(timed(partial(_bare, root / "images", root / f"copy-{number}")))
            ours.append(timed(partial(prepare, [root / "images"], root / f"prepared-{number}", num_workers=1)))
    return {
        **ratios(bare, ours),
        "prepared_per_second": num_images / min(one.clock for one in ours),
        "bare_per_second": num_images / min(one.clock for one in bare),
        "start_seconds": start.clock,
        "start_cpu_seconds": start.cpu,
        "num_images": num_images,
        "side": side,
    }


def _write_images(folder: Path, num: int, side: int) -> None:
    """Write JPEG images with captions; 16 different ones, repeated with other captions."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    drawn = []
    for _ in range(16):
        small = generator.integers(0, 256, (side // 16, side // 16, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC), np.int16)
        noisy = smooth + generator.normal(0, 6, smooth.shape).astype(np.int16)
        drawn.append(Image.fromarray(noisy.clip(0, 255).astype(np.uint8)))
    for number in range(num):
        drawn[number % len(drawn)].save(folder / f"{number:06}.jpg", quality=90)
        (folder / f"{number:06}.txt").write_text(f"image {number}", encoding="utf-8")


def _bare(folder: Path, copy: Path) -> None:
    """Read, decode and copy each image of a folder."""
    with copy.open("wb") as file:
        for path in sorted(folder.glob("*.jpg")):
            data = path.read_bytes()
            decode_rgb(data)
            file.write(data)
