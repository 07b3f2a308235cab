"""Combinations of values that cannot work, found within a second and before any GPU work.

Pure functions of the configuration and of numbers about the machine. Each yields sentences that say what is wrong,
under which key, and what to do. A location that is still missing (`???`, in a dry run) is not checked.
"""

import math
import posixpath
import re
from collections.abc import Callable, Iterator
from typing import Any

from omegaconf import MISSING

from diffusion.config.averages import average_problems
from diffusion.config.data import image_sizes
from diffusion.config.data_problems import data_problems
from diffusion.config.groups import group_problems, group_size, legal_world_sizes, microbatch_size
from diffusion.config.loading import missing_keys
from diffusion.config.model import NUM_TIMESTEPS, PredictionType
from diffusion.config.performance import Compilation
from diffusion.config.quantities import parse_time
from diffusion.config.schema import Config, Task
from diffusion.config.sizes import size_problems
from diffusion.config.stores import local_problem, url_problem
from diffusion.config.training import NumberFormat, Parallelism, Precision
from diffusion.errors import ConfigurationError, raise_all

NUM_SEEDS = 2**32

_LOCATIONS = re.compile(
    r"(data|validation)\.(remote|local|streams(\.\d+\.(name|remote|local))?)"
    r"|init_from\.checkpoint|model\.(pretrained|vae)|autoencoder\.vgg_weights"
)


def is_location(key: str) -> bool:
    """Whether a key says where something lies, so that a dry run can do without it."""
    return _LOCATIONS.fullmatch(key) is not None


def missing_locations(config: Config) -> dict[str, str]:
    """Keys of locations that are still `???`, and their meanings."""
    return {key: doc for key, doc in missing_keys(config).items() if is_location(key)}


def check(config: Config, *, world_size: int, vae_factor: int | None = None) -> None:
    """Check a configuration for a number of ranks; knows nothing of the machine.

    Args:
        config: the configuration.
        world_size: ranks that it is to run on.
        vae_factor: side of an image over side of its latent; None where it is not known yet.

    Raises:
        ConfigurationError: with everything that is wrong.
    """
    of_sizes = list(size_problems(config.data, config.validation, vae_factor))
    raise_all(
        ConfigurationError,
        [problem for part in _PARTS for problem in part(config)]
        + [*_batch(config, world_size), *of_sizes, *([] if of_sizes else _cuda_graphs(config, world_size))],
    )


def num_batches(config: Config) -> int:
    """Length of the run in optimizer steps.

    Raises:
        ConfigurationError: `trainer.max_duration` is not a positive number of batches.
    """
    text = config.trainer.max_duration
    match = re.fullmatch(r"\s*(\d+)\s*ba\s*", text, re.IGNORECASE)
    if match is None:
        raise ConfigurationError(
            f"trainer.max_duration is '{text}', but the length of a run is given in batches (550000ba): epochs depend "
            "on the number of samples, and batches do not."
        )
    if int(match[1]) == 0:
        raise ConfigurationError(f"trainer.max_duration is '{text}', but a run has at least one batch: write 1ba.")
    return int(match[1])


def _attempt(parse: Callable[[], Any], problems: list[str]) -> Any:
    """The result of a parser, or None and its complaint among the problems."""
    try:
        return parse()
    except ConfigurationError as error:
        problems.append(str(error))
        return None


def _value(config: Config, key: str) -> Any:
    """Value of a dotted key; None where a group on the way is null."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part) if value is not None else None
    return None if isinstance(value, str) and value == MISSING else value


_RANGES: dict[str, tuple[float, float]] = {
    "objective.caption_dropout": (0, 1),
    "data.horizontal_flip": (0, 1),
    "schedule.final": (0, 1),
    "model.lora.rank": (1, math.inf),
    "optimizer.lr": (0, math.inf),
    "optimizer.weight_decay": (0, math.inf),
    "objective.offset_noise": (0, math.inf),
    "autoencoder.l1_weight": (0, math.inf),
    "autoencoder.l2_weight": (0, math.inf),
    "autoencoder.kl_weight": (0, math.inf),
    "autoencoder.perceptual_weight": (0, math.inf),
    "autoencoder.adversarial_weight": (0, math.inf),
    "autoencoder.initial_logvar": (-30, 20),
    "samples.guidance_scale": (0, math.inf),
    "data.num_workers": (0, math.inf),
    "data.download_retry": (1, math.inf),
    "data.loader_timeout": (0, math.inf),
    "data.resolution": (1, math.inf),
    "data.global_batch_size": (1, math.inf),
    "data.group_size": (1, math.inf),
    "data.shuffle_block_size": (1, math.inf),
    "data.num_canonical_nodes": (1, math.inf),
    "data.prefetch_factor": (1, math.inf),
    "data.predownload": (1, math.inf),
    "trainer.device_train_microbatch_size": (1, math.inf),
    "trainer.num_replicas": (1, math.inf),
    "validation.num_samples": (1, math.inf),
    "validation.device_batch_size": (1, math.inf),
    "samples.num_inference_steps": (1, NUM_TIMESTEPS),
    "loggers.stream_loss_interval": (1, math.inf),
    "loggers.utilisation_interval": (1, math.inf),
    "plan.num_gpus": (1, math.inf),
    "plan.gpus_per_node": (1, math.inf),
    "plan.num_samples": (1, math.inf),
    "operations.guard.spike_factor": (1, math.inf),
    "operations.guard.spike_window": (3, math.inf),
    "operations.guard.margin": (1, math.inf),
    "operations.guard.skip": (0, math.inf),
    "operations.guard.max_rollbacks": (0, math.inf),
    "operations.supervision.max_restarts": (0, math.inf),
    "operations.supervision.first_pause": (0, math.inf),
    "operations.supervision.longest_pause": (0, math.inf),
}
_POSITIVE = (
    "autoencoder.discriminator_lr",
    "model.lora.alpha",
    "optimizer.eps",
    "optimizer.max_grad_norm",
    "objective.min_snr_gamma",
    "data.download_timeout",
    "trainer.dist_timeout",
    "trainer.init_timeout",
    "trainer.store_patience",
    "plan.images_per_second",
    "operations.supervision.hang_floor",
    "operations.supervision.hang_factor",
    "operations.supervision.data_patience",
    "operations.supervision.pause_patience",
    "operations.supervision.check_patience",
    "operations.max_gpu_hours",
    "operations.max_dollars",
    "plan.price_per_gpu_hour",
    "plan.gpu_memory_gb",
    "plan.image_kb",
)
_NAMED_PLACES = (
    "run_name",
    "output_folder",
    "trainer.checkpoint_folder",
    "data.remote",
    "data.local",
    "validation.remote",
    "validation.local",
)
_SEEDS = ("seed", "samples.seed", "model.frozen_seed")
_TIMES = {
    "schedule.warmup": False,
    "trainer.eval_interval": True,
    "trainer.save_interval": True,
    "trainer.keep_every": True,
    "samples.interval": True,
    "algorithms.ema.start": False,
    "autoencoder.adversarial_start": False,
    "algorithms.ema.interval": True,
    "algorithms.ema.power.snapshot_interval": True,
}
"""Times, and whether they are intervals, which cannot be zero."""

_NOT_IN_EPOCHS = ("trainer.keep_every", "autoencoder.adversarial_start", "algorithms.ema.start")
"""Times that are compared with the length of the run, or converted to steps, before the data is opened."""


def _numbers(config: Config) -> Iterator[str]:
    for key, (low, high) in _RANGES.items():
        value = _value(config, key)
        if value is not None and not (low <= value <= high and math.isfinite(value)):
            limits = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
            yield f"{key} is {value}, but must be {limits}{' and finite' if not math.isfinite(value) else ''}."
    for key in _POSITIVE:
        value = _value(config, key)
        if value is not None and not (value > 0 and math.isfinite(value)):
            yield f"{key} is {value}, but must be greater than 0 and finite."
    for key in _SEEDS:
        value = _value(config, key)
        if not 0 <= value < NUM_SEEDS:
            yield f"{key} is {value}, but seeds are integers from 0 to {NUM_SEEDS - 1} (2^32 - 1)."
    betas = config.optimizer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield f"optimizer.betas is {betas}, but must be two numbers of at least 0 and below 1, such as [0.9, 0.999]."
    if (guard := config.operations.guard) is not None and any(step < 0 for step in guard.skip_steps):
        yield f"operations.guard.skip_steps is {guard.skip_steps}, but steps are counted from 0."
    if config.algorithms.ema is not None:
        yield from average_problems(config.algorithms.ema)
    if config.trainer.keep_checkpoints != -1 and config.trainer.keep_checkpoints < 1:
        yield f"trainer.keep_checkpoints is {config.trainer.keep_checkpoints}: keep at least 1, or all with -1."


def _times(config: Config) -> Iterator[str]:
    problems: list[str] = []
    total = _attempt(lambda: num_batches(config), problems)
    steps: dict[str, float | None] = {}
    for key, is_interval in _TIMES.items():
        text = _value(config, key)
        time = _attempt(lambda text=text, key=key: parse_time(text, key), problems) if text is not None else None
        if time is None:
            continue
        if is_interval and time.value == 0:
            problems.append(f"{key} is '{text}', but an interval must be longer than nothing.")
        if key == "algorithms.ema.interval" and time.unit != "ba":
            problems.append(f"{key} is '{text}', but updates are counted in batches, as in 1ba.")
        if key == "algorithms.ema.power.snapshot_interval" and time.unit != "ba":
            problems.append(f"{key} is '{text}', but is counted in batches, as in 5000ba.")
        if key == "schedule.warmup" and time.unit not in ("ba", "dur"):
            problems.append(f"{key} is '{text}', but is counted in batches or as a share of the run: 10000ba, 0.1dur.")
        if key in _NOT_IN_EPOCHS and time.unit == "ep":
            problems.append(f"{key} is '{text}', but is counted in batches, as in 100000ba.")
        global_batch_size = _value(config, "data.global_batch_size") or 0
        if total is not None and global_batch_size > 0:
            steps[key] = time.in_batches(num_batches=total, global_batch_size=global_batch_size)
    yield from problems
    warmup, start = steps.get("schedule.warmup"), steps.get("algorithms.ema.start")
    interval = steps.get("algorithms.ema.interval")
    if total is not None and warmup is not None and warmup > total:
        yield (
            f"schedule.warmup is '{config.schedule.warmup}', longer than the run (trainer.max_duration is "
            f"'{config.trainer.max_duration}'): the learning rate would never be reached. Shorten the warm-up, as in "
            f"schedule.warmup=0.1dur."
        )
    if total is not None and config.algorithms.ema is not None and start is not None and start >= total:
        yield (
            f"algorithms.ema.start is '{config.algorithms.ema.start}', at or after the end of the run "
            f"(trainer.max_duration is '{config.trainer.max_duration}'): there would be no average. Start it earlier, "
            f"or switch it off with algorithms.ema=null."
        )
    elif total is not None and start is not None and interval and total // interval * interval <= start:
        yield (
            f"algorithms.ema.interval is '{_value(config, 'algorithms.ema.interval')}', of which no multiple lies "
            "between algorithms.ema.start and the end of the run: the average would never be updated. Shorten it."
        )


def _batch(config: Config, world_size: int) -> Iterator[str]:
    size = config.data.global_batch_size
    if size < 1:
        return
    yield from group_problems(config.data, world_size)
    if world_size % max(config.trainer.num_replicas, 1):
        yield (
            f"trainer.num_replicas is {config.trainer.num_replicas}, which does not divide {world_size} ranks into "
            "equal groups. Set it to the number of nodes, or to 1."
        )
    if size % world_size:
        legal = legal_world_sizes(size, group_size(config.data))
        yield (
            f"data.global_batch_size is {size}, which cannot be divided among {world_size} ranks: every rank must get "
            f"the same share. Start {_near(legal, world_size)} ranks (legal are {_listed(legal)}), or change it to "
            f"{_near_multiples(size, world_size)} (which makes it another experiment)."
        )


def _cuda_graphs(config: Config, world_size: int) -> Iterator[str]:
    if not config.performance.cuda_graphs:
        return
    trainer, share = config.trainer, config.data.global_batch_size // world_size
    if trainer.parallelism is Parallelism.fsdp:
        yield (
            "performance.cuda_graphs is true with trainer.parallelism fsdp, which gathers weights to other addresses "
            "in each step, and a graph reads from fixed ones. Set trainer.parallelism=ddp."
        )
    if config.performance.compilation is Compilation.none:
        yield (
            "performance.cuda_graphs is true with performance.compilation none, but compiled parts become graphs. Set "
            "performance.compilation=auto."
        )
    if trainer.activation_checkpointing:
        yield (
            "performance.cuda_graphs is true with trainer.activation_checkpointing, which runs forward graphs within "
            "the backward pass. Set trainer.activation_checkpointing=false."
        )
    limit = trainer.device_train_microbatch_size
    if (limit is None or limit > 0) and microbatch_size(config.data, limit, world_size) < share:
        yield (
            f"performance.cuda_graphs is true, and a rank has {share} samples in several microbatches: the second one "
            "would overwrite the gradients of the first. Raise trainer.device_train_microbatch_size, start more ranks, "
            "or set performance.cuda_graphs=false."
        )
    streams = config.data.streams if isinstance(config.data.streams, list) else []
    if len(set(image_sizes(streams, config.data.resolution))) > 1:
        yield (
            "performance.cuda_graphs is true with streams of several sizes, of which each would be recorded as graphs "
            "of its own. Set performance.cuda_graphs=false."
        )


def _model(config: Config) -> Iterator[str]:
    objective = config.objective
    if objective.zero_terminal_snr and objective.prediction_type is PredictionType.epsilon:
        yield (
            "objective.zero_terminal_snr is true with objective.prediction_type epsilon: at the last step the input is "
            "pure noise, from which the noise says nothing about the image (Lin et al. 2023). Set "
            "objective.prediction_type=v_prediction."
        )
    if config.trainer.reshard_after_forward and config.trainer.parallelism is Parallelism.ddp:
        yield (
            "trainer.reshard_after_forward is true with trainer.parallelism ddp, which shards nothing. Set "
            "trainer.parallelism=fsdp or trainer.reshard_after_forward=false."
        )

    if config.trainer.parallelism is Parallelism.ddp:
        for key, default in (("num_replicas", 1), ("reduce_precision", NumberFormat.fp32)):
            value = getattr(config.trainer, key)
            if value != default:
                yield (
                    f"trainer.{key} is {getattr(value, 'value', value)} with trainer.parallelism ddp, which does not "
                    f"know it. Set trainer.parallelism=fsdp, or leave trainer.{key} out."
                )
    if config.trainer.reduce_precision is NumberFormat.fp16 and config.trainer.precision is not Precision.amp_fp16:
        yield (
            f"trainer.reduce_precision is fp16 with trainer.precision {config.trainer.precision.value}, which does not "
            "scale the loss: small gradients would vanish. Set trainer.reduce_precision=bf16."
        )
    if config.model.lora is not None and config.init_from is None:
        yield (
            "model.lora is set without init_from, but LoRA changes weights that are trained. Set init_from.checkpoint, "
            "or model.lora=null."
        )
    if config.task is Task.autoencoder and config.trainer.parallelism is not Parallelism.ddp:
        yield (
            f"task is autoencoder with trainer.parallelism {config.trainer.parallelism.value}: the VAE is trained "
            "whole on each rank. Set trainer.parallelism=ddp."
        )
    if config.task is Task.autoencoder:
        for key, value in (("init_from", config.init_from), ("model.lora", config.model.lora)):
            if value is not None:
                yield (
                    f"{key} is set with task autoencoder, whose VAE starts from random weights and is trained whole. "
                    f"Leave {key} out."
                )
    guard = config.operations.guard
    if config.autoencoder.adversarial_weight > 0 and guard is not None and guard.spike_factor is not None:
        yield (
            "operations.guard.spike_factor is set with autoencoder.adversarial_weight, but the loss rises where the "
            "discriminator starts. Set operations.guard.spike_factor=null."
        )


def _places(config: Config) -> Iterator[str]:
    if config.operations.max_dollars is not None and config.plan.price_per_gpu_hour is None:
        yield "operations.max_dollars is set without a price: set plan.price_per_gpu_hour, or limit max_gpu_hours."
    for key in _NAMED_PLACES:
        value = _value(config, key)
        if value is not None and not value.strip():
            yield f"{key} is empty. Give it a value, or leave it out."
    for key in ("data.local", "validation.local"):
        if problem := local_problem(_value(config, key), key):
            yield problem
    inside = posixpath.normpath(config.run_name.strip().lstrip("/"))
    if config.run_name.strip() and (inside == "." or inside.split("/")[0] == ".."):
        yield (
            f"run_name is '{config.run_name}', which is no folder of its own below that of all runs. Give it a name, "
            "and another place in output_folder."
        )
    if "://" in config.output_folder:
        yield (
            f"output_folder is '{config.output_folder}', but the record, metrics and images of a run go to a folder. "
            "Give one, and trainer.checkpoint_folder=s3://bucket/prefix to keep its checkpoints in an object store."
        )
    if "://" in (config.operations.heartbeat_folder or ""):
        yield (
            f"operations.heartbeat_folder is '{config.operations.heartbeat_folder}', but signs of life are files that "
            "are overwritten at each step. Give a folder, or null for that of the run."
        )
    if config.trainer.checkpoint_folder is not None:
        problem = url_problem(config.trainer.checkpoint_folder, "trainer.checkpoint_folder")
        if problem is not None:
            yield problem


def _near(legal: list[int], number: int) -> str:
    """The legal number below and the one above."""
    below, above = [n for n in legal if n < number][-1:], [n for n in legal if n > number][:1]
    return " or ".join(str(n) for n in [*below, *above])


def _near_multiples(number: int, factor: int) -> str:
    below = number // factor * factor
    return " or ".join(str(n) for n in (below, below + factor) if n > 0)


def _listed(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers)


_PARTS = (_numbers, _times, _places, _model, data_problems)
