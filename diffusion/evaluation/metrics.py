"""Metrics of a set of images: FID, KID, CLIP-FID, CMMD, CLIP score and HPSv3, each with its protocol."""

import logging
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diffusion.distributed import agree, broadcast, is_first_rank, map_on_ranks
from diffusion.errors import ConfigurationError, DataError, explained_writes
from diffusion.evaluation.config import OF_PROMPTS, OF_REFERENCE, EvaluationConfig, Metric
from diffusion.evaluation.features import Clip, FeatureNetwork, extract_features, load_networks
from diffusion.evaluation.hpsv3 import NUM_PIXELS, RewardModel
from diffusion.evaluation.images import Images, open_reference
from diffusion.evaluation.prompts import Prompt, categories
from diffusion.evaluation.protocol import VERSION, Number, Protocol, content_hash, protocol_hash
from diffusion.evaluation.statistics import CMMD_SIGMA, Array, clip_scores, cmmd, frechet_distance, kernel_distance
from diffusion.files import atomic_path, unique_partial

logger = logging.getLogger(__name__)

FRECHET = "squared Frechet distance of normal distributions, float64, unbiased covariances"

ESTIMATORS = {
    Metric.fid: FRECHET,
    Metric.kid: "unbiased squared MMD over all pairs, kernel (x.y/D+1)^3, float64",
    Metric.clip_fid: FRECHET,
    Metric.cmmd: f"1000 x unbiased squared MMD over all pairs, Gaussian kernel of bandwidth {CMMD_SIGMA:g}, float64",
    Metric.clip_score: "100 x mean of the positive part of the cosine of image and prompt",
    Metric.hpsv3: "mean of the first output of the reward head",
}
"""Part of the protocols."""

_MANY_IMAGES = 10_000
_FEW_IMAGES = (
    f"%s is of %d images: below {_MANY_IMAGES:,} its bias, which falls with their number, is large. Compare only "
    "numbers of as many images, or use kid or cmmd, which have no bias"
)

DISTANCES = {
    Metric.fid: frechet_distance,
    Metric.kid: kernel_distance,
    Metric.clip_fid: frechet_distance,
    Metric.cmmd: cmmd,
}


@dataclass(kw_only=True)
class Metrics:
    """Computes the metrics of an evaluation, with its reference set opened and networks loaded.

    Features of reference sets are kept in the folder `cache`.

    Raises:
        ConfigurationError: the reference set or a network is missing.
        DataError: the reference set is damaged.
        MachineError: the folder cannot be made.
    """

    config: EvaluationConfig
    device: torch.device
    cache: Path

    def __post_init__(self) -> None:
        protocol = self.config.protocol
        if any(metric in OF_REFERENCE for metric in protocol.metrics):
            assert protocol.reference is not None
            with explained_writes(self.cache):
                self.cache.mkdir(parents=True, exist_ok=True)
            self.reference, identity = open_reference(protocol.reference)
            size = protocol.reference.size
            self.reference_record = {"content": identity, "num": len(self.reference), "scaled_square": size}
        of_features = [metric for metric in protocol.metrics if metric is not Metric.hpsv3]
        self.networks = load_networks(protocol.networks, of_features, self.device)
        self.reward: RewardModel | None = None
        if Metric.hpsv3 in protocol.metrics:
            assert protocol.networks.hpsv3 is not None
            self.reward = RewardModel(protocol.networks.hpsv3, self.device)

    def name(self, metric: Metric) -> str:
        """Name of a number: distances of features other than Inception's are not FID or KID."""
        if metric in (Metric.fid, Metric.kid) and self.config.protocol.networks.inception_replacement is not None:
            return f"{'frechet' if metric is Metric.fid else 'kernel'}_{self.networks[metric].name}"
        return metric.value

    def protocols(self, images: Mapping[str, Any], prompts: Sequence[Prompt]) -> dict[str, Protocol]:
        """Protocol of each number, of images with a record, whose prompts are for the metrics of prompts."""
        found = {}
        for metric in self.config.protocol.metrics:
            name, protocol = self.name(metric), self._protocol(metric, images)
            found[name] = protocol
            for category in categories(prompts) if metric in OF_PROMPTS else []:
                texts = dict.fromkeys(prompt.text for prompt in prompts if prompt.category == category)
                found[f"{name}/{category}"] = protocol | {"category": content_hash(list(texts))}
        return found

    def _protocol(self, metric: Metric, images: Mapping[str, Any]) -> Protocol:
        protocol = {"version": VERSION, "estimator": ESTIMATORS[metric], "images": dict(images)}
        if metric is Metric.hpsv3:
            assert self.reward is not None
            network = {"name": metric.value, "weights": self.reward.identity}
            return {**protocol, "network": network, "resize": f"bicubic, to {NUM_PIXELS} pixels"}
        network = self.networks[metric]
        protocol |= {
            "network": {"name": network.name, "weights": network.identity, "size": network.size},
            "resize": f"{self._resize(network)}, antialiased, 32 bits per channel, rounded once to 8",
        }
        return protocol | {"reference": self.reference_record} if metric in OF_REFERENCE else protocol

    def compute(
        self, image_set: Images, prompts: Sequence[Prompt] | None, images: Mapping[str, Any]
    ) -> dict[str, Number]:
        """Compute all numbers of images with a record, and with a prompt each for the metrics of prompts; collective.

        Returns:
            Numbers by name on the first rank; an empty dictionary on others.

        Raises:
            ConfigurationError: there are too few images, or no prompts for the metrics of prompts.
        """
        if len(image_set) < 2:
            raise ConfigurationError(f"{len(image_set)} images: metrics need 2 or more")
        of_prompts = [metric.value for metric in self.config.protocol.metrics if metric in OF_PROMPTS]
        if prompts is None and of_prompts:
            raise ConfigurationError(
                f"{' and '.join(of_prompts)} of protocol.metrics: prompts are missing. Add metadata.jsonl (file_name, "
                "prompt) to the folder of images, or remove these metrics"
            )
        prompts = prompts or ()
        texts = [prompt.text for prompt in prompts]
        own: dict[int, Array | None] = {}
        real: dict[int, Array | None] = {}
        values: dict[str, float] = {}
        for metric, network in self.networks.items():
            key = id(network)
            if key not in own:
                own[key] = extract_features(network, image_set, self.config, self.device, f"features {network.name}")
            if metric in OF_REFERENCE and key not in real:
                real[key] = self._reference_features(network)
            if (features := own[key]) is None:
                continue
            if metric in DISTANCES:
                reference = real[key]
                assert reference is not None
                values[self.name(metric)] = DISTANCES[metric](features, reference)
                fewest = min(len(features), len(reference))
                if ESTIMATORS[metric] == FRECHET and fewest < _MANY_IMAGES:
                    logger.warning(_FEW_IMAGES, self.name(metric), fewest)
            else:
                values |= means(metric.value, clip_scores(features, self._text_features(texts)), prompts)
        if (reward := self.reward) is not None:
            scores = map_on_ranks(len(image_set), lambda i: reward.score(image_set[i], texts[i]), "hpsv3")
            if is_first_rank():
                values |= means(Metric.hpsv3.value, np.array(scores), prompts)
        protocols = self.protocols(images, prompts)
        return {name: Number(value=value, protocol=protocols[name]) for name, value in values.items()}

    def _text_features(self, prompts: Sequence[str]) -> Array:
        clip, size = self.networks[Metric.clip_score], self.config.batch_size
        assert isinstance(clip, Clip)
        unique = list(dict.fromkeys(prompts))
        parts = [clip.text_features(unique[i : i + size]).float().cpu() for i in range(0, len(unique), size)]
        number = {prompt: i for i, prompt in enumerate(unique)}
        return torch.cat(parts)[[number[prompt] for prompt in prompts]].numpy()

    def _resize(self, network: FeatureNetwork) -> str:
        of_centre = " of the centre square" if isinstance(network, Clip) else ""
        return f"{self.config.protocol.resize_filter.value}{of_centre}"

    def _reference_features(self, network: FeatureNetwork) -> Array | None:
        """Features of the reference set, cached in a file; on the first rank."""
        record = {
            "reference": self.reference_record,
            "network": network.identity,
            "size": network.size,
            "resize": self._resize(network),
        }
        path = self.cache / f"{network.name}-{protocol_hash(record)}-all.npz"
        if broadcast(path.is_file()):
            return agree(lambda: _load(path) if is_first_rank() else None)
        features = extract_features(network, self.reference, self.config, self.device, f"reference {network.name}")
        if features is not None:
            # Another watcher may compute the same.
            partial = unique_partial(path)
            with explained_writes(path), atomic_path(path, partial=partial), partial.open("wb") as file:
                np.savez(file, features=features)
        return features


def means(name: str, scores: Array, prompts: Sequence[Prompt]) -> dict[str, float]:
    """Mean of the scores of all images, and of those of each category of their prompts."""
    found = {name: float(scores.mean())}
    for category in categories(prompts):
        found[f"{name}/{category}"] = float(scores[[prompt.category == category for prompt in prompts]].mean())
    return found


def _load(path: Path) -> Array:
    try:
        with np.load(path, allow_pickle=False) as content:
            return content["features"]
    except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is damaged ({error}): remove it") from error
