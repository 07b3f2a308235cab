"""What a number depends on besides the model and the guidance scale: written beside it, hashed, and compared."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from diffusion.evaluation.config import CompositionalConfig, Metric, ProtocolConfig
from diffusion.evaluation.features import FeatureNetwork
from diffusion.evaluation.statistics import CMMD_SIGMA

Protocol = dict[str, Any]
"""JSON-able description of how one number is computed."""

VERSION = 1
"""Raised when the same description comes to mean another computation."""

ESTIMATORS = {
    Metric.fid: "squared Frechet distance of normal distributions, float64, unbiased covariances",
    Metric.kid: "unbiased squared MMD over all pairs, kernel (x.y/D+1)^3, float64",
    Metric.clip_fid: "squared Frechet distance of normal distributions, float64, unbiased covariances",
    Metric.cmmd: f"1000 x unbiased squared MMD over all pairs, Gaussian kernel of bandwidth {CMMD_SIGMA:g}, float64",
    Metric.clip_score: "100 x mean of the positive part of the cosine of image and prompt",
}


def protocol_hash(protocol: Mapping[str, Any]) -> str:
    """Hash of a protocol, 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(protocol, sort_keys=True).encode()).hexdigest()[:16]


def metric_protocol(
    metric: Metric,
    config: ProtocolConfig,
    network: FeatureNetwork,
    *,
    reference: Mapping[str, Any] | None,
    images: Mapping[str, Any],
) -> Protocol:
    """The protocol of a metric.

    Args:
        metric: which.
        config: the configuration.
        network: the feature network.
        reference: what `reference_record` gave, if the metric needs it.
        images: what `generated_record` or `given_record` gave.
    """
    return {
        "version": VERSION,
        "estimator": ESTIMATORS[metric],
        "network": {"name": network.name, "weights": network.identity, "size": network.size},
        "resize": f"{config.resize_filter.value}, antialiased, 32 bits per channel, rounded once to 8",
        **({"reference": dict(reference)} if reference is not None else {}),
        "images": dict(images),
    }


def reference_record(identity: str, num: int, size: int | None) -> dict[str, Any]:
    """What identifies a reference set."""
    return {"content": identity, "num": num, "scaled_square": size}


def generated_record(record: Mapping[str, Any], num: int) -> dict[str, Any]:
    """What identifies how images are generated, from the record of a generation task.

    Model and guidance scale are what is evaluated. The batch size changes rounding errors only.
    """
    left_out = ("model", "guidance_scale", "batch_size")
    return {"num": num, **{key: value for key, value in record.items() if key not in left_out}}


def given_record(num: int) -> dict[str, Any]:
    """Of images that were given: nothing is known of how they were made."""
    return {"num": num, "given": True}


def compositional_protocol(
    config: CompositionalConfig, images: Mapping[str, Any], *, suite: str, detector: str
) -> Protocol:
    """The protocol of the compositional checks.

    Args:
        config: the configuration.
        images: what `generated_record` gave.
        suite: hash of the checks.
        detector: name and hash of the detector.
    """
    threshold = config.threshold if config.detector else None
    return {
        "version": VERSION,
        "estimator": "share of images that show what was asked for",
        "suite": suite,
        "detector": detector,
        "threshold": threshold,
        "images": dict(images),
    }


def difference(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> list[str]:
    """What differs between two protocols, as `key: this, that`."""
    found = []
    for key in sorted({*a, *b}):
        one, other = a.get(key), b.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            found += difference(one, other, f"{prefix}{key}.")
        elif one != other:
            found.append(f"{prefix}{key}: {one}, {other}")
    return found
