"""The ComposerModel: VAE, text encoder, U-Net and noise scheduler in one.

Shape letters: B batch, C channels, H W height and width of the latent, L tokens, D width of the text encoding.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from composer.models import ComposerModel
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from PIL import Image
from torch import Tensor
from torchmetrics import Metric
from transformers import CLIPTokenizer

from diffusion.config.model import ObjectiveConfig, Posterior
from diffusion.datasets.batch import BatchKey, Entry
from diffusion.models.conditioning import Conditioner, Conditioning, TextEncoder
from diffusion.models.flops import batch_flops
from diffusion.models.frozen import FrozenParts, upcast
from diffusion.models.image_request import ModelSizes, read_request
from diffusion.models.metrics import HeldOutMean, held_out_means, timestep_bins
from diffusion.models.norms import autocast_dtype, use_low_precision_norms
from diffusion.models.objectives import (
    EVALUATION,
    TRAINING,
    NoiseProcess,
    Purposes,
    draw_noise,
    draw_stratified_timesteps,
    draw_timesteps,
)
from diffusion.models.sampling import inference_scheduler, sample_latents, to_pil
from diffusion.models.tokenizers import tokenize
from diffusion.randomness import Purpose, bernoulli, normal

Batch = dict[str, Tensor]


class Prediction(NamedTuple):
    """What a forward pass returns."""

    prediction: Tensor
    """float [B, C, H, W], by the U-Net."""

    target: Tensor
    """float32 [B, C, H, W], what it should be."""

    weight: Tensor | None
    """float32 [B], weight of each sample's error; None is 1."""

    timesteps: Tensor
    """int64 [B]."""


class Draws(NamedTuple):
    """The random numbers of one forward pass of training, and what the batch tells the model."""

    sample: Tensor
    """int64 [B], addresses of the samples."""

    step: Tensor
    """int64 [B], optimizer step."""

    noise: Tensor
    """float32 [B, C, H, W]."""

    timesteps: Tensor
    """int64 [B]."""

    token_ids: Tensor
    """int64 [B, L], after captions were dropped."""

    content: Tensor
    """Images as they were cropped and flipped, uint8 [B, 3, 8H, 8W]; or the means of latents, [B, C, H, W]."""

    placement: Tensor | None
    """int64 [B, 6], sizes and crops; None where the U-Net is not told them."""


class LatentDiffusion(ComposerModel):
    """A latent diffusion model (Rombach et al. 2022) that is trained by Composer and samples by itself.

    The frozen parts are kept outside of the module tree: they are not in the optimizer, the checkpoints or FSDP, and
    stay in eval mode; they move with the model.

    Args:
        unet: the network that is trained.
        frozen: VAE, text encoder, tokenizer and latent scaling.
        noise_scheduler: holds the noise schedule and the prediction type.
        objective: the training objective; its prediction type must be the scheduler's.
        resolution: side of the images trained at, in pixels; the default size of generated images.
        seed: seed of noise, timesteps, posterior and dropped captions, 0 <= seed < 2^32.
        low_precision_norms: run the U-Net's GroupNorm and LayerNorm in the autocast precision.

    Attributes:
        observer: called with the draws of each forward pass of training, if it is set.
        loss_observer: called with the weighted error of each sample, float32 [B] without gradients, and its microbatch
            whenever the loss is computed, if it is set.
        held_out_streams: names of the streams of held-out data by their number, whose losses are metrics of their own;
            an empty one is left out.
        held_out_bins: parts of the timesteps whose losses on held-out data are metrics of their own.
        num_slots: samples of a global batch, over which `objective.stratified_timesteps` spreads the timesteps; 0
            outside of the Trainer, where each timestep is drawn by itself.
    """

    unet: UNet2DConditionModel

    def __init__(
        self,
        *,
        unet: UNet2DConditionModel,
        frozen: FrozenParts,
        noise_scheduler: DDPMScheduler,
        objective: ObjectiveConfig,
        resolution: int,
        seed: int = 17,
        low_precision_norms: bool = True,
    ) -> None:
        super().__init__()
        if low_precision_norms:
            use_low_precision_norms(unet)
        self.unet = unet
        self._frozen = {"vae": frozen.vae, "text_encoder": frozen.text_encoder}
        self.tokenizer: CLIPTokenizer = frozen.tokenizer
        self.latent_scaling = frozen.latent_scaling
        self.noise_scheduler = noise_scheduler
        self.noise_process = NoiseProcess(noise_scheduler.alphas_cumprod)
        self.objective = objective
        self.resolution = resolution
        self.seed = seed
        self.observer: Callable[[Draws], None] | None = None
        self.loss_observer: Callable[[Tensor, Batch], None] | None = None
        self.held_out_streams: Sequence[str] = ()
        self.held_out_bins: Sequence[range] = ()
        self.num_slots = 0
        empty_token_ids = torch.from_numpy(tokenize(self.tokenizer, [""])).long()[0]
        is_extended = unet.config["addition_embed_type"] == "text_time"
        self.conditioner = Conditioner(frozen.text_encoder, empty_token_ids, is_extended=is_extended)

    @property
    def vae(self) -> AutoencoderKL:
        """The frozen VAE."""
        return self._frozen["vae"]

    @property
    def text_encoder(self) -> TextEncoder:
        """The frozen text encoder."""
        return self._frozen["text_encoder"]

    @property
    def vae_factor(self) -> int:
        """Pixels per latent position along one side."""
        return 2 ** (len(self.vae.config.block_out_channels) - 1)  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def _sizes(self) -> ModelSizes:
        """What images that are asked for have to fit."""
        return ModelSizes(
            resolution=self.resolution,
            vae_factor=self.vae_factor,
            num_channels=self.unet.config["in_channels"],
            num_timesteps=self.noise_process.num_timesteps,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LatentDiffusion":
        """Move or cast the frozen parts with the rest (`to`, `cuda`, `half`)."""
        super()._apply(fn, recurse)
        for module in self._frozen.values():
            module._apply(fn)
        return self

    @torch.no_grad()
    def _latents(self, batch: Batch, purposes: Purposes) -> Tensor:
        """The U-Net's latents of a batch, float32 [B, C, H, W], drawn from the VAE's posterior or its mean."""
        if BatchKey.LATENT_MEAN in batch:
            mean, logvar = batch[BatchKey.LATENT_MEAN], batch.get(BatchKey.LATENT_LOGVAR)
        else:
            with upcast(self.vae) as vae:
                pixels = batch[BatchKey.IMAGE].to(vae.dtype) / 127.5 - 1.0
                posterior = vae.encode(pixels).latent_dist  # pyright: ignore[reportAttributeAccessIssue]
            mean, logvar = posterior.mean, posterior.logvar
        if self.objective.posterior == Posterior.sample:
            if logvar is None:
                raise ValueError(
                    "the data holds no log-variance: encode without --mean-only, or objective.posterior=mean"
                )
            noise = normal(
                self.seed, purposes.posterior, batch[BatchKey.STEP], batch[BatchKey.SAMPLE], tuple(mean.shape[1:])
            )
            mean = mean + torch.exp(0.5 * logvar.float()) * noise
        return self.latent_scaling.normalise(mean.float())

    def _drop_captions(self, batch: Batch) -> Tensor:
        """Token ids [B, L] with captions replaced by the empty one, at the configured rate."""
        is_dropped = bernoulli(
            self.seed,
            Purpose.CAPTION_DROP,
            batch[BatchKey.STEP],
            batch[BatchKey.SAMPLE],
            self.objective.caption_dropout,
        )
        return self.conditioner.drop(batch[BatchKey.TOKEN_IDS], is_dropped)

    def _timesteps(self, batch: Batch, purposes: Purposes) -> Tensor:
        """Timesteps of a batch, int64 [B]: uniform, or spread over the global batch."""
        num, step, sample = self.noise_process.num_timesteps, batch[BatchKey.STEP], batch[BatchKey.SAMPLE]
        if self.objective.stratified_timesteps and purposes is TRAINING and self.num_slots:
            return draw_stratified_timesteps(self.seed, step, sample, batch[BatchKey.SLOT], self.num_slots, num)
        return draw_timesteps(purposes, self.seed, step, sample, num)

    def _predict(self, batch: Batch, token_ids: Tensor, purposes: Purposes) -> Prediction:
        """Noise the latents of a batch and let the U-Net predict the target."""
        step, sample = batch[BatchKey.STEP], batch[BatchKey.SAMPLE]
        latents = self._latents(batch, purposes)
        shape = (latents.shape[1], latents.shape[2], latents.shape[3])
        noise = draw_noise(self.objective, purposes, self.seed, step, sample, shape)
        timesteps = self._timesteps(batch, purposes)
        told = self.conditioner.of_batch(batch, token_ids)
        if self.observer is not None and purposes is TRAINING:
            content = batch[BatchKey.IMAGE if BatchKey.IMAGE in batch else BatchKey.LATENT_MEAN]
            self.observer(Draws(sample, step, noise, timesteps, token_ids, content, told.placement))
        rates = self.noise_process.signal_and_noise_rate(timesteps)
        noised = self.noise_process.add_noise(latents, noise, rates)
        prediction_type, gamma = self.objective.prediction_type, self.objective.min_snr_gamma
        target = self.noise_process.target(prediction_type, latents, noise, rates)
        weight = None if gamma is None else self.noise_process.min_snr_weight(prediction_type, rates, gamma)
        if autocast_dtype(noised) is None:
            dtype = next(self.unet.parameters()).dtype
            noised, told = noised.to(dtype), told.to(dtype)
        prediction = self.unet(noised, timesteps, told.text, **told.added(), return_dict=False)[0]
        return Prediction(prediction, target, weight, timesteps)

    def forward(self, batch: Batch) -> Prediction:
        """Predict with the random numbers of training.

        Args:
            batch: the entries of `BatchKey`; without STEP (outside of the Trainer) it is step 0.

        Returns:
            The prediction and what it should be.
        """
        batch = _with_step(batch)
        return self._predict(batch, self._drop_captions(batch), TRAINING)

    def batch_flops(self, batch: Mapping[str, Entry]) -> float:
        """Operations of the U-Net for a batch, forward and backward; NaN where not known."""
        has_fixed = self._has_fixed_weights
        return batch_flops(self.unet.config, batch, vae_factor=self.vae_factor, has_fixed_weights=has_fixed)

    @cached_property
    def _has_fixed_weights(self) -> bool:
        """Whether weights of the U-Net are not trained, as under LoRA; remembered, since it is asked in each step."""
        return not all(parameter.requires_grad for parameter in self.unet.parameters())

    def loss(self, outputs: Prediction, batch: Batch) -> Tensor:
        """Mean squared error over the microbatch, weighted per sample: float32 []."""
        error = _squared_error(outputs)
        error = error if outputs.weight is None else error * outputs.weight
        if self.loss_observer is not None:
            self.loss_observer(error.detach(), batch)
        return error.mean()

    def eval_forward(self, batch: Batch, outputs: Prediction | None = None) -> Prediction:
        """Predict with noise and timesteps that are fixed for each sample; no caption is dropped."""
        if outputs is not None:
            return outputs
        batch = {**batch, BatchKey.STEP: torch.zeros_like(batch[BatchKey.SAMPLE])}
        return self._predict(batch, batch[BatchKey.TOKEN_IDS], EVALUATION)

    def expect_held_out(self, streams: Sequence[str], samples: Tensor) -> None:
        """Report the losses on held-out data by stream, and by those parts of the timesteps that its samples fall in.

        Args:
            streams: names of the streams by their number; an empty one is left out.
            samples: int64 [N], addresses of all samples.
        """
        num = self.noise_process.num_timesteps
        drawn = draw_timesteps(EVALUATION, self.seed, torch.zeros_like(samples), samples, num)
        occupied = [bool(((drawn >= part.start) & (drawn < part.stop)).any()) for part in timestep_bins(num)]
        self.held_out_streams = list(streams)
        self.held_out_bins = [part for part, taken in zip(timestep_bins(num), occupied, strict=True) if taken]

    def get_metrics(self, is_train: bool = False) -> dict[str, Metric]:
        """Validation loss, over all held-out data, by stream and by timestep: the unweighted mean squared error."""
        return {} if is_train else held_out_means("loss", self.held_out_streams, self.held_out_bins)

    def update_metric(self, batch: Any, outputs: Prediction, metric: Metric) -> None:
        """Add the error of each sample of an evaluation batch."""
        assert isinstance(metric, HeldOutMean)
        metric.add(_squared_error(outputs), batch, outputs.timesteps)

    @torch.no_grad()
    def generate(
        self,
        prompts: str | Sequence[str],
        negative_prompts: str | Sequence[str] | None = None,
        *,
        height: int | None = None,
        width: int | None = None,
        original_size: tuple[int, int] | None = None,
        crop: tuple[int, int] = (0, 0),
        num_inference_steps: int = 50,
        guidance_scale: float = 3.0,
        seed: int | Sequence[int] | None = None,
        num_images_per_prompt: int = 1,
        batch_size: int = 16,
        latents: Tensor | None = None,
        output: str = "pil",
        progress: bool = True,
    ) -> list[Image.Image] | Tensor:
        """Generate images.

        Args:
            prompts: one, or P of them.
            negative_prompts: what to lead away from, one for all or one per prompt; none is the empty caption, as in
                training.
            height: in pixels, a multiple of the VAE's factor; the resolution trained at by default.
            width: likewise.
            original_size: height and width of the image that the image is to look as if it were made from, with SDXL;
                its own by default.
            crop: rows above it and columns left of it that it is to look as if they were cut off, with SDXL.
            num_inference_steps: DDIM steps, at most those of the noise schedule.
            guidance_scale: classifier-free guidance; 1 is none.
            seed: image i gets seed + i; or one per image; None draws them at random.
            num_images_per_prompt: images for each prompt, next to one another.
            batch_size: images at a time.
            latents: initial noise float32 [B, C, H, W] of all images in place of the seeds'.
            output: "pil" for PIL images, "tensor" for float32 [B, 3, height, width] in [0, 1].
            progress: show a bar.

        Returns:
            P * num_images_per_prompt images.

        Raises:
            ValueError: an argument is wrong, or two do not fit one another.
        """
        if output not in ("pil", "tensor"):
            raise ValueError(f"output {output!r}: choose 'pil' or 'tensor'")
        request = read_request(
            self._sizes,
            prompts,
            negative_prompts,
            height=height,
            width=width,
            original_size=original_size,
            crop=crop,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            seed=seed,
            num_images_per_prompt=num_images_per_prompt,
            batch_size=batch_size,
            latents=latents,
        )
        parameter = next(self.unet.parameters())
        device, dtype = parameter.device, self.unet.dtype
        noise = request.initial_latents(device)
        scheduler = inference_scheduler(self.noise_scheduler)

        def denoise(x: Tensor, timestep: Tensor, told: Conditioning) -> Tensor:
            return self.unet(x.to(dtype), timestep, told.text, **told.added(), return_dict=False)[0]

        def tell(captions: Sequence[str]) -> Conditioning:
            token_ids = torch.from_numpy(tokenize(self.tokenizer, captions)).long().to(device)
            return self.conditioner.of_prompts(token_ids, request.placement).to(dtype)

        was_training = self.unet.training
        self.unet.eval()
        try:
            images = [torch.empty(0, 3, request.placement.height, request.placement.width)]
            for start in range(0, len(request.prompts), request.batch_size):
                part = slice(start, start + request.batch_size)
                sampled = sample_latents(
                    denoise,
                    scheduler,
                    noise[part],
                    tell(request.prompts[part]),
                    tell(request.negatives[part]),
                    num_inference_steps=request.num_inference_steps,
                    guidance_scale=request.guidance_scale,
                    progress=progress,
                )
                images.append(self.decode(sampled).cpu())
        finally:
            self.unet.train(was_training)
        result = torch.cat(images)
        return to_pil(result) if output == "pil" else result

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode the U-Net's latents [B, C, H, W] to images: float32 [B, 3, height, width] in [0, 1]."""
        unscaled = self.latent_scaling.denormalise(latents)
        with upcast(self.vae) as vae:
            decoded = vae.decode(unscaled.to(vae.dtype), return_dict=False)[0]  # pyright: ignore[reportArgumentType]
        return (decoded.float() / 2 + 0.5).clamp(0, 1)


def _squared_error(outputs: Prediction) -> Tensor:
    """Mean squared error of each sample: float32 [B]."""
    return F.mse_loss(outputs.prediction.float(), outputs.target, reduction="none").mean(dim=(1, 2, 3))


def _with_step(batch: Batch) -> Batch:
    if BatchKey.STEP in batch:
        return batch
    return {**batch, BatchKey.STEP: torch.zeros_like(batch[BatchKey.SAMPLE])}
