"""What a sweep file says, in the format of `wandb sweep`: method, parameters, and the command of a point."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from diffusion.config.loading import from_dict, read_yaml
from diffusion.errors import ConfigurationError


class Method(str, Enum):
    """How points are chosen."""

    grid = "grid"
    random = "random"


class Goal(str, Enum):
    """Which end of a metric is the better one."""

    minimize = "minimize"
    maximize = "maximize"


class Distribution(str, Enum):
    """How the values of a parameter are drawn."""

    categorical = "categorical"
    categorical_w_probabilities = "categorical_w_probabilities"
    uniform = "uniform"
    int_uniform = "int_uniform"
    q_uniform = "q_uniform"
    log_uniform = "log_uniform"
    log_uniform_values = "log_uniform_values"
    q_log_uniform_values = "q_log_uniform_values"
    normal = "normal"


@dataclass(kw_only=True)
class Parameter:
    """A key of the configuration that is varied."""

    value: Any = MISSING
    """The same in all points."""

    values: list[Any] | None = None
    """What it may be; in a grid all of them."""

    probabilities: list[float] | None = None
    """Of the values, in a random sweep."""

    distribution: Distribution | None = None
    """null: `categorical` with `values`, `int_uniform` between integers, `uniform` between other numbers."""

    min: Any = None
    """Smallest value; of `log_uniform` its natural logarithm."""

    max: Any = None
    """Largest value, included; of `log_uniform` its natural logarithm."""

    q: float = 1.0
    """Values of the `q_` distributions are multiples of it."""

    mu: float = 0.0
    """Mean of `normal`."""

    sigma: float = 1.0
    """Standard deviation of `normal`."""


@dataclass(kw_only=True)
class Metric:
    """What the points are ordered by."""

    name: str = "loss/train/total"
    """As in metrics.jsonl; the training loss is the mean of the last tenth of the steps, others are the last value."""

    goal: Goal = Goal.minimize
    """Which end is the better one."""


@dataclass(kw_only=True)
class SweepConfig:
    """A sweep."""

    name: str | None = None
    """Name of the sweep; null: that of the file."""

    description: str | None = None
    """For wandb's pages."""

    project: str | None = None
    """Of `wandb sweep`."""

    entity: str | None = None
    """Of `wandb sweep`."""

    program: str = "run.py"
    """What the command starts."""

    method: Method = Method.grid
    """Each combination of values, or `run_cap` random ones."""

    run_cap: int | None = None
    """Number of points of a random sweep."""

    metric: Metric = field(default_factory=Metric)
    parameters: dict[str, Parameter] = field(default_factory=dict)
    """Dotted keys of the run; `overrides` varies several together: each of its values is a group of dotted keys."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep file."""

    name: str
    settings: SweepConfig
    command: list[str]
    """Words, among them `${interpreter}`, `${program}`, a YAML file and `${args_no_hyphens}`."""


def read_sweep(path: Path) -> Sweep:
    """Read a sweep file.

    Raises:
        ConfigurationError: it says something that is not known here.
    """
    values = read_yaml(path)
    command = values.pop("command", None)  # Its ${...} are filled in for each point, and are no references.
    if values.get("method") == "bayes" or "early_terminate" in values:
        raise ConfigurationError(
            f"{path} needs wandb's server (method bayes, early_terminate): start it with `wandb sweep {path}` and "
            "`wandb agent`, or choose method grid or random and no early_terminate."
        )
    settings = from_dict(SweepConfig, values, str(path))
    if not isinstance(command, list) or "${args_no_hyphens}" not in command:
        raise ConfigurationError(
            f"{path} has no `command` that passes the parameters on: write command: ['${{env}}', '${{interpreter}}', "
            "'${program}', yamls/phase1.yaml, '${args_no_hyphens}']."
        )
    if not settings.parameters:
        raise ConfigurationError(f"{path} varies nothing: name keys of the configuration below `parameters`.")
    return Sweep(name=settings.name or path.stem, settings=settings, command=[str(word) for word in command])
