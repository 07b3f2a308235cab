"""The model in pure torch: from a batch to the loss, and from prompts to images.

The loss of a batch, in `LatentDiffusion.forward` and `loss`: latents x_0 from the VAE, noise and timesteps t from
addressed random numbers, x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) noise, the network's prediction from x_t, t and the
captions, and its mean squared error against noise, x_0, v or noise - x_0. Ingredients change
the conditioning, the network's blocks or the error of a sample, or add terms to the loss.

Shape letters: B batch, C channels, H W height and width of the latent, f pixels along a side of one of
its positions, L tokens, D width of the text encoding.
"""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion.config.model import ObjectiveConfig, Posterior
from diffusion.datasets.batch import BatchKey, Entry
from diffusion.errors import ConfigurationError
from diffusion.formats.marks import Mark
from diffusion.models import generation
from diffusion.models.conditioning import Conditioner, TextEncoder
from diffusion.models.fast.norms import use_low_precision_norms
from diffusion.models.flops import batch_flops
from diffusion.models.ingredients import Call, Caller, Ingredient
from diffusion.models.latents import VAE, latent_space
from diffusion.models.networks import Network, component_name, patch_size_of
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
from diffusion.models.pretrained import FrozenParts, module_identity, weights_identity
from diffusion.models.sampling import NoiseScheduler
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

    values: dict[str, Tensor]
    """float32 [B] by name: what ingredients return for their terms of the loss; empty in validation."""

    draws: "Draws"
    """Random numbers and inputs."""

    is_training: bool = True
    """False in validation, where the loss has no terms of ingredients."""


class Draws(NamedTuple):
    """Random numbers and inputs of a forward pass."""

    sample: Tensor
    """int64 [B], addresses of the samples: stream, occurrence and index in one number (`sample_address`)."""

    step: Tensor
    """int64 [B], optimizer step."""

    noise: Tensor
    """float32 [B, C, H, W]."""

    timesteps: Tensor
    """[B], int64, or float32 in rectified flow."""

    token_ids: Tensor
    """int64 [B, L], after captions were dropped."""

    content: Tensor
    """Cropped and flipped images, uint8 [B, 3, fH, fW]; or means of encoded latents, [B, C, H, W]."""

    placement: Tensor | None
    """int64 [B, 6], sizes and crops; None unless the model is SDXL."""

    scores: Tensor | None = None
    """float32 [B, S], after scores were dropped; None unless the model is conditioned on scores."""


class LatentDiffusion(nn.Module):
    """A latent diffusion model (Rombach et al. 2022).

    Its child modules are trained: the network, under its name in pipelines of diffusers (`unet`, `transformer`), and
    those of the ingredients. The frozen parts are outside of the module tree and so in no optimizer, checkpoint or FSDP
    unit. They stay in eval mode and move with the model.

    Args:
        network: the trained network.
        ingredients: parts of the recipe beside these, built for the network and the text encoder.
        frozen: VAE, text encoder, tokenizer and latent scaling.
        noise_scheduler: noise schedule and prediction type.
        objective: training objective, with the scheduler's prediction type.
        resolution: side of the training images in pixels, and default size of generated images.
        seed: seed of noise, timesteps, posterior and dropped captions, 0 <= seed < 2^32.
        low_precision_norms: run the network's GroupNorm and LayerNorm in the autocast precision.
        num_slots: samples of a global batch, for `objective.stratified_timesteps`; 0 outside of the Trainer, where
            timesteps are independent.
    """

    name = "diffusion"
    """Name of the model in its images: run, checkpoint and weights, if it is loaded from a run."""

    def __init__(
        self,
        *,
        network: Network,
        ingredients: Sequence[Ingredient] = (),
        frozen: FrozenParts,
        noise_scheduler: NoiseScheduler,
        objective: ObjectiveConfig,
        resolution: int,
        seed: int = 17,
        low_precision_norms: bool = True,
        num_slots: int = 0,
    ) -> None:
        super().__init__()
        if low_precision_norms:
            use_low_precision_norms(network)
        self.component = component_name(network)
        self.add_module(self.component, network)
        self.ingredients = ingredients
        self._frozen: dict[str, Any] = {"vae": frozen.vae, "text_encoder": frozen.text_encoder}
        self.frozen = frozen
        self.latent_space = latent_space(frozen.vae)
        self.caller = Caller(network, ingredients, is_pixel=isinstance(frozen.vae, nn.Identity))
        self.tokenizer = frozen.tokenizer
        self.latent_scaling = frozen.latent_scaling
        self.noise_scheduler = noise_scheduler
        self.noise_process = noise_process(objective, noise_scheduler)
        self.objective = objective
        self.resolution = resolution
        self.seed = seed
        self.num_slots = num_slots
        self.tokenize, self.num_chunks = frozen.tokenize, frozen.num_chunks
        empty_token_ids = torch.from_numpy(self.tokenize([""])).long()[0]
        self.conditioner = Conditioner(
            frozen.text_encoder,
            empty_token_ids,
            num_chunks=frozen.num_chunks,
            is_extended=network.config.get("addition_embed_type") == "text_time",
            is_masked=self.component == "transformer",
            is_adapted=any(ingredient.continues_text_encoder for ingredient in ingredients),
        )
        for ingredient in ingredients:  # Last: their names are compared with all attributes.
            _check_new(self._frozen.keys() | vars(frozen), ingredient.frozen, "a frozen part", ingredient)
            self._frozen |= ingredient.frozen
            if ingredient.module is not None:
                if not ingredient.part or "." in ingredient.part or hasattr(self, ingredient.part):
                    raise ConfigurationError(
                        f"no further part of the model can be called '{ingredient.part}': change `part` of "
                        f"{type(ingredient).__name__} to a new name without dots"
                    )
                self.add_module(ingredient.part, ingredient.module)

    @property
    def network(self) -> Network:
        """The trained network, a U-Net or a transformer."""
        return self.get_submodule(self.component)  # pyright: ignore[reportReturnType]

    @property
    def vae(self) -> VAE:
        """The frozen VAE; the identity where the network works on pixels."""
        return self._frozen["vae"]

    @property
    def text_encoder(self) -> TextEncoder:
        """The frozen text encoder."""
        return self._frozen["text_encoder"]

    @property
    def frozen_parts(self) -> list[nn.Module]:
        """VAE, text encoder and those of the ingredients."""
        return list(self._frozen.values())

    def identities(self) -> dict[str, str]:
        """Hashes of the frozen parts by name, as long as they are in the precision in which they were loaded."""
        own = {name: part for ingredient in self.ingredients for name, part in ingredient.frozen.items()}
        return self.frozen.identities() | {name: module_identity(part) for name, part in own.items()}

    @property
    def mark(self) -> Mark:
        """Origin of its images, with a hash of the weights as they are now."""
        others = [one.module for one in self.ingredients if one.module is not None and not one.serves_training_only]
        return Mark(model=self.name, version=weights_identity(self.network, self.vae, self.text_encoder, *others))

    @property
    def vae_factor(self) -> int:
        """Pixels per latent position along one side."""
        return self.latent_space.factor

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
            batch: the entries of `BatchKey`. The Trainer adds STEP, a loop of your own must; without it the step is 0.
        """
        if BatchKey.STEP not in batch:
            if torch.is_grad_enabled() and self.network.training:
                warnings.warn(
                    "without batch['step'] each sample has the same noise and timestep in every step: set it to "
                    "torch.full_like(batch['sample'], step)",
                    stacklevel=4,
                )
            batch = _with_step_0(batch)
        address, rate = (batch[BatchKey.STEP], batch[BatchKey.SAMPLE]), self.objective.caption_dropout
        is_dropped = bernoulli(self.seed, Purpose.CAPTION_DROP, *address, rate)
        return self._predict(batch, self.conditioner.drop(batch[BatchKey.TOKEN_IDS], is_dropped), TRAINING)

    def _predict(self, batch: Batch, token_ids: Tensor, purposes: Purposes) -> Prediction:
        """Add noise to the latents of a batch and predict the target."""
        objective, step, sample = self.objective, batch[BatchKey.STEP], batch[BatchKey.SAMPLE]
        latents = self._latents(batch, purposes)  # x_0
        shape = (latents.shape[1], latents.shape[2], latents.shape[3])
        noise = draw_noise(objective, purposes, self.seed, step, sample, shape)
        timesteps = self._timesteps(batch, purposes)
        call = Call(seed=self.seed, is_training=purposes is TRAINING, batch=batch)
        conditioning = self.caller.condition(self.conditioner.encode_batch(batch, token_ids), call)
        content = batch[BatchKey.IMAGE if BatchKey.IMAGE in batch else BatchKey.LATENT_MEAN]
        placement, scores = conditioning.placement, conditioning.scores
        draws = Draws(sample, step, noise, timesteps, token_ids, content, placement, scores)
        rates = self.noise_process.signal_and_noise_rate(timesteps)  # sqrt(abar_t), sqrt(1 - abar_t)
        noised = add_noise(latents, noise, rates)  # x_t
        prediction = self.caller(noised, timesteps, conditioning, call)
        target = TARGETS[objective.prediction_type]
        gamma = objective.min_snr_gamma
        weight = None if gamma is None else min_snr_weight(target, rates, gamma)
        values: dict[str, Tensor] = {}
        for ingredient in self.ingredients if call.is_training else ():
            added = ingredient.values(call, noised)
            _check_new(values, added, "a value for the loss", ingredient)
            values |= added
        return Prediction(prediction, target.compute(latents, noise, rates), weight, values, draws, call.is_training)

    def sample_errors(self, outputs: Prediction) -> Tensor:
        """Error of each sample in the loss: float32 [B]; the mean squared error, unless an ingredient changes it."""
        error = squared_error(outputs)
        for ingredient in self.ingredients:
            error = ingredient.error(before := error, outputs)
            if (shape := getattr(error, "shape", None)) != before.shape:
                found = type(error).__name__ if shape is None else list(shape)
                name = type(ingredient).__name__
                raise ConfigurationError(f"{name}.error returned {found}, not a tensor of {list(before.shape)}")
        return error if outputs.weight is None else error * outputs.weight

    def loss(self, outputs: Prediction, batch: Batch) -> Tensor | dict[str, Tensor]:
        """Mean error of the microbatch, float32 []; or all terms, where ingredients add some: the Trainer adds them."""
        terms = {"diffusion": self.sample_errors(outputs).mean()}
        for ingredient in self.ingredients if outputs.is_training else ():
            added = ingredient.loss(outputs)
            # Composer takes a term `total` for the sum.
            _check_new(terms.keys() | {"total"}, added, "a term of the loss", ingredient)
            terms |= added
        return terms if len(terms) > 1 else terms["diffusion"]

    @torch.no_grad()
    def _latents(self, batch: Batch, purposes: Purposes) -> Tensor:
        """Normalised latents of a batch, float32 [B, C, H, W]: samples of the VAE's posterior, or its means."""
        if BatchKey.LATENT_MEAN in batch:
            mean, logvar = batch[BatchKey.LATENT_MEAN], batch.get(BatchKey.LATENT_LOGVAR)
        else:
            mean, logvar = self.latent_space.encode(batch[BatchKey.IMAGE])
        if self.objective.posterior == Posterior.sample and self.latent_space.has_posterior:
            if logvar is None:
                raise ValueError(
                    "the data has no log-variance: encode without --mean-only, or objective.posterior=mean"
                )
            noise = normal(
                self.seed, purposes.posterior, batch[BatchKey.STEP], batch[BatchKey.SAMPLE], tuple(mean.shape[1:])
            )
            mean = mean + torch.exp(0.5 * logvar.float()) * noise
        return self.latent_scaling.normalise(mean.float())

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
        return [one for one in bins if bool(((drawn >= one.start) & (drawn < one.stop)).any())]

    def batch_flops(self, batch: Mapping[str, Entry]) -> float:
        """Floating-point operations for a batch, forward and backward, without frozen parts; NaN if unknown."""
        return batch_flops(
            self.network.config,
            batch,
            vae_factor=self.vae_factor,
            has_fixed_weights=self._has_fixed_weights,
            ingredients=self.ingredients,
        )

    @cached_property
    def _has_fixed_weights(self) -> bool:
        """Return whether weights of the network are frozen; cached, because each step needs it."""
        return not all(parameter.requires_grad for parameter in self.network.parameters())

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode the network's latents [B, C, H, W] to images: float32 [B, 3, height, width] in [0, 1]."""
        return self.latent_space.decode(self.latent_scaling.denormalise(latents))

    generate, requested_scores = generation.generate, generation.requested_scores


def timestep_bins(num_timesteps: int) -> list[range]:
    """Divide the timesteps 0 .. num_timesteps - 1 into ten nearly equal ranges."""
    ends = [num_timesteps * i // NUM_TIMESTEP_BINS for i in range(NUM_TIMESTEP_BINS + 1)]
    return [range(*pair) for pair in pairwise(ends)]


def _check_new(known: Collection[str], added: Any, what: str, ingredient: Ingredient) -> None:
    """Raise a ConfigurationError if an ingredient gives no dictionary, or names that are known already."""
    if not isinstance(added, Mapping):
        raise ConfigurationError(f"{type(ingredient).__name__} gives {added!r} for {what}: give a dictionary")
    if taken := {*known} & added.keys():
        raise ConfigurationError(f"{what} is called {taken.pop()} already: rename that of {type(ingredient).__name__}")


def squared_error(outputs: Prediction) -> Tensor:
    """Mean squared error of each sample: float32 [B]."""
    return F.mse_loss(outputs.prediction.float(), outputs.target, reduction="none").mean(dim=(1, 2, 3))


def _with_step_0(batch: Batch) -> Batch:
    return {**batch, BatchKey.STEP: torch.zeros_like(batch[BatchKey.SAMPLE])}
