"""Features of images: networks (Inception, CLIP, random weights), their input size, and extraction by all ranks.

Shape letters: B images of a batch, N images of a set, S side in pixels, D width of a feature.
"""

import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from diffusion.distributed import is_first_rank, map_on_ranks
from diffusion.errors import ConfigurationError, error_context, first_line
from diffusion.evaluation.config import EvaluationConfig, Metric, NetworksConfig, ResizeFilter
from diffusion.evaluation.images import Images
from diffusion.evaluation.protocol import content_hash
from diffusion.evaluation.statistics import Array
from diffusion.models.architectures import with_seed
from diffusion.models.model_folders import load_pretrained
from diffusion.models.pretrained import freeze, module_identity
from diffusion.models.tokenizers import repair
from diffusion.plugins import build_plugin

INCEPTION_FILE = "weights-inception-2015-12-05-6726825d.pth"
INCEPTION_URL = "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0"


class FeatureNetwork(Protocol):
    """Maps images to features."""

    name: str
    """Name without spaces, for files and tables."""

    identity: str
    """Hash of the weights, and of what else the features depend on besides the size."""

    size: int
    """Side S of the input."""

    def to(self, device: torch.device) -> Any:
        """Move to a device."""
        ...

    def image_features(self, pixels: Tensor) -> Tensor:
        """Pixels uint8 [B, 3, S, S] -> float [B, D]."""
        ...


def resized(image: Image.Image, size: int, resize_filter: ResizeFilter, *, of_centre: bool = False) -> np.ndarray:
    """Resize an image, or its centre square, with antialiasing, each channel in 32 bits, rounded once.

    So do Parmar et al. (2022), of the whole image.

    Returns:
        uint8 [3, S, S].
    """
    kind = Image.Resampling[resize_filter.name.upper()]
    left, top = ((side - min(image.size)) / 2 if of_centre else 0.0 for side in image.size)
    box = (left, top, image.width - left, image.height - top)
    channels = [np.asarray(channel.convert("F").resize((size, size), kind, box)) for channel in image.split()]
    return np.stack(channels).round().clip(0, 255).astype(np.uint8)


class Inception(nn.Module):
    """Inception network of FID (Heusel et al. 2017) from torch-fidelity, by its file of weights: 2,048 features.

    Raises:
        ConfigurationError: torch-fidelity or the file is missing, or the file has other content.
    """

    name = "inception-2015-12-05"
    size = 299

    def __init__(self, path: str | None) -> None:
        super().__init__()
        try:
            from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
        except ImportError as error:
            raise ConfigurationError(
                "FID and KID need torch-fidelity: install this package as `.[evaluation]`"
            ) from error
        file = Path(path).expanduser() if path else None
        if file is None or not file.is_file():
            raise ConfigurationError(
                f"protocol.networks.inception={path}: FID and KID need {INCEPTION_FILE} from {INCEPTION_URL}. Download "
                "it and give its path, or set protocol.networks.inception_replacement"
            )
        try:
            # torch-fidelity unpickles the file, which can run code: reject files with anything but tensors.
            torch.load(file, map_location="meta", weights_only=True)
            self._network = FeatureExtractorInceptionV3(self.name, ["2048"], feature_extractor_weights_path=str(file))
        except (RuntimeError, OSError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as error:
            reason = first_line(error)
            raise ConfigurationError(f"{file} does not hold the weights of {INCEPTION_FILE}: {reason}") from error
        freeze(self._network)
        self.identity = module_identity(self._network)

    @torch.no_grad()
    def image_features(self, pixels: Tensor) -> Tensor:
        """Pixels uint8 [B, 3, S, S] -> float32 [B, 2048]."""
        return self._network(pixels)[0]


class Clip(nn.Module):
    """Image and text encoder of a CLIP model of transformers; of an image it sees the centre square, as in training.

    The source is a folder or hub name, its key in the configuration is for messages.

    Raises:
        ConfigurationError: the model is missing.
    """

    def __init__(self, source: str, key: str, *, local_files_only: bool) -> None:
        from transformers import CLIPImageProcessor, CLIPModel, CLIPTokenizer
        from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

        super().__init__()
        options: dict[str, Any] = {
            "local_files_only": local_files_only,
            "remedy": "Give a folder of a CLIP model with config.json, model.safetensors, tokenizer files and "
            "preprocessor_config.json, or a hub name that this machine can reach",
        }
        with error_context(f"{key}={source}"):
            self._model: Any = load_pretrained(CLIPModel, source, **options)
            self._tokenizer: Any = load_pretrained(CLIPTokenizer, source, **options)
            processor: Any = load_pretrained(CLIPImageProcessor, source, **options)
        freeze(self._model)
        self.name = f"clip-{Path(source).name}"
        self.identity = module_identity(self._model)
        scaling = [list(processor.image_mean), list(processor.image_std)]
        if scaling != [OPENAI_CLIP_MEAN, OPENAI_CLIP_STD]:
            self.identity += f" {content_hash(scaling)}"
        self.size: int = self._model.config.vision_config.image_size
        self._mean = nn.Buffer(torch.tensor(processor.image_mean)[:, None, None])
        self._std = nn.Buffer(torch.tensor(processor.image_std)[:, None, None])

    @torch.no_grad()
    def image_features(self, pixels: Tensor) -> Tensor:
        """Pixels uint8 [B, 3, S, S] -> float32 [B, D], projected, not normalised."""
        return self._model.get_image_features((pixels / 255.0 - self._mean) / self._std).pooler_output

    @torch.no_grad()
    def text_features(self, texts: Sequence[str]) -> Tensor:
        """Texts, truncated to the model's length -> float32 [B, D], projected, not normalised."""
        length = self._model.config.text_config.max_position_embeddings
        tokens = self._tokenizer(
            [repair(text) for text in texts],
            padding="max_length",
            truncation=True,
            max_length=length,
            return_tensors="pt",
        )
        return self._model.get_text_features(**tokens.to(self._model.device)).pooler_output


class RandomFeatures(nn.Module):
    """Small convolutional network with random weights, for demonstrations, tests and images unlike photographs.

    Naeem et al. (2020, section 3.3) find random embeddings useful for images unlike those of pretraining. The width is
    a quarter of D.
    """

    def __init__(self, seed: int = 0, size: int = 64, width: int = 16) -> None:
        super().__init__()
        self.name, self.size = f"random-{width}", size
        self._network = freeze(with_seed(seed, lambda: _random_network(width)))
        self.identity = module_identity(self._network)

    @torch.no_grad()
    def image_features(self, pixels: Tensor) -> Tensor:
        """Pixels uint8 [B, 3, S, S] -> float32 [B, D], the mean over the positions."""
        return F.adaptive_avg_pool2d(self._network(pixels / 127.5 - 1.0), 1).flatten(1)


def _random_network(width: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise([3, width, 2 * width, 4 * width]):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers)


def load_networks(
    config: NetworksConfig, metrics: Sequence[Metric], device: torch.device
) -> dict[Metric, FeatureNetwork]:
    """Load the network of each metric; metrics with the same weights share one. Missing weights are a
    ConfigurationError.
    """
    loaded: dict[str | None, FeatureNetwork] = {}
    networks = {}
    for metric in metrics:
        key = "inception" if metric in (Metric.fid, Metric.kid) else metric.value
        source = getattr(config, key)
        if source not in loaded:
            network: Any
            if key != "inception":
                network = Clip(source, f"protocol.networks.{key}", local_files_only=config.local_files_only)
            elif config.inception_replacement is None:
                network = Inception(source)
            else:
                network = build_plugin(config.inception_replacement, "protocol.networks.inception_replacement")
            loaded[source] = network.to(device)
        networks[metric] = loaded[source]
    return networks


def extract_features(
    network: FeatureNetwork, images: Images, config: EvaluationConfig, device: torch.device, label: str
) -> Array | None:
    """Compute the features of a set; collective. The batches are the same for each number of ranks.

    Returns:
        float32 [N, D] in the order of the images on the first rank; None on others.

    Raises:
        ConfigurationError: features are not finite.
        DataError: an image cannot be decoded.
    """
    starts = range(0, len(images), config.batch_size)
    resize = partial(resized, size=network.size, resize_filter=config.protocol.resize_filter,
                     of_centre=isinstance(network, Clip))  # fmt: skip

    def features(number: int) -> Array:
        start = starts[number]
        # Sets are not thread-safe: they are read here and resized in threads.
        batch = [images[i] for i in range(start, min(start + config.batch_size, len(images)))]
        pixels = threads.map(resize, batch)
        batch_pixels = torch.from_numpy(np.stack(list(pixels))).to(device)
        found = network.image_features(batch_pixels).float().cpu().numpy()
        if not np.isfinite(found).all():
            raise ConfigurationError(f"protocol.networks: features of {network.name} are not finite: check its weights")
        return found

    with ThreadPoolExecutor(config.num_threads) as threads:
        batches = map_on_ranks(len(starts), features, label)
    return np.concatenate(batches) if is_first_rank() else None
