"""The points of a sweep: values, configuration, command and folder."""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion.checkpointing.resume import FINISHED
from diffusion.config.loading import load_config, to_yaml
from diffusion.errors import ConfigurationError
from diffusion.operations.command import split_command
from diffusion.sweeps.choice import choose_values
from diffusion.sweeps.definition import Sweep

_ENVIRONMENT = re.compile(r"\$\{envvar:(\w+)\}")


@dataclass(frozen=True, kw_only=True)
class Point:
    """A run of a sweep."""

    name: str
    """Hash of the configuration: the same point has the same name in every sweep."""

    values: Mapping[str, Any]
    command: list[str]
    folder: Path

    @property
    def is_finished(self) -> bool:
        """Whether the run has reached its end."""
        return (self.folder / FINISHED).is_file()


def make_points(
    sweep: Sweep, folder: Path, *, interpreter: Sequence[str], overrides: Sequence[str], seed: int
) -> list[Point]:
    """Make the points of a sweep, and check the configuration of each.

    Args:
        sweep: the sweep file.
        folder: for a folder of each run.
        interpreter: words of the launcher, for `${interpreter}`.
        overrides: `key.sub=value` for all points.
        seed: of a random sweep.

    Raises:
        ConfigurationError: a configuration is wrong, or that of two points is the same.
    """
    points: dict[str, Point] = {}
    for values in choose_values(sweep.settings, seed):
        given = [*(f"{key}={json.dumps(value)}" for key, value in values.items()), *overrides]
        command = _fill_in(sweep, interpreter, given)
        yaml, all_overrides = split_command(command)
        same = [f"run_name={sweep.name}", f"group={sweep.name}", "output_folder=point"]
        config = load_config(yaml, [*all_overrides, *same])
        name = hashlib.sha256(to_yaml(config).encode()).hexdigest()[:10]
        if name in points:
            raise ConfigurationError(
                f"two points of {sweep.name} are the same run, {dict(points[name].values)} and {dict(values)}: leave a "
                "value out, or do not replace a key that is varied."
            )
        own = [f"run_name={sweep.name}-{name}", f"group={sweep.name}", f"output_folder={folder / name}"]
        points[name] = Point(name=name, values=values, command=[*command, *own], folder=folder / name)
    return list(points.values())


def _fill_in(sweep: Sweep, interpreter: Sequence[str], given: Sequence[str]) -> list[str]:
    macros = {
        "${env}": ["/usr/bin/env"],
        "${interpreter}": interpreter,
        "${program}": [sweep.settings.program],
        "${args_no_hyphens}": given,
    }
    words = [part for word in sweep.command for part in macros.get(word, [word])]
    return [_ENVIRONMENT.sub(lambda name: os.environ.get(name[1], name[1]), word) for word in words]
