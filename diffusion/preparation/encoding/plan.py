"""Plan of an encoding: the data sets that are made of prepared data, and the shards that are missing."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from diffusion import storage
from diffusion.config.data import ImageSize, named_size
from diffusion.datasets.buckets import lowest_side
from diffusion.datasets.encoded import EncodedManifest
from diffusion.datasets.transforms import ImageTransform
from diffusion.errors import ConfigurationError, DataError
from diffusion.formats.data_set import MANIFEST, PreparedManifest
from diffusion.formats.shards import Shard, read_index, read_shards
from diffusion.preparation.encoding.models import EncodingModels
from diffusion.preparation.encoding.output import Output, Target
from diffusion.preparation.output import resolved


@dataclass(frozen=True, kw_only=True)
class EncodingSettings:
    """How shards are encoded."""

    batch_size: int
    """Images of a forward pass."""
    precision: str
    """`fp32` or `bf16`."""
    mean_only: bool
    """Leave the log-variance out."""
    max_shard_bytes: int
    """Size above which a shard is cut into several."""
    scores: tuple[str, ...] = ()
    """Names of the scores to store."""
    removed: frozenset[str] = frozenset()
    """Hashes of the keys of removed images."""
    convert_to_srgb: bool = False
    """Convert images by their colour profile."""


@dataclass(frozen=True, kw_only=True)
class ShardTask:
    """A prepared shard to encode."""

    number: int
    """Its number in its folder."""
    folder: str
    """URI of the prepared MDS folder."""
    shard: Shard
    """Its entry in the index."""
    removed: frozenset[int]
    """Indices, in the shard, of samples that were removed from the prepared data."""
    targets: tuple[Target, ...]

    @property
    def sizes(self) -> list[ImageSize]:
        """Sizes in which its images are encoded."""
        return list(dict.fromkeys(target.size for target in self.targets))


def _read_prepared(prepared: str) -> dict[str, list[Shard]]:
    """Read the indexes of prepared data, and compare them with the manifest: shards by `<split>/<bucket>`."""
    folders = {}
    for split, buckets in PreparedManifest.read(prepared).splits.items():
        for bucket, entry in buckets.items():
            uri = storage.join(prepared, split, bucket)
            if read_index(uri).sha256 != entry.sha256:
                where = storage.shown(storage.join(prepared, MANIFEST))
                raise DataError(f"{storage.shown(uri)} is not what {where} says: copy or prepare the data set again")
            folders[f"{split}/{bucket}"] = read_shards(uri)
    return folders


def plan_outputs(
    prepared: str, out: str, resolutions: Sequence[int], models: EncodingModels, settings: EncodingSettings
) -> list[Output]:
    """Decide which data sets are written: one in `out`, or one in `out/<resolution>` of several.

    Raises:
        ConfigurationError: A resolution is missing, given twice, or does not fit the VAE; or one of the folders lies in
            the other.
        DataError: `prepared` is not prepared data, is damaged, or has no images that are large enough.
    """
    if len(set(resolutions)) != len(resolutions):
        raise ConfigurationError(f"--resolution {' '.join(map(str, resolutions))}: give each once")
    for resolution in resolutions:
        models.latent_shape(ImageSize(resolution, resolution))
    folders = _read_prepared(prepared)
    source = hashlib.sha256(storage.read(storage.join(prepared, MANIFEST))).hexdigest()
    names = sorted({name.split("/")[1] for name in folders})
    squares = [name for name in names if not named_size(name)]
    if squares and not resolutions:
        raise ConfigurationError(f"--resolution is missing: the images of {squares[0]} are cut to squares of it")
    outputs = []
    for resolution in resolutions or [None]:
        uri = storage.join(out, str(resolution)) if len(resolutions) > 1 else out
        here, there = f"{resolved(uri)}/", f"{resolved(prepared)}/"
        if here.startswith(there) or there.startswith(here):
            raise ConfigurationError(
                f"{storage.shown(uri)} and the prepared data {storage.shown(prepared)} lie in one another: choose "
                "another folder to write"
            )
        chosen = {name for name in names if named_size(name) or (resolution and lowest_side(name) >= resolution)}
        if not chosen:
            raise DataError(
                f"{storage.shown(prepared)} has no bucket of images whose shorter side is {resolution} or more (there "
                f"are: {', '.join(names) or 'none'}): lower --resolution, or prepare larger images"
            )
        sizes = {name: list(size) for name in sorted(chosen) if (size := named_size(name))}
        for size in sizes.values():
            models.latent_shape(ImageSize(*size))
        side = resolution or round(math.sqrt(max(height * width for height, width in sizes.values())))
        counts: dict[str, dict[str, int]] = {}
        shards = {name: listed for name, listed in folders.items() if name.split("/")[1] in chosen}
        for name, listed in shards.items():
            split, bucket = name.split("/")
            counts.setdefault(split, {})[bucket] = sum(shard.num_samples for shard in listed)
        manifest = EncodedManifest(
            vae=models.vae_identity,
            tokenizer=models.tokenizer_identity,
            text_encoder=models.text_encoder_identity,
            transform=ImageTransform.square(side).identity(),
            resolution=side,
            mean_only=settings.mean_only,
            precision=settings.precision,
            batch_size=settings.batch_size,
            convert_to_srgb=settings.convert_to_srgb,
            empty_ids=[int(i) for i in models.empty_ids],
            scores=list(settings.scores),
            source=source,
            counts=counts,
            sizes=sizes,
        )
        outputs.append(Output(uri=uri, manifest=manifest, folders=shards))
    return outputs
