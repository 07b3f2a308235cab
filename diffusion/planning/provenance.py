"""What a run has seen: which samples, how often, worked out from the order instead of being logged."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from diffusion.config.schema import Config
from diffusion.datasets.bad_images import BadImage
from diffusion.datasets.loader import order_settings
from diffusion.datasets.mds import INDEX, open_shard, read_shards
from diffusion.datasets.sample_order import GlobalOrder, StreamShape, describe_changes, draws_per_stream
from diffusion.datasets.streams import StreamLocation, Substitutes, find_substitutes, locate_streams
from diffusion.errors import DataError

CHUNK = 2**18
"""Samples of the order that are computed at once."""


@dataclass(frozen=True, kw_only=True)
class Exposure:
    """A sample that a run has seen."""

    stream: str
    index: int
    """Its number in the stream."""

    times: int
    """How often it was drawn."""

    key: str
    metadata: dict[str, Any]
    """What its source knew, where the data holds it: prepared data does, latents do not."""

    @property
    def source(self) -> str:
        """Name of the source that it came from: the first part of its key."""
        return self.key.partition("/")[0]


def build_order(config: Config, folders: list[Path]) -> GlobalOrder:
    """The order that a run draws its samples in.

    Args:
        config: the run's configuration.
        folders: a local MDS folder for each stream, with the stream's samples in the stream's shards: the stream
            itself, or the prepared data that it was encoded from.

    Raises:
        DataError: a folder has no index.
    """
    streams = config.data.streams
    sizes = [np.array([shard["samples"] for shard in read_shards(folder)], np.int64) for folder in folders]
    draws = draws_per_stream(
        [int(size.sum()) for size in sizes],
        [stream.proportion for stream in streams],
        [stream.repeat for stream in streams],
    )
    shapes = [
        StreamShape(name=stream.name, samples_per_shard=size, draws=num)
        for stream, size, num in zip(streams, sizes, draws, strict=True)
    ]
    return GlobalOrder(shapes, order_settings(config.data, config.seed))


def check_order(order: GlobalOrder, fingerprint: Mapping[str, object]) -> None:
    """Refuse data or settings that give another order than the run had.

    Args:
        order: made by `build_order`.
        fingerprint: what the checkpoint says of its order.

    Raises:
        DataError: what differs.
    """
    if changes := describe_changes(fingerprint, order.fingerprint()):
        raise DataError(f"this is not the data that the run has seen: {'; '.join(changes)}. Name that with --data")


def times_seen(order: GlobalOrder, num_steps: int, *, progress: bool = False) -> list[NDArray[np.int32]]:
    """How often each sample was drawn in the first steps of a run.

    Args:
        order: the order of the run.
        num_steps: optimizer steps; an epoch has `order.num_steps`.
        progress: show a bar on stderr.

    Returns:
        int32 [N] for each stream: 4 bytes a sample. About a million samples of the order are counted a second.
    """
    counts = [np.zeros(stream.num_samples, np.int32) for stream in order.streams]
    size = order.settings.global_batch_size
    steps_per_chunk = max(1, CHUNK // size)
    with tqdm(total=num_steps * size, unit=" samples", unit_scale=True, disable=not progress) as bar:
        for epoch in range(-(-num_steps // order.num_steps)):
            samples = order.epoch(epoch)
            stop = min(order.num_steps, num_steps - epoch * order.num_steps)
            for first in range(0, stop, steps_per_chunk):
                slots = samples.slots(first, min(first + steps_per_chunk, stop))
                for stream, count in enumerate(counts):
                    drawn = slots.index[slots.stream == stream]
                    count += np.bincount(drawn, minlength=len(count)).astype(np.int32)
                bar.update(slots.index.size)
    return counts


def apply_substitutes(
    config: Config, folders: list[Path], counts: list[NDArray[np.int32]], bad: Sequence[BadImage] = ()
) -> None:
    """Count at their substitutes the samples that are removed or damaged, in place.

    Removals count as if they had been there from the beginning of the run. Marks count wherever they are: beside the
    streams of the run (images that could not be encoded) and beside the folders.

    Args:
        config: the run's configuration.
        folders: as for `build_order`.
        counts: made by `times_seen`.
        bad: images that the run could not decode.

    Raises:
        DataError: the marks of a data set are damaged, or cannot be reached.
    """
    locations = locate_streams(config.data.remote, config.data.local, config.data.streams)
    for location, folder, count in zip(locations, folders, counts, strict=True):
        beside_folder = StreamLocation(name=location.name, remote=None, local=str(folder))
        marked = [find_substitutes(place, len(count)).absent for place in (location, beside_folder)]
        undecodable = [image.index for image in bad if image.stream == location.name]
        substitutes = Substitutes(len(count), [*marked[0], *marked[1], *undecodable], location.name)
        for index in substitutes.absent:
            times, count[index] = int(count[index]), 0
            count[substitutes.substitute_of(index)] += times


def exposures(
    config: Config, folders: list[Path], counts: list[NDArray[np.int32]], *, progress: bool = False
) -> Iterator[Exposure]:
    """Look up what was seen, stream by stream, in the order of the data.

    Args:
        config: the run's configuration.
        folders: as for `build_order`.
        counts: made by `times_seen`.
        progress: show a bar on stderr.

    Raises:
        DataError: a shard is missing, or holds no keys.
    """
    with tqdm(total=sum(map(len, counts)), unit=" samples", unit_scale=True, disable=not progress) as bar:
        for stream, folder, count in zip(config.data.streams, folders, counts, strict=True):
            first = 0
            for entry in read_shards(folder):
                seen = np.flatnonzero(count[first : first + entry["samples"]])
                if len(seen):
                    with open_shard(folder, entry) as reader:
                        for number in seen.tolist():
                            yield _exposure(stream.name, first + number, int(count[first + number]), reader[number])
                first += entry["samples"]
                bar.update(entry["samples"])


def _exposure(stream: str, index: int, times: int, columns: dict[str, Any]) -> Exposure:
    if "key" not in columns:
        raise DataError(f"stream '{stream}' holds no keys: name the prepared data that it was made from")
    return Exposure(stream=stream, index=index, times=times, key=columns["key"], metadata=columns.get("metadata") or {})


def find_folders(config: Config, prepared: Path | None) -> list[Path]:
    """Where each stream's samples can be looked up on this machine.

    Args:
        config: the run's configuration.
        prepared: folder of the buckets of prepared data (`PREPARED/train`); None for the streams themselves.

    Raises:
        DataError: a stream is not on this machine.
    """
    locations = locate_streams(config.data.remote, config.data.local, config.data.streams)
    folders = [_folder(location) if prepared is None else prepared / location.name for location in locations]
    for location, folder in zip(locations, folders, strict=True):
        if not (folder / INDEX).is_file():
            raise DataError(
                f"{folder} (stream '{location.name}') is not an MDS folder here: copy the data to this machine and "
                "name it with --data"
            )
    return folders


def _folder(location: StreamLocation) -> Path:
    return Path(location.source if Path(location.source).is_dir() else location.local)
