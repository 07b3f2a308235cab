"""The data of a run, opened and read by the same classes as in training, and what its cache has to hold."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from diffusion.config.data import Representation, ValidationConfig
from diffusion.config.model import Posterior
from diffusion.config.schema import Config
from diffusion.datasets.batch import BatchKey, num_samples
from diffusion.datasets.collation import collate
from diffusion.datasets.dataset import Tokenize, TrainingDataset
from diffusion.datasets.loader import BatchLoader, order_settings, validation_dataset, validation_streams
from diffusion.datasets.mds import INDEX
from diffusion.datasets.sample_order import GlobalOrder, draws_per_stream
from diffusion.models.tokenizers import build_tokenizer, tokenize
from diffusion.operations.checks.cache import CacheDemand, find_cache_demand
from diffusion.operations.checks.streams import StreamReading
from diffusion.operations.checks.verdicts import Verdict, ok
from diffusion.planning.fleet import FleetStream, World

SAMPLES = 16
"""Samples of each stream that are read and decoded."""


def sections(config: Config) -> list[tuple[str, ValidationConfig]]:
    """The streams of a run by the data sets that they belong to, each as held-out data would be configured."""
    data = config.data
    found = [("", ValidationConfig(remote=data.remote, local=data.local, streams=data.streams))]
    if config.validation is not None:
        streams = validation_streams(config.validation, data)
        found.append(("validation ", replace(config.validation, streams=streams)))
    return found


def _tokenize(config: Config) -> Tokenize | None:
    if config.data.representation is Representation.latents:
        return None
    tokenizer = build_tokenizer(config.model.architecture)
    return lambda captions: tokenize(tokenizer, captions)


def read_batches(config: Config, section: ValidationConfig, *, reads: bool) -> list[Verdict]:
    """Read one batch of each stream, from its first shard, with the loader of training; to be called by all ranks.

    Args:
        config: the configuration.
        section: the data set, with its streams.
        reads: whether this rank is to read; all open the streams.

    Raises:
        DataError: a stream is missing, damaged, or not what the configuration says.
    """
    with_logvar = config.objective.posterior == Posterior.sample
    dataset = validation_dataset(
        replace(section, num_samples=None), config.data, tokenize=_tokenize(config), with_logvar=with_logvar
    )
    if not reads:
        return []
    chosen = [list(part[:SAMPLES]) for part in dataset.parts]
    verdicts = []
    began = time.perf_counter()
    for name, batch in zip(
        dataset.stream_names, BatchLoader(dataset, batch_sampler=chosen, collate_fn=collate), strict=True
    ):
        seconds, began = time.perf_counter() - began, time.perf_counter()
        shapes = ", ".join(f"{BatchKey(key).value} {_shape(value)}" for key, value in batch.items())
        verdicts.append(ok(f"batch of {name}", f"{num_samples(batch)} samples in {seconds:.2f} s: {shapes}"))
    return verdicts


def _shape(value: Any) -> str:
    return "x".join(map(str, value.shape))


def cache_demand_of_readings(config: Config, readings: Sequence[StreamReading], world: World) -> CacheDemand:
    """What a node has to keep, from the indexes of the streams.

    Raises:
        ConfigurationError: the streams do not give a global batch (or a group).
    """
    data = config.data
    draws = draws_per_stream(
        [sum(reading.samples_per_shard) for reading in readings],
        [stream.proportion for stream in data.streams],
        [stream.repeat for stream in data.streams],
    )
    streams = [reading.fleet_stream(num) for reading, num in zip(readings, draws, strict=True)]
    order = GlobalOrder([stream.shape for stream in streams], order_settings(data, config.seed))
    index_bytes = sum(reading.index_bytes for reading in readings)
    return find_cache_demand(streams, order, data, world, index_bytes=index_bytes)


def cache_demand_of_dataset(config: Config, dataset: TrainingDataset, world: World) -> CacheDemand:
    """What a node has to keep, from the data set of training that is open already."""
    order = dataset.order
    streams = [
        FleetStream(shape=shape, bytes_per_shard=stream.index.cached_bytes())
        for shape, stream in zip(order.streams, dataset.streams, strict=True)
    ]
    index_bytes = sum((stream.folder / INDEX).stat().st_size for stream in dataset.streams)
    return find_cache_demand(streams, order, config.data, world, index_bytes=index_bytes)
