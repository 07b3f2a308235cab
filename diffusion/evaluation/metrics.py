"""Metrics of a set of images: FID, KID, CLIP-FID, CMMD and CLIP score, each with its protocol."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diffusion.distributed import agree, broadcast, is_first_rank
from diffusion.errors import ConfigurationError, DataError
from diffusion.evaluation.config import OF_REFERENCE, Metric, ProtocolConfig, ReferenceConfig
from diffusion.evaluation.features import Extractor, FeatureNetwork, FeatureSet, Networks
from diffusion.evaluation.images import Images, open_reference
from diffusion.evaluation.protocol import Number, Protocol, metric_protocol, protocol_hash, reference_record
from diffusion.evaluation.statistics import clip_scores, cmmd, frechet_distance, kernel_distance

_NEED_ALL = (Metric.kid, Metric.cmmd, Metric.clip_score)
"""Metrics that need all features, not only their moments."""


@dataclass(kw_only=True)
class Metrics:
    """Computes the metrics of a protocol.

    Args:
        config: the protocol.
        networks: its feature networks, on the device of this rank.
        extractor: extractor of features.
        cache: folder with features of reference sets.
    """

    config: ProtocolConfig
    networks: Networks
    extractor: Extractor
    cache: Path
    _reference: tuple[Images, str] | None = field(default=None, init=False)
    _loaded: dict[Path, FeatureSet | None] = field(default_factory=dict, init=False)
    """Features of reference sets by file; None on ranks other than the first."""

    def open(self) -> None:
        """Open the reference set and load the networks, before images are generated.

        Raises:
            ConfigurationError: the reference set or a network is missing.
            DataError: the reference set is damaged.
        """
        if self.config.reference is not None and any(metric in OF_REFERENCE for metric in self.config.metrics):
            self._reference = open_reference(self.config.reference)
        for metric in self.config.metrics:
            self.networks.of(metric)

    def name(self, metric: Metric) -> str:
        """Name of a number: distances of features other than Inception's are not FID or KID."""
        if metric in (Metric.fid, Metric.kid) and self.config.networks.inception_replacement is not None:
            kind = "frechet" if metric is Metric.fid else "kernel"
            return f"{kind}_{self.networks.of(metric).name}"
        return metric.value

    def protocols(self, images: Mapping[str, Any]) -> dict[str, Protocol]:
        """Protocol of each number; call `open` first.

        Args:
            images: record of the images.
        """
        return {self.name(metric): self._protocol(metric, images) for metric in self.config.metrics}

    def compute(self, image_set: Images, prompts: Sequence[str] | None, images: Mapping[str, Any]) -> dict[str, Number]:
        """Compute all numbers; collective.

        Args:
            image_set: the images.
            prompts: prompt of each image, for the CLIP score.
            images: record of the images.

        Returns:
            Numbers by name on the first rank; an empty dictionary on others.

        Raises:
            ConfigurationError: there are too few images, or no prompts for the CLIP score.
        """
        if len(image_set) < 2:
            raise ConfigurationError(f"{len(image_set)} images: metrics need 2 or more")
        if prompts is None and Metric.clip_score in self.config.metrics:
            raise ConfigurationError(
                "clip_score needs prompts: add metadata.jsonl (file_name, prompt) to the folder of images, or remove "
                "clip_score from protocol.metrics"
            )
        numbers = {}
        for group in self._by_network():
            network = self.networks.of(group[0])
            keep = any(metric in _NEED_ALL for metric in group)
            features = self.extractor.extract(network, image_set, keep=keep, label=f"features {network.name}")
            for metric in group:
                reference = self._reference_features(network, keep) if metric in OF_REFERENCE else None
                if features is not None:
                    value = self._value(metric, features, reference, prompts)
                    numbers[self.name(metric)] = Number(value=value, protocol=self._protocol(metric, images))
        return numbers

    def _by_network(self) -> list[list[Metric]]:
        """Metrics grouped by network."""
        groups: dict[int, list[Metric]] = {}
        for metric in self.config.metrics:
            groups.setdefault(id(self.networks.of(metric)), []).append(metric)
        return list(groups.values())

    def _protocol(self, metric: Metric, images: Mapping[str, Any]) -> Protocol:
        reference = self._reference_record() if metric in OF_REFERENCE else None
        return metric_protocol(metric, self.config, self.networks.of(metric), reference=reference, images=images)

    def _reference_record(self) -> dict[str, Any]:
        image_set, identity, settings = self._opened()
        return reference_record(identity, len(image_set), settings.size)

    def _opened(self) -> tuple[Images, str, ReferenceConfig]:
        assert self._reference is not None, "call open first"
        assert self.config.reference is not None
        return *self._reference, self.config.reference

    def _reference_features(self, network: FeatureNetwork, keep: bool) -> FeatureSet | None:
        """Features of the reference set, cached in a file; on the first rank."""
        key = {
            "reference": self._reference_record(),
            "network": network.identity,
            "resize": self.config.resize_filter.value,
        }
        path = self.cache / f"{network.name}-{protocol_hash(key)}{'-all' if keep else ''}.npz"
        if path in self._loaded:
            return self._loaded[path]
        if broadcast(path.is_file()):
            found = agree(lambda: _load(path) if is_first_rank() else None)
        else:
            image_set = self._opened()[0]
            found = self.extractor.extract(network, image_set, keep=keep, label=f"reference {network.name}")
            if found is not None:
                found.save(path)
        self._loaded[path] = found
        return found

    def _value(
        self, metric: Metric, features: FeatureSet, reference: FeatureSet | None, prompts: Sequence[str] | None
    ) -> float:
        if metric is Metric.clip_score:
            assert prompts is not None
            assert features.features is not None
            return float(clip_scores(features.features, self._text_features(prompts)).mean())
        assert reference is not None
        if metric in (Metric.fid, Metric.clip_fid):
            return frechet_distance(features.moments, reference.moments)
        assert features.features is not None
        assert reference.features is not None
        distance = kernel_distance if metric is Metric.kid else cmmd
        return distance(features.features, reference.features)

    def _text_features(self, prompts: Sequence[str]) -> np.ndarray:
        clip, size = self.networks.clip(Metric.clip_score), self.extractor.batch_size
        unique = list(dict.fromkeys(prompts))
        parts = [clip.text_features(unique[i : i + size]).float().cpu() for i in range(0, len(unique), size)]
        number = {prompt: i for i, prompt in enumerate(unique)}
        return torch.cat(parts)[[number[prompt] for prompt in prompts]].numpy()


def _load(path: Path) -> FeatureSet:
    try:
        return FeatureSet.load(path)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} is damaged ({error}): remove it") from error
