"""Alignment of a network with a frozen image encoder (REPA; Yu et al. 2025, arXiv 2410.06940).

In training, hidden states of the noised latents are projected, and their cosine similarity with the features of the
clean image is raised at each position. Each sample is compared with its own image only: terms that compare samples
would make the loss depend on how a batch is cut.

Shape letters: B batch, h w positions of the hidden states, L = h w, K those of them that are not routed around, D width
of the hidden states, E width of the features.
"""

import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from diffusion.config.ingredients import AlignmentConfig
from diffusion.datasets.batch import BatchKey
from diffusion.errors import ConfigurationError, error_context
from diffusion.models.ingredients.base import Call, Caller, Ingredient
from diffusion.models.model_folders import load_pretrained
from diffusion.models.networks import Network, component_name, patch_size_of
from diffusion.models.precision import without_float16
from diffusion.models.pretrained import freeze

if TYPE_CHECKING:
    from diffusion.models.latent_diffusion import Prediction

PREPROCESSOR = "preprocessor_config.json"


class ImageEncoder(nn.Module):
    """A vision transformer of transformers, such as DINOv2, and the moments of its pixels.

    Args:
        network: returns `last_hidden_state`, with tokens that have no position, such as CLS, at the beginning.
        mean: mean of each channel in [0, 1].
        std: standard deviation of each channel.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: Any, mean: list[float], std: list[float]) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", torch.tensor(mean)[:, None, None])
        self.register_buffer("std", torch.tensor(std)[:, None, None])
        takes_sizes = "interpolate_pos_encoding" in inspect.signature(network.forward).parameters
        self._options = {"interpolate_pos_encoding": True} if takes_sizes else {}

    @torch.no_grad()
    def forward(self, images: Tensor, grid: tuple[int, int]) -> Tensor:
        """Features [B, E, h, w] of images uint8 [B, 3, height, width], scaled to patches on a grid of h x w."""
        size = [side * self.network.config.patch_size for side in grid]
        pixels = F.interpolate(images.float() / 255, size, mode="bicubic", antialias=True).clamp(0, 1)
        with without_float16(self):
            pixels = (pixels - self.mean) / self.std
            states = self.network(pixel_values=pixels, **self._options).last_hidden_state
        return states[:, -grid[0] * grid[1] :].transpose(1, 2).unflatten(2, grid)


class Alignment(nn.Module):
    """Trained projection of hidden states to the features of an image encoder, an MLP of three layers.

    Args:
        inner: D.
        hidden: width of the hidden layers.
        width: E.
    """

    def __init__(self, inner: int, hidden: int, width: int) -> None:
        super().__init__()
        self.projector = nn.Sequential(
            nn.Linear(inner, hidden),
            nn.SiLU(),
            nn.Linear(hidden, hidden),
            nn.SiLU(),
            nn.Linear(hidden, width),
        )

    def forward(self, states: Tensor, features: Tensor, grid: tuple[int, int], kept: Tensor | None = None) -> Tensor:
        """Mean cosine similarity of hidden states and features: float32 [B].

        Args:
            states: [B, K, D] of a transformer, or [B, D, h, w] of a U-Net.
            features: [B, E, height, width], averaged over the positions of the hidden states.
            grid: h and w of a transformer's tokens.
            kept: int64 [B, K], the tokens of a block that others are routed around.
        """
        if states.ndim == 4:  # [B, D, h, w] of a U-Net
            grid = (states.shape[2], states.shape[3])
            states = states.flatten(2).transpose(1, 2)
        target = F.adaptive_avg_pool2d(features, grid).flatten(2).transpose(1, 2)  # [B, L, E]
        if kept is not None and states.shape[1] < target.shape[1]:
            target = torch.take_along_dim(target, kept[..., None], dim=1)
        return F.cosine_similarity(self.projector(states).float(), target.float(), dim=-1).mean(1)


class AlignmentIngredient(Ingredient):
    """Aligns the output of a transformer's block, or of the middle of a U-Net, in training."""

    key = part = "alignment"
    wide_matrices = ("projector.0.weight",)
    serves_training_only = True
    module: Alignment

    def __init__(self, config: AlignmentConfig) -> None:
        self._config = config

    def build(self, network: Network, text_encoder: nn.Module, *, is_meta: bool = False) -> None:
        """Load the image encoder, and build the projection to its features.

        Raises:
            ConfigurationError: there is no image encoder.
        """
        kind, config = read_image_encoder(self._config.path)
        settings: Any = network.config
        is_transformer = component_name(network) == "transformer"
        inner = settings["hidden_size"] if is_transformer else settings["block_out_channels"][-1]
        self.module = Alignment(inner, self._config.width, config.hidden_size)
        self.frozen = {"image_encoder": kind(config) if is_meta else load_image_encoder(self._config.path)}

    def attach(self, network: Network, caller: Caller) -> None:
        """Register a hook at the aligned block.

        Raises:
            ConfigurationError: there is no such block.
        """
        self._caller, self._patch = caller, patch_size_of(network)
        is_transformer = component_name(network) == "transformer"
        name = f"blocks.{self._config.block_of(network.config['depth'])}" if is_transformer else "mid_block"
        network.get_submodule(name).register_forward_hook(self._keep)

    def _keep(self, source: nn.Module, arguments: Any, output: Tensor) -> None:
        if self._caller.call.is_training:
            self._caller.call.hidden = output

    def values(self, call: Call, noised: Tensor) -> dict[str, Tensor]:
        """Compare the hidden states with the features of the images, float32 [B]."""
        if BatchKey.IMAGE not in call.batch:
            raise ValueError("model.alignment needs images: data.representation=images")
        height, width = noised.shape[2:]
        cell = self._patch if self._caller.is_pixel else 2  # Positions of a feature along one side.
        features = self.frozen["image_encoder"](call.batch[BatchKey.IMAGE], (height // cell, width // cell))
        states, call.hidden = call.hidden, None
        grid = (height // self._patch, width // self._patch)
        return {"alignment": self.module(states, features, grid, call.kept)}

    def loss(self, outputs: "Prediction") -> dict[str, Tensor]:
        """Reward the mean similarity."""
        return {"alignment": -self._config.weight * outputs.values["alignment"].mean()}


def read_image_encoder(folder: str) -> tuple[type[Any], Any]:
    """Class and configuration of the image encoder in a folder in the layout of transformers.

    No code of the folder is run.

    Raises:
        ConfigurationError: there is none that transformers knows.
    """
    remedy = (
        "Give the folder of a vision transformer that transformers knows, such as DINOv2: config.json, "
        f"model.safetensors, {PREPROCESSOR}"
    )
    with error_context(f"model.alignment.path={folder}"):
        config: Any = load_pretrained(AutoConfig, folder, local_files_only=True, remedy=remedy)
        kind: Any = MODEL_MAPPING.get(type(config), None)
        sizes = (getattr(config, name, None) for name in ("patch_size", "hidden_size"))
        if kind is None or not all(isinstance(size, int) for size in sizes):
            raise ConfigurationError(f"{config.model_type} is no vision transformer. {remedy}")
    return kind, config


def load_image_encoder(folder: str) -> ImageEncoder:
    """Load a frozen image encoder, in float32.

    Raises:
        ConfigurationError: there is none in safetensors, the moments of its pixels are missing, or its states are no
            grid of patches.
    """
    kind, config = read_image_encoder(folder)
    options: dict[str, Any] = {"config": config}
    if "add_pooling_layer" in inspect.signature(kind).parameters:  # Weights of classifiers have none.
        options["add_pooling_layer"] = False
    network = load_pretrained(kind, folder, local_files_only=True, **options)
    try:
        moments = json.loads((Path(folder).expanduser() / PREPROCESSOR).read_bytes())
        encoder = ImageEncoder(network, moments["image_mean"], moments["image_std"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(
            f"model.alignment.path={folder} has no {PREPROCESSOR} with image_mean and image_std: add it"
        ) from error
    freeze(encoder)
    try:
        encoder(torch.zeros(1, 3, 4, 4, dtype=torch.uint8, device=encoder.mean.device), (4, 4))
    except Exception as error:  # The library's models raise anything
        raise ConfigurationError(
            f"model.alignment.path={folder}: states of a {type(network).__name__} are no grid of patches. Give a plain "
            "vision transformer, such as DINOv2"
        ) from error
    return encoder
