"""Features of images: networks (Inception, CLIP, random weights), their input size, and extraction by all ranks.

Shape letters: B images of a batch, N images of a set, S side in pixels, D width of a feature.
"""

import functools
import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from tqdm.auto import tqdm

from diffusion.distributed import gather, is_first_rank, rank, world_size
from diffusion.errors import ConfigurationError
from diffusion.evaluation.config import Metric, NetworksConfig, ResizeFilter
from diffusion.evaluation.images import Images
from diffusion.evaluation.statistics import Array, Moments, merge_moments, moments_of_batches
from diffusion.files import atomic_path
from diffusion.models.architectures import with_seed
from diffusion.models.pretrained import freeze, load_pretrained, module_identity
from diffusion.models.tokenizers import repair
from diffusion.plugins import build_plugin

INCEPTION_FILE = "weights-inception-2015-12-05-6726825d.pth"
INCEPTION_URL = "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0"
INCEPTION_SIDE = 299


class FeatureNetwork(Protocol):
    """Maps images to features."""

    name: str
    """Name without spaces, for files and tables."""

    identity: str
    """Hash of the weights."""

    size: int
    """Side S of the input."""

    def to(self, device: torch.device) -> Any:
        """Move to a device."""
        ...

    def image_features(self, pixels: Tensor) -> Tensor:
        """Pixels uint8 [B, 3, S, S] -> float [B, D]."""
        ...


def resized(image: Image.Image, size: int, resize_filter: ResizeFilter) -> np.ndarray:
    """Resize an image with antialiasing, each channel in 32 bits, rounded once (Parmar et al. 2022).

    Returns:
        uint8 [3, S, S].
    """
    kind = Image.Resampling[resize_filter.name.upper()]
    channels = [np.asarray(channel.convert("F").resize((size, size), kind)) for channel in image.split()]
    return np.stack(channels).round().clip(0, 255).astype(np.uint8)


class Inception:
    """Inception network of FID (Heusel et al. 2017) from torch-fidelity: 2,048 features.

    Args:
        path: torch-fidelity's file of weights.

    Raises:
        ConfigurationError: torch-fidelity or the file is missing, or the file has other content.
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
                f"protocol.networks.inception={path}: FID and KID need {INCEPTION_FILE} from {INCEPTION_URL}. Download "
                "it and give its path, or set protocol.networks.inception_replacement"
            )
        try:
            # torch-fidelity unpickles the file, which can run code: reject files with anything but tensors.
            torch.load(file, map_location="meta", weights_only=True)
            self._network = FeatureExtractorInceptionV3(self.name, ["2048"], feature_extractor_weights_path=str(file))
        except (RuntimeError, OSError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigurationError(f"{file} does not hold the weights of {INCEPTION_FILE}: {reason}") from error
        freeze(self._network)
        self.identity = module_identity(self._network)

    def to(self, device: torch.device) -> "Inception":
        """Move to a device."""
        self._network.to(device)
        return self

    @torch.no_grad()
    def image_features(self, pixels: Tensor) -> Tensor:
        """Pixels uint8 [B, 3, S, S] -> float32 [B, 2048]."""
        return self._network(pixels)[0]


class Clip:
    """Image and text encoder of a CLIP model of transformers.

    Args:
        source: folder or hub name.
        key: key of the source in the configuration, for messages.
        local_files_only: read the local cache instead of the hub.

    Raises:
        ConfigurationError: the model is missing.
    """

    def __init__(self, source: str, key: str, *, local_files_only: bool) -> None:
        from transformers import CLIPImageProcessor, CLIPModel, CLIPTokenizer

        try:
            self._model: Any = load_pretrained(CLIPModel, source, None, local_files_only, use_safetensors=True)
            self._tokenizer = load_pretrained(CLIPTokenizer, source, None, local_files_only)
            processor: Any = load_pretrained(CLIPImageProcessor, source, None, local_files_only)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{key}={source}: the CLIP model is missing. Give a folder with its config.json, model.safetensors, "
                f"tokenizer files and preprocessor_config.json, or a hub name that this machine can reach"
            ) from error
        freeze(self._model)
        self.name = f"clip-{Path(source).name}"
        self.identity = module_identity(self._model)
        self.size: int = self._model.config.vision_config.image_size
        self._mean = torch.tensor(processor.image_mean)[:, None, None]
        self._std = torch.tensor(processor.image_std)[:, None, None]

    def to(self, device: torch.device) -> "Clip":
        """Move to a device."""
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
        """Texts, truncated to the model's length -> float32 [B, D], projected, not normalised."""
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
    """Small convolutional network with random weights, for demonstrations, tests and images unlike photographs.

    Naeem et al. (2020, section 3.3) find random embeddings useful for images unlike those of pretraining.

    Args:
        seed: seed of the weights.
        size: S.
        width: a quarter of D.
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
        """Move to a device."""
        self._network.to(device)
        return self

    @torch.no_grad()
    def image_features(self, pixels: Tensor) -> Tensor:
        """Pixels uint8 [B, 3, S, S] -> float32 [B, D], the mean over the positions."""
        return F.adaptive_avg_pool2d(self._network(pixels / 127.5 - 1.0), 1).flatten(1)


class Networks:
    """Feature networks of a protocol, loaded at first use.

    Args:
        config: paths of their weights.
        device: device of the networks.
    """

    def __init__(self, config: NetworksConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self._clips: dict[str, Clip] = {}

    def of(self, metric: Metric) -> FeatureNetwork:
        """Network of a metric.

        Raises:
            ConfigurationError: the weights are missing.
        """
        if metric in (Metric.fid, Metric.kid):
            return self._inception
        return self.clip(metric)

    def clip(self, metric: Metric) -> Clip:
        """CLIP model of a metric."""
        source = getattr(self.config, metric.value)
        if source not in self._clips:
            key = f"protocol.networks.{metric.value}"
            self._clips[source] = Clip(source, key, local_files_only=self.config.local_files_only).to(self.device)
        return self._clips[source]

    @functools.cached_property
    def _inception(self) -> FeatureNetwork:
        replacement = self.config.inception_replacement
        if replacement is None:
            return Inception(self.config.inception).to(self.device)
        network: Any = build_plugin(replacement, "protocol.networks.inception_replacement")
        return network.to(self.device)


@dataclass(frozen=True, kw_only=True)
class FeatureSet:
    """Moments of the features of a set, and optionally the features."""

    moments: Moments
    """Number, mean and scatter, accumulated in float64."""

    features: Array | None = None
    """float32 [N, D], in the order of the images."""

    def save(self, path: Path) -> None:
        """Write a .npz file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"num": np.int64(self.moments.num), "mean": self.moments.mean, "scatter": self.moments.scatter}
        if self.features is not None:
            content["features"] = self.features
        with atomic_path(path) as partial, partial.open("wb") as file:
            np.savez(file, **content)  # pyright: ignore[reportArgumentType]

    @classmethod
    def load(cls, path: Path) -> "FeatureSet":
        """Read a file of `save`."""
        with np.load(path, allow_pickle=False) as content:
            moments = Moments(num=int(content["num"]), mean=content["mean"], scatter=content["scatter"])
            return cls(moments=moments, features=content.get("features"))


@dataclass(frozen=True, kw_only=True)
class Extractor:
    """Computes features on all ranks.

    The batches are the same for each number of ranks: rank r computes batches r, r + world size, and so on.
    """

    device: torch.device
    resize_filter: ResizeFilter
    batch_size: int
    num_threads: int

    def extract(self, network: FeatureNetwork, image_set: Images, *, keep: bool, label: str) -> FeatureSet | None:
        """Compute the features of a set; collective.

        Args:
            network: network on the device of this rank.
            image_set: the images.
            keep: keep the features besides their moments.
            label: label of the progress bar.

        Returns:
            The features on the first rank; None on others.

        Raises:
            DataError: an image cannot be decoded.
        """
        kept: list[tuple[int, Array]] = []

        def own_features() -> Iterator[Array]:
            for start, features in self._own_batches(network, image_set, label):
                if keep:
                    kept.append((start, features))
                yield features

        gathered = gather((moments_of_batches(own_features()), kept))
        if not is_first_rank():
            return None
        moments = merge_moments(part for part, _ in gathered if part is not None)
        if not keep:
            return FeatureSet(moments=moments)
        batches = sorted((batch for _, batches in gathered for batch in batches), key=lambda batch: batch[0])
        return FeatureSet(moments=moments, features=np.concatenate([features for _, features in batches]))

    def _own_batches(self, network: FeatureNetwork, image_set: Images, label: str) -> Iterator[tuple[int, Array]]:
        """First image number and features of each batch of this rank."""
        starts = range(rank() * self.batch_size, len(image_set), self.batch_size * world_size())
        with ThreadPoolExecutor(self.num_threads) as threads:
            for start in tqdm(starts, desc=label, disable=not is_first_rank(), leave=False):
                # Sets are not thread-safe: they are read here and resized in threads.
                images = [image_set[i] for i in range(start, min(start + self.batch_size, len(image_set)))]
                pixels = list(threads.map(lambda image: resized(image, network.size, self.resize_filter), images))
                batch = torch.from_numpy(np.stack(pixels)).to(self.device)
                yield start, network.image_features(batch).float().cpu().numpy()
