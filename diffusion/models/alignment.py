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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from diffusion.config.model import AlignmentConfig
from diffusion.errors import ConfigurationError, error_context
from diffusion.models.model_folders import load_pretrained
from diffusion.models.networks import component_name
from diffusion.models.precision import without_float16
from diffusion.models.pretrained import freeze

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

    @property
    def width(self) -> int:
        """E."""
        return self.network.config.hidden_size

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

    The states are the output of a transformer's block, or of the middle of a U-Net.

    Args:
        config: block and width.
        network: U-Net or transformer whose hidden states are taken, by a hook.
        width: E.
    """

    def __init__(self, config: AlignmentConfig, network: nn.Module, width: int) -> None:
        super().__init__()
        self.config = config
        settings: Any = network.config
        if component_name(network) == "transformer":
            source = network.get_submodule(f"blocks.{config.block_of(settings['depth'])}")
            inner = settings["hidden_size"]
        else:
            source, inner = network.get_submodule("mid_block"), settings["block_out_channels"][-1]
        self.projector = nn.Sequential(
            nn.Linear(inner, config.width),
            nn.SiLU(),
            nn.Linear(config.width, config.width),
            nn.SiLU(),
            nn.Linear(config.width, width),
        )
        self._states: Tensor | None = None
        source.register_forward_hook(self._keep)

    def _keep(self, source: nn.Module, arguments: Any, output: Tensor) -> None:
        if source.training:
            self._states = output

    def forward(self, features: Tensor, grid: tuple[int, int], kept: Tensor | None = None) -> Tensor:
        """Mean cosine similarity with the hidden states of the last forward pass: float32 [B].

        Args:
            features: [B, E, height, width], averaged over the positions of the hidden states.
            grid: h and w of a transformer's tokens.
            kept: int64 [B, K], the tokens of a block that others are routed around.
        """
        states, self._states = self._states, None
        assert states is not None, "the network is called first"
        if states.ndim == 4:  # [B, D, h, w] of a U-Net
            grid = (states.shape[2], states.shape[3])
            states = states.flatten(2).transpose(1, 2)
        target = F.adaptive_avg_pool2d(features, grid).flatten(2).transpose(1, 2)  # [B, L, E]
        if kept is not None and states.shape[1] < target.shape[1]:
            target = torch.take_along_dim(target, kept[..., None], dim=1)
        return F.cosine_similarity(self.projector(states).float(), target.float(), dim=-1).mean(1)


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
        if kind is None or not isinstance(getattr(config, "patch_size", None), int):
            raise ConfigurationError(f"{config.model_type} is no vision transformer. {remedy}")
    return kind, config


def load_image_encoder(folder: str) -> ImageEncoder:
    """Load a frozen image encoder, in float32.

    Raises:
        ConfigurationError: there is none in safetensors, or the moments of its pixels are missing.
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
    return encoder
