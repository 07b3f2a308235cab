"""How fast `prepare` is beside a loop that only decodes and copies."""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from diffusion.datasets.images import decode_rgb
from diffusion.preparation.prepare import prepare


def measure_preparing(*, num_pictures: int = 1000, side: int = 512, rounds: int = 3) -> dict[str, Any]:
    """Time `prepare` with one worker and the bare loop in turn.

    Bare: each JPEG of a folder is read, decoded once and appended to one file. `prepare` is everything: listing,
    decoding, measures, the order, shards on the disk, facts, manifest; without plug-ins, near-duplicates and report.

    Args:
        num_pictures: JPEG pictures that look like photographs to a decoder (smooth, with some noise).
        side: Their side in pixels.
        rounds: Times that each is measured; the median of the ratios of neighbours counts.

    Returns:
        `ratio` (rate of `prepare` over the bare one), `ratios`, `prepared_per_second` and `bare_per_second` (pictures,
        the best of the rounds), and the settings.
    """
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        _write_pictures(root / "pictures", num_pictures, side)
        bare, ours = [], []
        for number in range(rounds):
            bare.append(_bare(root / "pictures", root / f"copy-{number}"))
            start = time.perf_counter()
            prepare([root / "pictures"], root / f"prepared-{number}", num_workers=1)
            ours.append(time.perf_counter() - start)
    ratios = [mine / other for mine, other in zip(bare, ours, strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "prepared_per_second": num_pictures / min(ours),
        "bare_per_second": num_pictures / min(bare),
        "num_pictures": num_pictures,
        "side": side,
    }


def _write_pictures(folder: Path, num: int, side: int) -> None:
    """Write JPEG pictures with captions; 16 different ones, repeated with other captions."""
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
        (folder / f"{number:06}.txt").write_text(f"picture {number}", encoding="utf-8")


def _bare(folder: Path, copy: Path) -> float:
    """Seconds to read, decode and copy each picture of a folder."""
    start = time.perf_counter()
    with copy.open("wb") as file:
        for path in sorted(folder.glob("*.jpg")):
            data = path.read_bytes()
            decode_rgb(data)
            file.write(data)
    return time.perf_counter() - start
