"""Checks of the data: streams and their files, the cache of each node, and one batch of each stream."""

import hashlib
import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from diffusion import storage
from diffusion.config.data import DataConfig, Representation, ValidationConfig
from diffusion.config.fields import parse_size
from diffusion.config.model import Posterior
from diffusion.config.schema import Config
from diffusion.datasets.batch import BatchKey, collate, num_samples
from diffusion.datasets.dataset import ENCODED_COLUMNS, PREPARED_COLUMNS, Tokenize, TrainingDataset
from diffusion.datasets.loader import BatchLoader, order_settings, validation_dataset, validation_streams
from diffusion.datasets.mds import INDEX, find_wrong_hash
from diffusion.datasets.sample_order import GlobalOrder, StreamShape, draws_per_stream
from diffusion.datasets.streams import StreamLocation, check_location, find_manifest, locate_streams
from diffusion.errors import DataError, UserError
from diffusion.models.tokenizers import build_tokenizer, tokenize
from diffusion.operations.checks.check import Check, Job, Stage
from diffusion.operations.checks.machine import DiskProbe, probe_disk
from diffusion.operations.checks.verdicts import Verdict, ok, problem, size_text, warning
from diffusion.planning.downloads import FleetStream, World, traffic
from diffusion.storage import is_url, join

NUM_EXAMPLES = 3
"""Damaged files that a verdict names."""

BATCHES_AHEAD = 8
"""Batches that a worker downloads ahead if `data.predownload` is null."""

MIN_CACHED_SHARDS = 4
"""Smallest cache limit, in multiples of the largest shard."""

BATCH_SAMPLES = 16
"""Samples of each stream that are read and decoded."""


def data_sections(config: Config) -> list[tuple[str, ValidationConfig]]:
    """Return the data sets of a run in the form of validation data, each with the prefix of its verdicts."""
    data = config.data
    sections = [("", ValidationConfig(remote=data.remote, local=data.local, streams=data.streams))]
    if config.validation is not None:
        streams = validation_streams(config.validation, data)
        sections.append(("validation ", replace(config.validation, streams=streams)))
    return sections


def _locations(config: Config) -> dict[str, list[StreamLocation]]:
    """Return the locations of the streams of each data set, by the prefix of its verdicts."""
    return {
        prefix: locate_streams(section.remote, section.local, section.streams or [], prefix.strip() or "data")
        for prefix, section in data_sections(config)
    }


# Streams


@dataclass(frozen=True, kw_only=True)
class StreamProbe:
    """State of a stream, from its index and files."""

    name: str
    source: str
    """Folder or URL of the original."""

    sha256: str
    """Hash of the index, which contains the hashes of the shards."""

    index_bytes: int
    columns: Mapping[str, str]
    """MDS type of each column."""

    samples_per_shard: tuple[int, ...]
    bytes_per_shard: tuple[int, ...]
    """Bytes of each shard in a cache: both forms of a compressed one, which exist together for a moment."""

    damaged: tuple[str, ...] = ()
    """Files of the original that are missing or damaged; unknown behind a URL."""

    is_deep: bool = False
    """Whether the files were hashed."""

    cached_sha256: str | None = None
    """Hash of the index in the cache; None without one."""

    manifest: Mapping[str, Any] | None = None
    """Content of the data set's `manifest.json`."""


def probe_streams(job: Job) -> dict[str, StreamProbe | UserError]:
    """Probe the streams of all data sets, by the names of their verdicts."""
    found: dict[str, StreamProbe | UserError] = {}
    for prefix, locations in _locations(job.config).items():
        for location in locations:
            try:
                probe = probe_stream(location, job.config.data.download_timeout, deep=job.is_deep)
            except UserError as error:
                probe = error
            found[f"{prefix}stream {location.name}"] = probe
    return found


def probe_stream(location: StreamLocation, timeout: float, *, deep: bool = False) -> StreamProbe:
    """Read a stream's index and manifest, and examine its files.

    Args:
        location: location of the stream.
        timeout: seconds for a download.
        deep: hash the files, with a progress bar.

    Raises:
        DataError: it cannot be read, or is not an MDS folder.
    """
    check_location(location)
    content = _read_index(location, timeout)
    try:
        shards = json.loads(content)["shards"]
        stored = [shard["zip_data"] or shard["raw_data"] for shard in shards]
        files = {str(data["basename"]): (int(data["bytes"]), dict(data["hashes"])) for data in stored}
        samples = tuple(int(shard["samples"]) for shard in shards)
        sizes = tuple(
            int(shard["raw_data"]["bytes"]) + int((shard["zip_data"] or {"bytes": 0})["bytes"]) for shard in shards
        )
        columns = dict(zip(shards[0]["column_names"], shards[0]["column_encodings"], strict=True))
    except (KeyError, TypeError, IndexError, ValueError) as error:
        where = f"{location.source} (stream '{location.name}')"
        raise DataError(f"the {INDEX} of {where} is damaged ({error!r}): copy or write the data set again") from error
    folder = None if is_url(location.source) else Path(location.source)
    cached = Path(location.local, INDEX)
    is_cached = location.remote is not None and cached.is_file()
    return StreamProbe(
        name=location.name,
        source=location.source,
        sha256=hashlib.sha256(content).hexdigest(),
        index_bytes=len(content),
        columns=columns,
        samples_per_shard=samples,
        bytes_per_shard=sizes,
        damaged=tuple(_find_damaged(folder, files, deep=deep)) if folder is not None else (),
        is_deep=deep and folder is not None,
        cached_sha256=hashlib.sha256(cached.read_bytes()).hexdigest() if is_cached else None,
        manifest=find_manifest(location.source, location.access),
    )


def _read_index(location: StreamLocation, timeout: float) -> bytes:
    if not is_url(location.source):
        try:
            return Path(location.source, INDEX).read_bytes()
        except OSError as error:
            raise DataError(f"{location.source}/{INDEX} cannot be read: {error.strerror}") from error
    url = join(location.source, INDEX)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, INDEX)
        try:
            storage.download(url, path, access=replace(location.access, attempts=1, timeout=timeout))
        except UserError as error:
            raise DataError(f"{url} cannot be downloaded: {error}. Check address, credentials and network") from error
        return path.read_bytes()


def _find_damaged(folder: Path, files: Mapping[str, tuple[int, Mapping[str, str]]], *, deep: bool) -> Iterator[str]:
    """Return the files that are missing or have another size or, in a deep check, another hash than in the index."""
    for name, (size, hashes) in tqdm(files.items(), desc=str(folder), unit=" shards", disable=not deep):
        path = folder / name
        if not path.is_file() or path.stat().st_size != size or (deep and find_wrong_hash(path, dict(hashes))):
            yield name


def probe_representation(job: Job) -> Representation:
    """Return `data.representation`."""
    return job.config.data.representation


def check_streams(streams: Mapping[str, StreamProbe | UserError], representation: Representation) -> Iterator[Verdict]:
    """Check files, columns, manifest and cached index of each stream."""
    for name, stream in streams.items():
        verdicts = [problem(str(stream))] if isinstance(stream, UserError) else check_stream(stream, representation)
        yield from (replace(verdict, check=name) for verdict in verdicts)


def check_stream(stream: StreamProbe, representation: Representation) -> Iterator[Verdict]:
    """Check files, columns, manifest and cached index of a stream."""
    yield _check_shards(stream)
    expected = PREPARED_COLUMNS if representation is Representation.images else ENCODED_COLUMNS
    if missing := sorted(expected - stream.columns.keys()):
        yield problem(
            f"{stream.source} has the columns {', '.join(sorted(stream.columns))}, but data.representation is "
            f"{representation.value}, which reads {', '.join(missing)} as well",
            "set data.representation to that of the data, or write it with scripts/prepare.py and scripts/encode.py",
        )
    split, bucket = stream.source.rstrip("/").split("/")[-2:]
    manifest = stream.manifest or {}
    entry = manifest.get("splits", {}).get(split, {}).get(bucket)
    count = manifest.get("counts", {}).get(split, {}).get(bucket)
    is_same = count in (None, sum(stream.samples_per_shard))
    if isinstance(entry, dict):
        count, is_same = entry.get("num_samples"), entry.get("sha256") == stream.sha256
    if not is_same:
        what = f"the index of {stream.source} is not that of manifest.json above it, which records {count} samples"
        yield problem(what, "copy the whole data set again")
    if stream.cached_sha256 not in (None, stream.sha256):
        what = f"the cache of {stream.source} has the index of an older version of the data set"
        yield problem(what, "empty the cache (data.local), or choose another one")


def _check_shards(stream: StreamProbe) -> Verdict:
    num = len(stream.samples_per_shard)
    if stream.damaged:
        shown = ", ".join(stream.damaged[:NUM_EXAMPLES]) + (" ..." if len(stream.damaged) > NUM_EXAMPLES else "")
        what = f"{len(stream.damaged)} of {num} shards of {stream.source} are missing or damaged: {shown}"
        return problem(what, "copy or write the data set again")
    examined = "all there and whole" if stream.is_deep else "all there (--deep compares their hashes)"
    if is_url(stream.source):
        examined = "not examined behind a URL"
    size = size_text(sum(stream.bytes_per_shard))
    return ok(f"{sum(stream.samples_per_shard):,} samples in {num:,} shards of {size} in total, {examined}")


# Cache


@dataclass(frozen=True, kw_only=True)
class CacheDemand:
    """Bytes in the cache of a node."""

    live_bytes: int
    """Shards that are needed at once, and the indexes."""

    ahead_bytes: int
    """Shards that loader workers download ahead."""

    largest_shard: int
    node_bytes: int
    """All shards that the node reads in an epoch: the cache without a limit."""

    @property
    def good_limit(self) -> int:
        """Limit at which no shard is deleted before it is read."""
        return self.live_bytes + max(self.ahead_bytes, MIN_CACHED_SHARDS * self.largest_shard)


@dataclass(frozen=True, kw_only=True)
class CacheProbe:
    """Cache of a node for the training data."""

    demand: CacheDemand
    limit: str | None
    """`data.cache_limit`."""

    held_bytes: int
    """Current size."""

    disks: tuple[DiskProbe, ...]
    """File systems of its folders."""

    originals: tuple[str, ...]
    """Streams without a remote, whose folder is the only copy."""


def find_cache_demand(
    streams: Sequence[FleetStream], order: GlobalOrder, data: DataConfig, world: World, *, index_bytes: int = 0
) -> CacheDemand:
    """Compute the bytes in the cache of a node.

    Args:
        streams: shards of the streams of the order, with their bytes in a cache.
        order: order of samples.
        data: section `data` of the configuration.
        world: machines.
        index_bytes: bytes of the indexes of all streams.
    """
    row = traffic(streams, order.epoch(0), world, images_per_second=1.0)
    largest = max(int(stream.bytes_per_shard.max()) for stream in streams)
    downloaded = row.bytes_per_second * order.num_steps * data.global_batch_size
    share = data.global_batch_size // world.num_ranks
    steps_ahead = max(1, data.num_workers) * (data.predownload or BATCHES_AHEAD * share) / share
    return CacheDemand(
        live_bytes=row.cache_bytes + index_bytes,
        ahead_bytes=round(downloaded * min(1.0, steps_ahead / order.num_steps)) + largest,
        largest_shard=largest,
        node_bytes=min(sum(int(stream.bytes_per_shard.sum()) for stream in streams), round(downloaded)),
    )


def probe_cache(job: Job) -> CacheProbe | UserError | None:
    """Probe the cache by the indexes of the streams; None if a stream of the training data cannot be read."""
    config, data, locations = job.config, job.config.data, _locations(job.config)[""]
    probes = [job.probe(probe_streams)[f"stream {location.name}"] for location in locations]
    streams = [probe for probe in probes if isinstance(probe, StreamProbe)]
    if len(streams) < len(probes):
        return None
    try:
        draws = draws_per_stream(
            [sum(stream.samples_per_shard) for stream in streams],
            [stream.proportion for stream in data.streams],
            [stream.repeat for stream in data.streams],
        )
        fleet = [_fleet_stream(stream, num) for stream, num in zip(streams, draws, strict=True)]
        order = GlobalOrder([stream.shape for stream in fleet], order_settings(data, config.seed))
    except UserError as error:
        return error
    index_bytes = sum(stream.index_bytes for stream in streams)
    caches = [Path(location.local) for location in locations if location.remote is not None]
    return CacheProbe(
        demand=find_cache_demand(fleet, order, data, _world(job), index_bytes=index_bytes),
        limit=data.cache_limit,
        held_bytes=sum(probe_disk(cache, with_content=True).held_bytes for cache in caches),
        disks=_cache_disks(locations),
        originals=tuple(location.name for location in locations if location.remote is None),
    )


def probe_cache_of(dataset: TrainingDataset, job: Job) -> CacheProbe:
    """Probe the cache by the open data set of training."""
    order = dataset.order
    streams = [
        FleetStream(shape=shape, bytes_per_shard=stream.index.cached_bytes())
        for shape, stream in zip(order.streams, dataset.streams, strict=True)
    ]
    index_bytes = sum((stream.folder / INDEX).stat().st_size for stream in dataset.streams)
    remotes = zip(dataset.stream_names, dataset.streams, strict=True)
    return CacheProbe(
        demand=find_cache_demand(streams, order, job.config.data, _world(job), index_bytes=index_bytes),
        limit=job.config.data.cache_limit,
        held_bytes=dataset.cache_bytes(),
        disks=_cache_disks(_locations(job.config)[""]),
        originals=tuple(name for name, stream in remotes if stream.remote is None),
    )


def _fleet_stream(stream: StreamProbe, draws: int) -> FleetStream:
    samples, sizes = (np.array(counts, np.int64) for counts in (stream.samples_per_shard, stream.bytes_per_shard))
    return FleetStream(
        shape=StreamShape(name=stream.name, samples_per_shard=samples, draws=draws), bytes_per_shard=sizes
    )


def _cache_disks(locations: Iterable[StreamLocation]) -> tuple[DiskProbe, ...]:
    """Probe the file systems of the caches, each once."""
    disks = [probe_disk(Path(location.local).expanduser()) for location in locations if location.remote is not None]
    return tuple({disk.device: disk for disk in disks}.values())


def _world(job: Job) -> World:
    return World(num_nodes=job.num_nodes, ranks_per_node=job.ranks_per_node)


def check_cache_limit(cache: CacheProbe | UserError | None) -> Iterator[Verdict]:
    """Check that the limit leaves room for the shards that are needed at once."""
    if isinstance(cache, UserError):
        yield problem(str(cache), check="epoch")
    elif cache is not None:
        yield _check_limit(cache)


def _check_limit(cache: CacheProbe) -> Verdict:
    demand, limit = cache.demand, cache.limit
    if limit is None:
        return ok("none")
    if cache.originals:
        what = f"data.cache_limit is {limit}, but {', '.join(cache.originals)} has no remote: the only copy"
        return problem(f"{what} would be deleted", "set data.cache_limit=null, or give data.remote")
    size = parse_size(limit, "data.cache_limit")
    least = max(demand.live_bytes, MIN_CACHED_SHARDS * demand.largest_shard)
    what = (
        f"data.cache_limit is {limit}; a node needs {size_text(least)} at once and downloads "
        f"{size_text(demand.ahead_bytes)} ahead"
    )
    remedy = (
        f"set it to {_option_text(demand.good_limit)} or more, write smaller shards, or lower "
        "data.num_canonical_nodes (which changes the order)"
    )
    if size < least:
        return problem(f"{what}: shards would be deleted before they are read, again and again", remedy)
    if size < demand.good_limit:
        return warning(f"{what}: shards may be deleted before they are read", remedy)
    return ok(what)


def check_cache_space(cache: CacheProbe | UserError | None) -> Iterator[Verdict]:
    """Check that the disks have space for the cache."""
    if not isinstance(cache, CacheProbe):
        return
    demand = cache.demand
    size = demand.node_bytes
    if cache.limit is not None:
        size = min(size, parse_size(cache.limit, "data.cache_limit"))
    missing = max(0, size - cache.held_bytes)
    for disk in cache.disks:
        what = (
            f"{disk.folder} has {size_text(disk.free_bytes)} free, and {size_text(missing)} are still to be downloaded "
            "to this node"
        )
        remedy = "free space or choose another data.local"
        if not disk.is_writable:
            yield problem(f"{disk.folder} cannot be written", "choose another data.local")
        elif disk.free_bytes < missing:
            if disk.free_bytes + cache.held_bytes > demand.good_limit:
                remedy += f", or set data.cache_limit to at least {_option_text(demand.good_limit)}"
            yield problem(what, remedy)
        else:
            yield ok(what)


def _option_text(num_bytes: int) -> str:
    """Format bytes as a value of the configuration, such as 1.5gb."""
    return size_text(num_bytes).replace(" ", "").lower()


# Batches


def read_batches(config: Config, prefix: str, section: ValidationConfig, *, reads: bool) -> list[Verdict]:
    """Read one batch of each stream, from its first shard, with the loader of training; called by all ranks.

    Args:
        config: configuration of the run.
        prefix: prefix of the verdicts.
        section: the data set.
        reads: whether this rank reads; all ranks open the streams.

    Raises:
        DataError: a stream is missing, damaged, or not what the configuration says.
    """
    dataset = validation_dataset(
        replace(section, num_samples=None),
        config.data,
        tokenize=_tokenize(config),
        with_logvar=config.objective.posterior == Posterior.sample,
    )
    if not reads:
        return []
    chosen = [list(part[:BATCH_SAMPLES]) for part in dataset.parts]
    loader = BatchLoader(dataset, batch_sampler=chosen, collate_fn=collate)
    verdicts = []
    began = time.perf_counter()
    for name, batch in zip(dataset.stream_names, loader, strict=True):
        seconds, began = time.perf_counter() - began, time.perf_counter()
        shapes = ", ".join(f"{BatchKey(key).value} {'x'.join(map(str, value.shape))}" for key, value in batch.items())
        what = f"{num_samples(batch)} samples in {seconds:.2f} s: {shapes}"
        verdicts.append(ok(what, check=f"{prefix}batch of {name}"))
    return verdicts


def _tokenize(config: Config) -> Tokenize | None:
    if config.data.representation is Representation.latents:
        return None
    tokenizer = build_tokenizer(config.model.architecture)
    return lambda captions: tokenize(tokenizer, captions)


_AT_START = (Stage.start, Stage.doctor)

STREAM_CHECKS = [
    Check(name="stream NAME", needs=(probe_streams, probe_representation), function=check_streams),
]
CACHE_CHECKS = [
    Check(name="cache limit", needs=(probe_cache,), function=check_cache_limit, stages=_AT_START),
    Check(name="cache space", needs=(probe_cache,), function=check_cache_space, stages=_AT_START),
]
