"""What the training of a VAE leaves behind: the VAE with its latent statistics, and an image of reconstructions."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

import torch
from composer import Callback, Logger, State
from composer.utils import dist
from torch import Tensor

from diffusion.ema.callbacks import LateStartEMA
from diffusion.models.autoencoder import AutoencoderTraining, latent_statistics, save_autoencoder, to_pixels
from diffusion.models.sampling import image_grid, to_pil


class SaveAutoencoder(Callback):
    """At the end, measure the latents of a data set, and save the VAE with their mean and deviation.

    Args:
        model: what is trained.
        images: this rank's share of the images that the statistics are over, uint8 [B, 3, height, width] a batch.
        folder: the run folder; the VAE goes to `vae/`, a grid (above originals, below reconstructions) beside it.
        ema: the average that is saved, if there is one.
    """

    NUM_SHOWN = 8

    def __init__(
        self,
        model: AutoencoderTraining,
        pictures: Iterable[Tensor],
        folder: Path,
        ema: LateStartEMA | None = None,
    ) -> None:
        self.model, self.pictures, self.folder, self.ema = model, pictures, folder, ema

    def fit_end(self, state: State, logger: Logger) -> None:
        """Measure and save."""
        with self.ema.swapped_in(state) if self.ema is not None else contextlib.nullcontext():
            self._save()

    def _save(self) -> None:
        self.model.eval()
        device = next(self.model.vae.parameters()).device
        shown: Tensor | None = None

        def batches() -> Iterable[Tensor]:
            nonlocal shown
            for images in self.pictures:
                shown = images[: self.NUM_SHOWN] if shown is None else shown
                yield images

        mean, std = latent_statistics(self.model.vae, batches(), device)
        if dist.get_global_rank() == 0:
            save_autoencoder(self.model.vae, mean, std, self.folder / "vae")
            if shown is not None:
                self._draw(shown.to(device))
        dist.barrier()

    @torch.no_grad()
    def _draw(self, images: Tensor) -> None:
        pixels = to_pixels(images)
        latents = self.model.vae.encode(pixels).latent_dist.mean  # pyright: ignore[reportAttributeAccessIssue]
        decoded = self.model.vae.decode(latents, return_dict=False)[0]
        both = torch.cat([pixels, decoded]).clamp(-1, 1) / 2 + 0.5
        image_grid(to_pil(both), len(images)).save(self.folder / "reconstructions.png")
