"""Memory of a rank: weights, gradients, optimizer and averages, frozen networks, reduced gradients, activations.

Parameters and activations are counted on networks of the meta device, once for each architecture and image size.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import torch
import yaml
from diffusers.models.transformers.transformer_prx import PRXAttention, apply_rope
from torch import Tensor, nn

from diffusion.config.data import ImageSize, image_sizes, microbatch_size, microbatch_sizes
from diffusion.config.loading import from_dict, to_yaml
from diffusion.config.model import Compilation, ModelConfig
from diffusion.config.schema import Config, Task
from diffusion.config.training import NumberFormat, OptimizerName, Parallelism, Precision
from diffusion.datasets.batch import BatchKey
from diffusion.models.architectures import (
    ARCHITECTURES,
    build_frozen_text_encoder,
    build_network,
    build_vae,
    count_parameters,
    encoder_width,
    text_shape,
    vae_factor,
)
from diffusion.models.autoencoder import PatchDiscriminator, build_perceptual
from diffusion.models.conditioning import Conditioning, lowered_layers
from diffusion.models.fast.compilation import find_units
from diffusion.models.ingredients import Call, Caller, Ingredient, adapt, find_ingredients
from diffusion.models.networks import Network, text_width_of
from diffusion.models.precision import AUTOCAST_DTYPES
from diffusion.optimizers import hidden_matrices
from diffusion.planning.amounts import sum_known

log = logging.getLogger(__name__)

WEIGHT_BYTES = GRADIENT_BYTES = EMA_BYTES = 4
"""Master weights, gradients and their averages are fp32."""

MOMENT_BYTES = 4
"""A moment of a parameter is fp32: AdamW holds two, Muon one of each matrix."""

FORMAT_BYTES = {NumberFormat.fp32: 4, NumberFormat.fp16: 2, NumberFormat.bf16: 2}

CUDA_BYTES = 1.5e9
"""GPU memory of CUDA, its libraries and NCCL (assumed)."""

USABLE_MEMORY = 0.9
"""Share of a GPU's memory that may be planned (assumed). Workspaces, the largest temporary tensors and fragmentation
take the rest."""

GPU_MEMORY_GB = (40, 80, 141, 192)
"""Sizes of GPUs for which the largest microbatch is computed."""


class ParameterCounts(NamedTuple):
    """Parameters of a run."""

    trained: int
    """With gradients, optimizer state and averages; a VAE's discriminator included."""

    fixed: int = 0
    """Weights of the network that are not trained, but sharded, gathered and stored with those that are."""

    frozen: int = 0
    """Weights of networks that are only used, whole on each rank: VAE and text encoder; LPIPS for a VAE."""

    matrices: int = 0
    """Trained weights in matrices of hidden layers, which `optimizer.name: muon` updates."""

    lowered: int = 0
    """Frozen weights that a GPU holds in 16 bits: linear layers of the text encoder in mixed precision."""


@dataclass(frozen=True, kw_only=True)
class StateMemory:
    """Bytes of the training state of a rank for one parallelism."""

    name: str
    is_chosen: bool
    weights: int
    """With the gathered copies that stay for the backward pass."""

    gradients: int
    optimizer: int
    ema: int
    """All averages."""

    @property
    def total(self) -> int:
        """Weights, gradients, optimizer and averages."""
        return self.weights + self.gradients + self.optimizer + self.ema


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of a rank. None: unknown."""

    microbatch_size: int
    states: list[StateMemory]
    frozen_bytes: int
    reduction_bytes: int
    """Gradients that are not sharded: those of the unit being reduced, and those accumulated whole."""

    activation_bytes: int | None
    """Activations of a microbatch."""

    gpu_bytes: float
    """Sum of all, with CUDA; without unknown activations."""

    largest_microbatches: dict[float, int] | None
    """Largest legal microbatch by GB of a GPU's memory; 0: none fits."""

    @property
    def state_bytes(self) -> int:
        """Training state with the configured parallelism."""
        return next(state.total for state in self.states if state.is_chosen)


def plan_memory(config: Config, counts: ParameterCounts, num_ranks: int) -> MemoryPlan:
    """Compute the memory of a rank."""
    states = _states(config, counts, num_ranks)
    frozen = counts.frozen * WEIGHT_BYTES - counts.lowered * (WEIGHT_BYTES - FORMAT_BYTES[NumberFormat.bf16])
    held = CUDA_BYTES + state_bytes(config, counts, num_ranks) + frozen
    activations = activation_bytes(config, largest_size(config))
    share = config.data.global_batch_size / num_ranks

    def reduction(size: int) -> int:
        return _reduction_bytes(config, counts.trained, has_several_microbatches=size < share)

    def gpu_bytes(size: int) -> float:
        return held + reduction(size) + size * (activations or 0)

    largest = None
    if activations is not None:
        needed = {size: gpu_bytes(size) for size in microbatch_sizes(config.data, num_ranks) if size <= share}
        memories: set[float] = {*GPU_MEMORY_GB}
        if config.plan.gpu_memory_gb is not None:
            memories.add(config.plan.gpu_memory_gb)
        largest = {
            memory: max((size for size, num in needed.items() if num <= USABLE_MEMORY * memory * 1e9), default=0)
            for memory in sorted(memories)
        }
    size = microbatch_size(config.data, config.trainer.device_train_microbatch_size, num_ranks)
    return MemoryPlan(
        microbatch_size=size,
        states=states,
        frozen_bytes=frozen,
        reduction_bytes=reduction(size),
        activation_bytes=activations * size if activations is not None else None,
        gpu_bytes=gpu_bytes(size),
        largest_microbatches=largest,
    )


def state_bytes(config: Config, counts: ParameterCounts, num_ranks: int) -> int:
    """Bytes of a rank's training state with the configured parallelism."""
    return next(state.total for state in _states(config, counts, num_ranks) if state.is_chosen)


def _states(config: Config, counts: ParameterCounts, num_ranks: int) -> list[StateMemory]:
    """Training state with fsdp (FSDP2) without and with resharding after the forward pass, and with ddp."""
    trainer = config.trainer
    shard = Fraction(trainer.num_replicas, num_ranks)
    is_fp32 = trainer.precision is Precision.fp32
    copy = (counts.trained + counts.fixed) * (4 if is_fp32 else 2)

    def state(name: str, part: Fraction, copy: int, is_chosen: bool) -> StateMemory:
        trained, fixed, matrices = (math.ceil(one * part) for one in (counts.trained, counts.fixed, counts.matrices))
        return StateMemory(
            name=name,
            is_chosen=is_chosen,
            weights=(trained + fixed) * WEIGHT_BYTES + copy,
            gradients=trained * GRADIENT_BYTES,
            optimizer=moment_bytes(config, trained, matrices),
            ema=trained * average_bytes(config),
        )

    is_fsdp, reshards = trainer.parallelism is Parallelism.fsdp, trainer.reshard_after_forward
    return [
        state("fsdp (SHARD_GRAD_OP)", shard, copy, is_fsdp and not reshards),
        state("fsdp, reshard_after_forward (FULL_SHARD)", shard, 0, is_fsdp and reshards),
        state("ddp", Fraction(1), 0 if is_fp32 else copy, not is_fsdp),
    ]


def moment_bytes(config: Config, trained: int, matrices: int) -> int:
    """Bytes of the optimizer's moments of trained parameters, of which some are in matrices of hidden layers."""
    return MOMENT_BYTES * (2 * trained - (matrices if config.optimizer.name is OptimizerName.muon else 0))


def average_bytes(config: Config) -> int:
    """Bytes per parameter of all averages together."""
    return EMA_BYTES * config.algorithms.ema.num_averages if config.algorithms.ema is not None else 0


def _reduction_bytes(config: Config, num_trained: int, *, has_several_microbatches: bool) -> int:
    trainer = config.trainer
    if trainer.parallelism is Parallelism.ddp:
        return num_trained * GRADIENT_BYTES  # The buckets that gradients are reduced in.
    computed = NumberFormat.fp32 if trainer.precision is Precision.fp32 else NumberFormat.bf16
    unit = largest_unit(config) * (FORMAT_BYTES[computed] + FORMAT_BYTES[trainer.reduce_precision])
    return unit + (num_trained * GRADIENT_BYTES if config.accumulates_locally and has_several_microbatches else 0)


def largest_size(config: Config) -> ImageSize:
    """Largest area of the images of all streams."""
    return max(config.data.known_sizes, key=lambda size: size.height * size.width)


def mean_over_streams(
    config: Config, weights: Sequence[float | None], number_of: Callable[[ImageSize], float | None]
) -> float | None:
    """Weighted mean of a number of the streams' image sizes; where a weight is unknown, that of the largest size."""
    known = [weight for weight in weights if weight is not None]
    if len(config.data.known_sizes) == 1 or len(known) < len(weights) or not sum(known):
        return number_of(largest_size(config))
    numbers = map(number_of, image_sizes(config.data.known_streams, config.data.resolution))
    total = sum_known(
        None if number is None else weight * number for weight, number in zip(known, numbers, strict=True)
    )
    return None if total is None else total / sum(known)


# Networks


def parameter_counts(config: Config) -> ParameterCounts:
    """Count the parameters of what is configured.

    Raises:
        MachineError: a package that an ingredient needs is not installed.
        ConfigurationError: an ingredient does not fit the network.
    """
    if config.task is Task.diffusion:
        return _network_counts(to_yaml(config.model), AUTOCAST_DTYPES.get(config.trainer.precision))
    settings = config.autoencoder
    with torch.device("meta"):
        parts: list[nn.Module] = [build_vae(ARCHITECTURES[config.model.architecture], settings.vae)]
        if settings.adversarial_weight > 0:
            parts.append(PatchDiscriminator())
        perceptual = [build_perceptual(is_meta=True)] if settings.perceptual_weight > 0 else []
        frozen = sum(p.numel() for part in perceptual for p in part.parameters())
    return ParameterCounts(sum(_num_trained(part.parameters()) for part in parts), 0, frozen, _num_in_matrices(parts))


def activation_bytes(config: Config, size: ImageSize) -> int | None:
    """Bytes that the network keeps for the backward pass of one image; None where that is not known."""
    if config.task is not Task.diffusion or config.trainer.activation_checkpointing:
        return None
    dtype = torch.float32 if config.trainer.precision is Precision.fp32 else torch.bfloat16
    return _activation_bytes(to_yaml(config.model), size, dtype)


def largest_unit(config: Config) -> int:
    """Trained parameters of the largest part of the network whose gradients FSDP2 reduces at once."""
    if config.task is not Task.diffusion or config.performance.compilation is Compilation.unet:
        return parameter_counts(config).trained
    return _largest_unit(to_yaml(config.model), config.performance.compilation)


def meta_parts(config: ModelConfig) -> tuple[Network, list[Ingredient]]:
    """Build the network and the ingredients as they are trained, on the meta device."""
    ingredients = find_ingredients(config)
    with torch.device("meta"):
        network, text_encoder = build_network(config), build_frozen_text_encoder(config)
        for ingredient in ingredients:
            ingredient.build(network, text_encoder, is_meta=True)
        adapt(network, ingredients, initial=None, seed=0)
    return network, ingredients


def meta_forward(
    config: ModelConfig, network: Network, ingredients: Sequence[Ingredient], size: ImageSize, dtype: torch.dtype
) -> Tensor | None:
    """Prediction in training for one image of a size in pixels, on the meta device; None if the user's code fails."""
    settings: Any = network.config
    num_tokens, width = text_shape(config)[0], text_width_of(network)
    shape = [1, settings["in_channels"], *(side // vae_factor(config) for side in size)]
    if config.adapted_text_width is not None:
        width = encoder_width(config)
    with torch.device("meta"):
        latents, address = torch.empty(shape, dtype=dtype), torch.empty(1, dtype=torch.int64)
        batch: dict[str, Tensor] = {
            **dict.fromkeys((BatchKey.STEP, BatchKey.SAMPLE, BatchKey.SLOT, BatchKey.STREAM), address),
            BatchKey.TOKEN_IDS: torch.empty(1, num_tokens, dtype=torch.int64),
            BatchKey.PLACEMENT: torch.empty(1, 6, dtype=torch.int64),
            BatchKey.SCORES: torch.empty(1, len(config.score_names)),
            BatchKey.IMAGE: torch.empty(1, 3, *size, dtype=torch.uint8),
        }
        if not config.architecture.is_pixel:
            batch |= dict.fromkeys((BatchKey.LATENT_MEAN, BatchKey.LATENT_LOGVAR), latents.half())
        text, mask = torch.empty(1, num_tokens, width, dtype=dtype), torch.ones(1, num_tokens, dtype=torch.bool)
        caller, call = Caller(network, ingredients), Call(is_training=True, batch=batch)
        pooled = sizes = None
        if settings.get("addition_embed_type") == "text_time":
            pooled = settings["projection_class_embeddings_input_dim"] - 6 * settings["addition_time_embed_dim"]
            pooled, sizes = torch.empty(1, pooled, dtype=dtype), torch.empty(1, 6, dtype=dtype)
        try:
            conditioning = caller.condition(Conditioning(text, pooled, sizes, mask), call)
            return caller(latents, address, conditioning, call)
        except Exception as error:
            if not config.ingredients:
                raise
            log.warning("model.ingredients cannot be planned, as they fail on the meta device: %r", error)
            return None


def parse_model(text: str) -> ModelConfig:
    """Read a section `model` written by `to_yaml`, the key of cached counts."""
    return from_dict(ModelConfig, yaml.safe_load(text), "model")


@functools.cache
def _network_counts(model: str, dtype: torch.dtype | None = None) -> ParameterCounts:
    config = parse_model(model)
    network, ingredients = meta_parts(config)
    counts, parts = count_parameters(config), _trained_parts(network, ingredients)
    frozen = counts["vae"] + counts["text_encoder"]
    frozen += sum(p.numel() for one in ingredients for part in one.frozen.values() for p in part.parameters())
    trained = _num_trained(parts.parameters())
    fixed = sum(p.numel() for p in parts.parameters()) - trained
    with torch.device("meta"):
        layers = dtype and lowered_layers(build_frozen_text_encoder(config), dtype)
    lowered = sum(parameter.numel() for layer in layers or () for parameter in layer.parameters())
    return ParameterCounts(trained, fixed, frozen, _num_in_matrices(parts), lowered)


def _num_in_matrices(parts: Iterable[nn.Module]) -> int:
    return sum(_num_trained(hidden_matrices(part)) for part in parts)


def _trained_parts(network: Network, ingredients: Iterable[Ingredient]) -> nn.ModuleList:
    return nn.ModuleList([network, *(one.module for one in ingredients if one.module is not None)])


@functools.cache
def _largest_unit(model: str, compilation: Compilation) -> int:
    """Return the largest number of parameters of a unit, of the rest of the network, or of an ingredient."""
    config = parse_model(model)
    network, *others = _trained_parts(*meta_parts(config))
    sizes = [_num_trained(unit.parameters()) for unit in find_units(network, compilation)]
    rest = _num_trained(network.parameters()) - sum(sizes)
    return max(*sizes, rest, *(_num_trained(part.parameters()) for part in others))


def _num_trained(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)


@functools.cache
def _activation_bytes(model: str, size: ImageSize, dtype: torch.dtype) -> int | None:
    """Each storage that autograd keeps counts once, weights do not; nothing is recomputed.

    Attention counts as by a flash kernel, which keeps its inputs and output and no scores.
    """
    config = parse_model(model)
    network, ingredients = meta_parts(config)
    parts: Any = _trained_parts(network, ingredients).to(dtype)
    parts[0].set_attn_processor(FlashAttentionShapes())
    weights = {parameter.untyped_storage()._cdata for parameter in parts.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in weights:
            kept[storage] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = meta_forward(config, network, ingredients, size, dtype)
    # The graph of the output keeps the storages, and their numbers, in use.
    if output is None:
        return None
    assert output.is_meta
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


class _Kept(torch.autograd.Function):
    """Keeps what flash attention keeps."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:  # pyright: ignore
        result = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, result, mask)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


class FlashAttentionShapes:
    """An attention processor of diffusers that computes shapes only."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, **_: Any
    ) -> Tensor:
        """Attend: [B, positions, C], the same shape."""
        if isinstance(attn, PRXAttention):
            return self._attend_to_both(attn, hidden_states, encoder_hidden_states, **_)
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        attended: Any = _Kept.apply(attn.to_q(hidden_states), attn.to_k(context), attn.to_v(context), None)
        return attn.to_out[1](attn.to_out[0](attended))

    @staticmethod
    def _attend_to_both(attn: Any, image: Tensor, text: Any, image_rotary_emb: Any, attention_mask: Any) -> Tensor:
        """Attention of a transformer's block, to image and text; the kernel adds a mask [B, 1, 1, L] to its scores."""
        query, key, value = attn.img_qkv_proj(image).unflatten(-1, (3, attn.heads, -1)).permute(2, 0, 3, 1, 4)
        text_key, text_value = attn.txt_kv_proj(text).unflatten(-1, (2, attn.heads, -1)).permute(2, 0, 3, 1, 4)
        query = apply_rope(attn.norm_q(query), image_rotary_emb)
        key = torch.cat([attn.norm_added_k(text_key), apply_rope(attn.norm_k(key), image_rotary_emb)], dim=2)
        mask = attention_mask
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(image.shape[:2])], dim=1).to(query.dtype)
        attended: Any = _Kept.apply(query, key, torch.cat([text_value, value], dim=2), mask)
        return attn.to_out[1](attn.to_out[0](attended.transpose(1, 2).flatten(2)))
