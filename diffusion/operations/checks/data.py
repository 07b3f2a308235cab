"""Checks of the data: streams and what encoded them, the cache of each node, and a batch of each stream."""

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from diffusion import storage
from diffusion.config.data import DataConfig, ImageSize, Representation, StreamConfig, ValidationConfig, image_sizes
from diffusion.config.fields import parse_size, size_text
from diffusion.config.model import Posterior
from diffusion.config.schema import Config
from diffusion.datasets.batch import BatchKey, collate
from diffusion.datasets.cache import replace_index
from diffusion.datasets.dataset import Tokenize, TrainingDataset
from diffusion.datasets.encoded import EncodedManifest, check_encoded
from diffusion.datasets.loader import BatchLoader, check_locations, train_loader, validation_dataset
from diffusion.datasets.streams import (
    Files,
    StreamLocation,
    check_location,
    check_separate_caches,
    find_manifest,
    located_streams,
    read_files,
)
from diffusion.distributed import agree, broadcast, local_rank, local_world_size, on_first_rank, world_size
from diffusion.errors import ConfigurationError, DataError, MachineError, UserError
from diffusion.formats.shards import INDEX, check_sizes, read_index
from diffusion.models.tokenizers import caption_tokenizer, num_full
from diffusion.operations.checks.machine import existing
from diffusion.operations.checks.verdicts import Verdict, log_and_raise, ok, on_each_machine, problem, warning
from diffusion.planning.downloads import FleetStream, World, traffic
from diffusion.storage import is_url, join, shown

MIN_CACHED_SHARDS = 4
"""Smallest cache limit, in multiples of the largest shard."""

BATCH_SAMPLES = 16
"""Samples of each stream that the doctor reads and decodes."""

# At the start of training


def read_stream_files(config: Config) -> Files:
    """Read the manifests and marks of all streams; called by all ranks.

    Those of an object store are read by rank 0 for all, those of folders by each rank: nodes may have their own.

    Raises:
        DataError: on all ranks: one cannot be read.
    """
    locations = agree(lambda: [location for _, location in located_streams(config)])
    stored = on_first_rank(lambda: read_files(location for location in locations if is_url(location.source)))
    return {**stored, **agree(lambda: read_files(one for one in locations if not is_url(one.source)))}


def refresh_indexes(config: Config) -> None:
    """Replace the indexes in the caches of this node where the data has grown or changed; on its first rank.

    Raises:
        UserError: an original cannot be read, or an index not be replaced.
    """
    if local_rank() != 0:
        return
    data = config.data
    for _, location in located_streams(config):
        if _has_cached_index(location):
            index = read_source_index(location, timeout=data.download_timeout, attempts=data.download_attempts)
            replace_index(Path(location.local), index)


def _has_cached_index(location: StreamLocation) -> bool:
    return location.remote is not None and Path(location.local, INDEX).is_file()


def check_streams(config: Config, files: Files) -> None:
    """Check that the data exists and is what the configuration says, as far as that is known without the model."""
    check_separate_caches(location for _, location in located_streams(config))
    wanted = {"with_logvar": config.objective.posterior == Posterior.sample, "score_names": config.model.score_names}
    if config.plugins.train_dataset is None:
        check_locations(config.data, **wanted, files=files)
    if config.validation is not None:
        check_locations(config.data, config.validation, **wanted, files=files)
    for _ in _encoded_streams(config, files):
        pass


def check_identity(config: Config, identities: Mapping[str, str], files: Files) -> None:
    """Check that latents were encoded by the VAE, tokenizer and text encoder of the model, given by their identities.

    Others are a DataError.
    """
    for location, size, manifest in _encoded_streams(config, files):
        check_encoded(
            manifest,
            where=shown(location.source),
            size=size,
            needs_logvar=config.objective.posterior == Posterior.sample,
            vae_identity=identities["vae"],
            tokenizer_identity=identities["tokenizer"],
            text_encoder_identity=identities["text_encoder"] if config.data.text_embeddings else None,
        )


def _encoded_streams(config: Config, files: Files) -> Iterator[tuple[StreamLocation, ImageSize, EncodedManifest]]:
    """Iterate over the streams of latents for training and validation, with their image sizes and manifests."""
    if config.data.representation != Representation.latents:
        return
    streams = located_streams(config)
    sizes = image_sizes([stream for stream, _ in streams], config.data.resolution)
    for (_, location), size in zip(streams, sizes, strict=True):
        manifest, where = find_manifest(replace(location, files=files)), shown(location.source)
        if manifest is not None:
            yield location, size, EncodedManifest.from_json(manifest, where)
        elif config.plugins.train_dataset is None:
            raise DataError(f"{where} has no manifest.json beside it: encode it with scripts/encode.py")


def check_order(dataset: TrainingDataset) -> None:
    """Raise a DataError on all ranks unless they read samples in the same order; called by all ranks."""
    order = dataset.order.fingerprint()
    first = broadcast(order)

    def compare() -> None:
        if order != first:
            raise DataError(
                "the shards of data.streams are not those of rank 0, so the ranks would not draw from the same order: "
                "have one version of the data set on all nodes"
            )

    agree(compare)


def check_caches(config: Config, dataset: TrainingDataset) -> None:
    """Check each machine's cache at the start of training; called by all ranks.

    Raises:
        ConfigurationError: on all ranks, if `data.cache_limit` is too small.
        MachineError: on all ranks, if the disk of a machine is too small.
    """
    verdicts = on_each_machine(lambda: check_cache(dataset, config.data))
    log_and_raise([one for one in verdicts if one.check == "cache limit"], ConfigurationError)
    log_and_raise([one for one in verdicts if one.check != "cache limit"], MachineError)


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


def find_cache_demand(dataset: TrainingDataset, data: DataConfig) -> CacheDemand:
    """Compute the bytes in the cache of a node of this job."""
    order = dataset.order
    streams = [
        FleetStream(shape=shape, bytes_per_shard=np.array([shard.cached_bytes for shard in stream.index.shards]))
        for shape, stream in zip(order.streams, dataset.streams, strict=True)
    ]
    world = World(num_nodes=max(1, world_size() // local_world_size()), ranks_per_node=local_world_size())
    row = traffic(streams, order.epoch(0), world, images_per_second=1.0)
    largest = max(int(stream.bytes_per_shard.max()) for stream in streams)
    downloaded = row.bytes_per_second * order.num_steps * data.global_batch_size
    steps_ahead = max(1, data.num_workers) * dataset.batches_ahead
    return CacheDemand(
        live_bytes=row.cache_bytes + sum((stream.folder / INDEX).stat().st_size for stream in dataset.streams),
        ahead_bytes=round(downloaded * min(1.0, steps_ahead / order.num_steps)) + largest,
        largest_shard=largest,
        node_bytes=min(sum(int(stream.bytes_per_shard.sum()) for stream in streams), round(downloaded)),
    )


def check_cache(dataset: TrainingDataset, data: DataConfig) -> Iterator[Verdict]:
    """Check the limit of this node's cache, and the space on its disks; nothing where it has the originals."""
    if not any(stream.remote for stream in dataset.streams):
        return
    demand, needed = find_cache_demand(dataset, data), 0
    if data.cache_limit is None:
        needed = demand.node_bytes
    else:
        yield check_cache_limit(demand, data.cache_limit)
        needed = min(demand.node_bytes, parse_size(data.cache_limit, "data.cache_limit"))
    missing = max(0, needed - dataset.cache_bytes())
    caches = [existing(stream.folder) for stream in dataset.streams if stream.remote is not None]
    disks = {folder.stat().st_dev: folder for folder in caches}.values()
    if disks:
        free = sum(shutil.disk_usage(disk).free for disk in disks)
        yield check_cache_space(demand, *disks, free=free, missing=missing)


def check_cache_limit(demand: CacheDemand, limit: str) -> Verdict:
    """Check that a limit leaves room for the shards that are needed at once."""
    size = parse_size(limit, "data.cache_limit")
    min_size = max(demand.live_bytes, MIN_CACHED_SHARDS * demand.largest_shard)
    what = (
        f"data.cache_limit is {limit}; a node needs {size_text(min_size)} at once and downloads "
        f"{size_text(demand.ahead_bytes)} ahead"
    )
    remedy = (
        f"set it to {_option_text(demand.good_limit)} or more, write smaller shards, or lower "
        "data.num_canonical_nodes (which changes the order)"
    )
    if size < min_size:
        what += ": shards would be deleted before they are read, again and again"
        return problem("cache limit", what, remedy)
    if size < demand.good_limit:
        return warning("cache limit", f"{what}: shards may be deleted before they are read", remedy)
    return ok("cache limit", what)


def check_cache_space(demand: CacheDemand, *folders: Path, free: int, missing: int) -> Verdict:
    """Check that the disks have space for the cache; which streams fill which disk is not considered.

    There is a folder of the cache on each disk; the free bytes are those of all disks.
    """
    names = ", ".join(map(str, folders))
    what = f"{size_text(free)} are free for {names}, and {size_text(missing)} are still to be downloaded to this node"
    if free >= missing:
        return ok("cache space", what)
    remedy = (
        f"free space, choose another data.local, or set data.cache_limit (at least {_option_text(demand.good_limit)})"
    )
    return problem("cache space", what, remedy)


def _option_text(num_bytes: int) -> str:
    """Format bytes as a value of the configuration, such as 1.5gb."""
    return size_text(num_bytes).replace(" ", "").lower()


# By the doctor


def check_data(config: Config, *, deep: bool) -> Iterator[Verdict]:
    """Check the files of each stream, read a batch of it, and check the cache; on the first rank of a node.

    A deep check hashes the files of the streams that lie in folders, with a progress bar.
    """
    tokenizer = _tokenize(config)
    are_whole, streams = True, located_streams(config)
    try:
        check_separate_caches(location for _, location in streams)
    except ConfigurationError as error:
        yield problem("data", str(error))
        return
    for stream, location in streams:
        name = f"{'' if location.section == 'data' else f'{location.section} '}stream {location.name}"
        try:
            check_files(location, config.data.download_timeout, deep=deep)
            yield ok(name, _read_batch(config, location.section, stream, tokenizer))
        except UserError as error:
            are_whole = False
            yield problem(name, str(error))
    if are_whole:
        yield from _check_training_data(config, tokenizer)


def check_files(location: StreamLocation, timeout: float, *, deep: bool) -> None:
    """Compare the files of a stream with its index, and the index with the manifest; replace an older one in a cache.

    A deep check also compares the hashes of the files.

    Raises:
        DataError: files are missing or damaged, or of different versions of the data set.
        MachineError: an older index in a cache cannot be replaced.
    """
    check_location(location)
    index = read_source_index(location, timeout=timeout)
    split, bucket = ["", *location.source.rstrip("/").split("/")][-2:]
    manifest = find_manifest(location) or {}
    entry = manifest.get("splits", {}).get(split, {}).get(bucket)
    if isinstance(entry, dict) and entry.get("sha256") != hashlib.sha256(index).hexdigest():
        raise DataError(
            f"the index of {shown(location.source)} is not that of manifest.json above it, which records "
            f"{entry.get('num_samples')} samples: copy the whole data set again"
        )
    if _has_cached_index(location):
        replace_index(Path(location.local), index)
    if is_url(location.source):
        return
    folder = Path(location.source)
    shards = read_index(folder).shards
    check_sizes(folder, shards)
    if deep:
        damaged = []
        for shard in tqdm(shards, desc=str(folder), unit=" shards"):
            try:
                found = shard.stored.find_damage(folder)
            except OSError as error:
                found = f"{folder / shard.stored.name} cannot be read ({error.strerror})"
            damaged += [found] if found else []
        if damaged:
            raise DataError(
                f"{len(damaged)} shards of {folder} are damaged; the first: {damaged[0]}; copy or write the folder anew"
            )


def read_source_index(location: StreamLocation, *, timeout: float, attempts: int = 1) -> bytes:
    """Read the index of a stream's original; a UserError if it cannot be read."""
    access = replace(location.access, attempts=attempts, timeout=timeout)
    return storage.fetch(join(location.source, INDEX), access)


def index_hashes(config: Config) -> dict[str, str]:
    """Return the hash of the index of each readable stream, which contains the hashes of its shards."""
    hashes = {}
    for _, location in located_streams(config):
        try:
            index = read_source_index(location, timeout=config.data.download_timeout)
        except UserError:
            continue
        hashes[f"{location.section} {location.name}"] = hashlib.sha256(index).hexdigest()
    return hashes


def _read_batch(config: Config, section: str, stream: StreamConfig, tokenizer: Tokenize | None) -> str:
    """Read a batch of a stream from its first shard, with the loader of training, and describe it."""
    source = config.data if section == "data" else config.validation
    assert source is not None
    dataset = validation_dataset(
        ValidationConfig(remote=source.remote, local=source.local, streams=[stream]),
        config.data,
        tokenize=tokenizer,
        with_logvar=config.objective.posterior == Posterior.sample,
        score_names=config.model.score_names,
    )
    batches = BatchLoader(dataset, batch_sampler=[list(dataset.parts[0][:BATCH_SAMPLES])], collate_fn=collate)
    (batch,) = batches
    shapes = ", ".join(f"{BatchKey(key).value} {'x'.join(map(str, value.shape))}" for key, value in batch.items())
    found = f"{len(dataset):,} samples; a batch: {shapes}"
    if tokenizer is None or not (full := num_full(ids := batch[BatchKey.TOKEN_IDS], tokenizer([""])[0])):
        return found
    return f"{found}; {full} of {len(ids)} captions take all tokens of the text encoder: longer ones are cut"


def _check_training_data(config: Config, tokenizer: Tokenize | None) -> Iterator[Verdict]:
    """Open all streams together as training does, and check the cache."""
    try:
        loader = train_loader(
            config.data,
            seed=config.seed,
            tokenize=tokenizer,
            with_logvar=config.objective.posterior == Posterior.sample,
            score_names=config.model.score_names,
        )
    except UserError as error:
        yield problem("data", str(error))
        return
    dataset = loader.dataset
    assert isinstance(dataset, TrainingDataset)
    yield ok("data", f"{len(loader):,} steps in an epoch")
    yield from check_cache(dataset, config.data)
    dataset.close()


def _tokenize(config: Config) -> Tokenize | None:
    if config.data.representation is Representation.latents:
        return None
    return caption_tokenizer(config.model)
