"""Plug-ins, a source and a scanned data set for tests of scores."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from PIL import Image

from diffusion.preparation.records import Partition
from diffusion.preparation.scan import Scan
from tests.tools.image_files import encode
from tests.tools.metadata_parts import ToySource, write_part

COLOURS = ["red", "green", "white", "blue", "black", "gray", "yellow"]
CALLS: list[Any] = []


class Redness:
    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, images, captions):
        CALLS.append([image.getpixel((0, 0)) for image in images])
        return [self.scale * image.getpixel((0, 0))[0] for image in images]


class NumCaptions:
    reads_images = False

    def __call__(self, images, captions):
        assert all(image is None for image in images)
        CALLS.append(captions)
        return [len(texts) for texts in captions]


class Captioner:
    """Has no words for white."""

    def __call__(self, images, captions):
        CALLS.append([image.getpixel((0, 0)) for image in images])
        return [" " if image.getpixel((0, 0)) == (255, 255, 255) else "generated\n" for image in images]


class FirstWords:
    """Values by caption, None without an entry."""

    reads_images = False

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def __call__(self, images, captions):
        return [self.values.get(texts[0]) for texts in captions]


class VisibleGpus:
    """Value: CUDA_VISIBLE_DEVICES of the worker."""

    def __call__(self, images, captions):
        return [os.environ.get("CUDA_VISIBLE_DEVICES", "all") or "none"] * len(images)


@dataclass(frozen=True)
class ScannedData:
    """A data set that was scanned."""

    out: Path
    source: ToySource
    scan: Scan


def write_scan(folder: Path) -> ScannedData:
    """Write two partitions: seven images, of which 4 has no caption and 5 is rejected; and three images."""
    CALLS.clear()
    source: Any = ToySource(str(folder / "images"))
    for partition, colours in enumerate((COLOURS, COLOURS[:3])):
        rows = []
        for i, colour in enumerate(colours):
            content = encode(Image.new("RGB", (8, 6), colour))
            path = folder / "images" / str(partition) / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            reason = {4: "missing_caption", 5: "undecodable"}.get(i, "")
            rows.append({"key": f"toy/{partition}/{i}.png", "file": f"{partition}/{i}.png", "version": "1",
                         "xxh128": None if i == 5 else xxhash.xxh3_128_hexdigest(content),
                         "captions": [] if i == 4 else [f"{colour} {partition}"], "reason": reason})  # fmt: skip
        write_part(folder / "out", partition, rows)
    return ScannedData(folder / "out", source, Scan([source], [Partition(number=i) for i in range(2)]))
