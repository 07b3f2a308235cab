"""Exposure of a run: which samples it has seen and how often, computed from the order instead of being logged."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from diffusion.config.schema import Config
from diffusion.datasets.bad_images import BadImage
from diffusion.datasets.balanced import Integers
from diffusion.datasets.sample_order import SHARDS_OF_STREAMS, GlobalOrder, hash_shards, order_settings, stream_shapes
from diffusion.datasets.streams import StreamLocation, Substitutes, find_substitutes, locate_streams
from diffusion.errors import DataError
from diffusion.formats.shards import INDEX, SampleDecoder, ShardIndex, read_index, read_shard, shards_with_indices

CHUNK = 2**18
"""Samples of the order that are computed at once."""

LICENCE_COLUMNS = ("license", "licence")


@dataclass(frozen=True, kw_only=True)
class Exposure:
    """A sample that a run has seen."""

    stream: str
    index: int
    """Number in the stream."""

    times: int
    """Number of draws."""

    key: str
    metadata: dict[str, Any]
    """Metadata of its source, in prepared data; latents have none."""


def licence_of(metadata: Mapping[str, Any]) -> str:
    """Licence in the metadata of a source; empty if there is none."""
    return next((str(metadata[name]) for name in LICENCE_COLUMNS if metadata.get(name)), "")


def find_folders(config: Config, prepared: Path | None) -> list[Path]:
    """Local MDS folder of each stream, or of its bucket in a folder of prepared data (`PREPARED/train`), if given.

    Raises:
        DataError: a stream is not on this machine.
    """
    folders = []
    for location in locate_streams(config.data.remote, config.data.local, config.data.streams):
        here = location.source if Path(location.source).is_dir() else location.local
        folder = Path(here) if prepared is None else prepared / location.name
        if not (folder / INDEX).is_file():
            raise DataError(
                f"{folder} (stream '{location.name}') is not an MDS folder here: copy the data to this machine and "
                "name it with --data"
            )
        folders.append(folder)
    return folders


def build_order(config: Config, folders: list[Path], fingerprint: Mapping[str, Any]) -> GlobalOrder:
    """The order that a run draws its samples in, of the data as it was then if it has grown since.

    The folders, one for each stream, are the streams themselves or the prepared data that they were encoded from: the
    same samples in the same shards. The result has another fingerprint if the data is not that of the run.

    Raises:
        DataError: a folder has no index.
    """
    indexes = [read_index(folder) for folder in folders]
    wanted = fingerprint.get(SHARDS_OF_STREAMS)
    then = (sizes for sizes in _sizes_over_time(folders, indexes) if hash_shards(sizes) == wanted)
    sizes = next(then, [index.samples_per_shard for index in indexes])
    return GlobalOrder(stream_shapes(config.data.streams, sizes), order_settings(config.data, config.seed))


def _sizes_over_time(folders: Sequence[Path], indexes: Sequence[ShardIndex]) -> Iterator[Sequence[Integers]]:
    """Yield the sizes of the shards as they are, and as they were before a growth of one data set.

    A growth begins with a write task, whose number is in the names of its shards (in encoded data, that of the shard).
    """
    sizes = [index.samples_per_shard for index in indexes]
    yield sizes
    named = [[re.match(r"shard\.(\d+)", shard.raw.name) for shard in index.shards] for index in indexes]
    tasks = [np.array([int(match[1]) if match else 0 for match in matches]) for matches in named]
    datasets = [folder.parent.parent for folder in folders]
    for dataset in dict.fromkeys(datasets):
        grown = [one == dataset for one in datasets]
        for stop in np.unique(np.concatenate(list(itertools.compress(tasks, grown)))):
            streams = zip(sizes, tasks, grown, strict=True)
            yield [of_stream[task < stop] if has_grown else of_stream for of_stream, task, has_grown in streams]


def times_seen(order: GlobalOrder, num_steps: int) -> list[NDArray[np.int32]]:
    """Count the draws of each sample in the first steps of a run: int32 [N] for each stream.

    About a million samples of the order are counted a second.
    """
    counts = [np.zeros(stream.num_samples, np.int32) for stream in order.streams]
    size = order.settings.global_batch_size
    steps_per_chunk = max(1, CHUNK // size)
    with tqdm(total=num_steps * size, unit=" samples", unit_scale=True, disable=None) as bar:
        for epoch in range(-(-num_steps // order.num_steps)):
            samples = order.epoch(epoch)
            stop = min(order.num_steps, num_steps - epoch * order.num_steps)
            for first in range(0, stop, steps_per_chunk):
                slots = samples.slots(first, min(first + steps_per_chunk, stop))
                for stream, count in enumerate(counts):
                    drawn, times = np.unique(slots.index[slots.stream == stream], return_counts=True)
                    count[drawn] += times.astype(np.int32)
                bar.update(slots.index.size)
    return counts


def apply_substitutes(
    config: Config, folders: list[Path], counts: list[NDArray[np.int32]], bad: Sequence[BadImage] = ()
) -> None:
    """Count removed and damaged samples, and those that the run could not decode, at their substitutes, in place.

    Removals count as if they had been there from the beginning of the run. Marks count wherever they are: beside the
    streams of the run (images that could not be encoded) and beside the folders, which are those of `build_order`.

    Raises:
        DataError: the marks of a data set are damaged, or cannot be reached.
    """
    locations = locate_streams(config.data.remote, config.data.local, config.data.streams)
    for location, folder, count in zip(locations, folders, counts, strict=True):
        beside_folder = StreamLocation(name=location.name, remote=None, local=str(folder))
        total = read_index(folder).num_samples  # More, if the data has grown since.
        found = [index for one in (location, beside_folder) for index in find_substitutes(one, total).absent]
        marked = [index for index in found if index < len(count)]
        undecodable = [image.index for image in bad if image.stream == location.name]
        substitutes = Substitutes(len(count), [*marked, *undecodable], location.name)
        for index in substitutes.absent:
            times, count[index] = int(count[index]), 0
            count[substitutes.substitute_of(index)] += times


def exposures(config: Config, folders: list[Path], counts: list[NDArray[np.int32]]) -> Iterator[Exposure]:
    """Look up the samples that were seen, by `times_seen`, stream by stream, in the order of the data."""
    with tqdm(total=sum(map(len, counts)), unit=" samples", unit_scale=True, disable=None) as bar:
        for stream, folder, count in zip(config.data.streams, folders, counts, strict=True):
            for first, shard, _ in shards_with_indices(read_index(folder).shards):
                seen = np.flatnonzero(count[first : first + shard.num_samples])
                if len(seen):
                    if "key" not in shard.format.names:
                        raise DataError(f"stream '{stream.name}' has no keys: name its prepared data with --data")
                    samples = read_shard(folder, shard)
                    decode = SampleDecoder(shard.format, ("key", "metadata"))
                    for number in seen.tolist():
                        index, columns = first + number, decode(samples[number])
                        yield Exposure(
                            stream=stream.name,
                            index=index,
                            times=int(count[index]),
                            key=columns["key"],
                            metadata=columns.get("metadata") or {},
                        )
                bar.update(shard.num_samples)
