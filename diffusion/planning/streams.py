"""What a run reads of each stream: how often, and how much an epoch leaves out."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from omegaconf import MISSING

from diffusion.config.data import StreamConfig
from diffusion.config.schema import Config
from diffusion.datasets.loader import order_settings, validation_streams
from diffusion.datasets.sample_order import GlobalOrder, StreamShape, draws_per_stream
from diffusion.datasets.streams import StreamLocation, locate_streams
from diffusion.errors import ConfigurationError
from diffusion.storage import is_url


@dataclass(frozen=True, kw_only=True)
class StreamPlan:
    """How often one stream is seen. None is not known."""

    name: str
    num_samples: int | None
    """Samples in its index; None where it cannot be read here."""

    share: float | None
    """Of the run's images, between 0 and 1."""

    steps: float | None
    """Of the run: as many as its images would fill by themselves."""

    epochs: float | None
    """Times that each of its samples is seen, on average."""

    draws: int | None = None
    """Samples that it gives to an epoch before that is cut to whole global batches (and groups)."""

    dropped: int | None = None
    """How many of them are cut off in the first epoch; others in each."""


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """What an epoch consists of."""

    streams: list[StreamPlan]
    num_steps: int | None = None
    """Whole global batches in it; None where a stream is not known."""

    num_shards: int | None = None
    """Of all streams; likewise."""

    problem: str | None = None
    """Why there is no such epoch."""


def plan_epoch(config: Config, num_images: int) -> EpochPlan:
    """Work out what a run reads of each stream.

    Args:
        config: the configuration; locations may be missing (`???`).
        num_images: of the run.
    """
    data = config.data
    if config.plugins.train_dataset is not None or not isinstance(data.streams, list):
        return EpochPlan(streams=[])
    shapes: list[StreamShape | None] = [None] * len(data.streams)
    if MISSING not in (data.local, data.remote):
        shapes = [_read(location) for location in locate_streams(data.remote, data.local, data.streams)]
    counts = [None if shape is None else shape.num_samples for shape in shapes]
    unknown = [
        StreamPlan(
            name=stream.name,
            num_samples=count,
            share=share,
            steps=share * num_images / data.global_batch_size if share is not None else None,
            epochs=share * num_images / count if share is not None and count else None,
        )
        for stream, count, share in zip(data.streams, counts, _shares(data.streams, counts), strict=True)
    ]
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes):
        return EpochPlan(streams=unknown)
    draws = draws_per_stream(
        [shape.num_samples for shape in known],
        [stream.proportion for stream in data.streams],
        [stream.repeat for stream in data.streams],
    )
    drawn = [
        StreamShape(name=shape.name, samples_per_shard=shape.samples_per_shard, draws=num)
        for shape, num in zip(known, draws, strict=True)
    ]
    try:
        epoch = GlobalOrder(drawn, order_settings(data, config.seed)).epoch(0)
    except ConfigurationError as error:
        return EpochPlan(streams=unknown, problem=str(error))
    streams = [
        replace(plan, draws=stream.draws, dropped=dropped)
        for plan, stream, dropped in zip(unknown, drawn, epoch.dropped, strict=True)
    ]
    num_shards = sum(len(shape.samples_per_shard) for shape in known)
    return EpochPlan(streams=streams, num_steps=epoch.num_steps, num_shards=num_shards)


def absent_streams(config: Config) -> dict[str, str]:
    """Folders of data that the configuration names and that are not on this machine.

    Returns:
        By section, a sentence. URLs, locations that are missing (`???`), and data of a plug-in are skipped.
    """
    sections = {}
    if config.plugins.train_dataset is None and isinstance(config.data.streams, list):
        sections["data.streams"] = (config.data, config.data.streams)
    if config.validation is not None and (config.validation.streams or "data.streams" in sections):
        sections["validation.streams"] = (config.validation, validation_streams(config.validation, config.data))
    absent = {}
    for key, (section, streams) in sections.items():
        if MISSING in (section.local, section.remote):
            continue
        sources = [location.source for location in locate_streams(section.remote, section.local, streams)]
        if folders := [source for source in sources if not is_url(source) and not Path(source).is_dir()]:
            absent[key] = f"not on this machine: {', '.join(folders)}"
    return absent


def read_shape(name: str, folder: Path) -> StreamShape | None:
    """Samples per shard of an MDS folder, from its `index.json`; None where there is none that can be read."""
    try:
        shards = json.loads((folder / "index.json").read_text(encoding="utf-8"))["shards"]
        samples = np.array([shard["samples"] for shard in shards], np.int64)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return StreamShape(name=name, samples_per_shard=samples, draws=int(samples.sum()))


def _read(location: StreamLocation) -> StreamShape | None:
    """Samples per shard of a stream; None where its index cannot be read on this machine."""
    folders = [Path(place).expanduser() for place in (location.remote, location.local) if place and not is_url(place)]
    shapes = (read_shape(location.name, folder) for folder in folders)
    return next((shape for shape in shapes if shape is not None), None)


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
