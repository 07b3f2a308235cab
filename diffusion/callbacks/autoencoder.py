"""The result of training a VAE: the VAE with its latent statistics, and a grid of reconstructions."""

import contextlib
import logging
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, count, groupby, islice, product
from pathlib import Path

import torch
from composer import Callback, Logger, State
from diffusers.utils.constants import SAFETENSORS_WEIGHTS_NAME
from torch import Tensor

from diffusion.composer_models import AutoencoderTraining
from diffusion.config.data import ValidationConfig
from diffusion.config.schema import Config
from diffusion.datasets.bad_images import BadImages
from diffusion.datasets.batch import BatchKey
from diffusion.datasets.loader import validation_dataset
from diffusion.distributed import agree, is_first_rank, rank, world_size
from diffusion.ema.callbacks import LateStartEMA
from diffusion.errors import DataError, explained_writes
from diffusion.files import atomic_path
from diffusion.formats.run_folder import RECONSTRUCTIONS, VAE
from diffusion.models.autoencoder import latent_statistics, to_pixels
from diffusion.models.latents import latent_space
from diffusion.models.pretrained import read_safetensors
from diffusion.models.sampling import image_grid, to_pil
from diffusion.models.tokenizers import build_tokenizer, tokenize

log = logging.getLogger(__name__)

NUM_STATISTICS_IMAGES = 2048
"""Images of the training set over which the latent statistics of a VAE are measured."""

NUM_SHOWN = 8
"""Images in the grid of reconstructions."""


class AwaitDiscriminator(Callback):
    """Drop the discriminator's gradients before its start: gradients of zero would count as updates in AdamW."""

    def __init__(self, model: AutoencoderTraining) -> None:
        self.model = model

    def fit_start(self, state: State, logger: Logger) -> None:
        """Drop the updates that earlier versions counted."""
        if self.model.discriminator is not None and state.timestamp.batch.value < self.model.adversarial_start:
            for optimizer, parameter in product(state.optimizers, self.model.discriminator.parameters()):
                optimizer.state.pop(parameter, None)

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Drop them when they are reduced: the optimizer ignores weights without gradients."""
        if self.model.discriminator is not None and state.timestamp.batch.value < self.model.adversarial_start:
            self.model.discriminator.zero_grad(set_to_none=True)


class SaveAutoencoder(Callback):
    """At the end, measure the latents of a data set, and save the VAE with their mean and standard deviation.

    The images are this rank's share, batches of uint8 [B, 3, height, width]. The VAE, averaged where there is an
    average, goes to `vae/` in the run folder, a grid (above originals, below reconstructions) beside it. A VAE of other
    weights stays, since other runs may name it: the new one goes to `vae-ba500/` then.
    """

    def __init__(
        self, model: AutoencoderTraining, images: Iterable[Tensor], folder: Path, ema: LateStartEMA | None = None
    ) -> None:
        self.model, self.images, self.folder, self.ema = model, images, folder, ema
        self.space = latent_space(model.vae)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Measure and save."""
        with self.ema.swapped_in(state) if self.ema is not None else contextlib.nullcontext():
            self._save(state.timestamp.batch.value)

    def _save(self, step: int) -> None:
        self.model.eval()
        device = next(self.model.vae.parameters()).device
        images = iter(self.images)
        first = agree(lambda: list(islice(images, 1)), takes_long=True)  # Of few images, the last ranks have none.
        self.space.set_statistics(*latent_statistics(self.model.vae, chain(first, images), device))

        def write() -> None:
            if is_first_rank():
                self._write(step)
                self._draw(first[0][:NUM_SHOWN].to(device))

        agree(write, takes_long=True)

    def _write(self, step: int) -> None:
        names = chain([VAE, f"{VAE}-ba{step}"], (f"{VAE}-ba{step}-{number}" for number in count(2)))
        path = next(path for path in map(self.folder.joinpath, names) if not path.exists() or self._is_in(path))
        if path.exists():
            return
        with explained_writes(path), atomic_path(path) as partial:
            self.model.vae.save_pretrained(partial, safe_serialization=True)
        if path.name != VAE:
            log.warning("the VAE is in %s: vae/ beside it has other weights, which runs may name", path)

    def _is_in(self, path: Path) -> bool:
        """Return whether a folder holds these weights. A batch norm's statistics depend on how images are batched."""
        own = self.model.vae.state_dict()
        try:
            stored = read_safetensors(path / SAFETENSORS_WEIGHTS_NAME)
        except DataError:
            return False
        return own.keys() == stored.keys() and all(
            torch.equal(own[name].cpu(), stored[name]) for name in own if not name.startswith("bn.")
        )

    @torch.no_grad()
    def _draw(self, images: Tensor) -> None:
        pixels = to_pixels(images)
        latents, _ = self.space.moments(pixels)
        decoded = self.model.vae.decode(latents, return_dict=False)[0]  # pyright: ignore[reportArgumentType]
        both = torch.cat([pixels, decoded]).clamp(-1, 1) / 2 + 0.5
        with explained_writes(self.folder / RECONSTRUCTIONS, "Make room"):
            image_grid(to_pil(both), len(images)).save(self.folder / RECONSTRUCTIONS)


def statistics_images(config: Config) -> Iterator[Tensor]:
    """Iterate over this rank's share of the first images of the training set, each image on one rank only.

    Images that cannot be decoded are replaced without a limit, since the training was the judge of the data.

    Yields:
        uint8 [B, 3, height, width], images of one size.
    """
    data = config.data
    everything = ValidationConfig(
        remote=data.remote, local=data.local, streams=data.streams, num_samples=NUM_STATISTICS_IMAGES
    )
    tokenizer = build_tokenizer(config.model.architecture)
    dataset = validation_dataset(everything, data, tokenize=partial(tokenize, tokenizer))
    dataset.samples.bad_images = BadImages(is_limited=False)
    indices = range(rank(), len(dataset), world_size())
    size = everything.device_batch_size
    for start in range(0, len(indices), size):
        samples = [torch.as_tensor(dataset[i][BatchKey.IMAGE]) for i in indices[start : start + size]]
        for _, of_one_size in groupby(samples, key=lambda sample: sample.shape):
            yield torch.stack(list(of_one_size))
