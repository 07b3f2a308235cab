"""Which callbacks a run has, in which order."""

from typing import Any

from composer import Callback
from composer.callbacks import LRMonitor, MemoryMonitor, RuntimeEstimator
from composer.models import ComposerModel

from diffusion.callbacks.accumulation import AccumulateLocally
from diffusion.callbacks.addresses import DataPosition, StepAddress
from diffusion.callbacks.autoencoder import SaveAutoencoder
from diffusion.callbacks.bad_images import ReportBadImages
from diffusion.callbacks.clipping import ClipGradients
from diffusion.callbacks.collective_timeout import CollectiveTimeout
from diffusion.callbacks.cost_meter import CostMeter
from diffusion.callbacks.data_waiting import DataWaiting
from diffusion.callbacks.loss_guard import LossGuard
from diffusion.callbacks.preemption import SaveOnPreemption
from diffusion.callbacks.run_record import RunRecord
from diffusion.callbacks.samples import SampleGrids
from diffusion.callbacks.saving import SaveCheckpoints
from diffusion.callbacks.stream_losses import StreamLosses
from diffusion.callbacks.utilisation import Utilisation
from diffusion.checkpointing.resume import CheckpointStorage
from diffusion.config.checks import num_batches
from diffusion.config.data import Representation
from diffusion.config.performance import Compilation
from diffusion.config.quantities import parse_time
from diffusion.config.schema import Config
from diffusion.config.secrets import to_public_yaml
from diffusion.config.training import Device, Parallelism
from diffusion.datasets.streams import TextImageDataset
from diffusion.ema.callbacks import build_averages
from diffusion.models import fast
from diffusion.models.autoencoder import AutoencoderTraining
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.operations.checks.machine import num_cores
from diffusion.operations.utilisation import LoaderSettings
from diffusion.plugins import build_plugin
from diffusion.train_data import statistics_images
from diffusion.trainer import HostSpeedMonitor


def build_callbacks(config: Config, model: ComposerModel, places: CheckpointStorage, device: Device) -> list[Callback]:
    """Callbacks in the order in which they run: the average is updated before it is sampled."""
    folder = places.run
    callbacks: list[Callback] = [
        StepAddress(in_turns=config.plugins.train_dataset is not None),
        DataPosition(),
        RunRecord({"config": to_public_yaml(config), "model": _model_record(model)}),
        HostSpeedMonitor(window_size=20),
        LRMonitor(),
        RuntimeEstimator(),
    ]
    if config.optimizer.max_grad_norm is not None:
        callbacks.insert(0, ClipGradients(config.optimizer.max_grad_norm))
    if config.operations.guard is not None:
        callbacks.insert(0, LossGuard(config.operations.guard, folder))
    if device == Device.gpu:
        callbacks.append(MemoryMonitor())
    store = places.remote.store if places.remote is not None else None
    ema, averages = build_averages(config.algorithms.ema, folder, store)
    callbacks += averages
    if isinstance(model, LatentDiffusion):
        if fast.resolve_compilation(config.performance.compilation, device) is not Compilation.none:
            callbacks.append(CollectiveTimeout(config.trainer.init_timeout, config.trainer.dist_timeout))
        if _accumulates_locally(config):
            callbacks.append(AccumulateLocally())
        if config.plugins.train_dataset is None and len(config.data.streams) > 1:
            names = [stream.name for stream in config.data.streams]
            callbacks.append(StreamLosses(model, names, config.loggers.stream_loss_interval))
        callbacks.append(SampleGrids(model, config.samples, folder / "samples", ema))
    if isinstance(model, AutoencoderTraining):
        callbacks.append(SaveAutoencoder(model, statistics_images(config), folder, ema))
    callbacks.append(ReportBadImages(folder, config.loggers.utilisation_interval))
    plugins = config.plugins.callbacks
    callbacks += [build_plugin(plugin, f"plugins.callbacks.{i}", Callback) for i, plugin in enumerate(plugins)]
    saver = _build_saver(config, places)
    meter = CostMeter(folder, config.operations, config.plan.price_per_gpu_hour)
    return [meter, *callbacks, saver, SaveOnPreemption(saver, folder, meter)]


def _accumulates_locally(config: Config) -> bool:
    trainer = config.trainer
    is_fsdp = trainer.parallelism == Parallelism.fsdp
    return is_fsdp and not trainer.reshard_after_forward and config.performance.accumulate_locally


def build_meters(config: Config, dataset: Any) -> list[Callback]:
    """Callbacks that measure how busy the machines are, and how long they wait for data."""
    data = config.data
    is_ours = isinstance(dataset, TextImageDataset)
    utilisation = Utilisation(
        config.loggers.utilisation_interval,
        num_workers=data.num_workers,
        tiers=dataset.meter if is_ours and any(stream.remote is not None for stream in dataset.streams) else None,
    )
    settings = LoaderSettings(
        num_workers=data.num_workers,
        num_cores=num_cores(),
        decodes=is_ours and data.representation == Representation.images,
        has_cache_limit=data.cache_limit is not None,
    )
    return [utilisation, DataWaiting(utilisation, settings)]


def _build_saver(config: Config, places: CheckpointStorage) -> SaveCheckpoints:
    settings = config.trainer
    every = None
    if settings.keep_every is not None:
        time = parse_time(settings.keep_every, "trainer.keep_every")
        every = time.in_batches(num_batches=num_batches(config), global_batch_size=config.data.global_batch_size)
    newest = settings.keep_checkpoints if settings.keep_checkpoints > 0 else None
    return SaveCheckpoints(
        places.folder,
        settings.save_interval,
        newest=newest,
        every=every,
        remote=places.remote,
        background=settings.async_checkpoints,
    )


def _model_record(model: ComposerModel) -> dict[str, Any]:
    """What a reader of a checkpoint needs beside the weights."""
    if not isinstance(model, LatentDiffusion):
        return {}
    schedule = dict(model.noise_scheduler.config)
    return {
        "latent_scaling": {"mean": list(model.latent_scaling.mean), "std": list(model.latent_scaling.std)},
        "noise_schedule": {key: value for key, value in schedule.items() if not key.startswith("_")},
    }
