"""Images, time and cost of a run, and the exposure of its streams; needs no model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from omegaconf import MISSING

from diffusion import storage
from diffusion.config.data import StreamConfig
from diffusion.config.schema import Config
from diffusion.datasets.sample_order import GlobalOrder, order_settings, stream_shapes
from diffusion.datasets.streams import StreamLocation, locate_streams, located_streams
from diffusion.errors import ConfigurationError, DataError, UserError
from diffusion.formats.shards import INDEX, read_index
from diffusion.storage import is_url

SECONDS_PER_DAY = 86400
DAYS_PER_MONTH = 365.25 / 12


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """Images, time and cost of a run. None: unknown."""

    run_name: str
    num_iterations: int
    global_batch_size: int
    num_images: int
    num_ranks: int
    images_per_second: float | None
    days: float | None
    gpu_hours: float | None
    cost: float | None
    """In dollars."""


def plan_amounts(config: Config, *, world_size: int = 1) -> Amounts:
    """Compute images, time and cost of a run, whose locations may be missing (`???`).

    `plan.num_gpus` replaces the world size.
    """
    num_iterations, num_ranks = config.planned_steps(), config.plan.num_gpus or world_size
    num_images = num_iterations * config.data.global_batch_size
    throughput, price = config.plan.images_per_second, config.plan.price_per_gpu_hour
    days = num_images / throughput / SECONDS_PER_DAY if throughput else None
    gpu_hours = days * 24 * num_ranks if days is not None else None
    return Amounts(
        run_name=config.run_name,
        num_iterations=num_iterations,
        global_batch_size=config.data.global_batch_size,
        num_images=num_images,
        num_ranks=num_ranks,
        images_per_second=throughput,
        days=days,
        gpu_hours=gpu_hours,
        cost=gpu_hours * price if gpu_hours is not None and price is not None else None,
    )


@dataclass(frozen=True, kw_only=True)
class StreamPlan:
    """Exposure of one stream. None: unknown."""

    name: str
    num_samples: int | None
    """Samples in its index; None where it cannot be read here."""

    share: float | None
    """Share of the run's images; of a known epoch, without what is dropped."""

    epochs: float | None
    """Mean number of times that each sample is seen."""

    draws: int | None = None
    """Samples of an epoch before it is cut to whole global batches (and groups)."""

    dropped: int | None = None
    """Samples that are cut off in the first epoch; others in each."""


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """Streams and length of an epoch."""

    streams: list[StreamPlan]
    num_steps: int | None = None
    """Whole global batches; None where a stream is unknown."""

    problem: str | None = None
    """Reason for which there is no epoch."""


def plan_epoch(config: Config, num_images: int) -> EpochPlan:
    """Compute the exposure of each stream in a run of some images, whose locations may be missing (`???`)."""
    data = config.data
    if config.plugins.train_dataset is not None or not isinstance(data.streams, list):
        return EpochPlan(streams=[])
    shards: list[np.ndarray | None] = [None] * len(data.streams)
    if MISSING not in (data.local, data.remote):
        shards = [_samples_per_shard(one) for one in locate_streams(data.remote, data.local, data.streams)]
    counts = [None if one is None else int(one.sum()) for one in shards]
    plans = [
        StreamPlan(
            name=stream.name,
            num_samples=count,
            share=share,
            epochs=share * num_images / count if share is not None and count else None,
        )
        for stream, count, share in zip(data.streams, counts, _shares(data.streams, counts), strict=True)
    ]
    known = [one for one in shards if one is not None]
    if len(known) < len(shards):
        return EpochPlan(streams=plans)
    shapes = stream_shapes(data.streams, known)
    try:
        order = GlobalOrder(shapes, order_settings(data, config.seed))
    except ConfigurationError as error:
        return EpochPlan(streams=plans, problem=str(error))
    shares = (order.units / order.units.sum()).tolist()  # Of whole units; the rest is dropped.
    plans = [
        replace(plan, share=share, epochs=share * num_images / shape.num_samples, draws=shape.draws, dropped=lost)
        for plan, share, shape, lost in zip(plans, shares, shapes, order.epoch(0).dropped, strict=True)
    ]
    return EpochPlan(streams=plans, num_steps=order.num_steps)


def sum_known(values: Iterable[float | None]) -> float | None:
    """Sum; None if a value is unknown."""
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def absent_streams(config: Config) -> dict[str, str]:
    """Data that the configuration names and that is not on this machine or in its store: by key, a sentence."""
    absent = {}
    for section in ("data", "validation"):
        streams = [location for _, location in located_streams(config) if location.section == section]
        streams = [stream for stream in streams if "${" not in stream.source]  # It refers to a missing location.
        sources = [stream.source for stream in streams]
        folders = [source for source in sources if not is_url(source) and not Path(source).is_dir()]
        problems = [f"not on this machine: {', '.join(folders)}" if folders else None]
        problems += storage.concurrent_map(_find_problem, [stream for stream in streams if is_url(stream.source)])
        if any(problems):
            absent[f"{section}.streams"] = "; ".join(filter(None, problems))
    return absent


def _find_problem(stream: StreamLocation) -> str | None:
    """Return why the index of a stream in a store cannot be read, by one attempt; None if it can."""
    try:
        storage.fetch(storage.join(stream.source, INDEX), replace(stream.access, seconds=0))
    except UserError as error:
        return str(error)
    return None


def _samples_per_shard(location: StreamLocation) -> np.ndarray | None:
    """Samples per shard of a stream; None where its index cannot be read on this machine."""
    for folder in (location.remote, location.local):
        if folder and not is_url(folder):
            try:
                return read_index(Path(folder).expanduser()).samples_per_shard
            except (OSError, DataError):
                continue
    return None


def _shares(streams: Sequence[StreamConfig], counts: Sequence[int | None]) -> list[float | None]:
    """Share of each stream in the run's images."""
    weights = [stream.proportion for stream in streams]
    if None in weights:
        repeats = [1.0 if stream.repeat is None else stream.repeat for stream in streams]
        weights = [None if count is None else repeat * count for repeat, count in zip(repeats, counts, strict=True)]
    known = [weight for weight in weights if weight is not None]
    if len(known) < len(weights) or not sum(known):
        return [None] * len(weights)
    return [weight / sum(known) for weight in known]
