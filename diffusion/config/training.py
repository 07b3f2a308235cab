"""Configuration of how it is trained: optimizer, Trainer, averages, loggers, plug-ins."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING


class Decay(str, Enum):
    """Shape of the learning rate after the warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Parallelism(str, Enum):
    """How a model is spread over ranks."""

    fsdp = "fsdp"
    ddp = "ddp"


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
    """Where training runs."""

    auto = "auto"
    cpu = "cpu"
    gpu = "gpu"


@dataclass(kw_only=True)
class OptimizerConfig:
    """AdamW."""

    lr: float = 1e-4
    """Learning rate after the warm-up."""

    weight_decay: float = 0.01
    """Decoupled weight decay."""

    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay of the first and of the second moment."""

    eps: float = 1e-8
    """Added to the root of the second moment."""

    max_grad_norm: float | None = None
    """Gradients of a step are scaled down to this norm, taken over all weights and ranks; null: no clipping."""


@dataclass(kw_only=True)
class ScheduleConfig:
    """Learning rate over time."""

    warmup: str = "10000ba"
    """Linear from 0 over this time, in batches or as a share of the run (`0.1dur`)."""

    decay: Decay = Decay.constant
    """Afterwards: constant, or to `final` of the learning rate at the end of the run."""

    final: float = 0.0
    """Fraction of the learning rate that `linear` and `cosine` end at."""


@dataclass(kw_only=True)
class TrainerConfig:
    """Composer's Trainer."""

    max_duration: str = MISSING
    """Length of the run, in batches (`550000ba`)."""

    device_train_microbatch_size: int | None = None
    """Samples per forward pass, at most: the largest divisor of the rank's share up to this number is used, with
    data.mixing groups of data.group_size. Gradients are accumulated. Null: the whole share, or a group."""

    device: Device = Device.auto
    """auto takes a GPU where there is one."""

    precision: Precision = Precision.amp_bf16
    """Arithmetic; amp needs a GPU."""

    parallelism: Parallelism = Parallelism.fsdp
    """Sharded data parallelism (FSDP2), or DDP."""

    reshard_after_forward: bool = False
    """Sharded weights as well (FULL_SHARD); false shards gradients and optimizer state only (SHARD_GRAD_OP)."""

    num_replicas: int = 1
    """With fsdp: groups of ranks that each hold the sharded model once (HSDP), such as one group per node; gradients
    are averaged between the groups."""

    reduce_precision: NumberFormat = NumberFormat.fp32
    """With fsdp: number format in which ranks average gradients; 16 bits halve what the network carries, rounded. fp16
    with precision amp_fp16 only, which scales them."""

    activation_checkpointing: bool = False
    """Recompute each block's activations in the backward pass."""

    deterministic: bool = False
    """Only bitwise repeatable kernels on GPUs; slower."""

    eval_interval: str = "10000ba"
    """Time between evaluations."""

    save_interval: str = "10000ba"
    """Time between checkpoints."""

    checkpoint_folder: str | None = None
    """Where the checkpoints of this run alone go: a folder, or `s3://bucket/prefix`; null: the run folder."""

    async_checkpoints: bool = False
    """Write and upload checkpoints while training goes on; takes host memory for a copy of the rank's state."""

    store_patience: float = 300.0
    """Seconds for which an object store that does not answer is tried again before the run ends; at most 20 at the
    start of the run."""

    keep_checkpoints: int = -1
    """How many of the newest checkpoints stay; -1 keeps all."""

    keep_every: str | None = None
    """The first checkpoint at or after each multiple of this time (`100000ba`) stays for ever, too; null: none."""

    autoresume: bool = True
    """Continue from the newest complete checkpoint in the run folder."""

    dist_timeout: float = 600.0
    """Seconds after which a collective operation that not all ranks have reached ends the run."""

    init_timeout: float = 3600.0
    """The same in the first 100 steps of a start that compiles (performance.compilation), where each rank compiles when
    it meets a new size of images."""

    progress_bar: bool = True
    """Show progress on rank 0."""


@dataclass(kw_only=True)
class PowerEMAConfig:
    """Power-function averages, from which an average of any width is made after the training (Karras et al. 2024)."""

    relative_widths: list[float] = field(default_factory=lambda: [0.05, 0.10])
    """Standard deviation of each profile over the time since the start, below 0.2887."""

    snapshot_interval: str = MISSING
    """Time between files of each average in the run folder, in batches (`5000ba`); the last step is stored as well."""

    snapshot_precision: NumberFormat = NumberFormat.fp16
    """Of the tensors in these files."""


@dataclass(kw_only=True)
class EMAConfig:
    """Moving averages of the weights, started late. The first is evaluated and sampled; each takes 4 bytes a weight."""

    start: str = MISSING
    """When they are allocated as copies of the weights: `800000ba`, `0.94dur`."""

    decays: list[float] = field(default_factory=lambda: [0.9999])
    """Exponential averages: smoothing per update of each."""

    power: PowerEMAConfig | None = None
    """Power-function averages, which come after the exponential ones; null: none."""

    interval: str = "1ba"
    """Time between updates."""

    evaluate: bool = True
    """Evaluate and sample with the first average, once it has started."""

    @property
    def num_averages(self) -> int:
        """How many are kept."""
        return len(self.decays) + (len(self.power.relative_widths) if self.power is not None else 0)


@dataclass(kw_only=True)
class AlgorithmsConfig:
    """What changes training itself."""

    ema: EMAConfig | None = None
    """Moving averages of the weights; null: none."""


@dataclass(kw_only=True)
class SamplesConfig:
    """Grids of images for fixed prompts and seeds, written to the run folder and to the loggers."""

    prompts: list[str] = field(default_factory=list)
    """Prompts; an empty list draws no grids."""

    interval: str = "10000ba"
    """Time between grids."""

    guidance_scale: float = 3.0
    """Classifier-free guidance (Ho and Salimans 2022)."""

    num_inference_steps: int = 50
    """DDIM steps."""

    seed: int = 0
    """Seed of the first prompt's initial latents; the others follow."""


@dataclass(kw_only=True)
class WandbConfig:
    """Weights & Biases."""

    project: str = "diffusion"
    """Project."""

    entity: str | None = None
    """Team or user; null is the account's default."""

    offline: bool = True
    """Write to the run folder only, for a later `wandb sync`; needs no account."""

    tags: list[str] = field(default_factory=list)
    """Tags of the run."""


@dataclass(kw_only=True)
class LoggersConfig:
    """Where numbers and images go."""

    file: bool = True
    """`metrics.jsonl` in the run folder."""

    tensorboard: bool = False
    """Event files in the run folder."""

    wandb: WandbConfig | None = None
    """Weights & Biases; null is none."""

    stream_loss_interval: int = 10
    """Steps over which the training loss of each stream is averaged, where there are several."""

    utilisation_interval: int = 50
    """Steps between two readings of how busy machines and loader workers are, and how long training waits for data."""


@dataclass(kw_only=True)
class Plugin:
    """An object of the user's own."""

    path: str = MISSING
    """Import path of a class or function, `package.module.Name`; it is called with `arguments`."""

    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments."""


@dataclass(kw_only=True)
class PluginsConfig:
    """Objects of the user's own, by import path."""

    callbacks: list[Plugin] = field(default_factory=list)
    """Composer callbacks."""

    loggers: list[Plugin] = field(default_factory=list)
    """Composer logger destinations."""

    algorithms: list[Plugin] = field(default_factory=list)
    """Composer algorithms."""

    train_dataset: Plugin | None = None
    """A torch dataset in place of the streams, whose samples are dictionaries with the keys of `BatchKey`."""


@dataclass(kw_only=True)
class PlanConfig:
    """What `--dry-run` computes time and cost from."""

    num_gpus: int | None = None
    """GPUs of the fleet; null: as many as the launcher started."""

    gpus_per_node: int = 8
    """GPUs of one machine, for what each reads and keeps."""

    images_per_second: float | None = None
    """Measured throughput of the fleet; null: days and cost are not known."""

    price_per_gpu_hour: float | None = None
    """In dollars."""

    gpu_memory_gb: float | None = None
    """Memory of a GPU, for the largest microbatch beside those of 40, 80, 141 and 192 GB; null: these only."""

    num_samples: int | None = None
    """Samples of the data set, where its index cannot be read."""

    image_kb: float | None = None
    """Size of an image's file on average, where training reads images."""
