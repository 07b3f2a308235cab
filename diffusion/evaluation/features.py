"""Feature networks: Inception, CLIP, a randomly initialised one, and the way images are brought to their size.

Shape letters: B images, S side in pixels, D numbers of a feature.
"""

import functools
import pickle
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from diffusion.errors import ConfigurationError
from diffusion.evaluation.config import Metric, NetworksConfig, ResizeFilter
from diffusion.models.frozen import freeze, load_pretrained, with_seed
from diffusion.models.identity import module_identity
from diffusion.models.tokenizers import repair
from diffusion.plugins import build_plugin

INCEPTION_FILE = "weights-inception-2015-12-05-6726825d.pth"
INCEPTION_PLACE = "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0"
INCEPTION_SIDE = 299


class FeatureNetwork(Protocol):
    """Turns images into features."""

    name: str
    """What it is, in a few words without spaces."""

    identity: str
    """Hash of its weights."""

    size: int
    """S of the images that it takes."""

    def to(self, device: torch.device) -> Any:
        """Move it."""
        ...

    def image_features(self, pixels: Tensor) -> Tensor:
        """Pixels uint8 [B, 3, S, S] -> float [B, D]."""
        ...


def resized(image: Image.Image, size: int, resize_filter: ResizeFilter) -> np.ndarray:
    """Scale an image with antialiasing, each channel in 32-bit numbers, and round once (Parmar et al. 2022).

    Returns:
        uint8 [3, S, S].
    """
    kind = Image.Resampling[resize_filter.name.upper()]
    channels = [np.asarray(channel.convert("F").resize((size, size), kind)) for channel in image.split()]
    return np.stack(channels).round().clip(0, 255).astype(np.uint8)


class Inception:
    """The Inception network of FID (Heusel et al. 2017), as torch-fidelity computes it: 2,048 features.

    Args:
        path: torch-fidelity's file of weights.

    Raises:
        ConfigurationError: torch-fidelity or the file is missing, or it is another one.
    """

    name = "inception-2015-12-05"
    size = INCEPTION_SIDE

    def __init__(self, path: str | None) -> None:
        try:
            from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
        except ImportError as error:
            raise ConfigurationError(
                "FID and KID need torch-fidelity: install this package as `.[evaluation]`"
            ) from error
        file = Path(path).expanduser() if path else None
        if file is None or not file.is_file():
            raise ConfigurationError(
                f"protocol.networks.inception={path}: FID and KID need the file {INCEPTION_FILE} of {INCEPTION_PLACE}: "
                "put it on this machine and give its path, or set protocol.networks.inception_replacement"
            )
        try:
            # torch-fidelity reads with pickle, which can run code: this refuses what holds more than tensors.
            torch.load(file, map_location="meta", weights_only=True)
            self._network = FeatureExtractorInceptionV3(self.name, ["2048"], feature_extractor_weights_path=str(file))
        except (RuntimeError, OSError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigurationError(f"{file} does not hold the weights of {INCEPTION_FILE}: {reason}") from error
        freeze(self._network)
        self.identity = module_identity(self._network)

    def to(self, device: torch.device) -> "Inception":
        """Move it."""
        self._network.to(device)
        return self

    @torch.no_grad()
    def image_features(self, pixels: Tensor) -> Tensor:
        """Pixels uint8 [B, 3, S, S] -> float32 [B, 2048]."""
        return self._network(pixels)[0]


class Clip:
    """Both towers of a CLIP model of transformers.

    Args:
        place: folder or hub name.
        key: of the configuration, for messages.
        local_files_only: never ask the hub.

    Raises:
        ConfigurationError: the model is not there.
    """

    def __init__(self, place: str, key: str, *, local_files_only: bool) -> None:
        from transformers import CLIPImageProcessor, CLIPModel, CLIPTokenizer

        try:
            self._model: Any = load_pretrained(CLIPModel, place, None, local_files_only, use_safetensors=True)
            self._tokenizer = load_pretrained(CLIPTokenizer, place, None, local_files_only)
            processor: Any = load_pretrained(CLIPImageProcessor, place, None, local_files_only)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{key}={place}: the CLIP model is not there. Put its config.json, model.safetensors, tokenizer files "
                f"and preprocessor_config.json into a folder and give that, or a hub name that this machine can reach"
            ) from error
        freeze(self._model)
        self.name = f"clip-{Path(place).name}"
        self.identity = module_identity(self._model)
        self.size: int = self._model.config.vision_config.image_size
        self._mean = torch.tensor(processor.image_mean)[:, None, None]
        self._std = torch.tensor(processor.image_std)[:, None, None]

    def to(self, device: torch.device) -> "Clip":
        """Move it."""
        self._model.to(device)
        self._mean, self._std = self._mean.to(device), self._std.to(device)
        return self

    @torch.no_grad()
    def image_features(self, pixels: Tensor) -> Tensor:
        """Pixels uint8 [B, 3, S, S] -> float32 [B, D], projected, not normalised."""
        # get_image_features returns the tensor in transformers 4 only.
        encoded = self._model.vision_model(pixel_values=(pixels / 255.0 - self._mean) / self._std)
        return self._model.visual_projection(encoded.pooler_output)

    @torch.no_grad()
    def text_features(self, texts: Sequence[str]) -> Tensor:
        """Texts, cut to the model's length -> float32 [B, D], projected, not normalised."""
        length = self._model.config.text_config.max_position_embeddings
        tokens = self._tokenizer(
            [repair(text) for text in texts],
            padding="max_length",
            truncation=True,
            max_length=length,
            return_tensors="pt",
        )
        return self._model.text_projection(self._model.text_model(**tokens.to(self._model.device)).pooler_output)


class RandomFeatures:
    """A small convolutional network with random weights: for demonstrations and tests, and images unlike photographs.

    Naeem et al. (2020, section 3.3) find random embeddings useful where pretrained ones do not know the images.

    Args:
        seed: of the weights.
        size: S.
        width: D is four times this.
    """

    def __init__(self, seed: int = 0, size: int = 64, width: int = 16) -> None:
        self.name, self.size = f"random-{width}", size
        self._network = with_seed(seed, lambda: self._build(width))
        freeze(self._network)
        self.identity = module_identity(self._network)

    @staticmethod
    def _build(width: int) -> nn.Sequential:
        sides = [3, width, 2 * width, 4 * width]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sides):
            layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.ReLU()]
        return nn.Sequential(*layers)

    def to(self, device: torch.device) -> "RandomFeatures":
        """Move it."""
        self._network.to(device)
        return self

    @torch.no_grad()
    def image_features(self, pixels: Tensor) -> Tensor:
        """Pixels uint8 [B, 3, S, S] -> float32 [B, D], the mean over the positions."""
        return F.adaptive_avg_pool2d(self._network(pixels / 127.5 - 1.0), 1).flatten(1)


class Networks:
    """The feature networks of a protocol, each loaded when it is first asked for.

    Args:
        config: where their weights are.
        device: where they run.
    """

    def __init__(self, config: NetworksConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self._clips: dict[str, Clip] = {}

    def of(self, metric: Metric) -> FeatureNetwork:
        """The network of a metric.

        Raises:
            ConfigurationError: its weights are not there.
        """
        if metric in (Metric.fid, Metric.kid):
            return self._inception
        return self.clip(metric)

    def clip(self, metric: Metric) -> Clip:
        """The CLIP model of a metric."""
        place = getattr(self.config, metric.value)
        if place not in self._clips:
            key = f"protocol.networks.{metric.value}"
            self._clips[place] = Clip(place, key, local_files_only=self.config.local_files_only).to(self.device)
        return self._clips[place]

    @functools.cached_property
    def _inception(self) -> FeatureNetwork:
        replacement = self.config.inception_replacement
        if replacement is None:
            return Inception(self.config.inception).to(self.device)
        network: Any = build_plugin(replacement, "protocol.networks.inception_replacement")
        return network.to(self.device)
