"""Where a run's numbers and images go, from the configuration."""

import hashlib
from pathlib import Path

from composer.loggers import LoggerDestination

from diffusion.callbacks.continued_loggers import ContinuedTensorboard
from diffusion.callbacks.described_wandb import DescribedWandB
from diffusion.callbacks.metrics_file import MetricsFile
from diffusion.callbacks.starts_file import StartsFile
from diffusion.config.loading import to_dict
from diffusion.config.schema import Config
from diffusion.plugins import build_plugin

JOB_TYPE = "train"
"""For wandb, of the runs of training in a group."""


def build_loggers(config: Config, folder: Path) -> list[LoggerDestination]:
    """Build the logger destinations of a run.

    Args:
        config: the configuration.
        folder: the run folder.

    Raises:
        ConfigurationError: a plug-in cannot be imported or built.
    """
    loggers: list[LoggerDestination] = [StartsFile(folder)]  # First: it looks at what the last start has left.
    metrics = MetricsFile(folder / "metrics.jsonl") if config.loggers.file else None
    if metrics is not None:  # Before others: when a run continues, others take from it what they have lost.
        loggers.append(metrics)
    if config.loggers.tensorboard:
        loggers.append(ContinuedTensorboard(folder / "tensorboard"))
    if (wandb := config.loggers.wandb) is not None:
        run_id = hashlib.sha256(f"{config.run_name} {folder.resolve()}".encode()).hexdigest()[:12]
        loggers.append(
            DescribedWandB(
                folder,
                run_id,
                metrics=metrics,
                offline=wandb.offline,
                config=to_dict(config),
                captions={"samples": config.samples.prompts},
                job_type=JOB_TYPE,
                project=wandb.project,
                entity=wandb.entity,
                group=config.group,
                name=config.run_name,
                tags=wandb.tags,
            )
        )
    plugins = config.plugins.loggers
    loggers += [build_plugin(plugin, f"plugins.loggers.{i}", LoggerDestination) for i, plugin in enumerate(plugins)]
    return loggers
