"""Features of a set of images, computed by all ranks.

The batches are those of the numbers of the images, whatever the number of ranks: rank r takes every so manieth.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from diffusion.config.evaluation import ResizeFilter
from diffusion.evaluation.features import FeatureNetwork, resized
from diffusion.evaluation.images import Images
from diffusion.evaluation.ranks import Ranks
from diffusion.evaluation.statistics import Array, Moments, merge_moments, moments_of_batches
from diffusion.files import atomic_path


@dataclass(frozen=True, kw_only=True)
class FeatureSet:
    """Features of a set, or what is kept of them."""

    moments: Moments
    """Number, mean and scatter, accumulated in float64."""

    features: Array | None = None
    """float32 [N, D], in the order of the images, if they are kept."""

    def save(self, path: Path) -> None:
        """Write atomically as .npz."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"num": np.int64(self.moments.num), "mean": self.moments.mean, "scatter": self.moments.scatter}
        if self.features is not None:
            content["features"] = self.features
        with atomic_path(path) as partial, partial.open("wb") as file:
            np.savez(file, **content)  # pyright: ignore[reportArgumentType]

    @classmethod
    def load(cls, path: Path) -> "FeatureSet":
        """Read what `save` wrote."""
        with np.load(path, allow_pickle=False) as content:
            moments = Moments(num=int(content["num"]), mean=content["mean"], scatter=content["scatter"])
            return cls(moments=moments, features=content.get("features"))


@dataclass(frozen=True, kw_only=True)
class Extractor:
    """How features are computed."""

    ranks: Ranks
    device: torch.device
    resize_filter: ResizeFilter
    batch_size: int
    num_threads: int

    def extract(self, network: FeatureNetwork, image_set: Images, *, keep: bool, label: str) -> FeatureSet | None:
        """Compute the features of all images; to be called by all ranks.

        Args:
            network: on the device of this rank.
            image_set: the set.
            keep: keep each feature, not their moments only.
            label: of the progress bar.

        Returns:
            On the first rank; None on others.

        Raises:
            DataError: an image cannot be decoded.
        """
        kept: list[tuple[int, Array]] = []

        def own_features() -> Iterator[Array]:
            for start, features in self._own_batches(network, image_set, label):
                if keep:
                    kept.append((start, features))
                yield features

        gathered = self.ranks.gather((moments_of_batches(own_features()), kept))
        if not self.ranks.is_first:
            return None
        moments = merge_moments(part for part, _ in gathered if part is not None)
        if not keep:
            return FeatureSet(moments=moments)
        batches = sorted((batch for _, batches in gathered for batch in batches), key=lambda batch: batch[0])
        return FeatureSet(moments=moments, features=np.concatenate([features for _, features in batches]))

    def _own_batches(self, network: FeatureNetwork, image_set: Images, label: str) -> Iterator[tuple[int, Array]]:
        """Number of the first image and features of each batch of this rank."""
        starts = range(self.ranks.rank * self.batch_size, len(image_set), self.batch_size * self.ranks.size)
        with ThreadPoolExecutor(self.num_threads) as threads:
            for start in tqdm(starts, desc=label, disable=not self.ranks.is_first, leave=False):
                # Sets may read one at a time only, so they are read here and resized in threads.
                images = [image_set[i] for i in range(start, min(start + self.batch_size, len(image_set)))]
                pixels = list(threads.map(lambda image: resized(image, network.size, self.resize_filter), images))
                yield start, self._features(network, pixels)

    def _features(self, network: FeatureNetwork, pixels: Sequence[np.ndarray]) -> Array:
        batch = torch.from_numpy(np.stack(pixels)).to(self.device)
        return network.image_features(batch).float().cpu().numpy()
