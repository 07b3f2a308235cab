"""The configuration of a run: its sections, whose keys with types, defaults and meanings are in the modules beside.

The sections (here and in `model`, `ingredients`, `data`, `training`, `operations`) are dataclasses that YAML files and
overrides are merged into (`diffusion.config.loading`). A field without a sensible default is `MISSING`, in a YAML file
`???`, and must be set. Times are Composer's time strings: `10ba` batches (optimizer steps), `1000sp` samples,
`0.94dur` a fraction of the run.
"""

import math
from dataclasses import dataclass, field
from enum import Enum

from omegaconf import MISSING

from diffusion.config.data import DataConfig, ValidationConfig
from diffusion.config.fields import MAX_SEED, bounded, parse_time
from diffusion.config.model import AutoencoderConfig, InitFromConfig, ModelConfig, ObjectiveConfig, PerformanceConfig
from diffusion.config.operations import OperationsConfig, PlanConfig
from diffusion.config.training import (
    AlgorithmsConfig,
    LoggersConfig,
    NumberFormat,
    OptimizerConfig,
    Parallelism,
    PluginsConfig,
    SamplesConfig,
    ScheduleConfig,
    TrainerConfig,
)
from diffusion.errors import ConfigurationError


class Task(str, Enum):
    """Trained model."""

    diffusion = "diffusion"
    autoencoder = "autoencoder"


@dataclass(kw_only=True)
class Config:
    """A run."""

    run_name: str = MISSING
    """Name of the run; the same name continues it."""

    group: str | None = None
    """Group of related runs (phases, sweeps)."""

    output_folder: str = "runs/${run_name}"
    """Folder of the checkpoints, logs, images and the resolved configuration."""

    task: Task = Task.diffusion
    """Train the diffusion model, or the VAE."""

    seed: int = bounded(17, min=0, max=MAX_SEED)
    """Determines the initial weights, the order of the samples and every random number."""

    init_from: InitFromConfig | None = None
    """Initial weights of the network, or of the VAE with `task: autoencoder`; null: random."""

    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    autoencoder: AutoencoderConfig = field(default_factory=AutoencoderConfig)
    data: DataConfig = field(default_factory=DataConfig)
    validation: ValidationConfig | None = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    performance: PerformanceConfig = field(default_factory=PerformanceConfig)
    algorithms: AlgorithmsConfig = field(default_factory=AlgorithmsConfig)
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    loggers: LoggersConfig = field(default_factory=LoggersConfig)
    plugins: PluginsConfig = field(default_factory=PluginsConfig)
    operations: OperationsConfig = field(default_factory=OperationsConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)

    def planned_steps(self) -> int:
        """Length of the run in optimizer steps; a ConfigurationError if `trainer.max_duration` is not in batches."""
        duration, key = self.trainer.max_duration, "trainer.max_duration"
        if (time := parse_time(duration, key)).unit != "ba":
            raise ConfigurationError(f"{key} is '{duration}', but must be in batches (ba).")
        return int(time.value)

    def steps_of(self, text: str, key: str) -> float | None:
        """Convert a time of a key to optimizer steps; None where that takes the length of an epoch."""
        time, batch_size = parse_time(text, key), self.data.global_batch_size
        return time.in_steps(num_steps=self.planned_steps(), global_batch_size=batch_size)

    def interval_of(self, text: str, key: str) -> str:
        """Write an interval for Composer, which would round a share of the run up where its product is inexact."""
        steps = self.steps_of(text, key)
        return text if steps is None or not text.lower().endswith("dur") else f"{math.ceil(steps)}ba"

    @property
    def accumulates_locally(self) -> bool:
        """True if FSDP2 reduces the gradients of all microbatches at once; it adds them up in `reduce_precision`."""
        trainer = self.trainer
        return (
            self.performance.accumulate_locally
            and trainer.parallelism is Parallelism.fsdp
            and not trainer.reshard_after_forward
            and trainer.reduce_precision is NumberFormat.fp32
        )
