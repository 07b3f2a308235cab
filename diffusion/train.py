"""From configuration to a trained model: model, data, algorithms and callbacks put together for Composer's Trainer."""

import logging
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from composer import Algorithm, Trainer
from composer.models import ComposerModel
from composer.optim import (
    ComposerScheduler,
    ConstantWithWarmupScheduler,
    CosineAnnealingWithWarmupScheduler,
    LinearWithWarmupScheduler,
)
from composer.utils import dist, reproducibility
from torch.distributed.checkpoint.api import CheckpointException

from diffusion.callbacks.heartbeat import Heartbeat
from diffusion.callbacks.metrics_file import LossCurve, MetricsFile
from diffusion.checkpointing.find import check_checkpoint, resolve_checkpoint
from diffusion.checkpointing.read import as_data_error
from diffusion.checkpointing.resume import (
    CheckpointStorage,
    checkpoint_storage,
    find_resumption,
    finish,
    has_ended,
    is_finished,
    mark_finished,
    remove_downloads,
)
from diffusion.checkpointing.roll_back import roll_back
from diffusion.config.checks import check, check_machine, num_batches, resolve_device
from diffusion.config.data import microbatch_size
from diffusion.config.quantities import parse_time
from diffusion.config.schema import Config, Task
from diffusion.config.secrets import to_public_yaml
from diffusion.config.training import Decay, Device, Parallelism, Precision
from diffusion.datasets.streams import TextImageDataset
from diffusion.distributed import agree
from diffusion.errors import ConfigurationError, MachineError, error_context
from diffusion.files import write_atomically
from diffusion.launch import PreemptedError
from diffusion.loading import open_initial
from diffusion.models import fast
from diffusion.models.architectures import ARCHITECTURES
from diffusion.models.autoencoder import AutoencoderTraining, initialise_logvar
from diffusion.models.build import build_model, load_unet
from diffusion.models.frozen import build_vae, with_seed
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.layout import is_pipeline
from diffusion.models.lora import add_lora
from diffusion.operations.checks.device import computes_bf16
from diffusion.operations.checks.registry import check_caches, check_machines
from diffusion.operations.costs import BudgetSpentError
from diffusion.operations.heartbeats import heartbeat_folder
from diffusion.operations.lease import leased
from diffusion.plugins import build_plugin, check_plugins
from diffusion.run_loggers import build_loggers
from diffusion.sharding import correct_gradient_average, fsdp_config
from diffusion.train_callbacks import build_callbacks, build_meters
from diffusion.train_data import build_evaluator, build_train_data, check_identity, check_streams
from diffusion.trainer import HostTrainer

log = logging.getLogger(__name__)

AUTOCAST_DTYPES = {Precision.amp_bf16: torch.bfloat16, Precision.amp_fp16: torch.float16}

RUN_CONFIG = "config.yaml"
"""In the run folder: the resolved configuration of the start that trained last."""


def train(config: Config, build: Callable[[Config, Device], ComposerModel] | None = None) -> Trainer:
    """Train as configured, or go on with what an earlier start of the same run has done.

    Args:
        config: resolved configuration.
        build: builds the model in place of `build_training_model`.

    Returns:
        The Trainer, after the run.

    Raises:
        UserError: on every rank: the configuration, the data or the machine is at fault.
        PreemptedError: on every rank: a signal came, a checkpoint was saved and the loggers are closed.
    """
    num_gpus = torch.cuda.device_count()
    ranks = dist.get_local_world_size()
    check_machine(config, num_gpus=num_gpus, bf16_supported=computes_bf16(), local_world_size=ranks)
    device = resolve_device(config.trainer.device, num_gpus)
    if not torch.distributed.is_initialized():
        dist.initialize_dist(device.value, timeout=config.trainer.dist_timeout)
    reproducibility.seed_all(config.seed)
    if config.trainer.deterministic:
        reproducibility.configure_deterministic_mode()
    agree(lambda: check(config, world_size=dist.get_world_size(), vae_factor=_spec(config).vae_factor))
    agree(lambda: check_plugins(config.plugins))

    folder = Path(config.output_folder).expanduser()
    agree(lambda: _open_run_folder(folder, config))
    with leased(folder) as lease, Heartbeat(heartbeat_folder(config, folder), lease) as heartbeat:
        return _train(config, folder, device, heartbeat, build)


def _train(
    config: Config,
    folder: Path,
    device: Device,
    heartbeat: Heartbeat,
    build: Callable[[Config, Device], ComposerModel] | None,
) -> Trainer:
    """Train in a run folder that is open."""
    check_machines(config, device)
    agree(lambda: check_streams(config))
    places = agree(lambda: checkpoint_storage(config, folder))
    roll_back(places, keeps_all=config.trainer.keep_checkpoints == -1)
    load_path = find_resumption(config, places)
    if load_path is None:
        agree(lambda: _find_initial(config), takes_long=True)
    build = build or partial(build_training_model, is_new=load_path is None)
    model = agree(lambda: build(config, device), takes_long=True)
    torch.backends.cudnn.benchmark = config.performance.cudnn_benchmark and not config.trainer.deterministic
    if isinstance(model, LatentDiffusion):
        agree(lambda: check_identity(config, model))
        move_frozen(model, device)
        if device == Device.gpu and config.trainer.precision != Precision.fp32:
            model.conditioner.lower_precision(AUTOCAST_DTYPES[config.trainer.precision])
    trainer = _build_trainer(config, model, places, load_path, device, heartbeat)
    if config.trainer.parallelism == Parallelism.fsdp:
        correct_gradient_average(trainer.state.model)
    step = trainer.state.timestamp.batch.value
    if has_ended(trainer) and is_finished(folder, step):
        log.info("run %s has reached its end (%d) before; nothing is left to do", config.run_name, step)
    else:
        agree(lambda: _record_config(folder, config))
        try:
            if has_ended(trainer):
                finish(trainer)
            else:
                trainer.fit()
        except (PreemptedError, BudgetSpentError):
            trainer.close()
            raise
        mark_finished(folder, trainer.state.timestamp.batch.value)
    trainer.close()
    return trainer


def _spec(config: Config) -> Any:
    return ARCHITECTURES[config.model.architecture]


def _open_run_folder(folder: Path, config: Config) -> None:
    """Create the run folder and see that it can be written, on rank 0.

    What an earlier start has recorded in it stays: this one may still refuse, or find nothing left to do.
    """
    if dist.get_global_rank() != 0:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _not_writable(folder, error) from error
    if not (folder / RUN_CONFIG).exists():
        _record_config(folder, config)


def _record_config(folder: Path, config: Config) -> None:
    """Save the resolved configuration in the run folder, on rank 0."""
    if dist.get_global_rank() != 0:
        return
    try:
        write_atomically(folder / RUN_CONFIG, to_public_yaml(config))
    except OSError as error:
        raise _not_writable(folder, error) from error


def _not_writable(folder: Path, error: OSError) -> MachineError:
    return MachineError(f"output_folder={folder} cannot be written: {error.strerror}. Choose another one")


def _find_initial(config: Config) -> None:
    """Look for the checkpoint to start from, and compare it with its checksums; one in a store is downloaded.

    The first rank of each node does: the others read what it has seen.
    """
    if config.init_from is None or is_pipeline(config.init_from.checkpoint) or dist.get_local_rank() != 0:
        return
    with error_context("init_from.checkpoint"):
        check_checkpoint(resolve_checkpoint(config.init_from.checkpoint))


def build_training_model(config: Config, device: Device, *, is_new: bool = True) -> ComposerModel:
    """Build the model that a run trains.

    Args:
        config: of the run.
        device: where it will be trained.
        is_new: read the weights to start from; a checkpoint holds its own.

    Raises:
        ConfigurationError: weights are not where the configuration says, or the combination is impossible.
    """
    if config.task == Task.autoencoder:
        if config.trainer.parallelism != Parallelism.ddp:
            raise ConfigurationError("task=autoencoder trains with trainer.parallelism=ddp: set it")
        return with_seed(config.seed, lambda: _build_autoencoder(config))
    model = build_model(config.model, config.objective, resolution=config.data.resolution, seed=config.seed)
    model.num_slots = config.data.global_batch_size
    fast.apply(model.unet, config.performance, device)
    if config.trainer.activation_checkpointing:
        model.unet.enable_gradient_checkpointing()
    if is_new and config.init_from is not None:
        with error_context("init_from.checkpoint"):
            initial = open_initial(config.init_from, model.unet)
            load_unet(model, initial.read_all(), initial.place)
    if config.model.lora is not None:
        add_lora(model.unet, config.model.lora, config.seed)
    return model


def _build_autoencoder(config: Config) -> AutoencoderTraining:
    settings = config.autoencoder
    vae = build_vae(_spec(config), settings.vae)
    initialise_logvar(vae, settings.initial_logvar)
    start = parse_time(settings.adversarial_start, "autoencoder.adversarial_start").in_batches(
        num_batches=num_batches(config), global_batch_size=config.data.global_batch_size
    )
    assert start is not None
    return AutoencoderTraining(vae, settings, config.seed, start)


def move_frozen(model: LatentDiffusion, device: Device) -> None:
    """Move VAE and text encoder to this rank's device: FSDP moves what it shards only."""
    place = torch.device("cuda", torch.cuda.current_device()) if device == Device.gpu else torch.device("cpu")
    for module in (model.vae, model.text_encoder):
        module.to(place)  # pyright: ignore[reportArgumentType]


# Trainer


def _build_optimizer(config: Config, model: ComposerModel) -> torch.optim.AdamW:
    optimizer = config.optimizer
    if isinstance(model, AutoencoderTraining):
        parameters = model.parameter_groups()
    else:
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


def _build_algorithms(config: Config) -> list[Algorithm]:
    plugins = config.plugins.algorithms
    return [build_plugin(plugin, f"plugins.algorithms.{i}", Algorithm) for i, plugin in enumerate(plugins)]


def _build_trainer(
    config: Config,
    model: ComposerModel,
    places: CheckpointStorage,
    load_path: str | None,
    device: Device,
    heartbeat: Heartbeat,
) -> Trainer:
    train_data = agree(lambda: build_train_data(config))
    if isinstance(dataset := getattr(train_data.dataloader, "dataset", None), TextImageDataset):
        check_caches(config, dataset)
    evaluator = agree(lambda: build_evaluator(config, model))
    loggers = agree(lambda: build_loggers(config, places.run))
    callbacks = agree(lambda: build_callbacks(config, model, places, device))
    callbacks = [heartbeat, *agree(lambda: build_meters(config, dataset)), *callbacks]
    algorithms = agree(lambda: _build_algorithms(config))
    for metrics in [logger for logger in loggers if isinstance(logger, MetricsFile)]:
        callbacks.append(LossCurve(metrics, places.run / "loss.png", config.run_name))

    settings = config.trainer
    parallelism = {"fsdp": fsdp_config(settings)} if settings.parallelism == Parallelism.fsdp else None
    build = partial(
        HostTrainer,
        model=model,
        train_dataloader=train_data,
        eval_dataloader=evaluator,
        optimizers=_build_optimizer(config, model),
        schedulers=_build_scheduler(config),
        algorithms=algorithms,
        callbacks=callbacks,
        loggers=loggers,
        max_duration=settings.max_duration,
        device=device.value,
        precision=settings.precision.value,
        device_train_microbatch_size=microbatch_size(
            config.data, settings.device_train_microbatch_size, dist.get_world_size()
        ),
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
        trainer = build()
    except CheckpointException as error:
        raise as_data_error(error, str(load_path)) from error
    remove_downloads(places)
    return trainer
