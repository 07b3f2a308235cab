"""Small data for the verification: drawn shapes, prepared, and encoded by a VAE with random weights."""

from pathlib import Path

from demo.shapes import write_data_set
from diffusion.config.model import Architecture, ModelConfig
from diffusion.datasets.encoded import EncodedManifest
from diffusion.models import FrozenParts, load_frozen_parts
from diffusion.preparation.encoding.encode import encode
from diffusion.preparation.encoding.models import EncodingModels
from diffusion.preparation.prepare import prepare

NUM_IMAGES = 400


def make_data(folder: Path, resolution: int) -> Path:
    """Write `prepared/`, `latents/` and `vae/` into a folder.

    The VAE has random weights: it need not be good, only the same for all runs.

    Returns:
        The folder.
    """
    write_data_set(folder / "source", NUM_IMAGES, seed=5)
    sources = [folder / "source" / layout for layout in ("images", "webdataset", "parquet")]
    prepare(sources, folder / "prepared", edges=[32, 64], num_workers=1)
    parts = load_frozen_parts(ModelConfig(architecture=Architecture.tiny))
    parts.vae.save_pretrained(folder / "vae")
    encode_prepared(folder / "prepared", folder / "latents", parts, resolution)
    return folder


def encode_prepared(prepared: Path, out: Path, parts: FrozenParts, resolution: int) -> EncodedManifest:
    """Encode prepared data with a model's frozen parts, on the CPU."""
    return encode(prepared, out, models=EncodingModels.of(parts), resolutions=[resolution])[0]
