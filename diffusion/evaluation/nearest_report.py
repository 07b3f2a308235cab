"""Opens the images and data sets of a comparison with training images, and writes its table and its page."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import MISSING
from PIL import Image

from diffusion.datasets.provenance import licence_of
from diffusion.errors import ConfigurationError, DataError
from diffusion.evaluation.images import Images, PreparedSamples, image_files, list_images
from diffusion.evaluation.nearest import Comparison, Neighbour, distances
from diffusion.evaluation.prompts import ListedImage
from diffusion.files import read_json, write_atomically
from diffusion.formats.data_set import ENCODED, MANIFEST, SPLITS, PreparedManifest
from diffusion.formats.run_folder import is_run, read_config
from diffusion.formats.shards import INDEX
from diffusion.reports.figures import COLOURS, DARK, legend_beside, subplots, svg_uri
from diffusion.reports.page import TEMPLATES, image_uri, write_page

TABLE, PAGE = "nearest.jsonl", "nearest.html"

SHOWN = 200
"""Images on the page, at most."""

_SIDE = 160
"""Longer side of an image on the page, in pixels."""


def find_data(folder: Path) -> Path:
    """Find the prepared data set: the folder itself, the one of a split, or the one that a run was trained on.

    Raises:
        ConfigurationError: it cannot be found.
        DataError: the folder is no data set.
    """
    root = folder
    if is_run(folder):
        data = read_config(folder).data
        if data.local == MISSING or data.remote or any(one.local or one.remote for one in data.streams):
            raise ConfigurationError(f"{folder} was not trained on one local data set: give a prepared one")
        root = Path(data.local).expanduser()
    if root.name in SPLITS and (root.parent / MANIFEST).is_file():
        root = root.parent
    manifest = root / MANIFEST
    if manifest.is_file() and read_json(manifest).get("kind") == ENCODED:
        raise ConfigurationError(f"{root} is encoded data, without images: give the prepared data set it was made from")
    PreparedManifest.read(root)
    return root


def open_training(data: Path) -> PreparedSamples:
    """Open the training images of a prepared data set; a DataError if there are none."""
    samples = PreparedSamples(data / SPLITS[0])
    if not len(samples):
        raise DataError(f"{data / SPLITS[0]} has no samples: prepare the data anew")
    return samples


def open_validation(data: Path, given: Path | None) -> Images:
    """Open the validation images: the split of a prepared data set, or those of a given folder.

    The folder is one of images, of a prepared data set (its validation split, or else all of it) or of a split.

    Raises:
        ConfigurationError: there are none.
    """
    root = data / SPLITS[1] if given is None else given
    if given is not None and (given / SPLITS[1]).is_dir():
        root = given / SPLITS[1]
    if next(root.rglob(INDEX), None) is None:
        images = image_files(list_images(root))
    else:
        samples = PreparedSamples(root)
        images = Images(len(samples), lambda index: samples.keyed_image(index)[1])
    if not len(images):
        raise ConfigurationError(
            f"{root} has no validation images, by whose distances copies are judged: give --validation FOLDER, of "
            "images or of a prepared data set"
        )
    return images


def write_report(
    out: Path, images: Sequence[ListedImage], training: PreparedSamples, comparison: Comparison, *, num: int, name: str
) -> None:
    """Write `nearest.jsonl` and `nearest.html` into a folder, each atomically.

    For each image `num` neighbours are listed, and those that it may be a copy of. `name` is that of the features.
    """
    listed = [
        [near for i, near in enumerate(row) if i < num or comparison.is_copy(near)] for row in comparison.neighbours
    ]
    rows = [
        {
            "file": str(image.path),
            "prompt": image.prompt or None,
            "is_copy": any(map(comparison.is_copy, nearest)),
            "nearest": [_row(near, training, comparison) for near in nearest],
        }
        for image, nearest in zip(images, listed, strict=True)
    ]
    write_atomically(out / TABLE, "".join(json.dumps(row) + "\n" for row in rows))
    order = sorted(range(len(rows)), key=lambda i: (not rows[i]["is_copy"], listed[i][0].distance))
    pairs = [
        {
            **rows[i],
            "name": images[i].path.name,
            "uri": _small(image_files([images[i].path])[0]),
            "uris": [_small(training.keyed_image(near.number)[1]) for near in listed[i]],
        }
        for i in order[:SHOWN]
    ]
    values = {
        "title": "Nearest training images",
        "copies": len(comparison.copies()),
        "num": len(rows),
        "median": float(np.median(distances(comparison.neighbours))),
        "median_validation": float(np.median(distances(comparison.validation))),
        "num_validation": len(comparison.validation),
        "num_training": len(training),
        "comparison": comparison,
        "name": name,
        "chart": _chart(comparison),
        "pairs": pairs,
    }
    write_page(out / PAGE, TEMPLATES / "nearest.html", values)


def _row(near: Neighbour, training: PreparedSamples, comparison: Comparison) -> dict[str, Any]:
    metadata = training.sample(near.number, ["metadata"]).get("metadata") or {}
    return {
        "key": near.key,
        "source": near.key.partition("/")[0],
        "licence": licence_of(metadata) or None,
        "distance": round(near.distance, 6),
        "bits": near.bits,
        "is_copy": comparison.is_copy(near),
    }


def _small(image: Image.Image) -> str:
    image = image.copy()
    image.thumbnail((_SIDE, _SIDE))
    return image_uri(image, jpeg_quality=85)


def _chart(comparison: Comparison) -> str:
    """Histograms of the distances to the nearest training image."""
    sets = {"generated": distances(comparison.neighbours), "validation": distances(comparison.validation)}
    bins = np.linspace(0, max(float(values.max()) for values in sets.values()) or 1.0, 41)
    figure, axes = subplots(height=2.6)
    for colour, (label, values) in zip(COLOURS, sets.items(), strict=False):
        weights = np.full(len(values), 100 / len(values))
        axes.hist(values, bins, weights=weights, histtype="stepfilled", alpha=0.45, color=colour, label=label)
    axes.axvline(comparison.min_distance, color=DARK, linestyle="--", linewidth=1, label="copies are nearer")
    axes.set(xlabel="distance to the nearest training image", ylabel="% of the images", xlim=(0, None))
    legend_beside(axes)
    return svg_uri(figure)
