"""Drawings of concepts in styles in which they were held out: prompts of a grid, and scores of generated ones.

    python -m benchmarks.held_out prompts TRAIN HELD_OUT --out FOLDER
    python -m benchmarks.held_out scores TRAIN HELD_OUT IMAGES --out FOLDER --cells FOLDER_OF_THE_GRID'S_IMAGES

TRAIN and HELD_OUT are prepared data sets whose metadata has `concept` and `style`; IMAGES holds one image for each
held-out drawing, in its order. Each image is compared with all drawings, of training and held out. A model that has
learned what a style is draws the held-out drawing, which it has never seen; one that remembers draws a drawing of
training.
"""

import argparse
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from diffusion.errors import DataError
from diffusion.evaluation.images import PreparedSamples, read_image
from diffusion.evaluation.prompts import open_images
from diffusion.files import write_json
from diffusion.formats.marks import Mark, save_marked
from diffusion.launch import CommandParser, run_command

NUM_CONCEPTS = 10
"""Rows of the grid."""

SIDE = 16
"""Side in pixels at which drawings are compared."""

FRAME = (220, 40, 40)


class Drawing(NamedTuple):
    """A drawing of a data set."""

    concept: str
    style: str
    caption: str
    image: Image.Image
    is_held_out: bool


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("prompts", "scores"):
        command = commands.add_parser(name)
        command.add_argument("train", type=Path)
        command.add_argument("held_out", type=Path)
        if name == "scores":
            command.add_argument("images", type=Path)
            command.add_argument("--cells", type=Path, required=True, help="images of the prompts, by generate.py")
        command.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    """Write the prompts of the grid, or scores and grids."""
    options = parse_arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    drawings = [*read(options.train, is_held_out=False), *read(options.held_out, is_held_out=True)]
    cells = choose_cells(drawings)
    if options.command == "prompts":
        lines = (json.dumps({"prompt": cell.caption}) for row in cells for cell in row)
        (options.out / "cells.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return
    images, generated = ([read_image(one.path) for one in open_images(f)] for f in (options.images, options.cells))
    if len(generated) != sum(map(len, cells)):
        raise DataError(f"{options.cells} has {len(generated)} images: generate one for each of the prompts")
    result, found = score(drawings, images)
    write_json(options.out / "held_out.json", result)
    print(json.dumps(result, indent=2))
    mark = Mark(model=options.out.resolve().name)
    save_marked(draw_grid(cells, generated), options.out / "grid.png", mark)
    save_marked(draw_pairs(drawings, images, found), options.out / "pairs.png", mark)


def read(root: Path, *, is_held_out: bool) -> Iterator[Drawing]:
    """Read the drawings of a prepared data set, in its order; a DataError if one has no caption, concept or style."""
    samples = PreparedSamples(root)
    for number in range(len(samples)):
        sample, (key, image) = samples.sample(number, ["captions", "metadata"]), samples.keyed_image(number)
        about = sample["metadata"]
        if not {"concept", "style"} <= about.keys() or not sample["captions"]:
            raise DataError(f"{root}: {key} lacks a caption, or concept and style in its metadata")
        yield Drawing(about["concept"], about["style"], sample["captions"][0], image, is_held_out)


def choose_cells(drawings: list[Drawing]) -> list[list[Drawing]]:
    """Choose concepts by hash that exist in all styles, some held out: a row of drawings by style for each."""
    styles = sorted({one.style for one in drawings})
    by_concept: dict[str, dict[str, Drawing]] = defaultdict(dict)
    for one in drawings:
        by_concept[one.concept][one.style] = one
    complete = [
        concept
        for concept, row in by_concept.items()
        if len(row) == len(styles) and any(one.is_held_out for one in row.values())
    ]
    if not complete:
        raise DataError("no concept exists in all styles and was held out in one: a grid needs one")
    complete.sort(key=lambda concept: hashlib.sha256(concept.encode()).digest())
    return [[by_concept[concept][style] for style in styles] for concept in complete[:NUM_CONCEPTS]]


def score(drawings: list[Drawing], images: list[Image.Image]) -> tuple[dict[str, Any], NDArray[np.int64]]:
    """Compare images of the held-out pairs with all drawings.

    Returns:
        Shares in percent, and for each image the number of the nearest drawing of training.

    Raises:
        DataError: there is not one image for each held-out drawing.
    """
    from diffusion.evaluation.nearest import nearest

    asked = [number for number, one in enumerate(drawings) if one.is_held_out]
    trained = [number for number, one in enumerate(drawings) if not one.is_held_out]
    if len(images) != len(asked):
        raise DataError(f"there are {len(images)} images for {len(asked)} held-out drawings: generate one for each")
    queries, references = reduced(images), reduced([one.image for one in drawings])
    own = np.linalg.norm(queries - references[asked], axis=1)
    indexes, distances = nearest(queries, references[trained], 1)
    _, of_asked = nearest(queries, references[asked], 1)
    first = own <= np.minimum(distances, of_asked)[:, 0]
    found = np.array(trained)[indexes[:, 0]]
    pairs = [(drawings[number], drawings[near]) for number, near in zip(asked, found, strict=True)]

    def share(matches: Iterable[bool]) -> float:
        return round(100 * float(np.mean(list(matches))), 1)

    result = {
        "images": len(images),
        "nearest of all drawings is the held-out one, %": share(first),
        "nearest training drawing has the style, %": share(a.style == b.style for a, b in pairs),
        "nearest training drawing has the concept, %": share(a.concept == b.concept for a, b in pairs),
    }
    return result, found


def reduced(images: list[Image.Image]) -> NDArray[np.float32]:
    """Pixels at a low resolution, 0 to 255: float32 [N, 3 S S]."""
    return np.stack([np.asarray(one.resize((SIDE, SIDE), Image.Resampling.BOX), np.float32).ravel() for one in images])


def draw_grid(cells: list[list[Drawing]], generated: list[Image.Image]) -> Image.Image:
    """Draw generated images by concept (rows) and style (columns); pairs that were held out are framed."""
    side, left, top = max(generated[0].width, 64), 150, 20  # Names of styles need 64 pixels.
    width, height = left + side * len(cells[0]), top + side * len(cells)
    grid = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(grid)
    for j, cell in enumerate(cells[0]):
        draw.text((left + side * j + 4, 4), cell.style, fill="black")
    for i, row in enumerate(cells):
        draw.text((4, top + side * i + side // 2), row[0].concept, fill="black")
        for j, cell in enumerate(row):
            at = (left + side * j, top + side * i)
            grid.paste(generated[i * len(row) + j].resize((side, side), Image.Resampling.NEAREST), at)
            if cell.is_held_out:
                draw.rectangle((at[0], at[1], at[0] + side - 1, at[1] + side - 1), outline=FRAME, width=2)
    return grid


def draw_pairs(
    drawings: list[Drawing], images: list[Image.Image], found: NDArray[np.int64], num: int = 48, columns: int = 4
) -> Image.Image:
    """Draw, for every so many held-out pairs: the generated image, the held-out drawing, the nearest of training."""
    held_out = [one for one in drawings if one.is_held_out]
    chosen = list(range(0, len(held_out), max(len(held_out) // num, 1)))[:num]
    side, gap = images[0].width, 12
    sheet = Image.new("RGB", (columns * (3 * side + gap), -(-len(chosen) // columns) * (side + gap)), "white")
    for place, number in enumerate(chosen):
        x, y = place % columns * (3 * side + gap), place // columns * (side + gap)
        for k, image in enumerate((images[number], held_out[number].image, drawings[found[number]].image)):
            sheet.paste(image.resize((side, side)), (x + k * side, y))
    return sheet


if __name__ == "__main__":
    raise SystemExit(run_command(main))
