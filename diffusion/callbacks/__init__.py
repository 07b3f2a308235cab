"""Composer callbacks and loggers of a run: which, and in which order."""

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from composer import Algorithm, Callback
from composer.callbacks import LRMonitor, MemoryMonitor, RuntimeEstimator
from composer.loggers import LoggerDestination
from composer.models import ComposerModel
from composer.utils import is_notebook

from diffusion.callbacks.autoencoder import AwaitDiscriminator, SaveAutoencoder, statistics_images
from diffusion.callbacks.batch import CountChunks, StepAddress
from diffusion.callbacks.clipping import ClipGradients
from diffusion.callbacks.collectives import AccumulateLocally, CollectiveTimeout
from diffusion.callbacks.compilation import ParallelCompilation
from diffusion.callbacks.data_position import DataPosition
from diffusion.callbacks.guards import BadImageGuard, LossGuard
from diffusion.callbacks.loggers import ProgressLines, PrometheusLogger, TensorBoardLogger, WandB
from diffusion.callbacks.metrics_file import MetricsFile, StartsFile
from diffusion.callbacks.monitoring import CostMeter, Heartbeat, Utilisation
from diffusion.callbacks.preemption import SaveOnPreemption
from diffusion.callbacks.samples import SampleGrids
from diffusion.callbacks.saving import RunRecord, SaveCheckpoints
from diffusion.callbacks.stream_losses import StreamLosses
from diffusion.checkpointing.resume import CheckpointStorage
from diffusion.composer_models import AutoencoderTraining, LatentDiffusionTraining
from diffusion.config.data import Mixing, Representation
from diffusion.config.loading import to_public_yaml
from diffusion.config.model import Compilation
from diffusion.config.schema import Config
from diffusion.config.training import Device
from diffusion.datasets.dataset import TextImageDataset, TrainingDataset
from diffusion.distributed import num_cores
from diffusion.ema.callbacks import LateStartEMA, build_averages
from diffusion.errors import ConfigurationError
from diffusion.formats.run_folder import METRICS, SAMPLES, TENSORBOARD
from diffusion.models import fast
from diffusion.operations.heartbeats import heartbeat_folder
from diffusion.operations.utilisation import LoaderSettings
from diffusion.plugins import build_plugins
from diffusion.trainer import HostSpeedMonitor


def build_loggers(config: Config, folder: Path) -> list[LoggerDestination]:
    """Build the logger destinations of a run folder, in the order in which they run."""
    settings, endpoint = config.loggers, config.loggers.prometheus
    metrics = MetricsFile(folder / METRICS) if settings.file else None
    loggers = [
        metrics,
        # After the metrics file, which knows what earlier starts have logged.
        StartsFile(folder, metrics),
        TensorBoardLogger(folder / TENSORBOARD) if settings.tensorboard else None,
        WandB(folder, config) if settings.wandb is not None else None,
        None if endpoint is None else PrometheusLogger(endpoint, folder, heartbeat_folder(config, folder)),
        ProgressLines() if config.trainer.progress_bar and not shows_progress_bar(config) else None,
        *build_plugins(config.plugins.loggers, "plugins.loggers", LoggerDestination),
    ]
    return [logger for logger in loggers if logger is not None]


def shows_progress_bar(config: Config) -> bool:
    """Return whether Composer shows its progress bar, which in a log would be a line for each change of each number."""
    return config.trainer.progress_bar and (is_notebook() or sys.stderr.isatty())


def build_callbacks(
    config: Config,
    model: ComposerModel,
    dataset: Any,
    storage: CheckpointStorage,
    device: Device,
    heartbeat: Heartbeat,
    identities: Mapping[str, str],
) -> list[Callback]:
    """Build the callbacks of this rank, in the order in which they run; the heartbeat has started.

    Checkpoints record the identities of the frozen parts.

    Raises:
        ConfigurationError: a plug-in cannot be imported or built.
    """
    folder, operations, settings, data = storage.run, config.operations, config.trainer, config.data
    ema, averages = build_averages(config.algorithms.ema, folder, storage.remote)
    streams = dataset.streams if isinstance(dataset, TrainingDataset) else []
    loader = LoaderSettings(
        num_workers=data.num_workers,
        num_cores=num_cores(),
        decodes=bool(streams) and data.representation == Representation.images,
        has_cache_limit=data.cache_limit is not None,
    )
    is_remote = any(stream.remote is not None for stream in streams)
    interval = config.loggers.utilisation_interval
    utilisation = Utilisation(interval, loader, dataset.meter if is_remote else None)
    meter = CostMeter(folder, operations, config.plan.price_per_gpu_hour, utilisation)
    guard = LossGuard(operations.guard, folder) if operations.guard is not None else None
    keep_every = settings.keep_every
    saver = SaveCheckpoints(
        storage.folder,
        config.interval_of(settings.save_interval, "trainer.save_interval"),
        newest=settings.keep_checkpoints if settings.keep_checkpoints > 0 else None,
        every=None if keep_every is None else config.steps_of(keep_every, "trainer.keep_every"),
        remote=storage.remote,
        background=settings.async_checkpoints,
        guard=guard,
    )
    max_norm = config.optimizer.max_grad_norm
    bad_images = BadImageGuard(folder, interval, dataset) if isinstance(dataset, TextImageDataset) else None
    callbacks = [
        # Clocks: what the callbacks below do in an event belongs to the phase that begins with it.
        heartbeat,
        utilisation,
        meter,
        # A wrong loss ends the run before anything else is done in its step. A skipped update is dropped before it is
        # clipped.
        guard,
        ClipGradients(max_norm) if max_norm is not None else None,
        # The model draws its random numbers by the addresses in the batch.
        StepAddress(in_turns=config.plugins.train_dataset is not None),
        DataPosition(),
        RunRecord(to_public_yaml(config), identities),
        HostSpeedMonitor(window_size=20),
        LRMonitor(),
        RuntimeEstimator(),
        MemoryMonitor() if device == Device.gpu else None,
        # The average of the weights is updated before it is sampled.
        *averages,
        *_build_task_callbacks(config, model, folder, device, ema),
        bad_images,
        *build_plugins(config.plugins.callbacks, "plugins.callbacks", Callback),
        # A checkpoint holds what the callbacks above have done in its step. Then a signal may end the run.
        saver,
        SaveOnPreemption(saver, folder, meter),
    ]
    return [callback for callback in callbacks if callback is not None]


def check_states(objects: Iterable[Callback | Algorithm]) -> None:
    """Raise a ConfigurationError if two objects share one state in checkpoints, which name it by the class."""
    classes: defaultdict[str, list[type[Callback | Algorithm]]] = defaultdict(list)
    for one in objects:
        classes[type(one).__qualname__].append(type(one))
    for name, kinds in classes.items():
        if len(kinds) > 1 and any(kind.state_dict not in (Callback.state_dict, Algorithm.state_dict) for kind in kinds):
            raise ConfigurationError(
                f"plugins: a checkpoint holds one state by the name {name}, but the run has {len(kinds)} classes or "
                f"objects of it, of {' and '.join(kind.__module__ for kind in kinds)}: give yours other names"
            )


def _build_task_callbacks(
    config: Config, model: ComposerModel, folder: Path, device: Device, ema: LateStartEMA | None
) -> list[Callback]:
    """Build the callbacks of a diffusion model or of a VAE; a model of the user's own has none."""
    usual = CollectiveTimeout(config.trainer.dist_timeout, None)
    if isinstance(model, AutoencoderTraining):
        return [usual, AwaitDiscriminator(model), SaveAutoencoder(model, statistics_images(config), folder, ema)]
    if not isinstance(model, LatentDiffusionTraining):
        return [usual]
    callbacks: list[Callback] = []
    settings, streams = config.trainer, config.data.streams
    compilation = fast.resolve_compilation(config.performance.compilation, device)
    if compilation is Compilation.none:
        callbacks.append(usual)
    else:
        then = None if config.data.mixing is Mixing.groups else settings.dist_timeout
        callbacks.append(CollectiveTimeout(settings.compile_timeout, then))
    if config.performance.parallel_compilation and compilation is Compilation.blocks:
        callbacks.append(ParallelCompilation(config, device))
    if config.accumulates_locally:
        callbacks.append(AccumulateLocally())
    if model.num_chunks > 1:
        callbacks.append(CountChunks(model.conditioner))
    if config.plugins.train_dataset is None and len(streams) > 1:
        callbacks.append(StreamLosses(model, [one.name for one in streams], config.loggers.stream_loss_interval))
    samples = replace(config.samples, interval=config.interval_of(config.samples.interval, "samples.interval"))
    return [*callbacks, SampleGrids(model, samples, folder / SAMPLES, ema, config.run_name)]
