"""Checks of the data at the start of training: streams and manifests, and the identity of what encoded them."""

from collections.abc import Iterator

from diffusion.config.data import ImageSize, Representation, image_sizes
from diffusion.config.model import Posterior
from diffusion.config.schema import Config
from diffusion.datasets.encoded import EncodedManifest, check_encoded, read_encoded_manifest
from diffusion.datasets.loader import check_training_streams, check_validation_streams, validation_streams
from diffusion.datasets.streams import StreamLocation, locate_streams
from diffusion.errors import DataError
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.pretrained import module_identity, tokenizer_identity


def check_streams(config: Config) -> None:
    """Check that the data exists and is what the configuration says, as far as that is known without the model.

    Raises:
        DataError: what is missing or differs, and what to do.
    """
    with_logvar = config.objective.posterior == Posterior.sample
    if config.plugins.train_dataset is None:
        check_training_streams(config.data, with_logvar=with_logvar)
    if config.validation is not None:
        check_validation_streams(config.validation, config.data, with_logvar=with_logvar)
    for _ in _encoded_streams(config):
        pass


def _encoded_streams(config: Config) -> Iterator[tuple[StreamLocation, ImageSize, EncodedManifest]]:
    """Iterate over the streams of latents for training and validation, with their image sizes and manifests.

    Raises:
        DataError: one has no manifest, or one of something else.
    """
    data = config.data
    if data.representation != Representation.latents or config.plugins.train_dataset is not None:
        return
    roots = [(data.remote, data.local, data.streams)]
    if config.validation is not None:
        streams = validation_streams(config.validation, data)
        roots.append((config.validation.remote, config.validation.local, streams))
    for remote, local, streams in roots:
        sizes = image_sizes(streams, data.resolution)
        for location, size in zip(locate_streams(remote, local, streams), sizes, strict=True):
            manifest = read_encoded_manifest(location.source, location.access)
            if manifest is None:
                raise DataError(f"{location.source} has no manifest.json beside it: encode it with scripts/encode.py")
            yield location, size, manifest


def check_identity(config: Config, model: LatentDiffusion) -> None:
    """Check that latents were encoded by the VAE, tokenizer and text encoder of the model.

    Raises:
        DataError: they were not.
    """
    streams = list(_encoded_streams(config))
    if not streams:
        return
    vae, tokenizer = module_identity(model.vae), tokenizer_identity(model.tokenizer)
    text_encoder = module_identity(model.text_encoder) if config.data.text_embeddings else None
    for location, size, manifest in streams:
        check_encoded(
            manifest,
            where=location.source,
            size=size,
            needs_logvar=config.objective.posterior == Posterior.sample,
            vae_identity=vae,
            tokenizer_identity=tokenizer,
            text_encoder_identity=text_encoder,
        )
