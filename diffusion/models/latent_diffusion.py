"""The model in pure torch: from a batch to the loss, and from prompts to images.

The loss of a batch, read `LatentDiffusion.forward` and `loss`: latents x_0 from the VAE, noise and timesteps t from
addressed random numbers, x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) noise, the network's prediction from x_t, t and the
captions, and its mean squared error against noise, x_0, v or noise - x_0. With alignment, the similarity of hidden
states and image features is subtracted.

Shape letters: B batch, C channels, H W height and width of the latent, L tokens, D width of the text encoding.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from PIL import Image
from torch import Tensor, nn

from diffusion.config.model import ObjectiveConfig, Posterior, Sampler, TokenRoutingConfig
from diffusion.datasets.batch import BatchKey, Entry
from diffusion.datasets.transforms import Placement
from diffusion.models.alignment import Alignment, ImageEncoder
from diffusion.models.conditioning import Conditioner, Conditioning, TextEncoder
from diffusion.models.fast.norms import autocast_dtype, use_low_precision_norms
from diffusion.models.flops import batch_flops
from diffusion.models.networks import Network, component_name, patch_size_of, predict
from diffusion.models.objectives import (
    EVALUATION,
    TARGETS,
    TRAINING,
    Purposes,
    add_noise,
    draw_noise,
    draw_quantiles,
    draw_stratified_quantiles,
    min_snr_weight,
    noise_process,
)
from diffusion.models.precision import upcast
from diffusion.models.pretrained import FrozenParts, module_identity
from diffusion.models.sampling import (
    NoiseScheduler,
    expand_prompts,
    image_seeds,
    image_size,
    inference_scheduler,
    initial_latents,
    sample_latents,
    to_pil,
    whole_number,
)
from diffusion.models.score_conditioning import ScoreConditioner, ScoreEmbedding, drop_scores
from diffusion.models.text_adapter import Adapter, TextAdapter
from diffusion.models.token_routing import TokenRouter
from diffusion.randomness import Purpose, bernoulli, normal

Batch = dict[str, Tensor]

NUM_TIMESTEP_BINS = 10


class Prediction(NamedTuple):
    """Result of a forward pass."""

    prediction: Tensor
    """float [B, C, H, W], output of the network."""

    target: Tensor
    """float32 [B, C, H, W], target of the prediction."""

    weight: Tensor | None
    """float32 [B], weight of each sample's squared error; None is 1."""

    timesteps: Tensor
    """[B], int64, or float32 in rectified flow."""

    similarity: Tensor | None = None
    """float32 [B], cosine similarity of hidden states and image features; None without alignment, or in validation."""


class Draws(NamedTuple):
    """Random numbers and inputs of a forward pass of training, for `LatentDiffusion.observer`."""

    sample: Tensor
    """int64 [B], addresses of the samples."""

    step: Tensor
    """int64 [B], optimizer step."""

    noise: Tensor
    """float32 [B, C, H, W]."""

    timesteps: Tensor
    """[B], int64, or float32 in rectified flow."""

    token_ids: Tensor
    """int64 [B, L], after captions were dropped."""

    content: Tensor
    """Cropped and flipped images, uint8 [B, 3, 8H, 8W]; or means of encoded latents, [B, C, H, W]."""

    placement: Tensor | None
    """int64 [B, 6], sizes and crops; None unless the model is SDXL."""

    scores: Tensor | None = None
    """float32 [B, S], after scores were dropped; None unless the model is conditioned on scores."""


class LatentDiffusion(nn.Module):
    """A latent diffusion model (Rombach et al. 2022).

    Its child modules are trained: the network, under its name in pipelines of diffusers (`unet`, `transformer`), and
    the text adapter, the embedding of scores and the projection of the alignment, if there are. The frozen
    parts are outside of the module tree and so in no optimizer, checkpoint or FSDP unit. They stay in eval mode and
    move with the model.

    Args:
        network: the trained network.
        text_adapter: trained layers behind the text encoder.
        score_embedding: trained embedding of the images' scores.
        alignment: trained projection of hidden states to image features.
        image_encoder: frozen, of these features.
        frozen: VAE, text encoder, tokenizer and latent scaling.
        noise_scheduler: noise schedule and prediction type.
        objective: training objective, with the scheduler's prediction type.
        resolution: side of the training images in pixels, and default size of generated images.
        seed: seed of noise, timesteps, posterior and dropped captions, 0 <= seed < 2^32.
        token_routing: tokens that skip blocks of the transformer in training.
        low_precision_norms: run the network's GroupNorm and LayerNorm in the autocast precision.

    Attributes:
        observer: called with the draws of each forward pass of training, unless None.
        loss_observer: called with the weighted error of each sample, float32 [B] without gradients, and its microbatch
            in each computation of the loss, unless None.
        num_slots: samples of a global batch, for `objective.stratified_timesteps`; 0 outside of the Trainer, where
            timesteps are independent.
    """

    def __init__(
        self,
        *,
        network: Network,
        text_adapter: Adapter | None = None,
        score_embedding: ScoreEmbedding | None = None,
        alignment: Alignment | None = None,
        image_encoder: ImageEncoder | None = None,
        frozen: FrozenParts,
        noise_scheduler: NoiseScheduler,
        objective: ObjectiveConfig,
        resolution: int,
        seed: int = 17,
        token_routing: TokenRoutingConfig | None = None,
        low_precision_norms: bool = True,
    ) -> None:
        super().__init__()
        if low_precision_norms:
            use_low_precision_norms(network)
        self.component = component_name(network)
        self.add_module(self.component, network)
        self.text_adapter = text_adapter
        self.score_embedding = score_embedding
        self._score_conditioner = None if score_embedding is None else ScoreConditioner(network, score_embedding)
        self.alignment = alignment
        self.token_routing = token_routing
        self._router = None if token_routing is None else TokenRouter(network, token_routing)
        self._frozen: dict[str, Any] = {"vae": frozen.vae, "text_encoder": frozen.text_encoder}
        if image_encoder is not None:
            self._frozen["image_encoder"] = image_encoder
        self._parts = frozen
        self.tokenizer = frozen.tokenizer
        self.latent_scaling = frozen.latent_scaling
        self.noise_scheduler = noise_scheduler
        self.noise_process = noise_process(objective, noise_scheduler)
        self.objective = objective
        self.resolution = resolution
        self.seed = seed
        self.observer: Callable[[Draws], None] | None = None
        self.loss_observer: Callable[[Tensor, Batch], None] | None = None
        self.num_slots = 0
        self.tokenize, self.num_chunks = frozen.tokenize, frozen.num_chunks
        empty_token_ids = torch.from_numpy(self.tokenize([""])).long()[0]
        self.conditioner = Conditioner(
            frozen.text_encoder,
            empty_token_ids,
            num_chunks=frozen.num_chunks,
            is_extended=network.config.get("addition_embed_type") == "text_time",
            is_masked=self.component == "transformer",
            is_adapted=isinstance(text_adapter, TextAdapter),
        )

    @property
    def network(self) -> Network:
        """The trained network, a U-Net or a transformer."""
        return self.get_submodule(self.component)  # pyright: ignore[reportReturnType]

    @property
    def vae(self) -> AutoencoderKL:
        """The frozen VAE."""
        return self._frozen["vae"]

    @property
    def text_encoder(self) -> TextEncoder:
        """The frozen text encoder."""
        return self._frozen["text_encoder"]

    @property
    def frozen_parts(self) -> list[nn.Module]:
        """VAE, text encoder and, with alignment, image encoder."""
        return list(self._frozen.values())

    def identities(self) -> dict[str, str]:
        """Hashes of the frozen parts by name, as long as they are in the precision in which they were loaded."""
        encoder = self._frozen.get("image_encoder")
        return self._parts.identities() | ({} if encoder is None else {"image_encoder": module_identity(encoder)})

    @property
    def vae_factor(self) -> int:
        """Pixels per latent position along one side."""
        return 2 ** (len(self.vae.config.block_out_channels) - 1)  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def side_factor(self) -> int:
        """Both sides of an image in pixels are multiples of it."""
        return self.vae_factor * patch_size_of(self.network)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LatentDiffusion":
        """Move or cast the frozen parts with the rest (`to`, `cuda`, `half`)."""
        super()._apply(fn, recurse)
        for module in self._frozen.values():
            module._apply(fn)
        return self

    def forward(self, batch: Batch) -> Prediction:
        """Predict with the random numbers of training.

        Args:
            batch: the entries of `BatchKey`; without STEP (outside of the Trainer) the step is 0.
        """
        batch = batch if BatchKey.STEP in batch else _with_step_0(batch)
        return self._predict(batch, self._drop_captions(batch), TRAINING)

    def _predict(self, batch: Batch, token_ids: Tensor, purposes: Purposes) -> Prediction:
        """Add noise to the latents of a batch and predict the target."""
        objective, step, sample = self.objective, batch[BatchKey.STEP], batch[BatchKey.SAMPLE]
        latents = self._latents(batch, purposes)  # x_0
        shape = (latents.shape[1], latents.shape[2], latents.shape[3])
        noise = draw_noise(objective, purposes, self.seed, step, sample, shape)
        timesteps = self._timesteps(batch, purposes)
        conditioning = self._adapt(self.conditioner.encode_batch(batch, token_ids))
        conditioning = conditioning._replace(scores=self._scores(batch, purposes))
        if self.observer is not None and purposes is TRAINING:
            content = batch[BatchKey.IMAGE if BatchKey.IMAGE in batch else BatchKey.LATENT_MEAN]
            placement, scores = conditioning.placement, conditioning.scores
            self.observer(Draws(sample, step, noise, timesteps, token_ids, content, placement, scores))
        rates = self.noise_process.signal_and_noise_rate(timesteps)  # sqrt(abar_t), sqrt(1 - abar_t)
        noised = add_noise(latents, noise, rates)  # x_t
        if self._router is not None:
            num_tokens = noised[0, 0].numel() // patch_size_of(self.network) ** 2
            self._router.select(self.seed, step, sample, num_tokens, is_training=purposes is TRAINING)
        prediction = self._denoise(noised, timesteps, conditioning)
        target = TARGETS[objective.prediction_type]
        gamma = objective.min_snr_gamma
        weight = None if gamma is None else min_snr_weight(target, rates, gamma)
        similarity = self._similarity(batch, noised) if self.alignment and purposes is TRAINING else None
        return Prediction(prediction, target.compute(latents, noise, rates), weight, timesteps, similarity)

    def _denoise(self, noised: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        """Prediction of the network, float [B, C, H, W]; in the precision of its weights unless there is autocast."""
        if autocast_dtype(noised) is None:
            dtype = next(self.network.parameters()).dtype
            noised, conditioning = noised.to(dtype), conditioning.to(dtype)
        if self._score_conditioner is not None:
            assert conditioning.scores is not None
            self._score_conditioner.set(conditioning.scores)
        return predict(self.network, noised, timesteps, conditioning)

    def _similarity(self, batch: Batch, noised: Tensor) -> Tensor:
        """Similarity [B] of the hidden states for noised latents [B, C, H, W] with the features of the images."""
        assert self.alignment is not None
        if BatchKey.IMAGE not in batch:
            raise ValueError("model.alignment needs images: data.representation=images")
        height, width = noised.shape[2:]
        features = self._frozen["image_encoder"](batch[BatchKey.IMAGE], (height // 2, width // 2))
        patch = patch_size_of(self.network)
        kept = None if self._router is None else self._router.kept
        return self.alignment(features, (height // patch, width // patch), kept)

    def _adapt(self, conditioning: Conditioning) -> Conditioning:
        """Continue the text encoding by the adapter."""
        if self.text_adapter is None:
            return conditioning
        if autocast_dtype(conditioning.text) is None:
            conditioning = conditioning.to(next(self.text_adapter.parameters()).dtype)
        return conditioning._replace(text=self.text_adapter(conditioning.text, conditioning.mask))

    def loss(self, outputs: Prediction, batch: Batch) -> Tensor | dict[str, Tensor]:
        """Mean squared error of the microbatch, weighted by sample: float32 [].

        With alignment, both terms, which the Trainer adds.
        """
        error = squared_error(outputs)
        error = error if outputs.weight is None else error * outputs.weight
        if self.loss_observer is not None:
            self.loss_observer(error.detach(), batch)
        if self.alignment is None or outputs.similarity is None:
            return error.mean()
        return {"diffusion": error.mean(), "alignment": -self.alignment.config.weight * outputs.similarity.mean()}

    @torch.no_grad()
    def _latents(self, batch: Batch, purposes: Purposes) -> Tensor:
        """Normalised latents of a batch, float32 [B, C, H, W]: samples of the VAE's posterior, or its means."""
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
                    "the data has no log-variance: encode without --mean-only, or objective.posterior=mean"
                )
            noise = normal(
                self.seed, purposes.posterior, batch[BatchKey.STEP], batch[BatchKey.SAMPLE], tuple(mean.shape[1:])
            )
            mean = mean + torch.exp(0.5 * logvar.float()) * noise
        return self.latent_scaling.normalise(mean.float())

    def _drop_captions(self, batch: Batch) -> Tensor:
        """Token ids [B, L], with captions replaced by the empty one at the rate `objective.caption_dropout`."""
        is_dropped = bernoulli(
            self.seed,
            Purpose.CAPTION_DROP,
            batch[BatchKey.STEP],
            batch[BatchKey.SAMPLE],
            self.objective.caption_dropout,
        )
        return self.conditioner.drop(batch[BatchKey.TOKEN_IDS], is_dropped)

    def _scores(self, batch: Batch, purposes: Purposes) -> Tensor | None:
        """Scores float32 [B, S] of the images, in training with dropped ones; None without conditioning on them."""
        if self.score_embedding is None:
            return None
        if BatchKey.SCORES not in batch:
            raise ValueError("the data has no scores, which model.score_conditioning needs")
        if purposes is not TRAINING:
            return batch[BatchKey.SCORES]
        rate = self.score_embedding.config.dropout
        return drop_scores(batch[BatchKey.SCORES], self.seed, batch[BatchKey.STEP], batch[BatchKey.SAMPLE], rate)

    def _timesteps(self, batch: Batch, purposes: Purposes) -> Tensor:
        """Timesteps [B] of a batch: independent, or spread over the global batch."""
        step, sample = batch[BatchKey.STEP], batch[BatchKey.SAMPLE]
        if self.objective.stratified_timesteps and purposes is TRAINING and self.num_slots:
            quantiles = draw_stratified_quantiles(self.seed, step, sample, batch[BatchKey.SLOT], self.num_slots)
        else:
            quantiles = draw_quantiles(purposes, self.seed, step, sample)
        return self.noise_process.timesteps(quantiles)

    def eval_forward(self, batch: Batch, outputs: Prediction | None = None) -> Prediction:
        """Predict with noise and timesteps that are fixed per sample, without dropped captions."""
        if outputs is not None:
            return outputs
        batch = _with_step_0(batch)
        return self._predict(batch, batch[BatchKey.TOKEN_IDS], EVALUATION)

    def occupied_timestep_bins(self, samples: Tensor) -> list[range]:
        """Return the tenths of the timesteps that validation samples, by their addresses [N], draw."""
        drawn = self._timesteps({BatchKey.SAMPLE: samples, BatchKey.STEP: torch.zeros_like(samples)}, EVALUATION)
        bins = timestep_bins(self.noise_process.num_timesteps)
        return [part for part in bins if bool(((drawn >= part.start) & (drawn < part.stop)).any())]

    def batch_flops(self, batch: Mapping[str, Entry]) -> float:
        """Floating-point operations of network and text adapter for a batch, forward and backward; NaN if unknown."""
        return batch_flops(
            self.network.config,
            batch,
            vae_factor=self.vae_factor,
            has_fixed_weights=self._has_fixed_weights,
            adapter=None if self.text_adapter is None else self.text_adapter.shape,
            routing=self.token_routing,
        )

    @cached_property
    def _has_fixed_weights(self) -> bool:
        """Return whether weights of the network are frozen, as under LoRA; cached, because each step needs it."""
        return not all(parameter.requires_grad for parameter in self.network.parameters())

    @torch.no_grad()
    def generate(
        self,
        prompts: str | Sequence[str],
        negative_prompts: str | Sequence[str] | None = None,
        *,
        scores: Mapping[str, float] | None = None,
        height: int | None = None,
        width: int | None = None,
        original_size: tuple[int, int] | None = None,
        crop: tuple[int, int] = (0, 0),
        num_inference_steps: int = 50,
        sampler: Sampler | str | None = None,
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
            negative_prompts: one for all or one per prompt; None is the empty caption, as in training.
            scores: scores to ask for, by name; the others are "none". Those of negative prompts are the same.
            height: in pixels, a multiple of the VAE's factor; the training resolution by default.
            width: as height.
            original_size: height and width that SDXL is given as the size of the original; the image's by default.
            crop: rows and columns that SDXL is given as cropped at the top and left.
            num_inference_steps: at most the timesteps of the noise schedule. A step of Heun takes two evaluations.
            sampler: "ddim"; with rectified flow "euler" or "heun"; the first that fits by default.
            guidance_scale: classifier-free guidance; 1 is none.
            seed: image i gets seed + i; or one seed per image; None draws them at random.
            num_images_per_prompt: number of adjacent images of a prompt.
            batch_size: images at a time.
            latents: initial noise float32 [B, C, H, W] of all images, instead of seeds.
            output: "pil" for PIL images, "tensor" for float32 [B, 3, height, width] in [0, 1].
            progress: show a bar.

        Returns:
            P * num_images_per_prompt images.

        Raises:
            ValueError: an argument is invalid, or contradicts another one.
        """
        if output not in ("pil", "tensor"):
            raise ValueError(f"output {output!r}: choose 'pil' or 'tensor'")
        num_images_per_prompt = whole_number("num_images_per_prompt", num_images_per_prompt, least=1)
        texts, negatives = expand_prompts(prompts, negative_prompts, num_images_per_prompt)
        size = image_size(height, width, default=self.resolution, factor=self.side_factor)
        placement = Placement(*(original_size or size), *crop, *size)
        most_steps = self.noise_process.num_timesteps
        num_inference_steps = whole_number("num_inference_steps", num_inference_steps, least=1, most=most_steps)
        batch_size = whole_number("batch_size", batch_size, least=1)
        seeds = image_seeds(seed, len(texts))
        noise = self._initial_noise(latents, seeds, size)
        asked = self.requested_scores(scores)

        scheduler = inference_scheduler(self.noise_scheduler, sampler)
        was_training = self.network.training
        self.network.eval()
        try:
            images = [torch.empty(0, 3, *size, device="cpu")]
            for start in range(0, len(texts), batch_size):
                part = slice(start, start + batch_size)
                sampled = sample_latents(
                    self._denoise,
                    scheduler,
                    noise[part],
                    self._encode_prompts(texts[part], placement, asked),
                    self._encode_prompts(negatives[part], placement, asked),
                    num_inference_steps=num_inference_steps,
                    guidance_scale=guidance_scale,
                    progress=progress,
                )
                images.append(self.decode(sampled).cpu())
        finally:
            self.network.train(was_training)
        result = torch.cat(images)
        return to_pil(result) if output == "pil" else result

    def _initial_noise(self, latents: Tensor | None, seeds: Sequence[int], size: tuple[int, int]) -> Tensor:
        """Initial noise of images of a size in pixels, given or from their seeds: float32 [B, C, H, W]."""
        device = next(self.network.parameters()).device
        shape = (self.network.config["in_channels"], size[0] // self.vae_factor, size[1] // self.vae_factor)
        if latents is None:
            return initial_latents(seeds, shape, device)
        if (found := tuple(latents.shape)) != (expected := (len(seeds), *shape)):
            raise ValueError(f"latents {found}: {len(seeds)} images of {size[0]} x {size[1]} px take {expected}")
        return latents.to(device, torch.float32)

    def requested_scores(self, scores: Mapping[str, float] | None) -> Tensor | None:
        """Scores float32 [S] to ask for, NaN for "none"; None without conditioning on them.

        Raises:
            ValueError: the model was not trained with one of the scores.
        """
        if self.score_embedding is not None:
            return self.score_embedding.asked(scores).to(self.network.device)
        if scores:
            raise ValueError(f"scores {', '.join(scores)}: the model was trained without model.score_conditioning")
        return None

    def _encode_prompts(self, prompts: Sequence[str], placement: Placement, scores: Tensor | None) -> Conditioning:
        token_ids = torch.from_numpy(self.tokenize(prompts)).long().to(self.network.device)
        conditioning = self._adapt(self.conditioner.encode_prompts(token_ids, placement)).to(self.network.dtype)
        return conditioning._replace(scores=None if scores is None else scores.expand(len(prompts), -1))

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode the network's latents [B, C, H, W] to images: float32 [B, 3, height, width] in [0, 1]."""
        unscaled = self.latent_scaling.denormalise(latents)
        with upcast(self.vae) as vae:
            decoded = vae.decode(unscaled.to(vae.dtype), return_dict=False)[0]  # pyright: ignore[reportArgumentType]
        return (decoded.float() / 2 + 0.5).clamp(0, 1)


def timestep_bins(num_timesteps: int) -> list[range]:
    """Divide the timesteps 0 .. num_timesteps - 1 into ten nearly equal ranges."""
    ends = [num_timesteps * i // NUM_TIMESTEP_BINS for i in range(NUM_TIMESTEP_BINS + 1)]
    return [range(*pair) for pair in pairwise(ends)]


def squared_error(outputs: Prediction) -> Tensor:
    """Mean squared error of each sample: float32 [B]."""
    return F.mse_loss(outputs.prediction.float(), outputs.target, reduction="none").mean(dim=(1, 2, 3))


def _with_step_0(batch: Batch) -> Batch:
    return {**batch, BatchKey.STEP: torch.zeros_like(batch[BatchKey.SAMPLE])}
