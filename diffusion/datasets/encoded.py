"""Models and settings that encoded data was made with, and the comparison with those of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from diffusion.config.data import ImageSize
from diffusion.datasets.transforms import ImageTransform
from diffusion.errors import DataError
from diffusion.formats.data_set import ENCODED, check_folder

VERSION = 1
CODE = "float16-moments-v2"
"""Identity of what is computed and stored besides VAE, tokenizer and transform; raised whenever that changes."""


@dataclass(frozen=True, kw_only=True)
class EncodedManifest:
    """Content of the `manifest.json` of encoded data."""

    vae: str
    """Identity (hash) of the VAE."""

    tokenizer: str
    """Identity (hash) of the tokenizer."""

    transform: str
    """Identity of the transform from an image to the VAE's input."""

    resolution: int
    """Side of the encoded squares, in pixels; of buckets with a size of their own, the side of as large a square."""

    mean_only: bool
    """True if the log-variance is absent (`--mean-only`)."""

    precision: str
    """Precision of the VAE's forward pass: `fp32` or `bf16`."""

    empty_ids: list[int]
    """Token ids of the empty caption, which replaces dropped captions while training."""

    source: str
    """SHA-256 of the `manifest.json` of the prepared data."""

    counts: dict[str, dict[str, int]]
    """Samples by split and bucket, with removed and damaged ones."""

    sizes: dict[str, list[int]] = field(default_factory=dict)
    """Height and width of the images of each bucket that does not hold squares of `resolution`; may be absent."""

    text_encoder: str | None = None
    """Identity (hash) of the text encoder whose embeddings are stored; None where there are none."""

    scores: list[str] = field(default_factory=list)
    """Names of the scores of each sample."""

    batch_size: int = 32
    """Images of a forward pass, cut from each prepared shard: part of what the bytes depend on, through rounding."""

    convert_to_srgb: bool = False
    """True if images were converted to sRGB; absent in data of earlier versions."""

    code: str = CODE
    """Version of what is computed and stored."""

    version: int = VERSION
    kind: str = ENCODED

    def size_of(self, bucket: str) -> ImageSize:
        """Size of the encoded images of a bucket."""
        return ImageSize(*self.sizes.get(bucket, [self.resolution, self.resolution]))

    @classmethod
    def from_json(cls, content: Mapping[str, Any], where: str) -> "EncodedManifest":
        """Read it from the content of a `manifest.json`; a DataError if it is of another kind or version."""
        if content.get("kind") != ENCODED:
            raise DataError(
                f"{where} is not encoded data: encode it with scripts/encode.py, and read what that writes "
                "(data.local=OUT/train)"
            )
        keys = {field.name for field in fields(cls)}
        required = {field.name for field in fields(cls) if field.default is field.default_factory is MISSING}
        if content.get("version") != VERSION or not required <= content.keys() <= keys:
            raise DataError(
                f"{where} was encoded by another version of this package (format {content.get('version')}, this one "
                f"reads {VERSION}): run scripts/encode.py again"
            )
        try:
            folders = [f"{split}/{bucket}" for split, buckets in content["counts"].items() for bucket in buckets]
        except (AttributeError, TypeError) as error:
            raise DataError(f"{where} is damaged ({error}): run scripts/encode.py again") from error
        for folder in folders:
            check_folder(folder)
        return cls(**content)


def check_encoded(
    manifest: EncodedManifest,
    *,
    where: str,
    size: ImageSize,
    needs_logvar: bool,
    vae_identity: str | None = None,
    tokenizer_identity: str | None = None,
    text_encoder_identity: str | None = None,
    score_names: Sequence[str] = (),
) -> None:
    """Raise a DataError that names all differences if encoded data does not fit a run. What is None is not checked.

    `where` is the stream's folder or URL, which ends with the name of its bucket. The identities are those of the run's
    parts; that of the text encoder counts where stored embeddings are to be used.
    """
    expected = {
        "resolution": (_shown(manifest.size_of(where.rstrip("/").rpartition("/")[2])), _shown(size)),
        "transform": (manifest.transform, ImageTransform.square(manifest.resolution).identity()),
        "code": (manifest.code, CODE),
        "VAE": (manifest.vae, vae_identity),
        "tokenizer": (manifest.tokenizer, tokenizer_identity),
        "scores": (", ".join(manifest.scores) or "none", ", ".join(score_names) or None),
    }
    differences = [
        f"{name}: {have} there, {want} here" for name, (have, want) in expected.items() if want not in (None, have)
    ]
    if text_encoder_identity is not None and manifest.text_encoder != text_encoder_identity:
        there = manifest.text_encoder or "no text embeddings"
        differences.append(f"text encoder: {there} there, {text_encoder_identity} here")
    if needs_logvar and manifest.mean_only:
        differences.append("log-variance: only the means are there, and objective.posterior is sample")
    if differences:
        option = f" --resolution {size.height}" if size.height == size.width else ""
        raise DataError(
            f"{where} was not encoded for this run. " + "; ".join(differences) + ". Encode the prepared data with this "
            f"run's model (`python scripts/encode.py PREPARED OUT{option} --config YAML`) or correct the configuration"
        )


def _shown(size: ImageSize) -> str:
    return str(size.height) if size.height == size.width else str(size)
