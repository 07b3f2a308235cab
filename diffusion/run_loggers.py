"""Where a run's numbers and pictures go, from the configuration."""

import hashlib
from pathlib import Path

from composer.loggers import LoggerDestination, TensorboardLogger, WandBLogger

from diffusion.callbacks.metrics_file import MetricsFile
from diffusion.config.schema import Config
from diffusion.plugins import build_plugin


def build_loggers(config: Config, folder: Path) -> list[LoggerDestination]:
    """Build the logger destinations of a run.

    Args:
        config: the configuration.
        folder: the run folder.

    Raises:
        ConfigurationError: a plug-in cannot be imported or built.
    """
    loggers: list[LoggerDestination] = []
    if config.loggers.file:
        loggers.append(MetricsFile(folder / "metrics.jsonl"))
    if config.loggers.tensorboard:
        loggers.append(TensorboardLogger(log_dir=str(folder / "tensorboard")))
    if (wandb := config.loggers.wandb) is not None:
        run_id = hashlib.sha256(f"{config.run_name} {folder.resolve()}".encode()).hexdigest()[:12]
        loggers.append(
            WandBLogger(
                project=wandb.project,
                entity=wandb.entity,
                group=config.group,
                name=config.run_name,
                tags=wandb.tags,
                init_kwargs={
                    "dir": str(folder),
                    "id": run_id,
                    "resume": "allow",
                    "mode": "offline" if wandb.offline else "online",
                },
            )
        )
    plugins = config.plugins.loggers
    loggers += [build_plugin(plugin, f"plugins.loggers.{i}") for i, plugin in enumerate(plugins)]
    return loggers
