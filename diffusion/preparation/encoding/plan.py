"""What is to be encoded: the data sets, and the prepared shards that each of them lacks."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion.config.data import ImageSize, named_size
from diffusion.datasets.buckets import lowest_side
from diffusion.datasets.encoded import EncodedManifest
from diffusion.datasets.manifest import MANIFEST, PreparedManifest
from diffusion.datasets.mds import read_index, read_shards
from diffusion.datasets.transforms import ImageTransform
from diffusion.errors import ConfigurationError, DataError
from diffusion.preparation.encoding.models import EncodingModels


@dataclass(frozen=True, kw_only=True)
class PreparedPlace:
    """One prepared MDS folder.

    Attributes:
        split: `train` or `validation`.
        bucket: Its name.
        folder: Where it lies.
        shards: Entries of its shards in the index.
    """

    split: str
    bucket: str
    folder: Path
    shards: list[dict[str, Any]]

    @property
    def name(self) -> str:
        """`<split>/<bucket>`."""
        return f"{self.split}/{self.bucket}"

    @property
    def num_samples(self) -> int:
        """Samples of all shards."""
        return sum(entry["samples"] for entry in self.shards)

    def holds(self, resolution: int | None) -> bool:
        """Return whether it is encoded for a resolution: its images are large enough, or it has a size of its own."""
        return bool(named_size(self.bucket)) or (resolution is not None and lowest_side(self.bucket) >= resolution)


@dataclass(frozen=True, kw_only=True)
class Output:
    """One encoded data set.

    Attributes:
        folder: Where it is written.
        manifest: Its manifest when it is finished.
        places: What it is made of, by `<split>/<bucket>`.
    """

    folder: Path
    manifest: EncodedManifest
    places: dict[str, PreparedPlace]

    @property
    def num_samples(self) -> int:
        """Samples of all places."""
        return sum(place.num_samples for place in self.places.values())


def shard_identity(entry: Mapping[str, Any]) -> str:
    """Return what tells a prepared shard from another: a hash of its size, its samples and its hashes."""
    content = [entry["samples"], entry["raw_data"]["bytes"], entry["raw_data"]["hashes"]]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def read_prepared(prepared: Path) -> list[PreparedPlace]:
    """Read the MDS folders of prepared data, checked against the manifest.

    Raises:
        DataError: It is not prepared data, or is damaged.
    """
    places = []
    for split, buckets in PreparedManifest.read(prepared).splits.items():
        for bucket, entry in buckets.items():
            folder = prepared / split / bucket
            if read_index(folder).sha256 != entry.sha256:
                raise DataError(f"{folder} is not what {prepared / MANIFEST} says: copy or prepare the data set again")
            places.append(PreparedPlace(split=split, bucket=bucket, folder=folder, shards=read_shards(folder)))
    return places


def plan_outputs(
    prepared: Path,
    out: Path,
    *,
    models: EncodingModels,
    resolutions: Sequence[int],
    batch_size: int,
    precision: str,
    mean_only: bool,
) -> list[Output]:
    """Decide which data sets are written: one in `out`, or one in `out/<resolution>` of several.

    Args:
        prepared: Output of `prepare`.
        out: The folder.
        models: What encodes.
        resolutions: Sides of the squares in pixels; may be empty where all buckets have sizes of their own.
        batch_size: Images of a forward pass.
        precision: `fp32` or `bf16`.
        mean_only: Leave the log-variance out.

    Raises:
        ConfigurationError: A resolution is missing, given twice, or does not fit the VAE.
        DataError: `prepared` is not prepared data or is damaged; it has no images that are large enough.
    """
    if len(set(resolutions)) != len(resolutions):
        raise ConfigurationError(f"--resolution {' '.join(map(str, resolutions))}: give each once")
    for resolution in resolutions:
        models.latent_shape(ImageSize(resolution, resolution))
    places = read_prepared(prepared)
    source = hashlib.sha256((prepared / MANIFEST).read_bytes()).hexdigest()
    squares = [place.bucket for place in places if not named_size(place.bucket)]
    if squares and not resolutions:
        raise ConfigurationError(f"--resolution is missing: the images of {squares[0]} are cut to squares of it")
    outputs = []
    for resolution in resolutions or [None]:
        chosen = [place for place in places if place.holds(resolution)]
        if not chosen:
            names = sorted({place.bucket for place in places})
            raise DataError(
                f"{prepared} has no bucket of images whose shorter side is {resolution} or more (there are: "
                f"{', '.join(names) or 'none'}): lower --resolution, or prepare larger images"
            )
        sizes = {place.bucket: list(size) for place in chosen if (size := named_size(place.bucket))}
        side = resolution or round(math.sqrt(max(height * width for height, width in sizes.values())))
        counts: dict[str, dict[str, int]] = {}
        for place in chosen:
            if place.bucket in sizes:
                models.latent_shape(ImageSize(*sizes[place.bucket]))
            counts.setdefault(place.split, {})[place.bucket] = place.num_samples
        manifest = EncodedManifest(
            vae=models.vae_identity,
            tokenizer=models.tokenizer_identity,
            text_encoder=models.text_encoder_identity,
            transform=ImageTransform.square(side).identity(),
            resolution=side,
            mean_only=mean_only,
            precision=precision,
            batch_size=batch_size,
            empty_ids=[int(i) for i in models.empty_ids],
            source=source,
            counts=counts,
            sizes=sizes,
        )
        folder = out / str(resolution) if len(resolutions) > 1 else out
        outputs.append(Output(folder=folder, manifest=manifest, places={place.name: place for place in chosen}))
    return outputs
