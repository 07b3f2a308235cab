"""The registry of all checks, and who runs which: the doctor all of them, training a few at its start."""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch
from composer.utils import dist

from diffusion.config.checks import check as check_config
from diffusion.config.checks import check_machine, resolve_device
from diffusion.config.schema import Config
from diffusion.config.training import Device
from diffusion.datasets.dataset import TrainingDataset
from diffusion.distributed import agree
from diffusion.errors import ConfigurationError, MachineError, UserError
from diffusion.models.architectures import ARCHITECTURES
from diffusion.operations.checks import data, gpu, machine, ranks
from diffusion.operations.checks.check import Job, Stage, run_checks
from diffusion.operations.checks.device import computes_bf16
from diffusion.operations.checks.verdicts import Level, Verdict, merge, ok, problem, raise_problems

MACHINE_CHECKS = [*machine.CHECKS, *gpu.CHECKS]
"""Checks of a machine, run by its first rank."""

DATA_CHECKS = [*data.STREAM_CHECKS, *data.CACHE_CHECKS]
"""Checks of the data as a machine sees it, run by its first rank."""

CHECKS = [*ranks.NODE_CHECKS, *MACHINE_CHECKS, *DATA_CHECKS, *ranks.RANK_CHECKS]
"""All checks; those of `ranks` are run by all ranks together."""

JOINING_SECONDS = 60.0
"""Minimum time for ranks to find each other: some still import when others are there."""

DEEP_SECONDS = 86400.0
"""Time-out of collectives while one rank hashes the data of its machine."""

log = logging.getLogger(__name__)


def diagnose(config: Config, timeout: float = 120.0, *, deep: bool = False) -> list[Verdict]:
    """Run all checks; called by all ranks of the job, or by one process.

    Args:
        config: configuration of the run.
        timeout: seconds for which ranks wait for each other.
        deep: hash all shards that this machine can read in a folder.

    Returns:
        Verdicts on all machines; the same on all ranks.

    Raises:
        ConfigurationError: the configuration is impossible.
        NoAnswerError: some ranks do not answer.
    """
    vae_factor = ARCHITECTURES[config.model.architecture].vae_factor
    check_config(config, world_size=dist.get_world_size(), vae_factor=vae_factor)
    device, device_verdict = _find_device(config)
    has_ranks, has_streams = dist.get_world_size() > 1, config.plugins.train_dataset is None
    if has_ranks and not dist.is_initialized():
        dist.initialize_dist(device.value, timeout=DEEP_SECONDS if deep else max(2 * timeout, JOINING_SECONDS))
        ranks.announce_host()
    job = _job(config, device, deep=deep, timeout=timeout)
    verdicts = []
    if has_ranks:  # First, since this names ranks that do not answer.
        verdicts += run_checks(ranks.NODE_CHECKS, job, Stage.doctor)
    checks = MACHINE_CHECKS + (DATA_CHECKS if has_streams else [])
    verdicts += _on_each_machine(lambda: [device_verdict, *run_checks(checks, job, Stage.doctor)])
    if has_ranks:
        verdicts += run_checks(ranks.RANK_CHECKS, job, Stage.doctor)
    if has_streams and not any(verdict.level is Level.problem for verdict in verdicts):
        verdicts += _read_batches(config)
    return verdicts


def check_machines(config: Config, device: Device) -> None:
    """Check each machine at the start of training; called by all ranks.

    Args:
        config: configuration of the run.
        device: device of training.

    Raises:
        MachineError: on all ranks, if a machine lacks something.
    """
    job = _job(config, device)
    _log_and_raise(_on_each_machine(lambda: run_checks(MACHINE_CHECKS, job, Stage.start)), MachineError)


def check_caches(config: Config, dataset: TrainingDataset) -> None:
    """Check each machine's cache at the start of training; called by all ranks.

    Args:
        config: configuration of the run.
        dataset: open data set of training.

    Raises:
        ConfigurationError: on all ranks, if `data.cache_limit` is too small, or would delete originals.
        MachineError: on all ranks, if the disk of a machine is too small.
    """
    if config.data.cache_limit is None and not any(stream.remote for stream in dataset.streams):
        return

    def check() -> list[Verdict]:
        job = _job(config, Device.cpu)
        job.results[data.probe_cache] = data.probe_cache_of(dataset, job)
        return run_checks(data.CACHE_CHECKS, job, Stage.start)

    verdicts = _on_each_machine(check)
    _log_and_raise([verdict for verdict in verdicts if verdict.check == "cache limit"], ConfigurationError)
    _log_and_raise([verdict for verdict in verdicts if verdict.check != "cache limit"], MachineError)


def _job(config: Config, device: Device, *, deep: bool = False, timeout: float = 120.0) -> Job:
    return Job(
        config=config,
        device=device,
        world_size=dist.get_world_size(),
        ranks_per_node=dist.get_local_world_size(),
        is_deep=deep and dist.get_local_rank() == 0,
        timeout=timeout,
    )


def _find_device(config: Config) -> tuple[Device, Verdict]:
    """Return the device of training and whether the GPUs suffice."""
    num_gpus = torch.cuda.device_count()
    device = resolve_device(config.trainer.device, num_gpus)
    what = f"{device.value}, {num_gpus} GPUs are visible, {config.trainer.precision.value}"
    try:
        ranks_here = dist.get_local_world_size()
        check_machine(config, num_gpus=num_gpus, bf16_supported=computes_bf16(), local_world_size=ranks_here)
    except MachineError as error:
        return Device.gpu if num_gpus else Device.cpu, problem(str(error), check="device")
    return device, ok(what, check="device")


def _on_each_machine(find: Callable[[], Sequence[Verdict]]) -> list[Verdict]:
    """Run checks on the first rank of each machine and merge the verdicts; called by all ranks."""
    is_first = dist.get_local_rank() == 0
    found = agree(lambda: list(find()) if is_first else [])
    gathered = dist.all_gather_object((f"node {dist.get_node_rank()}", found) if is_first else None)
    return merge([entry for entry in gathered if entry is not None])


def _log_and_raise(verdicts: Sequence[Verdict], kind: type[UserError]) -> None:
    """Log the warnings on rank 0 and raise the problems on all ranks."""
    if dist.get_global_rank() == 0:
        for verdict in verdicts:
            if verdict.level is Level.warning:
                log.warning("%s", verdict.line)
    agree(lambda: raise_problems(verdicts, kind))


def _read_batches(config: Config) -> list[Verdict]:
    """Read a batch of each stream on each machine."""
    is_first = dist.get_local_rank() == 0
    verdicts: list[Verdict] = []
    for prefix, section in data.data_sections(config):
        try:
            found = agree(partial(data.read_batches, config, prefix, section, reads=is_first))
        except UserError as error:
            verdicts.append(problem(str(error), check=f"{prefix}data"))
        else:
            verdicts += dist.all_gather_object(found)[0]
    return verdicts
