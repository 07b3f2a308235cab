"""Everything that can be checked before a run: machines, data, and the ranks together."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import time
from typing import Any, TypeVar

import torch
from composer.utils import dist

from diffusion.config.checks import check, check_machine, resolve_device
from diffusion.config.data import ValidationConfig
from diffusion.config.loading import to_yaml
from diffusion.config.schema import Config
from diffusion.config.training import Device
from diffusion.datasets.streams import StreamLocation, locate_streams
from diffusion.distributed import agree
from diffusion.errors import MachineError, UserError
from diffusion.models.architectures import ARCHITECTURES
from diffusion.operations.checks.cache import CacheDemand, check_cache_limit, check_cache_space
from diffusion.operations.checks.demand import find_demand
from diffusion.operations.checks.device import computes_bf16
from diffusion.operations.checks.kernel_log import check_xids, parse_xids, read_kernel_log
from diffusion.operations.checks.machine import (
    check_bytecode,
    check_cache_speed,
    check_clock,
    check_leftovers,
    check_machine_reading,
    check_output_space,
    check_output_speed,
)
from diffusion.operations.checks.node_measures import introduce, measure_nodes
from diffusion.operations.checks.nodes import check_nodes
from diffusion.operations.checks.opening import cache_demand_of_readings, read_batches, sections
from diffusion.operations.checks.ranks import check_ranks, check_reduction, measure_reduction, read_rank
from diffusion.operations.checks.readings import (
    checkpoint_folder,
    checkpoint_key,
    count_uncompiled,
    find_leftovers,
    measure_write_speed,
    read_disk,
    read_machine,
)
from diffusion.operations.checks.startup import cache_folders, world
from diffusion.operations.checks.streams import StreamReading, check_stream, newest_file, read_stream
from diffusion.operations.checks.verdicts import Level, Verdict, merge, ok, problem

PATIENCE_SECONDS = 120.0
"""How long ranks wait for each other."""

JOINING_SECONDS = 60.0
"""What ranks have at least to find each other: some still import while others are there, however little patience."""

DEEP_SECONDS = 86400.0
"""How long ranks wait while one hashes the data of its machine."""

T = TypeVar("T")


def diagnose(config: Config, patience: float = PATIENCE_SECONDS, *, deep: bool = False) -> list[Verdict]:
    """Check a run; to be called by all ranks of the job that is to train, or by one process.

    Args:
        config: the configuration.
        patience: seconds that ranks wait for each other.
        deep: hash all shards that this machine can read in a folder.

    Returns:
        What was found, of all machines; the same on all ranks.

    Raises:
        ConfigurationError: the configuration is impossible.
        NoAnswerError: some ranks do not answer.
    """
    factor = ARCHITECTURES[config.model.architecture].vae_factor
    check(config, world_size=dist.get_world_size(), vae_factor=factor)
    device, found = _find_device(config)
    if dist.get_world_size() > 1 and not dist.is_initialized():
        dist.initialize_dist(device.value, timeout=DEEP_SECONDS if deep else max(2 * patience, JOINING_SECONDS))
        introduce()
    verdicts: list[Verdict] = []
    if dist.get_world_size() > 1:  # First, since this names ranks that do not answer.
        place, folder = _place(device), checkpoint_folder(config)
        verdicts += check_nodes(measure_nodes(place, torch.cuda.device_count(), folder, patience))
    verdicts += _of_each_machine(lambda: [*found, *_check_this_machine(config, device)])
    readings: dict[str, list[StreamReading]] = {}
    if config.plugins.train_dataset is None:
        verdicts += _of_each_machine(lambda: _check_streams(config, readings, deep=deep))
    if dist.get_world_size() > 1:
        verdicts += _check_together(config, device, readings)
    if config.plugins.train_dataset is None and not any(verdict.level is Level.problem for verdict in verdicts):
        verdicts += _check_batches(config)
    return verdicts


def _find_device(config: Config) -> tuple[Device, list[Verdict]]:
    """What it is to train on, and whether the GPUs suffice."""
    num_gpus = torch.cuda.device_count()
    device = resolve_device(config.trainer.device, num_gpus)
    what = f"{device.value}, {num_gpus} GPUs are visible, {config.trainer.precision.value}"
    try:
        ranks = dist.get_local_world_size()
        check_machine(config, num_gpus=num_gpus, bf16_supported=computes_bf16(), local_world_size=ranks)
    except MachineError as error:
        return Device.gpu if num_gpus else Device.cpu, [problem("device", str(error))]
    return device, [ok("device", what)]


def _of_each_machine(find: Callable[[], list[Verdict]]) -> list[Verdict]:
    """Check on the first rank of each machine and put the verdicts together; to be called by all ranks."""
    is_leader = dist.get_local_rank() == 0
    found = agree(lambda: find() if is_leader else [])
    gathered = dist.all_gather_object((f"node {dist.get_node_rank()}", found) if is_leader else None)
    return merge([entry for entry in gathered if entry is not None])


def _check_this_machine(config: Config, device: Device) -> list[Verdict]:
    ranks = dist.get_local_world_size()
    demand = find_demand(config, world_size=dist.get_world_size(), ranks_per_node=ranks, device=device)
    reading = read_machine()
    folder = checkpoint_folder(config)
    disk = read_disk(folder, with_content=True)
    verdicts = [*check_machine_reading(reading, demand), check_output_space(disk, demand, checkpoint_key(config))]
    if disk.is_writable:
        verdicts.append(_speed("output speed", folder, lambda speed: check_output_speed(str(folder), speed, demand)))
    if device is Device.gpu:
        log = read_kernel_log()
        verdicts.append(check_xids(parse_xids(log) if log is not None else None))
    bytecode = check_bytecode(*count_uncompiled(), is_forbidden=sys.dont_write_bytecode)
    return [*verdicts, check_leftovers(find_leftovers(), reading.shm_bytes), bytecode]


def _speed(name: str, folder: Path, judge: Callable[[float], Verdict]) -> Verdict:
    try:
        return judge(measure_write_speed(folder))
    except OSError as error:
        return problem(name, f"{folder} cannot be written to: {error.strerror}", "free space, or choose another folder")


def _check_streams(config: Config, readings: dict[str, list[StreamReading]], *, deep: bool = False) -> list[Verdict]:
    """Check the streams as far as that needs no other rank; what was read is put into `readings`."""
    verdicts = []
    for name, section in sections(config):
        readings[name] = []
        timeout = config.data.download_timeout
        for location in _locations(section, name.strip() or "data"):
            found = _attempt(f"{name}stream {location.name}", partial(read_stream, location, timeout, deep=deep))
            if isinstance(found, Verdict):
                verdicts.append(found)
                continue
            readings[name].append(found)
            of_stream = check_stream(found, config.data.representation)
            verdicts += [replace(verdict, check=name + verdict.check) for verdict in of_stream]
    verdicts.append(check_clock(time(), newest_file([one for part in readings.values() for one in part])))
    if len(readings[""]) == len(config.data.streams):
        verdicts += _check_caches(config, readings[""])
    return verdicts


def _locations(section: ValidationConfig, name: str) -> list[StreamLocation]:
    return locate_streams(section.remote, section.local, section.streams or [], name)


def _attempt(name: str, find: Callable[[], T]) -> T | Verdict:
    """What a step gives, or the problem that it met."""
    try:
        return find()
    except UserError as error:
        return problem(name, str(error))


def _check_caches(config: Config, readings: Sequence[StreamReading]) -> list[Verdict]:
    """Check limit, space and speed of the cache of the training data."""
    limit, locations = config.data.cache_limit, _locations(sections(config)[0][1], "data")
    without = [location.name for location in locations if location.remote is None]
    demand = _attempt("epoch", lambda: cache_demand_of_readings(config, readings, world()))
    if isinstance(demand, Verdict):
        return [demand]
    verdicts = [check_cache_limit(limit, demand, without)]
    held = _cached_bytes(locations)
    for folder in cache_folders(config):
        disk = read_disk(folder)
        verdicts.append(check_cache_space(disk, demand, limit, held))
        if disk.is_writable:
            judge = partial(_cache_speed, config, folder, demand)
            verdicts.append(_speed("cache speed", folder, judge))
    return verdicts


def _cache_speed(config: Config, folder: Path, demand: CacheDemand, speed: float) -> Verdict:
    throughput = config.plan.images_per_second
    return check_cache_speed(str(folder), speed, throughput * demand.bytes_per_image if throughput else None)


def _cached_bytes(locations: Sequence[StreamLocation]) -> int:
    """Bytes that the caches hold already."""
    return sum(
        read_disk(Path(location.local), with_content=True).held_bytes
        for location in locations
        if location.remote is not None
    )


def _check_together(config: Config, device: Device, readings: dict[str, list[StreamReading]]) -> list[Verdict]:
    """Check that the ranks are alike and can talk to each other."""
    if dist.get_local_rank() != 0 and config.plugins.train_dataset is None:
        _check_streams(config, readings)
    data = {section + one.name: one.sha256 for section, part in readings.items() for one in part}
    everyone: list[Any] = dist.all_gather_object(read_rank(data, to_yaml(config)))
    reductions = dist.all_gather_object(check_reduction(measure_reduction(_place(device))))
    worst = next((verdict for verdict in reductions if verdict.level is Level.problem), reductions[0])
    return [*check_ranks(everyone), worst]


def _place(device: Device) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device is Device.gpu else torch.device("cpu")


def _check_batches(config: Config) -> list[Verdict]:
    """Read a batch of each stream on each machine."""
    is_leader = dist.get_local_rank() == 0
    verdicts: list[Verdict] = []
    for name, section in sections(config):
        found = _attempt(f"{name}data", lambda part=section: agree(lambda: read_batches(config, part, reads=is_leader)))
        verdicts += [found] if isinstance(found, Verdict) else dist.all_gather_object(found)[0]
    return verdicts
