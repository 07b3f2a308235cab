"""Conditioning on scores of the training images (MIRO, Dufour et al. 2025, arXiv 2510.25897).

Scores that `prepare` computed, such as an aesthetic one, enter as one vector beside the timestep. Training sees images
of all scores; sampling asks for high ones.

The vector is added to the time embedding by a hook. For fixed scores it is a constant, so that an export folds it into
the bias of the embedding's last layer, and stock pipelines give the same images.

Shape letters: B batch, S scores, F Fourier features of a score, E width of the time embedding.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from diffusion.config.ingredients import MAX_DEVIATIONS, ScoreConditioningConfig
from diffusion.datasets.batch import BatchKey
from diffusion.errors import ConfigurationError
from diffusion.models.conditioning import Conditioning
from diffusion.models.fast.norms import autocast_dtype
from diffusion.models.ingredients.base import Call, Caller, Ingredient
from diffusion.models.networks import Network, component_name
from diffusion.randomness import Purpose, uniform

NUM_PERIODS, LONGEST_PERIOD = 6, MAX_DEVIATIONS
"""Periods of the Fourier features in standard deviations, each half of the one before: the longest tells -4 from 4."""

LAST_LAYERS = {"unet": "time_embedding.linear_2", "transformer": "time_in.out_layer"}
"""Last layer of the time embedding."""


def fourier_features(normalised: Tensor) -> Tensor:
    """Sines and cosines of normalised scores float32 [B, S]: [B, S, F]; NaN where a score is NaN."""
    frequencies = torch.arange(NUM_PERIODS, device=normalised.device).exp2() * (2 * math.pi / LONGEST_PERIOD)
    angles = normalised[..., None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def drop_scores(scores: Tensor, seed: int, step: Tensor, sample: Tensor, rate: float) -> Tensor:
    """Replace scores [B, S] by NaN at a rate, each by itself; `step` and `sample` int64 [B] are the address."""
    is_dropped = uniform(seed, Purpose.SCORE_DROP, step, sample, scores.shape[1]) < rate
    return scores.masked_fill(is_dropped, math.nan)


class ScoreEmbedding(nn.Module):
    """A learned vector of scores, for the time embedding; zero at first.

    Args:
        config: names and moments of the scores.
        width: E.
    """

    def __init__(self, config: ScoreConditioningConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.none = nn.Parameter(torch.zeros(len(config.columns), 2 * NUM_PERIODS))
        """Features of a score that is missing."""
        self.in_layer, self.out_layer = nn.Linear(self.none.numel(), width), nn.Linear(width, width)
        nn.init.zeros_(self.out_layer.weight)
        nn.init.zeros_(self.out_layer.bias)

    def forward(self, features: Tensor) -> Tensor:
        """Map features [B, S, F], NaN where a score is missing, to [B, E]."""
        known = torch.where(features.isnan(), self.none, features)
        return self.out_layer(nn.functional.silu(self.in_layer(known.flatten(1))))

    def features(self, scores: Tensor) -> Tensor:
        """Features [B, S, F] of scores float32 [B, S], outside of `forward`: FSDP would round scores to 8 bits."""
        columns = zip(scores.unbind(1), self.config.columns, strict=True)
        return fourier_features(torch.stack([(score - one.mean) / one.std for score, one in columns], dim=1))


class ScoreConditioningIngredient(Ingredient):
    """Adds the vector of scores to the time embedding of a network."""

    key, part = "score_conditioning", "score_embedding"
    wide_matrices = ("out_layer.weight",)
    module: ScoreEmbedding

    def __init__(self, config: ScoreConditioningConfig) -> None:
        self._config = config

    def build(self, network: Network, text_encoder: nn.Module, *, is_meta: bool = False) -> None:
        """Build the embedding."""
        last: Any = network.get_submodule(LAST_LAYERS[component_name(network)])
        self.module = ScoreEmbedding(self._config, last.out_features)

    def attach(self, network: Network, caller: Caller) -> None:
        """Register a hook at the time embedding."""
        self._caller = caller
        time_embedding = LAST_LAYERS[component_name(network)].partition(".")[0]
        network.get_submodule(time_embedding).register_forward_hook(self._add)

    def condition(self, conditioning: Conditioning, call: Call) -> Conditioning:
        """Take the scores float32 [B, S] of a batch, in training with dropped ones."""
        if not call.batch:  # Sampling, with the requested scores.
            return conditioning
        if BatchKey.SCORES not in call.batch:
            raise ValueError("the data has no scores, which model.score_conditioning needs")
        scores = call.batch[BatchKey.SCORES]
        if call.is_training:
            address = call.batch[BatchKey.STEP], call.batch[BatchKey.SAMPLE]
            scores = drop_scores(scores, call.seed, *address, self._config.dropout)
        return conditioning._replace(scores=scores)

    def requested_scores(self, scores: Mapping[str, float]) -> Tensor:
        """Scores float32 [S] to ask for, NaN for the others.

        Raises:
            ValueError: the model was not trained with one of them, or it is too far from the mean.
        """
        if unknown := sorted(scores.keys() - {*self._config.names}):
            raise ValueError(f"score {unknown[0]}: the model was trained with {', '.join(self._config.names)}")
        for problem in self._config.out_of_range(scores):
            raise ValueError(f"score {problem}")
        return torch.tensor([scores.get(name, math.nan) for name in self._config.names])

    def prepare(self, call: Call, noised: Tensor, conditioning: Conditioning) -> None:
        """Compute what is added, from scores float32 [B, S], NaN where missing."""
        assert conditioning.scores is not None
        features = self.module.features(conditioning.scores)
        if autocast_dtype(features) is None:
            features = features.to(self.module.none.dtype)
        call.time_vector = self.module(features)

    def _add(self, module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        call = self._caller.call
        added, call.time_vector = call.time_vector, None
        assert added is not None, "each call of the network has a vector of its own"
        return output + added.to(output.dtype)

    @torch.no_grad()
    def exported(self, weights: dict[str, Tensor], network: Network, scores: Mapping[str, float]) -> dict[str, Tensor]:
        """Fold scores into the bias of the time embedding; those that are not given are "none".

        Raises:
            ConfigurationError: an activation follows that bias, behind which the model adds.
        """
        if network.config.get("timestep_post_act") is not None:
            raise ConfigurationError("model.score_conditioning cannot be exported with model.network.timestep_post_act")
        self.build(network, nn.Module())
        prefix, component = f"{self.part}.", component_name(network)
        own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        self.module.load_state_dict(own)
        added = self.module(self.module.features(self.requested_scores(scores)[None]))[0]
        bias = f"{component}.{LAST_LAYERS[component]}.bias"
        return {**weights, bias: weights[bias] + added.to(weights[bias].dtype)}
