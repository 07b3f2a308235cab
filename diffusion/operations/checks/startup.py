"""Quick checks of machines and data at the start of training, before the model is on a GPU.

They take a fraction of a second. `scripts/doctor.py` checks more, and reads data.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from composer.utils import dist

from diffusion.config.data import ImageSize, Representation, image_sizes
from diffusion.config.model import Posterior
from diffusion.config.schema import Config
from diffusion.config.training import Device
from diffusion.datasets.dataset import TrainingDataset
from diffusion.datasets.encoded import EncodedManifest, check_encoded, read_encoded_manifest
from diffusion.datasets.loader import check_training_streams, check_validation_streams, validation_streams
from diffusion.datasets.streams import StreamLocation, locate_streams
from diffusion.distributed import agree
from diffusion.errors import ConfigurationError, DataError, MachineError, UserError
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.pretrained import module_identity, tokenizer_identity
from diffusion.operations.checks.cache import check_cache_limit, check_cache_space
from diffusion.operations.checks.demand import find_demand
from diffusion.operations.checks.machine import check_machine_reading, check_output_space
from diffusion.operations.checks.opening import cache_demand_of_dataset
from diffusion.operations.checks.readings import checkpoint_folder, checkpoint_key, read_disk, read_machine
from diffusion.operations.checks.verdicts import Verdict, merge, raise_problems, warnings_of
from diffusion.planning.fleet import World

log = logging.getLogger(__name__)


def check_machines(config: Config, device: Device) -> None:
    """Check each machine of the job for what the run needs; to be called by all ranks.

    Args:
        config: the configuration.
        device: what it trains on.

    Raises:
        MachineError: on all ranks: a machine lacks something.
    """

    def verdicts() -> list[Verdict]:
        demand = find_demand(
            config, world_size=dist.get_world_size(), ranks_per_node=dist.get_local_world_size(), device=device
        )
        disk = read_disk(checkpoint_folder(config))
        if demand.storage_bytes is not None and disk.free_bytes < demand.storage_bytes:
            disk = read_disk(disk.folder, with_content=True)  # Slow on a network disk, and seldom needed.
        space = check_output_space(disk, demand, checkpoint_key(config))
        return [*check_machine_reading(read_machine(), demand), space]

    _tell(verdicts, MachineError)


def check_caches(config: Config, dataset: TrainingDataset) -> None:
    """Check each machine's cache for what it has to hold; to be called by all ranks.

    Args:
        config: the configuration.
        dataset: the data of training, opened.

    Raises:
        ConfigurationError: on all ranks: `data.cache_limit` is too small, or would delete originals.
        MachineError: on all ranks: the disk of a machine is too small.
    """
    remotes = [stream.remote for stream in dataset.streams]
    limit = config.data.cache_limit
    if not any(remotes) and limit is None:
        return
    demand = cache_demand_of_dataset(config, dataset, world())
    without = [name for name, remote in zip(dataset.stream_names, remotes, strict=True) if remote is None]
    _tell(lambda: [check_cache_limit(limit, demand, without)], ConfigurationError)
    folders = cache_folders(config)
    _tell(
        lambda: [check_cache_space(read_disk(folder), demand, limit, dataset.cache_bytes()) for folder in folders],
        MachineError,
    )


def check_streams(config: Config) -> None:
    """Check that the data exists and is what the configuration says, as far as that is known without the model.

    Raises:
        DataError: what is missing or differs, and what to do.
    """
    with_logvar = config.objective.posterior == Posterior.sample
    if config.plugins.train_dataset is None:
        check_training_streams(config.data, with_logvar=with_logvar)
    if config.validation is not None:
        check_validation_streams(config.validation, config.data, with_logvar=with_logvar)
    for _ in _encoded_streams(config):
        pass


def _encoded_streams(config: Config) -> Iterator[tuple[StreamLocation, ImageSize, EncodedManifest]]:
    """Iterate over the streams of latents for training and validation, with their image sizes and manifests.

    Raises:
        DataError: one has no manifest, or one of something else.
    """
    data = config.data
    if data.representation != Representation.latents or config.plugins.train_dataset is not None:
        return
    roots = [(data.remote, data.local, data.streams)]
    if config.validation is not None:
        streams = validation_streams(config.validation, data)
        roots.append((config.validation.remote, config.validation.local, streams))
    for remote, local, streams in roots:
        sizes = image_sizes(streams, data.resolution)
        for location, size in zip(locate_streams(remote, local, streams), sizes, strict=True):
            manifest = read_encoded_manifest(location.source, location.access)
            if manifest is None:
                raise DataError(f"{location.source} has no manifest.json beside it: encode it with scripts/encode.py")
            yield location, size, manifest


def check_identity(config: Config, model: LatentDiffusion) -> None:
    """Check that latents were encoded by the VAE, tokenizer and text encoder of the model.

    Raises:
        DataError: they were not.
    """
    streams = list(_encoded_streams(config))
    if not streams:
        return
    vae, tokenizer = module_identity(model.vae), tokenizer_identity(model.tokenizer)
    text_encoder = module_identity(model.text_encoder) if config.data.text_embeddings else None
    for location, size, manifest in streams:
        check_encoded(
            manifest,
            where=location.source,
            size=size,
            needs_logvar=config.objective.posterior == Posterior.sample,
            vae_identity=vae,
            tokenizer_identity=tokenizer,
            text_encoder_identity=text_encoder,
        )


def world() -> World:
    """The machines of this job."""
    per_node = dist.get_local_world_size()
    return World(num_nodes=max(1, dist.get_world_size() // per_node), ranks_per_node=per_node)


def cache_folders(config: Config) -> list[Path]:
    """Folders that streams are cached in, one for each file system."""
    locations = locate_streams(config.data.remote, config.data.local, config.data.streams)
    folders = [Path(location.local).expanduser() for location in locations if location.remote is not None]
    return list({read_disk(folder).device: folder for folder in folders}.values())


def _tell(find: Callable[[], Sequence[Verdict]], kind: type[UserError]) -> None:
    """Check once on each machine; rank 0 logs the warnings of all, and a problem anywhere ends all ranks."""
    is_leader = dist.get_local_rank() == 0
    verdicts = agree(lambda: list(find()) if is_leader else [])
    gathered = dist.all_gather_object((f"node {dist.get_node_rank()}", verdicts) if is_leader else None)
    if dist.get_global_rank() == 0:
        merged = merge([entry for entry in gathered if entry is not None])
        for verdict in merged:
            for text in warnings_of([verdict]):
                log.warning("%s%s", f"{verdict.where}: " if verdict.where else "", text)
    agree(lambda: raise_problems(verdicts, kind))
