"""What a supervisor has to know of a command that starts a job: read from the YAML file and the overrides in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diffusion.config.loading import load_config
from diffusion.config.schema import Config
from diffusion.errors import ConfigurationError
from diffusion.operations.beats import beats_folder
from diffusion.operations.supervision import Places


@dataclass(frozen=True, kw_only=True)
class Supervised:
    """A job that is to be supervised."""

    config: Config
    arguments: tuple[str, ...]
    """The YAML and the overrides."""

    places: Places
    webhook: str | None
    """Address for events, a secret."""


def read_command(command: Sequence[str], environment: Mapping[str, str]) -> Supervised:
    """Read where a job leaves its traces, and how it is to be supervised.

    Args:
        command: launcher, program, the YAML of the run, and `key.sub=value`.
        environment: where the address of the webhook is.

    Raises:
        ConfigurationError: the command names no YAML, the configuration is wrong, or the webhook is not set.
    """
    yaml, overrides = split_command(command)
    config = load_config(yaml, overrides)
    name = config.operations.supervision.webhook_variable
    if name is not None and not environment.get(name):
        raise ConfigurationError(
            f"operations.supervision.webhook_variable is {name}, but there is no such environment variable. Set it to "
            "the address that events are posted to, or the key to null"
        )
    run = Path(config.output_folder).expanduser()
    return Supervised(
        config=config,
        arguments=(yaml, *overrides),
        places=Places(run=run, beats=beats_folder(config, run)),
        webhook=environment[name] if name is not None else None,
    )


def split_command(command: Sequence[str]) -> tuple[str, list[str]]:
    """The YAML file and the overrides in a command that starts a job.

    Raises:
        ConfigurationError: the command names no YAML.
    """
    place = next((i for i, argument in enumerate(command) if Path(argument).suffix in (".yaml", ".yml")), None)
    if place is None:
        raise ConfigurationError(
            f"the command '{' '.join(command)}' names no YAML file: give the whole command that starts the job, as in "
            "composer run.py yamls/phase1.yaml"
        )
    return command[place], [word for word in command[place + 1 :] if "=" in word and not word.startswith("-")]
