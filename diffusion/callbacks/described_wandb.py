"""A run of Weights & Biases that says what it is: its configuration, its captions, and none of its secrets."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diffusion.callbacks.continued_loggers import ContinuedWandB
from diffusion.callbacks.metrics_file import MetricsFile
from diffusion.config.secrets import redact, redact_arguments


class DescribedWandB(ContinuedWandB):
    """`ContinuedWandB` with the configuration of the run, captions under images, and a kind of job.

    Args:
        folder: the run folder, below which wandb writes.
        run_id: the run's id for wandb.
        metrics: the run's metrics file, as for `ContinuedWandB`.
        offline: write to files only.
        config: plain containers; secrets are hidden here.
        captions: of the images that are logged under a name.
        job_type: what tells this run from others of its group.
        options: further arguments of `WandBLogger`.
    """

    def __init__(
        self,
        folder: Path,
        run_id: str,
        *,
        metrics: MetricsFile | None,
        offline: bool,
        config: Mapping[str, Any],
        captions: Mapping[str, Sequence[str]],
        job_type: str,
        **options: Any,
    ) -> None:
        super().__init__(folder, run_id, metrics=metrics, offline=offline, **options)
        self.captions = captions
        self._init_kwargs |= {
            "config": wandb_config(config),
            "job_type": job_type,
            # wandb stores the command line, in which an override may be a secret.
            "settings": {"_args": redact_arguments(sys.argv[1:])},
        }

    def log_images(
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        *more: Any,
        **named: Any,
    ) -> None:
        """Log images, with captions where there is one for each."""
        captions = self.captions.get(name, ())
        if not channels_last or not isinstance(images, Sequence) or len(captions) != len(images):
            super().log_images(images, name, channels_last, step, *more, **named)
        elif self._enabled and not self._points.has(name, step):
            import wandb

            pictures = [
                wandb.Image(np.asarray(image), caption=caption) for image, caption in zip(images, captions, strict=True)
            ]
            wandb.log({name: pictures}, step=step)


def wandb_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as wandb's tables can show, filter and group it.

    Nested dictionaries become columns such as `data.streams.256-512.proportion`: lists of dictionaries become
    dictionaries, by `name` or number. Secrets are hidden.
    """
    plain = _named(redact(config))
    assert isinstance(plain, dict)
    return plain


def _named(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _named(child) for key, child in value.items()}
    if isinstance(value, list) and value and all(isinstance(child, Mapping) for child in value):
        names = [str(child.get("name", number)) for number, child in enumerate(value)]
        names = names if len(set(names)) == len(names) else [str(number) for number in range(len(value))]
        return {name: _named(child) for name, child in zip(names, value, strict=True)}
    return [_named(child) for child in value] if isinstance(value, list) else value
