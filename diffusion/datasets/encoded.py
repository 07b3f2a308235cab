"""What encoded data was made with, and whether that is what a run needs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from diffusion.datasets.locations import find_manifest
from diffusion.datasets.transforms import SquareTransform
from diffusion.errors import DataError

VERSION = 1
ENCODED = "encoded"
"""What the manifest says it is the manifest of."""


@dataclass(frozen=True, kw_only=True)
class EncodedManifest:
    """Content of the `manifest.json` of encoded data."""

    vae: str
    """Identity (hash) of the VAE."""

    tokenizer: str
    """Identity (hash) of the tokenizer."""

    transform: str
    """Identity of the transform from a picture to the VAE's input."""

    resolution: int
    """Side of the encoded squares, in pixels."""

    mean_only: bool
    """Whether the log-variance was left out."""

    precision: str
    """Precision of the VAE's forward pass: `fp32` or `bf16`."""

    empty_ids: list[int]
    """Token ids of the empty caption, which replaces dropped captions while training."""

    source: str
    """SHA-256 of the `manifest.json` of the prepared data."""

    counts: dict[str, dict[str, int]]
    """Samples by split and bucket."""

    version: int = VERSION
    kind: str = ENCODED

    def to_json(self) -> dict[str, Any]:
        """As plain containers."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any], where: str) -> "EncodedManifest":
        """Read it from the content of a `manifest.json`.

        Args:
            content: the parsed file.
            where: the data set, for messages.

        Raises:
            DataError: it is another kind of manifest, or of another version.
        """
        if content.get("kind") != ENCODED:
            raise DataError(f"{where} is not encoded data: encode it with scripts/encode.py")
        if content.get("version") != VERSION or content.keys() != {field.name for field in fields(cls)}:
            raise DataError(
                f"{where} was encoded by another version of this package (format {content.get('version')}, this one "
                f"reads {VERSION}): run scripts/encode.py again"
            )
        return cls(**content)


def read_encoded_manifest(source: str) -> EncodedManifest | None:
    """Read the manifest of an encoded stream, from beside or above its folder or URL; None where there is none."""
    content = find_manifest(source)
    return None if content is None else EncodedManifest.from_json(content, source)


def check_encoded(
    manifest: EncodedManifest,
    *,
    where: str,
    resolution: int,
    needs_logvar: bool,
    vae_identity: str | None = None,
    tokenizer_identity: str | None = None,
    empty_ids: Sequence[int] | None = None,
) -> None:
    """Refuse encoded data that does not fit a run.

    Args:
        manifest: manifest of the data.
        where: the data set, for messages.
        resolution: side of the pictures, in pixels.
        needs_logvar: whether draws from the posterior are wanted.
        vae_identity: `module_identity` of the run's VAE; None is not checked.
        tokenizer_identity: identity of the run's tokenizer; None is not checked.
        empty_ids: the run's ids [L] of the empty caption; None is not checked.

    Raises:
        DataError: what differs, all of it, and the command that makes data that fits.
    """
    expected = {
        "resolution": (manifest.resolution, resolution),
        "transform": (manifest.transform, SquareTransform(resolution=resolution).identity()),
        "VAE": (manifest.vae, vae_identity),
        "tokenizer": (manifest.tokenizer, tokenizer_identity),
        "empty caption's ids": (manifest.empty_ids, None if empty_ids is None else [int(i) for i in empty_ids]),
    }
    differences = [
        f"{name}: {have} there, {want} here" for name, (have, want) in expected.items() if want not in (None, have)
    ]
    if needs_logvar and manifest.mean_only:
        differences.append("log-variance: only the means are there, and objective.posterior is sample")
    if differences:
        raise DataError(
            f"{where} was not encoded for this run. " + "; ".join(differences) + ". Encode the prepared data with this "
            f"run's model (`python scripts/encode.py PREPARED OUT --resolution {resolution} --config YAML`) or correct "
            "the configuration"
        )
