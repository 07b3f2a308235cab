"""Checks of a whole run: relations between sections, the number of ranks, the latent size, and the machine.

They take less than a second and need no GPU. Limits of single keys and relations within a section are declared there
(`diffusion.config.fields`). A location that is still missing (`???`, in a dry run) is not checked.
"""

import logging
import math
import posixpath
from collections.abc import Iterator, Mapping
from pathlib import Path

from omegaconf import MISSING

from diffusion.config.data import (
    DataConfig,
    Representation,
    group_size,
    image_sizes,
    legal_world_sizes,
    microbatch_size,
)
from diffusion.config.fields import section_problems
from diffusion.config.model import AttentionBackend, Compilation, PredictionType
from diffusion.config.schema import Config, Task
from diffusion.config.secrets import redact
from diffusion.config.training import Decay, Device, OptimizerName, Parallelism, Precision
from diffusion.errors import ConfigurationError, MachineError, raise_all

log = logging.getLogger(__name__)

MIN_SIDES = {"adversarial_weight": 24, "perceptual_weight": 16}
"""Side in pixels of the smallest images that the VAE's discriminator takes; LPIPS takes 16."""


def check_common_settings(own: Mapping[str, str], first: Mapping[str, str]) -> None:
    """Raise a ConfigurationError if this rank has other settings than the first one."""
    differing = sorted(key for key in own.keys() | first.keys() if own.get(key) != first.get(key))
    if differing:
        raise ConfigurationError(
            f"the configuration differs from that of rank 0 in {', '.join(differing)}. Start the same command with the "
            "same files and environment on all machines"
        )


def check(
    config: Config,
    *,
    world_size: int | None,
    side_factor: int | None = None,
    num_text_tokens: int | None = None,
    may_be_random: bool = False,
) -> None:
    """Check a configuration for a number of ranks.

    Args:
        config: the configuration.
        world_size: number of ranks; None if unknown.
        side_factor: both sides of an image are multiples of it; None if unknown.
        num_text_tokens: tokens of a caption; None if unknown.
        may_be_random: accept a VAE and text encoder of full size with random weights, for measurements of speed.

    Raises:
        ConfigurationError: lists all problems.
    """
    problems = list(section_problems(config))
    sections_are_right = not problems
    problems += [*_folders(config), *_tasks(config), *([] if may_be_random else _random_parts(config))]
    if sections_are_right:
        problems += [*_times(config), *_image_sizes(config, side_factor), *_judged_sizes(config)]
        problems += rank_problems(config, world_size) if world_size is not None else []
        if side_factor is not None and num_text_tokens is not None:
            problems += _attention_lengths(config, side_factor, num_text_tokens)
    raise_all(ConfigurationError, redact(problems))
    for warning in _warnings(config) if side_factor is not None else ():
        log.warning("%s", warning)


def rank_problems(config: Config, world_size: int) -> list[str]:
    """List what keeps a configuration, whose sections are right, from starting on a number of ranks."""
    problems = list(_ranks(config, world_size))
    if not problems and config.performance.cuda_graphs:
        problems += _cuda_graphs(config, world_size)
    return problems


def _folders(config: Config) -> Iterator[str]:
    if not config.output_folder.strip():
        yield "output_folder is empty. Set a value, or remove the key."
    if "://" in config.output_folder:
        yield (
            f"output_folder is '{config.output_folder}', but must be a local folder. Set one, and "
            "trainer.checkpoint_folder=s3://bucket/prefix for checkpoints in an object store."
        )
    checkpoints = config.trainer.checkpoint_folder
    if checkpoints and Path(checkpoints).expanduser().resolve() == Path(config.output_folder).expanduser().resolve():
        yield (
            f"trainer.checkpoint_folder is '{checkpoints}', the output_folder, where the lease of the run is. Set "
            "another folder, or null for checkpoints/ in it."
        )
    paths = {
        "run_name": config.run_name,
        "output_folder": config.output_folder,
        "trainer.checkpoint_folder": config.trainer.checkpoint_folder or "",
    }
    for key, path in paths.items():
        if ("{" in path or "}" in path) and "${" not in path:  # Of a plan, whose locations may be missing.
            yield f"{key} is '{path}', and Composer fills in braces. Write ${{run_name}} for the name of the run."
    inside = posixpath.normpath(config.run_name.strip().lstrip("/"))
    if inside == "." or inside.split("/")[0] == "..":
        yield (
            f"run_name is '{config.run_name}', which is no subfolder of the folder of all runs. Change it, and set "
            "output_folder for another location."
        )


def _random_parts(config: Config) -> Iterator[str]:
    if config.task is Task.diffusion and (missing := config.model.missing_parts):
        others = (
            "model.text_encoder.path" if config.model.architecture.is_pixel else "model.vae and model.text_encoder.path"
        )
        yield (
            f"model.pretrained is null with model.architecture {config.model.architecture.value}, and the "
            f"{' and the '.join(missing)} would have random weights. Set model.pretrained, or {others}."
        )


def _tasks(config: Config) -> Iterator[str]:
    for section in config.model.ingredient_sections.values():
        yield from section.conflicts(config)
    if config.task is Task.diffusion:
        yield from _network(config)
    has_names = isinstance(config.data.streams, list) or config.plugins.train_dataset is None
    if config.validation is not None and config.validation.streams is None and not has_names:
        yield (
            "validation.streams is null, but with plugins.train_dataset no training stream has a name. Set "
            "validation.streams=[{name: 256-512}], or validation=null."
        )
    if config.performance.attention is AttentionBackend.flash and config.model.architecture.is_transformer:
        yield (
            "performance.attention is flash, which takes no mask, and a transformer masks the padding of captions. Set "
            "performance.attention=auto."
        )
    if config.task is Task.diffusion and config.model.architecture.is_pixel:
        yield from _pixels(config)
    if unknown := sorted(config.samples.scores.keys() - {*config.model.score_names}):
        yield (
            f"samples.scores has {', '.join(unknown)}, and model.score_conditioning has no such column. Remove it, or "
            "add the column."
        )
    if config.optimizer.name is OptimizerName.muon and config.trainer.precision is Precision.amp_fp16:
        yield (
            "optimizer.name is muon with trainer.precision amp_fp16, whose scaled gradients only AdamW takes. Set "
            "optimizer.name=adamw, or trainer.precision=amp_bf16."
        )
    is_transformer = config.task is Task.diffusion and config.model.architecture.is_transformer
    if config.optimizer.base_width is not None and not (is_transformer and config.model.lora is None):
        yield (
            "optimizer.base_width is set, and only transformers without LoRA have such learning rates. Remove it, or "
            "set task=diffusion model.architecture=transformer_m model.lora=null."
        )
    if config.operations.max_dollars is not None and config.plan.price_per_gpu_hour is None:
        yield "operations.max_dollars is set without plan.price_per_gpu_hour. Set it, or operations.max_gpu_hours."
    if config.task is not Task.autoencoder:
        return
    if config.trainer.parallelism is not Parallelism.ddp:
        yield "task is autoencoder, and the VAE is not sharded. Set trainer.parallelism=ddp."
    if config.model.architecture.is_pixel:
        yield "task is autoencoder, and model.architecture works on pixels. Set model.architecture=stable_diffusion_2."
    if config.data.representation is Representation.latents:
        yield "task is autoencoder, and the VAE is trained on images. Set data.representation=images."
    ignored = {f"model.{name}": "null" for name in config.model.ingredient_sections}
    ignored |= {"model.ingredients": "[]"} if config.model.ingredients else {}
    ignored |= {"trainer.activation_checkpointing": "false"} if config.trainer.activation_checkpointing else {}
    ignored |= {"performance.cuda_graphs": "false"} if config.performance.cuda_graphs else {}
    ignored |= {"samples.prompts": "[]"} if config.samples.prompts else {}
    for key, value in ignored.items():
        yield f"task is autoencoder, and {key} is for the diffusion model. Set {key}={value}."
    if config.plugins.train_dataset is not None and MISSING in (config.data.local, config.data.streams):
        yield (
            "task is autoencoder, whose latents are measured on data.streams after the training, also with "
            "plugins.train_dataset. Set data.local and data.streams."
        )


def _warnings(config: Config) -> Iterator[str]:
    """Name what is not refused, because runs that have begun with it continue."""
    data, objective, timeout = config.data, config.objective, config.trainer.dist_timeout
    if objective.zero_terminal_snr and objective.min_snr_gamma is not None:
        yield (
            "objective.min_snr_gamma gives the weight 0 to the last step of objective.zero_terminal_snr, with which "
            "sampling begins: the network does not learn it. Set objective.min_snr_gamma=null, or "
            "objective.zero_terminal_snr=false"
        )
    if data.num_workers and not 0 < data.loader_timeout < timeout:
        yield (
            f"data.loader_timeout is {data.loader_timeout:g}: the collectives of other ranks end first, after "
            f"trainer.dist_timeout={timeout:g}. Set it to {0.9 * timeout:g}"
        )
    if (section := config.model.score_conditioning) is not None:
        yield from (f"samples.scores: {problem}" for problem in section.out_of_range(config.samples.scores))
    if config.plugins.train_dataset is not None:
        for name in ("caption_weights", "crop", "horizontal_flip"):
            if getattr(data, name) != getattr(DataConfig, name):
                yield f"data.{name} has no effect on plugins.train_dataset"


def _network(config: Config) -> Iterator[str]:
    changes = config.model.network
    if changes.get("dropout"):
        yield (
            f"model.network.dropout is {changes['dropout']}, and its draws would depend on ranks and microbatches. "
            "Remove it."
        )
    for name in ("class_embed_type", "num_class_embeds"):
        if changes.get(name) is not None:
            yield f"model.network.{name} is {changes[name]}, and the data has no classes. Remove it."


def _pixels(config: Config) -> Iterator[str]:
    start = f"model.architecture is {config.model.architecture.value}, which works on pixels"
    if config.data.representation is Representation.latents:
        yield f"{start}, and data.representation is latents. Set data.representation=images."
    if config.objective.prediction_type is not PredictionType.flow:
        yield f"{start} and predicts images of rectified flow. Set objective.prediction_type=flow."


def _times(config: Config) -> Iterator[str]:
    total = config.planned_steps()
    duration = f"trainer.max_duration is '{config.trainer.max_duration}'"
    warmup = config.steps_of(config.schedule.warmup, "schedule.warmup")
    if warmup is not None and warmup > total:
        yield (
            f"schedule.warmup is '{config.schedule.warmup}', longer than the run ({duration}). Shorten it, as in "
            "schedule.warmup=0.1dur."
        )
    cooldown = config.steps_of(config.schedule.cooldown, "schedule.cooldown")
    if config.schedule.decay is Decay.wsd and (warmup or 0) + (cooldown or 0) > total:
        yield (
            f"schedule.warmup '{config.schedule.warmup}' and schedule.cooldown '{config.schedule.cooldown}' are longer "
            f"than the run ({duration}). Shorten one."
        )
    if (ema := config.algorithms.ema) is None:
        return
    start = config.steps_of(ema.start, "algorithms.ema.start")
    if start is not None and start >= total:
        yield (
            f"algorithms.ema.start is '{ema.start}', at or after the end of the run ({duration}). Start it earlier, or "
            "set algorithms.ema=null."
        )


def _image_sizes(config: Config, side_factor: int | None) -> Iterator[str]:
    if side_factor is None:
        return
    sizes = {"data.resolution": [config.data.resolution]}
    sections = {"data": config.data.streams, "validation": config.validation.streams if config.validation else None}
    for section, streams in sections.items():
        if isinstance(streams, list):
            for index, size in enumerate(image_sizes(streams, 0)):
                sizes[f"{section}.streams.{index}.resolution"] = list(size)
    for key, sides in sizes.items():
        if any(side % side_factor for side in sides):
            near = " x ".join(_near_multiples(side, side_factor) for side in sides)
            yield (
                f"{key} is {' x '.join(map(str, sides))}, but must be a multiple of {side_factor}, the factor by "
                f"which VAE and network shrink an image. Use {near}."
            )


def _judged_sizes(config: Config) -> Iterator[str]:
    """Discriminator and LPIPS have strides that small images do not survive."""
    settings = config.autoencoder
    weights = {key: weight for key in MIN_SIDES if (weight := getattr(settings, key)) > 0}
    if config.task is not Task.autoencoder or not weights:
        return
    side = min(min(size) for size in config.data.known_sizes)
    for key, weight in weights.items():
        start, end, min_side = f"autoencoder.{key} is {weight}", f"or autoencoder.{key} to 0.", MIN_SIDES[key]
        if side < min_side:
            yield f"{start}, which needs images of {min_side} pixels, not {side}. Set data.resolution higher, {end}"
        elif settings.equivariance is not None and side * settings.equivariance.min_scale < min_side:
            yield (
                f"{start}, and autoencoder.equivariance.min_scale is {settings.equivariance.min_scale}: images of "
                f"{side} pixels would shrink below {min_side}. Set it to {math.ceil(100 * min_side / side) / 100}, "
                f"{end}"
            )


def _attention_lengths(config: Config, side_factor: int, num_text_tokens: int) -> Iterator[str]:
    """On Hopper and from torch 2.11 on, cuDNN's backward pass with a mask may return NaN (pytorch #196678)."""
    attention, trainer = config.performance.attention, config.trainer
    is_cudnn = attention is AttentionBackend.cudnn or (
        attention is AttentionBackend.auto and not trainer.deterministic and trainer.precision is not Precision.fp32
    )
    if config.task is not Task.diffusion or not config.model.architecture.is_transformer or not is_cudnn:
        return
    for size in config.data.known_sizes:
        num_tokens = (size.height // side_factor) * (size.width // side_factor)
        for num in config.model.token_counts(num_tokens):
            if (num + num_text_tokens) % 128 == 64:
                yield (
                    f"performance.attention is {attention.value}, with which {num} tokens of an image of {size} pixels "
                    f"and {num_text_tokens} of a caption may get gradients of NaN on Hopper (cuDNN, pytorch #196678). "
                    "Set performance.attention=efficient, or another length of captions."
                )


def _ranks(config: Config, world_size: int) -> Iterator[str]:
    size, group = config.data.global_batch_size, group_size(config.data)
    if world_size % config.trainer.num_replicas:
        yield (
            f"trainer.num_replicas is {config.trainer.num_replicas}, which does not divide {world_size} ranks into "
            "equal groups. Set it to the number of nodes, or to 1."
        )
    legal = legal_world_sizes(size, group)
    if world_size not in legal:
        near = [*[n for n in legal if n < world_size][-1:], *[n for n in legal if n > world_size][:1]]
        unit = f"groups of {group} samples" if group > 1 else "samples"
        yield (
            f"data.global_batch_size is {size}, but {world_size} ranks cannot have equal numbers of {unit}. Start "
            f"{' or '.join(map(str, near))} ranks (legal are {', '.join(map(str, legal))}), or change it to "
            f"{_near_multiples(size, world_size * group)} (which makes it another experiment)."
        )


def _cuda_graphs(config: Config, world_size: int) -> Iterator[str]:
    trainer, data = config.trainer, config.data
    start = "performance.cuda_graphs is true, but"
    if trainer.parallelism is Parallelism.fsdp:
        yield f"{start} fsdp gathers weights to changing addresses. Set trainer.parallelism=ddp."
    if config.performance.compilation is Compilation.none:
        yield f"{start} only compiled parts become graphs. Set performance.compilation=auto."
    if trainer.activation_checkpointing:
        yield f"{start} recomputation runs graphs within others. Set trainer.activation_checkpointing=false."
    if microbatch_size(data, trainer.device_train_microbatch_size, world_size) < data.global_batch_size // world_size:
        yield (
            f"{start} a second microbatch would overwrite the gradients of the first. Raise "
            "trainer.device_train_microbatch_size, or start more ranks."
        )
    if len(data.known_sizes) > 1:
        yield f"{start} data.streams has images of several sizes. Set performance.cuda_graphs=false."


def _near_multiples(number: int, factor: int) -> str:
    below = number // factor * factor
    return " or ".join(str(n) for n in (below, below + factor) if n > 0)


def check_device(config: Config, *, num_gpus: int, bf16_supported: bool, local_world_size: int = 1) -> None:
    """Raise a MachineError with all problems if this machine, with its GPUs and ranks, cannot run a configuration."""
    raise_all(MachineError, list(_device_problems(config, num_gpus, bf16_supported, local_world_size)))


def _device_problems(config: Config, num_gpus: int, bf16_supported: bool, local_world_size: int) -> Iterator[str]:
    trainer = config.trainer
    if trainer.device.resolve(num_gpus) is not Device.gpu:
        if trainer.precision is not Precision.fp32:
            why = ", and no GPU is visible" if trainer.device is Device.auto else ""
            yield (
                f"trainer.precision is {trainer.precision.value} with trainer.device {trainer.device.value}{why}, but "
                "a CPU trains in fp32. Set trainer.precision=fp32."
            )
        return
    if num_gpus == 0:
        yield (
            "trainer.device is gpu, but no GPU is visible (torch.cuda.device_count() is 0). Check the driver and "
            "CUDA_VISIBLE_DEVICES, or set trainer.device=cpu trainer.precision=fp32."
        )
        return
    if trainer.precision is Precision.amp_bf16 and not bf16_supported:
        yield (
            "trainer.precision is amp_bf16, which the GPUs do not support (it needs compute capability 8.0). Set "
            "trainer.precision=amp_fp16."
        )
    if local_world_size > num_gpus:
        yield (
            f"{local_world_size} ranks were started on this machine, which has {num_gpus} visible GPUs. Start "
            f"{num_gpus}, or check CUDA_VISIBLE_DEVICES."
        )
