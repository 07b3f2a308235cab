"""Combinations of values about data that cannot work."""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterator

from omegaconf import MISSING

from diffusion.config.data import Crop, Representation, StreamConfig
from diffusion.config.quantities import parse_size
from diffusion.config.schema import Config, Task
from diffusion.config.stores import local_problem
from diffusion.errors import ConfigurationError

HASHES = {name for name in hashlib.algorithms_available if hasattr(hashlib, name) and not name.startswith("shake_")} | {
    "xxh32",
    "xxh64",
    "xxh3_64",
    "xxh128",
    "xxh3_128",
}
"""Those of Streaming: the length of shake's is not fixed."""


def data_problems(config: Config) -> Iterator[str]:
    """What is wrong with the keys of `data` and `validation`, a sentence each."""
    data = config.data
    if data.text_embeddings and data.representation is not Representation.latents:
        yield (
            "data.text_embeddings is true with data.representation images: they are stored beside latents. Set "
            "data.representation=latents, or data.text_embeddings=false."
        )
    if data.representation is Representation.latents:
        remedy = "Set data.representation=images, or encode the images as they are to be."
        if data.crop is Crop.random:
            yield f"data.crop is random with data.representation latents, whose crop was fixed by encoding. {remedy}"
        if data.horizontal_flip > 0:
            yield (
                f"data.horizontal_flip is {data.horizontal_flip} with data.representation latents: a mirrored latent "
                f"is not the latent of the mirrored image. {remedy}"
            )
        if config.task is Task.autoencoder:
            yield (
                "task is autoencoder with data.representation latents: the VAE is trained on images. "
                "Set data.representation=images."
            )
    if data.validate_hash is not None and data.validate_hash not in HASHES:
        yield f"data.validate_hash is '{data.validate_hash}', which is no hash that is known here. Use xxh64, or null."
    if data.cache_limit is not None:
        try:
            parse_size(data.cache_limit, "data.cache_limit")
        except ConfigurationError as error:
            yield str(error)
    if isinstance(data.streams, list):
        yield from _streams(data.streams, "data.streams")
        yield from _stores(data.streams, data.remote, "data")
        if data.cache_limit is not None and data.remote is None:
            for stream in data.streams:
                if stream.remote is None:
                    yield (
                        f"data.cache_limit is '{data.cache_limit}', but stream '{stream.name}' has no remote: "
                        "evicting its shards would delete the only copy. Set data.cache_limit=null, or give the remote."
                    )
    has_names = isinstance(data.streams, list) or config.plugins.train_dataset is None
    if config.validation is not None and config.validation.streams is None and not has_names:
        yield (
            "validation.streams is null with plugins.train_dataset, so that there are no training streams to take the "
            "names from. Name the folders of held-out data, as in validation.streams=[{name: 256-512}], or set "
            "validation=null."
        )
    if config.validation is not None and isinstance(config.validation.streams, list):
        yield from _streams(config.validation.streams, "validation.streams")
        yield from _stores(config.validation.streams, config.validation.remote, "validation")


def _stores(streams: list[StreamConfig], root: str | None, section: str) -> Iterator[str]:
    for stream in streams:
        remote = stream.remote or root
        given = [name for name in ("endpoint_url", "profile") if getattr(stream, name) is not None]
        if given and (remote is None or not remote.startswith("s3://")):
            yield (
                f"{section}.streams: stream '{stream.name}' has {' and '.join(given)}, but its remote is {remote}: "
                f"these say which S3 store an s3:// remote lies in. Give the stream such a remote, or leave them out."
            )
        if stream.endpoint_url is not None and not re.match(r"https?://[^/]", stream.endpoint_url):
            yield (
                f"{section}.streams: endpoint_url of stream '{stream.name}' is '{stream.endpoint_url}', but must be an "
                "address such as https://objects.example.com."
            )


def _streams(streams: list[StreamConfig], key: str) -> Iterator[str]:
    if not streams:
        yield f"{key} is empty: name at least one folder of shards, as in {key}=[{{name: 256-512}}]."
    names = Counter(stream.name for stream in streams if stream.name != MISSING)
    for name, count in names.items():
        if count > 1:
            yield f"{key} holds '{name}' {count} times: name each stream once, and use `repeat` to see it more often."
    without = [stream.name for stream in streams if stream.proportion is None]
    if 0 < len(without) < len(streams):
        yield (
            f"{key} gives a proportion for some streams but not for {', '.join(without)}: give one for all streams, or "
            "for none (natural proportions)."
        )
    for number, stream in enumerate(streams):
        for field in ("name", "remote", "local"):
            value = getattr(stream, field)
            if value is not None and not value.strip():
                yield f"{key}.{number}.{field} is empty. Give it a value, or leave it out."
        if problem := local_problem(stream.local, f"{key}.{number}.local"):
            yield problem
        if stream.proportion is not None and stream.repeat is not None:
            yield (
                f"{key}: stream '{stream.name}' has a proportion and a repeat, which both say how often it is seen. "
                "Keep one of them."
            )
        for field in ("proportion", "repeat"):
            value = getattr(stream, field)
            if value is not None and not (value > 0 and math.isfinite(value)):
                yield f"{key}: the {field} of stream '{stream.name}' is {value}, but must be greater than 0."
