"""What differs between this start of a run and the one that wrote the checkpoint, and what of it may."""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from diffusion.checkpointing.reading import read_record
from diffusion.config.checks import is_location
from diffusion.config.loading import to_yaml
from diffusion.config.schema import Config, Task
from diffusion.config.secrets import to_public_yaml
from diffusion.errors import ConfigurationError

log = logging.getLogger(__name__)

_TRAINED = {
    Task.diffusion: re.compile(r"task|model\.(?!local_files_only|low_precision_norms).*|objective\..*"),
    Task.autoencoder: re.compile(
        r"task|model\.architecture|autoencoder\.(?!adversarial_start|discriminator_lr|initial_logvar).*"
    ),
}
"""Keys that say what is trained: with others it is another run."""

Change = tuple[str, Any, Any]
"""Key, value in the checkpoint, value now."""


def check_changes(config: Config, checkpoint: Path, place: str) -> None:
    """Refuse to go on with another model or objective, and tell what else is new.

    Args:
        config: the configuration of this start.
        checkpoint: what is to be continued.
        place: what to call it in messages.

    Raises:
        ConfigurationError: another model or objective is configured than the checkpoint was trained with.
        DataError: the checkpoint does not say what it was trained as.
    """
    changes = list(_changes(yaml.safe_load(read_record(checkpoint)["config"]), config))
    refused = [change for change in changes if _is_another_run(config.task, change)]
    if refused:
        raise ConfigurationError(
            f"{place} cannot be continued, since it was trained as something else: {_listed(refused)}. Set "
            f"{'this' if len(refused) == 1 else 'these'} back; or begin another run, with another run_name or "
            "output_folder, from its weights if that is wanted (init_from.checkpoint)"
        )
    if changes:
        log.info("settings that are others than in %s: %s", place, _listed(changes))


def _changes(before: dict[str, Any], config: Config) -> Iterator[Change]:
    """Keys of today's schema whose values differ; a checkpoint that does not know a key has its default."""
    now, defaults = yaml.safe_load(to_public_yaml(config)), yaml.safe_load(to_yaml(Config()))
    for section, value in now.items():
        was = before.get(section, defaults[section])
        if not (isinstance(value, dict) and isinstance(was, dict)):
            was, value = {"": was}, {"": value}
        known = defaults[section] if isinstance(defaults[section], dict) else {}
        for key, one in value.items():
            other = was.get(key, known.get(key))
            if other != one:
                yield f"{section}.{key}".rstrip("."), other, one


def _is_another_run(task: Task, change: Change) -> bool:
    """Whether a change is one of what is trained. Weights that are only read may lie elsewhere now."""
    key, was, value = change
    is_moved = is_location(key) and was is not None and value is not None
    return _TRAINED[task].fullmatch(key) is not None and not is_moved


def _listed(changes: list[Change]) -> str:
    return "; ".join(f"{key} (was {_shown(was)}, is {_shown(value)})" for key, was, value in changes)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
