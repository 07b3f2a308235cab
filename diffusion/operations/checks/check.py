"""Checks and the job that they check: a check has a name, the probes that it needs, and a function to verdicts."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar

from diffusion.config.schema import Config
from diffusion.config.training import Device
from diffusion.operations.checks.verdicts import Verdict

T = TypeVar("T")


class Stage(str, Enum):
    """Time of a check."""

    host = "host"
    """Before each start, in a process of its own on each host (`this_machine`): seconds, without model and data."""

    start = "start"
    """At the start of training, on each machine: a fraction of a second."""

    doctor = "doctor"
    """On request (`scripts/doctor.py`): minutes, with all ranks."""


@dataclass(kw_only=True)
class Job:
    """A job on this machine, with the results of its probes."""

    config: Config
    device: Device
    world_size: int = 1
    ranks_per_node: int = 1
    is_deep: bool = False
    """Whether to hash all shards."""

    timeout: float = 120.0
    """Seconds for which ranks wait for each other."""

    results: dict[Callable[["Job"], Any], Any] = field(default_factory=dict)
    """Results of probes."""

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return max(1, self.world_size // self.ranks_per_node)

    def probe(self, read: Callable[["Job"], T]) -> T:
        """Return the result of a probe, which runs once."""
        if read not in self.results:
            self.results[read] = read(self)
        return self.results[read]


@dataclass(frozen=True, kw_only=True)
class Check:
    """A check of a machine or a job."""

    name: str
    """Name of its verdicts, unless they have their own."""

    needs: tuple[Callable[[Job], Any], ...]
    """Probes whose results are the arguments of the function."""

    function: Callable[..., Verdict | Iterable[Verdict]]
    stages: tuple[Stage, ...] = (Stage.doctor,)
    needs_gpu: bool = False
    """Whether it is omitted for training on the CPU."""

    def run(self, job: Job) -> Iterator[Verdict]:
        """Run the check."""
        if self.needs_gpu and job.device is not Device.gpu:
            return
        found = self.function(*(job.probe(read) for read in self.needs))
        for verdict in [found] if isinstance(found, Verdict) else found:
            yield verdict if verdict.check else replace(verdict, check=self.name)


def run_checks(checks: Sequence[Check], job: Job, stage: Stage) -> list[Verdict]:
    """Run the checks of a stage in their order."""
    return [verdict for check in checks if stage in check.stages for verdict in check.run(job)]
