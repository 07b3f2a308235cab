"""Training, from top to bottom as it happens: check, resume or initialise, model, data, callbacks, fit.

`train` is the whole of it, on every rank; the functions below it are its steps, in the same order. A step that may fail
on some ranks only runs within `agree`, so that all ranks fail together, with one message.

From here to the loss: `datasets/loader.py` gives the batches of `datasets/batch.py`, `LatentDiffusion.forward` in
`models/latent_diffusion.py` computes the prediction and `loss` the loss, with the formulas of `models/objectives.py`.
"""

import copy
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from composer import Algorithm, Callback, Evaluator, Trainer, algorithms
from composer.core import DataSpec
from composer.loggers import LoggerDestination
from composer.models import ComposerModel
from composer.optim import (
    ComposerScheduler,
    ConstantWithWarmupScheduler,
    CosineAnnealingWithWarmupScheduler,
    LinearWithWarmupScheduler,
)
from composer.utils import dist as composer_dist
from composer.utils import get_device, reproducibility
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils.data import DataLoader, IterableDataset

from diffusion.callbacks import build_callbacks, build_loggers, check_states, shows_progress_bar
from diffusion.callbacks.monitoring import Heartbeat
from diffusion.callbacks.saving import SaveCheckpoints
from diffusion.checkpointing.find import check_checkpoint, resolve_checkpoint
from diffusion.checkpointing.read import as_user_error, read_identities
from diffusion.checkpointing.resume import (
    checkpoint_storage,
    find_resumption,
    finish,
    group_settings,
    has_ended,
    is_finished,
    mark_finished,
    remove_downloads,
    restore_group_settings,
    with_kept_settings,
)
from diffusion.checkpointing.roll_back import roll_back
from diffusion.composer_models import AutoencoderTraining, LatentDiffusionTraining
from diffusion.config.checks import check, check_common_settings, check_device
from diffusion.config.data import Shuffling, microbatch_size
from diffusion.config.loading import to_public_yaml
from diffusion.config.locations import common_settings
from diffusion.config.model import Posterior
from diffusion.config.schema import Config, Task
from diffusion.config.training import Collectives, Decay, Device, OptimizerName, Parallelism, Precision
from diffusion.datasets.batch import num_samples, split_batch
from diffusion.datasets.dataset import TrainingDataset
from diffusion.datasets.loader import BatchLoader, stop_workers, train_loader, validation_dataset, validation_loader
from diffusion.datasets.streams import Files
from diffusion.distributed import (
    agree,
    all_gather,
    broadcast,
    is_first_rank,
    local_rank,
    local_world_size,
    on_first_rank,
    rank,
    world_size,
)
from diffusion.errors import ConfigurationError, PreemptedError, error_context, explained_writes
from diffusion.files import write_atomically
from diffusion.formats.run_folder import CONFIG, FINISHED, STARTS
from diffusion.loading import check_objective, read_initial
from diffusion.models import fast
from diffusion.models.architectures import ARCHITECTURES, build_vae, image_side_factor, num_text_tokens, with_seed
from diffusion.models.autoencoder import initialise_logvar
from diffusion.models.build import build_parts, load_weights
from diffusion.models.fast.compilation import compile_text_encoder
from diffusion.models.ingredients import adapt
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.networks import cast_positions, scale_output, wide_matrices
from diffusion.models.precision import AUTOCAST_DTYPES
from diffusion.models.pretrained import check_identities, is_pipeline, is_single_file, read_vae
from diffusion.models.tokenizers import caption_tokenizer
from diffusion.operations.checks.data import (
    check_caches,
    check_identity,
    check_order,
    check_streams,
    read_stream_files,
    refresh_indexes,
)
from diffusion.operations.checks.gpu import computes_bf16
from diffusion.operations.checks.machine import check_machines
from diffusion.operations.costs import BudgetSpentError
from diffusion.operations.heartbeats import heartbeat_folder
from diffusion.operations.lease import leased, leased_checkpoints
from diffusion.optimizers import AdamW, build_muon, scale_rates, warmup_stable_decay
from diffusion.plugins import IndexedDataset, build_plugin, build_plugins, check_plugins
from diffusion.sharding import fsdp_config, load_smddp
from diffusion.storage import is_url
from diffusion.trainer import HostTrainer

log = logging.getLogger(__name__)


def train(config: Config, build: Callable[[Config, Device], ComposerModel] | None = None) -> Trainer:
    """Train as configured, or continue an earlier start of the same run; return the Trainer after the run.

    `build` replaces `build_training_model`; VAE and text encoder may be random then.

    Raises:
        UserError: on every rank: the configuration, the data or the machine is at fault.
        PreemptedError: on every rank: after a signal (a checkpoint was saved) or a wrong loss; loggers are closed.
    """
    # Check
    device = start_ranks(config)
    shape = agree(lambda: {"side_factor": image_side_factor(config), "num_text_tokens": num_text_tokens(config.model)})
    is_own = build is not None
    agree(lambda: check(config, world_size=world_size(), **shape, may_be_random=is_own))
    agree(lambda: check_plugins(config))
    first = broadcast(common_settings(config))
    agree(lambda: check_common_settings(common_settings(config), first))
    config = with_absolute_paths(config)
    folder = Path(config.output_folder).expanduser()
    agree(lambda: record_config(folder, config, overwrite=False))
    with (
        leased(folder, is_shared=config.trainer.checkpoint_folder is None) as lease,
        Heartbeat(heartbeat_folder(config, folder), lease) as heartbeat,
        leased_checkpoints(config.trainer.checkpoint_folder, timeout=config.trainer.store_timeout),
    ):
        check_machines(config, device)
        files = read_stream_files(config)
        agree(lambda: check_streams(config, files))
        agree(lambda: refresh_indexes(config), takes_long=True)

        # Resume or initialise
        storage = agree(lambda: checkpoint_storage(config, folder))
        roll_back(config, storage)
        load_path = find_resumption(config, storage)
        if load_path is None:
            initial = find_initial_weights(config)
        else:
            if is_first_rank() and not (folder / STARTS).is_file():
                log.warning("%s has no earlier starts of this run: rollbacks and budgets are counted from now", folder)
            initial = config = agree(lambda: with_kept_settings(config, Path(load_path)))

        # Model
        build = build or partial(build_training_model, is_new=load_path is None)
        model = agree(lambda: build(initial, device), takes_long=True)
        identities = identities_of(model, load_path)
        if isinstance(model, LatentDiffusion):
            agree(lambda: check_identity(config, identities, files))
            prepare_frozen(config, model, device)

        # Data
        train_data = agree(lambda: build_train_data(config, files))
        dataset = getattr(train_data.dataloader, "dataset", None)
        if isinstance(dataset, TrainingDataset):
            check_order(dataset)
            check_caches(config, dataset)
        evaluator = agree(lambda: build_evaluator(config, model, files))

        # Loggers and callbacks
        loggers = agree(lambda: build_loggers(config, folder))
        callbacks = agree(lambda: build_callbacks(config, model, dataset, storage, device, heartbeat, identities))

        # Fit
        trainer = build_trainer(config, model, train_data, evaluator, loggers, callbacks, load_path, device)
        remove_downloads(storage)
        fit(trainer, config, folder)
        return trainer


# Check


def start_ranks(config: Config) -> Device:
    """Join the process group and seed this rank; return its device. A UserError says what this machine lacks."""
    num_gpus = torch.cuda.device_count()
    check_device(config, num_gpus=num_gpus, bf16_supported=computes_bf16(), local_world_size=local_world_size())
    device = config.trainer.device.resolve(num_gpus)
    if device is Device.cpu and not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(1)  # The last bits of sums depend on it.
    if config.trainer.collectives is Collectives.smddp:
        load_smddp()
        type(get_device(device.value)).dist_backend = Collectives.smddp.value
    if not torch.distributed.is_initialized():
        composer_dist.initialize_dist(device.value, timeout=config.trainer.dist_timeout)
    reproducibility.seed_all(config.seed)
    if config.trainer.deterministic:
        reproducibility.configure_deterministic_mode()
    torch.backends.cudnn.benchmark = config.performance.cudnn_benchmark and not config.trainer.deterministic
    return device


def with_absolute_paths(config: Config) -> Config:
    """Make paths of frozen parts and of outputs absolute, so that later commands find them from any directory."""
    config = copy.deepcopy(config)
    model = config.model
    sections: list[tuple[Any, str]] = [(model, "pretrained"), (model, "vae"), (model.text_encoder, "path")]
    sections += [(section, "path") for section in model.ingredient_sections.values()]
    for section, key in [*sections, (config.autoencoder, "vgg_weights")]:
        source = getattr(section, key, None)
        if source and (path := Path(source).expanduser()).exists():  # Others are hub names.
            setattr(section, key, os.path.abspath(path))  # noqa: PTH100 -- without "..", links stay
    for section, key in ((config.trainer, "checkpoint_folder"), (config.operations, "heartbeat_folder")):
        if (folder := getattr(section, key)) and not is_url(folder):
            setattr(section, key, os.path.abspath(Path(folder).expanduser()))  # noqa: PTH100
    return config


def record_config(folder: Path, config: Config, *, overwrite: bool = True) -> None:
    """Create the run folder and save the resolved configuration in it, on rank 0.

    Without `overwrite` that of an earlier start stays: this start may still fail, or find the run finished. A folder
    that cannot be written is a MachineError.
    """
    if not is_first_rank():
        return
    with explained_writes(f"output_folder={folder}", "Choose another one"):
        folder.mkdir(parents=True, exist_ok=True)
        if overwrite or not (folder / CONFIG).exists():
            write_atomically(folder / CONFIG, to_public_yaml(config))


# Resume or initialise


def find_initial_weights(config: Config) -> Config:
    """Find the checkpoint to start from and verify its checksums, on the first rank of each node.

    The source run may still write and remove checkpoints, so that a search on each node could find another one. A
    checkpoint in a store is downloaded. To be called by all ranks.

    Returns:
        The configuration with the path of the checkpoint on this node.

    Raises:
        UserError: on all ranks: there is none, it is damaged, or the nodes find different ones.
    """
    if config.init_from is None:
        return config
    source = config.init_from.checkpoint
    if config.task is Task.autoencoder or is_pipeline(source) or is_single_file(source):
        return config  # Without checksums.

    def find() -> Path | None:
        if local_rank() != 0:
            return None
        with error_context("init_from.checkpoint"):
            check_checkpoint(path := resolve_checkpoint(source))
        return path

    found: list[Path | None] = all_gather(agree(find, takes_long=True))
    agree(lambda: _check_same(found, source))
    path = found[rank() - local_rank()]
    return replace(config, init_from=replace(config.init_from, checkpoint=str(path)))


def _check_same(found: list[Path | None], source: str) -> None:
    names = sorted({path.name for path in found if path is not None})
    if len(names) > 1:
        raise ConfigurationError(
            f"init_from.checkpoint: the nodes find different checkpoints in {source}: {', '.join(names)}. Name one"
        )


# Model


def build_training_model(config: Config, device: Device, *, is_new: bool = True) -> ComposerModel:
    """Build the model to train; a new one reads the initial weights, a checkpoint holds its own.

    Raises:
        ConfigurationError: weights are not where the configuration says, or the combination is impossible.
    """
    if config.task == Task.autoencoder:
        return with_seed(config.seed, lambda: _build_autoencoder(config, is_new))
    parts = build_parts(config.model, config.objective, resolution=config.data.resolution, seed=config.seed)
    model = LatentDiffusionTraining(**parts, num_slots=config.data.global_batch_size)
    if config.optimizer.base_width is not None:
        scale_output(model.network, model.network.config["hidden_size"] / config.optimizer.base_width)
    fast.apply(model.network, config.performance, device)
    if config.performance.compile_text_encoder:
        compile_text_encoder(model.text_encoder, model.network)
    if config.trainer.activation_checkpointing:
        model.network.enable_gradient_checkpointing()
        if config.trainer.parallelism is Parallelism.fsdp and config.trainer.precision in AUTOCAST_DTYPES:
            cast_positions(model.network, AUTOCAST_DTYPES[config.trainer.precision])
    initial = None
    if is_new and config.init_from is not None:
        check_objective(config)
        with error_context("init_from.checkpoint"):
            initial = read_initial(config, model)
            load_weights(model, initial, config.init_from.checkpoint)
    adapt(model.network, model.ingredients, initial, config.seed)
    return model


def _build_autoencoder(config: Config, is_new: bool) -> AutoencoderTraining:
    settings = config.autoencoder
    vae = build_vae(ARCHITECTURES[config.model.architecture], settings.vae)
    initialise_logvar(vae, settings.initial_logvar)
    if is_new and config.init_from is not None:
        with error_context("init_from.checkpoint"):
            vae.load_state_dict(read_vae(config.init_from.checkpoint, vae))
    start = config.steps_of(settings.adversarial_start, "autoencoder.adversarial_start")
    assert start is not None
    return AutoencoderTraining(vae, settings, config.seed, start)


def identities_of(model: ComposerModel, load_path: str | None) -> dict[str, str]:
    """Return the identities of a model's frozen parts, which must be those of the checkpoint to resume from, if any.

    The first rank of each node hashes its parts. To be called by all ranks.

    Raises:
        ConfigurationError: on all ranks: a part differs, from the checkpoint's or between nodes.
    """
    if not isinstance(model, LatentDiffusion | AutoencoderTraining):
        return {}
    own = agree(lambda: model.identities() if local_rank() == 0 else {}, takes_long=True)
    found = broadcast(own)
    agree(lambda: _check_equal_parts(own, found))
    if load_path is not None:
        stored = on_first_rank(lambda: read_identities(Path(load_path)))
        remedy = "Give the paths of the same weights (model.pretrained, model.vae ...), or begin another run"
        agree(lambda: check_identities(stored, found, load_path, remedy))
    return found


def _check_equal_parts(own: Mapping[str, str], first: Mapping[str, str]) -> None:
    if differing := [part.replace("_", " ") for part, identity in own.items() if identity != first[part]]:
        raise ConfigurationError(
            f"this node has another {', '.join(differing)} than the first one: have the same weights at the paths of "
            "model.pretrained, model.vae ... on all nodes"
        )


def prepare_frozen(config: Config, model: LatentDiffusion, device: Device) -> None:
    """Move VAE, text encoder and image encoder to the device of this rank; FSDP moves only what it shards.

    On a GPU the linear layers of the text encoder get the precision of training.
    """
    on_gpu = device == Device.gpu
    target = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    for module in model.frozen_parts:
        module.to(target)  # pyright: ignore[reportArgumentType]
    if on_gpu and config.trainer.precision != Precision.fp32:
        model.conditioner.lower_precision(AUTOCAST_DTYPES[config.trainer.precision])


# Data


def build_train_data(config: Config, files: Files | None = None) -> DataSpec:
    """Open the training data of this rank; `files` are its manifests and marks, None: read them."""
    if config.plugins.train_dataset is not None:
        return DataSpec(_plugin_loader(config), get_num_samples_in_batch=num_samples)
    loader = train_loader(
        config.data,
        seed=config.seed,
        tokenize=caption_tokenizer(config.model),
        with_logvar=config.objective.posterior == Posterior.sample,
        score_names=config.model.score_names,
        files=files,
    )
    return DataSpec(loader, split_batch=split_batch, get_num_samples_in_batch=num_samples)


def _plugin_loader(config: Config) -> DataLoader:
    data, plugin = config.data, config.plugins.train_dataset
    assert plugin is not None
    dataset: Any = build_plugin(plugin, "plugins.train_dataset", IndexedDataset)
    if len(dataset) < data.global_batch_size:
        raise ConfigurationError(
            f"plugins.train_dataset ({plugin.path}) holds {len(dataset)} samples, fewer than the "
            f"{data.global_batch_size} of a step: give it more, or lower data.global_batch_size"
        )
    if isinstance(dataset, IterableDataset):
        raise ConfigurationError(f"plugins.train_dataset ({plugin.path}) has no __getitem__: give it one")
    is_shuffled = data.shuffle is not Shuffling.none
    sampler = composer_dist.get_sampler(dataset, shuffle=is_shuffled, drop_last=True, seed=config.seed)
    rank_batch_size = data.global_batch_size // world_size()
    # The host may wait for earlier work on the device when it copies from memory that is not pinned.
    options: dict[str, Any] = {"num_workers": data.num_workers, "pin_memory": torch.cuda.is_available()}
    if data.num_workers:
        options |= {"prefetch_factor": data.prefetch_factor, "timeout": data.loader_timeout}
    return BatchLoader(dataset, rank_batch_size, sampler=sampler, drop_last=True, **options)


def build_evaluator(config: Config, model: ComposerModel, files: Files | None = None) -> Evaluator | None:
    """Open this rank's part of the validation data, and prepare the model's metrics for it; None without any.

    Raises:
        UserError: the data is missing, damaged or not what the configuration says.
    """
    if config.validation is None:
        return None
    dataset = validation_dataset(
        config.validation,
        config.data,
        tokenize=caption_tokenizer(config.model),
        with_logvar=config.objective.posterior == Posterior.sample,
        score_names=config.model.score_names,
        files=files,
    )
    if isinstance(model, LatentDiffusionTraining):
        model.set_validation_data(dataset.stream_names_with_samples, torch.from_numpy(dataset.addresses()))
    loader = validation_loader(dataset, config.validation, config.data, rank=rank(), num_ranks=world_size())
    return Evaluator(
        label="validation",
        dataloader=DataSpec(loader, split_batch=split_batch, get_num_samples_in_batch=num_samples),
        eval_interval=config.interval_of(config.trainer.eval_interval, "trainer.eval_interval"),
        device_eval_microbatch_size=config.validation.device_batch_size,
    )


# Fit


def build_trainer(
    config: Config,
    model: ComposerModel,
    train_data: DataSpec,
    evaluator: Evaluator | None,
    loggers: list[LoggerDestination],
    callbacks: list[Callback],
    load_path: str | None,
    device: Device,
) -> Trainer:
    """Build Composer's Trainer, which loads the checkpoint.

    Raises:
        ConfigurationError: an algorithm of the user's own cannot be built, or two objects would share a state.
        DataError: the checkpoint is damaged.
        MachineError: it cannot be read.
    """
    settings, optimizer = config.trainer, build_optimizer(config, model)
    configured = group_settings(optimizer)
    own = agree(lambda: build_plugins(config.plugins.algorithms, "plugins.algorithms", Algorithm))
    for objects in ([*loggers, *callbacks], own):
        agree(partial(check_states, objects))
    try:
        trainer = HostTrainer(
            model=model,
            train_dataloader=train_data,
            eval_dataloader=evaluator,
            optimizers=optimizer,
            schedulers=_build_scheduler(config),
            algorithms=own,
            callbacks=callbacks,
            loggers=loggers,
            max_duration=settings.max_duration,
            device=device.value,
            precision=settings.precision.value,
            device_train_microbatch_size=microbatch_size(
                config.data, settings.device_train_microbatch_size, world_size()
            ),
            parallelism_config={"fsdp": fsdp_config(settings)} if settings.parallelism == Parallelism.fsdp else None,
            seed=config.seed,
            deterministic_mode=settings.deterministic,
            dist_timeout=settings.dist_timeout,
            run_name=config.run_name,
            progress_bar=shows_progress_bar(config),
            load_path=load_path,
            load_exclude_algorithms=dir(algorithms),  # Composer would evaluate text of the checkpoint to build them.
            load_strict_model_weights=True,
            load_ignore_keys=_drop_empty_scaler,
        )
    except CheckpointException as error:
        raise as_user_error(error, str(load_path)) from error
    if config.performance.log_late:
        trainer.log_late()
    if load_path is not None:
        restore_group_settings(trainer, configured)
    return trainer


def _drop_empty_scaler(checkpoint: dict[str, Any]) -> None:
    """Drop the empty state of a disabled GradScaler, as of a CPU: an enabled one does not load it."""
    if not any(checkpoint["state"].get("scaler", {}).values()):
        checkpoint["state"].pop("scaler", None)


def build_optimizer(config: Config, model: ComposerModel) -> AdamW:
    """Build the optimizer of a model's trained parameters."""
    optimizer = config.optimizer
    settings: dict[str, Any] = {
        "lr": optimizer.lr,
        "betas": (optimizer.betas[0], optimizer.betas[1]),
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "fused": True,
    }
    if isinstance(model, AutoencoderTraining):
        groups = model.parameter_groups()
    else:
        groups = [{"params": [parameter for parameter in model.parameters() if parameter.requires_grad]}]
    is_muon = optimizer.name is OptimizerName.muon
    built = build_muon(model, groups, momentum=optimizer.momentum, **settings) if is_muon else AdamW(groups, **settings)
    if optimizer.base_width is not None:
        assert isinstance(model, LatentDiffusion)
        wide = wide_matrices(model.network)
        for ingredient in model.ingredients:
            wide += [model.get_parameter(f"{ingredient.part}.{name}") for name in ingredient.wide_matrices]
        scale_rates(built, wide, model.network.config["hidden_size"] / optimizer.base_width)
    return built


def _build_scheduler(config: Config) -> ComposerScheduler:
    schedule = config.schedule
    t_warmup = config.interval_of(schedule.warmup, "schedule.warmup")
    if schedule.decay == Decay.constant:
        return ConstantWithWarmupScheduler(t_warmup=t_warmup)
    if schedule.decay == Decay.linear:
        return LinearWithWarmupScheduler(t_warmup=t_warmup, alpha_f=schedule.final)
    if schedule.decay == Decay.cosine:
        return CosineAnnealingWithWarmupScheduler(t_warmup=t_warmup, alpha_f=schedule.final)
    warmup = config.steps_of(schedule.warmup, "schedule.warmup")
    cooldown = config.steps_of(schedule.cooldown, "schedule.cooldown")
    assert warmup is not None and cooldown is not None
    total, final = config.planned_steps(), schedule.final
    multiplier = partial(warmup_stable_decay, warmup=warmup, cooldown=cooldown, total=total, final=final)
    return lambda state, ssr=1.0: multiplier(state.timestamp.batch.value)


def fit(trainer: Trainer, config: Config, folder: Path) -> None:
    """Train from the Trainer's step to the end of the run, and close the Trainer.

    Raises:
        PreemptedError: a signal came, and a checkpoint was saved.
        BudgetSpentError: the budget of the run is spent.
    """
    step = trainer.state.timestamp.batch.value
    if has_ended(trainer) and is_finished(folder, step):
        log.info("run %s has reached its end (%d) before; nothing is left to do", config.run_name, step)
        _close(trainer)
        return
    agree(lambda: record_config(folder, config))
    try:
        if has_ended(trainer):
            finish(trainer)
        else:
            if is_first_rank():
                (folder / FINISHED).unlink(missing_ok=True)  # Of a shorter run, or one whose checkpoints were removed.
            trainer.fit()
    except (PreemptedError, BudgetSpentError):
        _close(trainer)
        raise
    except BaseException as error:
        for callback in trainer.state.callbacks:
            if isinstance(callback, SaveCheckpoints) and callback.is_writing:  # The process must still hold the lease.
                log.error("%s: %s; waiting for the checkpoint that is being written", type(error).__name__, error)
                callback.close(trainer.state, trainer.logger)
        raise
    _close(trainer)
    mark_finished(folder, trainer.state.timestamp.batch.value)


def _close(trainer: Trainer) -> None:
    """Close the Trainer and stop its loaders' workers. After an error they end with the process instead."""
    trainer.close()
    state = trainer.state
    for loader in (state.train_dataloader, *(one.dataloader.dataloader for one in state.evaluators)):
        stop_workers(loader)
