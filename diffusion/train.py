"""From configuration to a trained model: model, data, algorithms and callbacks put together for Composer's Trainer."""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from composer import Callback, Evaluator, Trainer
from composer.callbacks import LRMonitor, MemoryMonitor, RuntimeEstimator, SpeedMonitor
from composer.core import DataSpec
from composer.models import ComposerModel
from composer.optim import (
    ComposerScheduler,
    ConstantWithWarmupScheduler,
    CosineAnnealingWithWarmupScheduler,
    LinearWithWarmupScheduler,
)
from composer.utils import dist, reproducibility
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils.data import DataLoader

from diffusion.algorithms.ema import LateStartEMA
from diffusion.callbacks.addresses import DataPosition, StepAddress
from diffusion.callbacks.autoencoder import SaveAutoencoder
from diffusion.callbacks.metrics_file import LossCurve, MetricsFile
from diffusion.callbacks.preemption import SaveOnPreemption
from diffusion.callbacks.run_record import RunRecord
from diffusion.callbacks.samples import SampleGrids
from diffusion.callbacks.saving import SaveCheckpoints
from diffusion.checkpoints import read_unet, resolve_checkpoint
from diffusion.config.checks import check, check_machine, num_batches, resolve_device
from diffusion.config.data import Representation
from diffusion.config.loading import to_yaml
from diffusion.config.model import Posterior
from diffusion.config.quantities import parse_time
from diffusion.config.schema import Config, Task
from diffusion.config.training import Decay, Device, Parallelism
from diffusion.datasets.batch import BatchKey
from diffusion.datasets.encoded import check_encoded, read_encoded_manifest
from diffusion.datasets.loader import train_loader, validation_dataset, validation_loader
from diffusion.datasets.locations import locate_streams
from diffusion.errors import ConfigurationError, DataError, MachineError
from diffusion.launch import PreemptedError, agree
from diffusion.models.architectures import ARCHITECTURES
from diffusion.models.autoencoder import AutoencoderTraining, initialise_logvar
from diffusion.models.build import build_model, load_unet
from diffusion.models.frozen import build_vae, with_seed
from diffusion.models.identity import module_identity, tokenizer_identity
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.tokenizers import build_tokenizer, tokenize
from diffusion.plugins import build_plugin
from diffusion.resumption import find_resumption
from diffusion.run_loggers import build_loggers
from diffusion.safe_loading import as_data_error
from diffusion.sharding import ElasticFSDP2Config, correct_gradient_average

log = logging.getLogger(__name__)

NUM_STATISTICS_PICTURES = 2048
"""Pictures of the training set over which a VAE's latent statistics are measured."""


def train(config: Config) -> Trainer:
    """Train as configured, or go on with what an earlier start of the same run has done.

    Args:
        config: resolved configuration.

    Returns:
        The Trainer, after the run.

    Raises:
        UserError: on every rank: the configuration, the data or the machine is at fault.
        PreemptedError: on every rank: a signal came, a checkpoint was saved and the loggers are closed.
    """
    num_gpus = torch.cuda.device_count()
    bf16 = num_gpus > 0 and torch.cuda.is_bf16_supported()
    check_machine(config, num_gpus=num_gpus, bf16_supported=bf16, local_world_size=dist.get_local_world_size())
    device = resolve_device(config.trainer.device, num_gpus)
    if not torch.distributed.is_initialized():
        dist.initialize_dist(device.value, timeout=config.trainer.dist_timeout)
    reproducibility.seed_all(config.seed)
    if config.trainer.deterministic:
        reproducibility.configure_deterministic_mode()
    agree(lambda: check(config, world_size=dist.get_world_size(), vae_factor=_spec(config).vae_factor))

    folder = Path(config.output_folder).expanduser()
    agree(lambda: _open_run_folder(folder, config))
    model = agree(lambda: _build_model(config))
    if isinstance(model, LatentDiffusion):
        move_frozen(model, device)
    trainer = _build_trainer(config, model, folder, device)
    if config.trainer.parallelism == Parallelism.fsdp:
        correct_gradient_average(trainer.state.model)
    if _has_ended(trainer):
        log.info(
            "run %s has reached its end (%s) before; nothing is left to do",
            config.run_name,
            trainer.state.timestamp.batch,
        )
    else:
        try:
            trainer.fit()
        except PreemptedError:
            trainer.close()
            raise
    trainer.close()
    return trainer


def _has_ended(trainer: Trainer) -> bool:
    end = trainer.state.max_duration
    return end is not None and trainer.state.timestamp.get(end.unit) >= end


def _spec(config: Config) -> Any:
    return ARCHITECTURES[config.model.architecture]


def _open_run_folder(folder: Path, config: Config) -> None:
    """Create the run folder and save the resolved configuration in it, on rank 0."""
    if dist.get_global_rank() != 0:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / "config.yaml.partial"
        partial.write_text(to_yaml(config), encoding="utf-8")
        partial.replace(folder / "config.yaml")
    except OSError as error:
        raise MachineError(f"output_folder={folder} cannot be written: {error.strerror}. Choose another one") from error


def _build_model(config: Config) -> ComposerModel:
    if config.task == Task.autoencoder:
        if config.trainer.parallelism != Parallelism.ddp:
            raise ConfigurationError("task=autoencoder trains with trainer.parallelism=ddp: set it")
        vae = with_seed(config.seed, lambda: build_vae(_spec(config), config.autoencoder.vae))
        initialise_logvar(vae, config.autoencoder.initial_logvar)
        return AutoencoderTraining(vae, config.autoencoder, config.seed)
    model = build_model(config.model, config.objective, resolution=config.data.resolution, seed=config.seed)
    if config.init_from is not None:
        checkpoint = resolve_checkpoint(config.init_from.checkpoint)
        load_unet(model, read_unet(checkpoint, config.init_from.weights), str(checkpoint))
    return model


def move_frozen(model: LatentDiffusion, device: Device) -> None:
    """Move VAE and text encoder to this rank's device: FSDP moves what it shards only."""
    place = torch.device("cuda", torch.cuda.current_device()) if device == Device.gpu else torch.device("cpu")
    for module in (model.vae, model.text_encoder):
        module.to(place)  # pyright: ignore[reportArgumentType]


# Data


def _tokenize(config: Config) -> Callable[[list[str]], Any]:
    tokenizer = build_tokenizer(config.model.architecture)
    return lambda captions: tokenize(tokenizer, captions)


def _check_identity(config: Config, model: LatentDiffusion) -> None:
    """Refuse latents of another VAE or tokenizer."""
    if config.data.representation != Representation.latents or config.plugins.train_dataset is not None:
        return
    vae, tokenizer = module_identity(model.vae), tokenizer_identity(model.tokenizer)
    roots = [(config.data.remote, config.data.local, config.data.streams)]
    if config.validation is not None:
        streams = config.validation.streams or config.data.streams
        roots.append((config.validation.remote, config.validation.local, streams))
    for remote, local, streams in roots:
        for location in locate_streams(remote, local, streams):
            manifest = read_encoded_manifest(location.source)
            if manifest is None:
                raise DataError(f"{location.source} has no manifest.json beside it: encode it with scripts/encode.py")
            check_encoded(
                manifest,
                where=location.source,
                resolution=config.data.resolution,
                needs_logvar=config.objective.posterior == Posterior.sample,
                vae_identity=vae,
                tokenizer_identity=tokenizer,
            )


def _num_samples(batch: dict[str, Tensor]) -> int:
    return batch[BatchKey.SAMPLE].shape[0]


def _data_spec(loader: Any) -> DataSpec:
    return DataSpec(loader, get_num_samples_in_batch=_num_samples)


def _build_train_data(config: Config) -> DataSpec:
    rank_batch_size = config.data.global_batch_size // dist.get_world_size()
    if config.plugins.train_dataset is not None:
        dataset = build_plugin(config.plugins.train_dataset, "plugins.train_dataset")
        sampler = dist.get_sampler(dataset, shuffle=config.data.shuffle, drop_last=True, seed=config.seed)
        loader = DataLoader(
            dataset, rank_batch_size, sampler=sampler, num_workers=config.data.num_workers, drop_last=True
        )
        return _data_spec(loader)
    loader = train_loader(
        config.data,
        seed=config.seed,
        tokenize=_tokenize(config),
        rank_batch_size=rank_batch_size,
        with_logvar=config.objective.posterior == Posterior.sample,
    )
    return _data_spec(loader)


def _build_evaluator(config: Config) -> Evaluator | None:
    if config.validation is None:
        return None
    dataset = validation_dataset(
        config.validation,
        config.data,
        tokenize=_tokenize(config),
        with_logvar=config.objective.posterior == Posterior.sample,
    )
    sampler = dist.get_sampler(dataset, shuffle=False, drop_last=False)
    loader = validation_loader(dataset, config.validation, config.data, sampler=sampler)
    return Evaluator(label="validation", dataloader=_data_spec(loader), eval_interval=config.trainer.eval_interval)


def _statistics_pictures(config: Config) -> Iterator[Tensor]:
    """This rank's share of the first pictures of the training set, each picture on one rank only."""
    from diffusion.config.data import ValidationConfig

    everything = ValidationConfig(
        remote=config.data.remote,
        local=config.data.local,
        streams=config.data.streams,
        num_samples=NUM_STATISTICS_PICTURES,
    )
    dataset = validation_dataset(everything, config.data, tokenize=_tokenize(config))
    indices = range(dist.get_global_rank(), len(dataset), dist.get_world_size())
    size = everything.device_batch_size
    for start in range(0, len(indices), size):
        samples = [torch.as_tensor(dataset[i][BatchKey.IMAGE]) for i in indices[start : start + size]]
        yield torch.stack(samples)


# Trainer


def _build_optimizer(config: Config, model: ComposerModel) -> torch.optim.AdamW:
    optimizer = config.optimizer
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    betas = (optimizer.betas[0], optimizer.betas[1])
    return torch.optim.AdamW(
        parameters, lr=optimizer.lr, betas=betas, eps=optimizer.eps, weight_decay=optimizer.weight_decay, fused=True
    )


def _build_scheduler(config: Config) -> ComposerScheduler:
    schedule = config.schedule
    if schedule.decay == Decay.constant:
        return ConstantWithWarmupScheduler(t_warmup=schedule.warmup)
    if schedule.decay == Decay.linear:
        return LinearWithWarmupScheduler(t_warmup=schedule.warmup, alpha_f=schedule.final)
    return CosineAnnealingWithWarmupScheduler(t_warmup=schedule.warmup, alpha_f=schedule.final)


def _build_callbacks(config: Config, model: ComposerModel, folder: Path, device: Device) -> list[Callback]:
    """Callbacks in the order in which they run: the average is updated before it is sampled."""
    callbacks: list[Callback] = [
        StepAddress(),
        DataPosition(),
        RunRecord({"config": to_yaml(config), "model": _model_record(model)}),
        SpeedMonitor(window_size=20),
        LRMonitor(),
        RuntimeEstimator(),
    ]
    if device == Device.gpu:
        callbacks.append(MemoryMonitor())
    ema = None
    if (settings := config.algorithms.ema) is not None:
        ema = LateStartEMA(
            start=settings.start, decay=settings.decay, interval=settings.interval, evaluate=settings.evaluate
        )
        callbacks.append(ema)
    if isinstance(model, LatentDiffusion):
        callbacks.append(SampleGrids(model, config.samples, folder / "samples", ema))
    if isinstance(model, AutoencoderTraining):
        callbacks.append(SaveAutoencoder(model, _statistics_pictures(config), folder))
    plugins = config.plugins.callbacks
    callbacks += [build_plugin(plugin, f"plugins.callbacks.{i}") for i, plugin in enumerate(plugins)]
    saver = _build_saver(config, folder / "checkpoints")
    return [*callbacks, saver, SaveOnPreemption(saver, folder)]


def _build_saver(config: Config, checkpoints: Path) -> SaveCheckpoints:
    settings = config.trainer
    every = None
    if settings.keep_every is not None:
        time = parse_time(settings.keep_every, "trainer.keep_every")
        every = time.in_batches(num_batches=num_batches(config), global_batch_size=config.data.global_batch_size)
    newest = settings.keep_checkpoints if settings.keep_checkpoints > 0 else None
    return SaveCheckpoints(checkpoints, settings.save_interval, newest=newest, every=every)


def _model_record(model: ComposerModel) -> dict[str, Any]:
    """What a reader of a checkpoint needs beside the weights."""
    if not isinstance(model, LatentDiffusion):
        return {}
    schedule = dict(model.noise_scheduler.config)
    return {
        "latent_scaling": {"mean": list(model.latent_scaling.mean), "std": list(model.latent_scaling.std)},
        "noise_schedule": {key: value for key, value in schedule.items() if not key.startswith("_")},
    }


def _build_trainer(config: Config, model: ComposerModel, folder: Path, device: Device) -> Trainer:
    if isinstance(model, LatentDiffusion):
        agree(lambda: _check_identity(config, model))
    train_data = agree(lambda: _build_train_data(config))
    evaluator = agree(lambda: _build_evaluator(config))
    loggers = agree(lambda: build_loggers(config, folder))
    callbacks = agree(lambda: _build_callbacks(config, model, folder, device))
    load_path = find_resumption(config, folder / "checkpoints")
    for metrics in [logger for logger in loggers if isinstance(logger, MetricsFile)]:
        callbacks.append(LossCurve(metrics, folder / "loss.png", config.run_name))

    settings = config.trainer
    parallelism = None
    if settings.parallelism == Parallelism.fsdp:
        fsdp = ElasticFSDP2Config(
            reshard_after_forward=settings.reshard_after_forward,
            activation_checkpointing=settings.activation_checkpointing,
            state_dict_type="sharded",
        )
        parallelism = {"fsdp": fsdp}
    algorithms = config.plugins.algorithms
    build = partial(
        Trainer,
        model=model,
        train_dataloader=train_data,
        eval_dataloader=evaluator,
        optimizers=_build_optimizer(config, model),
        schedulers=_build_scheduler(config),
        algorithms=[build_plugin(plugin, f"plugins.algorithms.{i}") for i, plugin in enumerate(algorithms)],
        callbacks=callbacks,
        loggers=loggers,
        max_duration=settings.max_duration,
        device=device.value,
        precision=settings.precision.value,
        device_train_microbatch_size=settings.device_train_microbatch_size,
        parallelism_config=parallelism,
        seed=config.seed,
        deterministic_mode=settings.deterministic,
        dist_timeout=settings.dist_timeout,
        run_name=config.run_name,
        progress_bar=settings.progress_bar,
        load_path=load_path,
        load_strict_model_weights=True,
    )
    try:
        return build()
    except CheckpointException as error:
        raise as_data_error(error, str(load_path)) from error
