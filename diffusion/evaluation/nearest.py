"""Nearest training images of generated ones, among which copies stand out.

Validation images come from the same source, but were not trained on: a generated image that is nearer to training than
nearly all of them is a suspected copy.

Shape letters: N queries, M references, D width of a feature, K nearest references, S side in pixels.
"""

import heapq
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import MISSING
from PIL import Image, ImageOps
from torch import Tensor

from diffusion.datasets.provenance import licence_of
from diffusion.errors import ConfigurationError, DataError
from diffusion.evaluation.config import EvaluationConfig
from diffusion.evaluation.features import FeatureNetwork, extract_features
from diffusion.evaluation.images import Images, PreparedSamples, image_files, list_images
from diffusion.evaluation.prompts import ListedImage
from diffusion.evaluation.statistics import Array
from diffusion.files import read_json, write_atomically
from diffusion.formats.data_set import ENCODED, MANIFEST, SPLITS, PreparedManifest
from diffusion.formats.run_folder import is_run, read_config
from diffusion.formats.shards import INDEX
from diffusion.preparation.measures import perceptual_hash
from diffusion.reports.figures import COLOURS, DARK, legend_beside, subplots, svg_uri
from diffusion.reports.page import TEMPLATES, image_uri, write_page

MAX_BITS = 4
"""Maximum difference of the perceptual hashes of a copy, as for duplicates of a preparation by default."""

_BLOCK = 2**13
"""References whose features are in memory at a time."""

_QUERIES = 1024
"""Queries that are compared at a time."""

TABLE, PAGE = "nearest.jsonl", "nearest.html"

SHOWN = 200
"""Images on the page, at most."""

_SIDE = 160
"""Longer side of an image on the page, in pixels."""


class Pixels:
    """Reduced pixels, less the mean of each channel: a feature without weights that finds copies."""

    def __init__(self, size: int = 32) -> None:
        self.name, self.identity, self.size = f"pixels-{size}", "", size

    def to(self, device: torch.device) -> "Pixels":
        """Return itself: there are no weights."""
        return self

    def image_features(self, pixels: Tensor) -> Tensor:
        """Pixels uint8 [B, 3, S, S] -> float32 [B, 3 S S]; a distance is a root mean square of levels from 0 to 1."""
        values = pixels / (255.0 * (3 * self.size**2) ** 0.5)
        return (values - values.mean((2, 3), keepdim=True)).flatten(1)


def nearest(queries: Array, references: Array, num: int = 3) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Find the nearest references of each query; of equally near ones the first.

    Products of matrices choose candidates; the distances of these are those of their differences.

    Args:
        queries: [N, D].
        references: [M, D].
        num: K; M, if there are fewer references.

    Returns:
        Indexes int64 [N, K], and Euclidean distances float32 [N, K], ascending.
    """
    queries, references = np.asarray(queries, np.float32), np.asarray(references, np.float32)
    num = min(num, len(references))
    indexes, distances = np.empty((len(queries), num), np.int64), np.empty((len(queries), num), np.float32)
    if not num:
        return indexes, distances
    norms = np.square(references).sum(1)
    for start in range(0, len(queries), _QUERIES):
        part = queries[start : start + _QUERIES]
        squares = np.square(part).sum(1, keepdims=True) + norms - 2 * part @ references.T
        # Errors of rounding grow with the norms.
        margins = 1e-5 * (np.square(part).sum(1) + norms.max())
        limits = np.partition(squares, num - 1, axis=1)[:, num - 1] + margins
        for i, (query, row, limit) in enumerate(zip(part, squares, limits, strict=True), start):
            candidates = np.flatnonzero(row <= limit)
            exact = np.linalg.norm(references[candidates] - query, axis=1)
            first = np.argsort(exact, kind="stable")[:num]
            indexes[i], distances[i] = candidates[first], exact[first]
    return indexes, distances


@dataclass(frozen=True, order=True)
class Neighbour:
    """A training image near to another image."""

    distance: float

    number: int
    """Number of its sample."""

    key: str
    """Key of its sample."""

    bits: int
    """Bits in which the perceptual hashes differ."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Generated and validation images, compared with training images."""

    neighbours: list[list[Neighbour]]
    """Neighbours of each generated image, ascending: the nearest, and the one of the most similar perceptual hash."""

    validation: list[list[Neighbour]]
    """Neighbours of each validation image."""

    quantile: float
    """Share of the validation images that would be suspected by their distance, and by their hash, at most."""

    @cached_property
    def min_distance(self) -> float:
        """A nearer image is a suspected copy."""
        ascending = np.sort(distances(self.validation))
        rank = min(max(int(self.quantile * (len(ascending) + 1)), 1), len(ascending))
        return float(ascending[rank - 1])

    @cached_property
    def max_bits(self) -> int:
        """An image whose perceptual hash differs in as many bits at most is a suspected copy; -1 where validation
        images have such hashes, too, as those of plain drawings.
        """
        bits = np.array([min(near.bits for near in row) for row in self.validation])
        shares = [float(np.mean(bits <= limit)) for limit in range(MAX_BITS + 1)]
        return sum(share <= self.quantile for share in shares) - 1

    def is_copy(self, near: Neighbour) -> bool:
        """Check if an image is a suspected copy of its neighbour."""
        return near.distance < self.min_distance or near.bits <= self.max_bits

    def copies(self) -> list[int]:
        """Numbers of the generated images that are suspected copies."""
        return [i for i, row in enumerate(self.neighbours) if any(map(self.is_copy, row))]


def distances(rows: Sequence[Sequence[Neighbour]]) -> NDArray[np.float64]:
    """Distance of each image to the nearest training image."""
    return np.array([row[0].distance for row in rows])


def compare(
    images: Images,
    training: PreparedSamples,
    validation: Images,
    network: FeatureNetwork,
    config: EvaluationConfig,
    device: torch.device,
    *,
    num: int = 3,
    quantile: float = 0.01,
) -> Comparison:
    """Compare the centre squares of images and of a data set's training images; removed samples are left out.

    Validation images are like those of training, and were not trained on. Below the quantile of their distances an
    image is a suspected copy. Each of the three sets has one image or more. The network is on the device.

    Raises:
        ConfigurationError: validation images are among the training images.
        DataError: an image cannot be decoded.
    """

    def measure(num_images: int, read: Callable[[int], Image.Image], label: str) -> tuple[Array, NDArray[np.uint64]]:
        hashes = np.empty(num_images, np.uint64)

        def hashed(index: int) -> Image.Image:
            image = read(index)
            side = min(image.size)
            square = ImageOps.fit(image, (side, side))
            hashes[index] = perceptual_hash(square)
            return square

        features = extract_features(network, Images(num_images, hashed), config, device, label)
        assert features is not None
        return features, hashes

    generated, generated_hashes = measure(len(images), images.read, "images")
    others, other_hashes = measure(len(validation), validation.read, "validation")
    queries, query_hashes = np.concatenate([generated, others]), np.concatenate([generated_hashes, other_hashes])
    found: list[set[Neighbour]] = [set() for _ in queries]
    for start in range(0, len(training), _BLOCK):
        keys: list[str] = []

        def read(index: int, start: int = start, keys: list[str] = keys) -> Image.Image:
            key, image = training.keyed_image(start + index)
            keys.append(key)
            return image

        features, hashes = measure(min(_BLOCK, len(training) - start), read, "training")
        indexes, _ = nearest(queries, features, num)
        for query, query_hash, near, row in zip(queries, query_hashes, indexes, found, strict=True):
            bits = np.bitwise_count(hashes ^ query_hash)
            for place in {*near.tolist(), int(bits.argmin())}:
                distance = float(np.linalg.norm(features[place] - query))
                row.add(Neighbour(distance, start + place, keys[place], int(bits[place])))
            alike = min(row, key=lambda one: (one.bits, one))
            row.intersection_update({*heapq.nsmallest(num, row), alike})
    neighbours = [sorted(row) for row in found]
    comparison = Comparison(
        neighbours=neighbours[: len(images)], validation=neighbours[len(images) :], quantile=quantile
    )
    if comparison.min_distance == 0:
        raise ConfigurationError("validation images are among the training images: give --validation others")
    return comparison


# Data sets, table and page


def find_data(folder: Path, prepared: Path | None = None) -> tuple[Path, set[str] | None]:
    """Find a prepared data set, and the names of the buckets that a run was trained on; None: all.

    The folder is the data set, one of its splits, or a run. `prepared` is the data set that the run's was encoded from.

    Raises:
        ConfigurationError: it cannot be found.
        DataError: the folder is no data set.
    """
    root, buckets = folder, None
    if is_run(folder):
        data = read_config(folder).data
        is_elsewhere = (
            data.local == MISSING or data.remote or any(one.local or one.remote for one in data.known_streams)
        )
        if prepared is None and is_elsewhere:
            raise ConfigurationError(f"{folder} was not trained on one local data set: name a prepared one with --data")
        root = prepared or Path(data.local).expanduser()
        buckets = {Path(one.name).name for one in data.known_streams} or None
    elif prepared is not None:
        raise ConfigurationError(f"--data is for a run, and {folder} is none: leave one of them out")
    if root.name in SPLITS and (root.parent / MANIFEST).is_file():
        root = root.parent
    manifest = root / MANIFEST
    if manifest.is_file() and read_json(manifest).get("kind") == ENCODED:
        raise ConfigurationError(
            f"{root} is encoded data, without images: give the prepared data set it was made from, "
            "or name that with --data beside a run"
        )
    PreparedManifest.read(root)
    return root, buckets


def open_training(data: Path, buckets: Collection[str] | None = None) -> PreparedSamples:
    """Open the training images of a prepared data set, or of some of its buckets; a DataError if there are none."""
    samples = PreparedSamples(data / SPLITS[0], buckets)
    if not len(samples):
        names = "" if buckets is None else f" in {', '.join(sorted(buckets))}"
        raise DataError(f"{data / SPLITS[0]} has no samples{names}: prepare the data anew, or give other data")
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
