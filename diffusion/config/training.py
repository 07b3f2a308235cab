"""Configuration of training: optimizer, Trainer, averages, loggers, plug-ins."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from omegaconf import MISSING

from diffusion.config.fields import MAX_SECONDS, MAX_SEED, Plugin, bounded, time
from diffusion.config.model import NUM_TIMESTEPS
from diffusion.config.operations import PrometheusConfig

MAX_WIDTH = 1 / math.sqrt(12)
"""Relative width of the plain mean of all weights; a wider profile would weight the oldest most."""


class Decay(str, Enum):
    """Shape of the learning rate after the warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    wsd = "wsd"


class OptimizerName(str, Enum):
    """Optimizer."""

    adamw = "adamw"
    muon = "muon"


class Parallelism(str, Enum):
    """Distribution of a model over ranks."""

    fsdp = "fsdp"
    ddp = "ddp"


class Collectives(str, Enum):
    """Library of the collective operations of GPUs."""

    nccl = "nccl"
    smddp = "smddp"


class Precision(str, Enum):
    """Arithmetic of the forward and backward pass; master weights are fp32 in each."""

    fp32 = "fp32"
    amp_bf16 = "amp_bf16"
    amp_fp16 = "amp_fp16"


class NumberFormat(str, Enum):
    """Number format of tensors in files and on the network: 4, 2 and 2 bytes."""

    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"


class Device(str, Enum):
    """Device of training."""

    auto = "auto"
    cpu = "cpu"
    gpu = "gpu"

    def resolve(self, num_gpus: int) -> "Device":
        """Resolve `auto` on a machine with a number of GPUs."""
        if self is not Device.auto:
            return self
        return Device.gpu if num_gpus else Device.cpu


@dataclass(kw_only=True)
class OptimizerConfig:
    """AdamW, or Muon."""

    name: OptimizerName = OptimizerName.adamw
    """muon: Muon (Jordan et al. 2024) for matrices of hidden layers, with updates of the size of AdamW's, and AdamW for
    the rest."""

    lr: float = bounded(1e-4, min=0)
    """Learning rate after the warm-up."""

    base_width: int | None = bounded(None, min=1)
    """Width of a transformer (its `hidden_size`) for which `lr` was found. Learning rates of matrices and the random
    output layer follow the width of the network, so that the best `lr` stays (muP). Null: they do not."""

    weight_decay: float = bounded(0.01, min=0)
    """Decoupled weight decay."""

    betas: list[float] = bounded([0.9, 0.999], min=0, below=1)
    """Decay of the first and of the second moment."""

    eps: float = bounded(1e-8, above=0)
    """Added to the root of the second moment."""

    momentum: float = bounded(0.95, min=0, below=1)
    """Decay of Muon's momentum."""

    max_grad_norm: float | None = bounded(None, above=0)
    """Largest norm of the gradients of a step, over all weights and ranks; null: no clipping."""

    def problems(self, key: str) -> Iterator[str]:
        """Describe wrong relations."""
        if len(self.betas) != 2:
            yield f"{key}.betas is {self.betas}, but must be two numbers, such as [0.9, 0.999]."


@dataclass(kw_only=True)
class ScheduleConfig:
    """Learning rate over time."""

    warmup: str = time("10000ba", units="ba dur")
    """Length of the linear increase from 0, in batches or as a share of the run (`0.1dur`)."""

    decay: Decay = Decay.constant
    """After the warm-up: constant, or down to `final` of the learning rate at the end of the run. wsd (warm-up, stable,
    decay): constant up to `cooldown`, and then 1 - sqrt."""

    cooldown: str = time("0.2dur", units="ba dur", positive=True)
    """Length of the decay of `wsd` at the end of the run, in batches or as a share of the run."""

    final: float = bounded(0.0, min=0, max=1)
    """Fraction of the learning rate at the end of `linear`, `cosine` and `wsd`."""


@dataclass(kw_only=True)
class TrainerConfig:
    """Composer's Trainer."""

    max_duration: str = time(MISSING, units="ba", positive=True)
    """Length of the run, in batches (`550000ba`)."""

    device_train_microbatch_size: int | None = bounded(None, min=1)
    """Maximum of samples per forward pass: the largest divisor of the rank's share up to this number is used, with
    data.mixing groups of data.group_size. Gradients are accumulated. Null: the whole share, or a group."""

    device: Device = Device.auto
    """auto: a GPU if there is one."""

    precision: Precision = Precision.amp_bf16
    """Number format of the arithmetic; amp needs a GPU."""

    parallelism: Parallelism = Parallelism.fsdp
    """Sharded data parallelism (FSDP2), or DDP."""

    collectives: Collectives = Collectives.nccl
    """Library of the collective operations of GPUs: NCCL, or SageMaker's (smddp), which the container must hold for its
    torch."""

    reshard_after_forward: bool = False
    """Also shard weights (FULL_SHARD); false: shard gradients and optimizer state only (SHARD_GRAD_OP)."""

    num_replicas: int = bounded(1, min=1)
    """With fsdp: groups of ranks with one sharded model each (HSDP), such as one group per node; gradients are averaged
    between the groups."""

    reduce_precision: NumberFormat = NumberFormat.fp32
    """With fsdp: number format in which ranks average gradients; 16 bits halve the network traffic, with rounding. fp16
    only with precision amp_fp16, which scales the loss."""

    activation_checkpointing: bool = False
    """Recompute each block's activations in the backward pass."""

    deterministic: bool = False
    """Use only bitwise repeatable kernels on GPUs; slower."""

    eval_interval: str = time("10000ba", positive=True)
    """Time between evaluations."""

    save_interval: str = time("10000ba", positive=True)
    """Time between checkpoints."""

    checkpoint_folder: str | None = None
    """Location of the checkpoints of this run alone: a folder, or `s3://bucket/prefix`; null: the run folder."""

    async_checkpoints: bool = False
    """Write and upload checkpoints during training; needs host memory for a copy of the rank's state."""

    store_timeout: float = bounded(300.0, above=0)
    """Seconds of attempts to reach an object store before the run ends; at most 20 at the start of the run."""

    keep_checkpoints: int = -1
    """Number of newest checkpoints that are kept; -1: all."""

    keep_every: str | None = time(None, units="ba sp dur", positive=True)
    """Also keep the first checkpoint at or after each multiple of this time (`100000ba`); null: none."""

    autoresume: bool = True
    """Continue from the newest complete checkpoint in the run folder; false: begin anew, in a folder without any."""

    dist_timeout: float = bounded(600.0, above=0, max=MAX_SECONDS)
    """Timeout of collective operations, in seconds."""

    compile_timeout: float = bounded(3600.0, above=0, max=MAX_SECONDS)
    """Timeout of collective operations, in seconds, while ranks compile (performance.compilation): in the first 100
    steps of a start, with `data.mixing: groups` in all, since a rare size of images may come late."""

    progress_bar: bool = True
    """Show progress on rank 0: a bar in a terminal, elsewhere a line each half minute."""

    def problems(self, key: str) -> Iterator[str]:
        """Describe wrong relations."""
        if self.keep_checkpoints != -1 and self.keep_checkpoints < 1:
            yield f"{key}.keep_checkpoints is {self.keep_checkpoints}, but must be at least 1, or -1 for all."
        if self.parallelism is Parallelism.ddp:
            if self.reshard_after_forward:
                yield (
                    f"{key}.reshard_after_forward is true with {key}.parallelism ddp, which shards nothing. Set "
                    f"{key}.parallelism=fsdp or {key}.reshard_after_forward=false."
                )
            for name, default in (("num_replicas", 1), ("reduce_precision", NumberFormat.fp32)):
                value = getattr(self, name)
                if value != default:
                    yield (
                        f"{key}.{name} is {getattr(value, 'value', value)}, but has no effect with {key}.parallelism "
                        f"ddp. Set {key}.parallelism=fsdp, or remove {key}.{name}."
                    )
        if self.reduce_precision is NumberFormat.fp16 and self.precision is not Precision.amp_fp16:
            yield (
                f"{key}.reduce_precision is fp16 with {key}.precision {self.precision.value}, which does not scale the "
                f"loss: small gradients would vanish. Set {key}.reduce_precision=bf16."
            )
        folder = self.checkpoint_folder
        if folder is not None and not folder.strip():
            yield f"{key}.checkpoint_folder is empty. Set a value, or remove the key."
        elif folder is not None and "://" in folder and not re.match("s3://[^/]", folder):
            yield (
                f"{key}.checkpoint_folder is '{folder}', but must be a folder or s3://bucket/prefix. S3_ENDPOINT_URL "
                "is the address of other stores with the S3 protocol."
            )


@dataclass(kw_only=True)
class PowerEMAConfig:
    """Power-function averages, which give an average of any width after training (Karras et al. 2024)."""

    relative_widths: list[float] = bounded([0.05, 0.10], above=0, below=MAX_WIDTH)
    """Standard deviation of each profile over the time since the start, less than that of the plain mean."""

    snapshot_interval: str = time(MISSING, units="ba", positive=True)
    """Time between files of each average in the run folder, in batches (`5000ba`); the last step is stored as well."""

    snapshot_precision: NumberFormat = NumberFormat.fp16
    """Number format of the tensors in these files."""

    def problems(self, key: str) -> Iterator[str]:
        """Describe wrong relations."""
        if not self.relative_widths:
            yield f"{key}.relative_widths is empty. Give widths, such as [0.05, 0.10], or set {key}=null."
        if len(set(self.relative_widths)) < len(self.relative_widths):
            yield f"{key}.relative_widths is {self.relative_widths}, with a repeated average. Name each once."


@dataclass(kw_only=True)
class EMAConfig:
    """Moving averages of the weights. The first is evaluated and sampled; each takes 4 bytes per weight."""

    start: str = time(MISSING, units="ba sp dur")
    """Time of their allocation as copies of the weights: `800000ba`, `0.94dur`. A resumption that would move
    their step, as a longer run moves `0.94dur`, is refused, as are averages whose step has passed."""

    decays: list[float] = bounded([0.9999], min=0, below=1)
    """Exponential averages: decay of each per update."""

    power: PowerEMAConfig | None = None
    """Power-function averages, listed after the exponential ones; null: none."""

    interval: str = time("1ba", units="ba", positive=True)
    """Time between updates, in batches."""

    evaluate: bool = True
    """Evaluate and sample with the first average, once it has started."""

    @property
    def num_averages(self) -> int:
        """Number of averages."""
        return len(self.decays) + (len(self.power.relative_widths) if self.power is not None else 0)

    def problems(self, key: str) -> Iterator[str]:
        """Describe wrong relations."""
        if self.power is None and not self.decays:
            yield f"{key}.decays is empty, so that there is no average. Name one, or set {key}=null."
        if len(set(self.decays)) < len(self.decays):
            yield f"{key}.decays is {self.decays}, with a repeated average. Name each once."


@dataclass(kw_only=True)
class AlgorithmsConfig:
    """Changes of the training algorithm."""

    ema: EMAConfig | None = None
    """Moving averages of the weights; null: none."""


@dataclass(kw_only=True)
class SamplesConfig:
    """Grids of generated images for fixed prompts and seeds, in the run folder and the loggers."""

    prompts: list[str] = field(default_factory=list)
    """Prompts; an empty list: no grids."""

    interval: str = time("10000ba", positive=True)
    """Time between grids."""

    guidance_scale: float = bounded(3.0, min=0)
    """Scale of the classifier-free guidance (Ho and Salimans 2022)."""

    num_inference_steps: int = bounded(50, min=1, max=NUM_TIMESTEPS)
    """Steps of the sampler: DDIM, or Euler for rectified flow."""

    seed: int = bounded(0, min=0, max=MAX_SEED)
    """Seed of the initial latents of the first prompt; the following prompts have the following seeds."""

    scores: dict[str, float] = field(default_factory=dict)
    """Scores to ask for, by name; those of `model.score_conditioning` that are not here are "none"."""


@dataclass(kw_only=True)
class WandbConfig:
    """Weights & Biases."""

    project: str = "diffusion"
    """Name of the project."""

    entity: str | None = None
    """Team or user; null: the default of the account."""

    offline: bool = True
    """Only write to the run folder, for a later `wandb sync`; needs no account."""

    tags: list[str] = field(default_factory=list)
    """Tags of the run."""


@dataclass(kw_only=True)
class LoggersConfig:
    """Destinations of numbers and images."""

    file: bool = True
    """Write `metrics.jsonl` in the run folder."""

    tensorboard: bool = False
    """Write TensorBoard event files in the run folder."""

    wandb: WandbConfig | None = None
    """Weights & Biases; null: none."""

    prometheus: PrometheusConfig | None = None
    """Endpoint of rank 0 with throughput, losses and costs; null: none."""

    stream_loss_interval: int = bounded(10, min=1)
    """Steps over which the training loss of each stream is averaged, if there are several streams."""

    utilisation_interval: int = bounded(50, min=1)
    """Steps between measurements of the utilisation of machines and loader workers, and of waits for data; ranks also
    exchange their bad images then."""


@dataclass(kw_only=True)
class PluginsConfig:
    """User-defined objects, by import path."""

    callbacks: list[Plugin] = field(default_factory=list)
    """Composer callbacks."""

    loggers: list[Plugin] = field(default_factory=list)
    """Composer logger destinations."""

    algorithms: list[Plugin] = field(default_factory=list)
    """Composer algorithms."""

    train_dataset: Plugin | None = None
    """A torch dataset that replaces the streams; its samples are dictionaries with the keys of `BatchKey`. Of `data`,
    batch sizes and the options of loader workers apply; captions, crops and flips are its own."""
