"""Ways to run one recipe: a covering set, in which every pair of values occurs."""

import itertools
import random
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One way to run the same recipe."""

    representation: str = "latents"
    """`latents` or `images`."""

    buckets: str = "one"
    """`one` or `several`."""

    world_size: int = 1
    """Ranks that it starts with."""

    microbatch: int = 4
    """Samples per rank and forward pass."""

    workers: int = 0
    """Loader processes per rank."""

    parallelism: str = "fsdp"
    """`fsdp` or `ddp`."""

    interruption: str = "none"
    """`none`, `kill` (-9) or `term` (SIGTERM) at a random step, resumed on another number of ranks."""

    @property
    def data_setting(self) -> tuple[str, str]:
        """Runs of one setting train on the same numbers, and so have the same losses."""
        return self.representation, self.buckets

    @property
    def name(self) -> str:
        """For folders and tables."""
        values = (self.representation, self.buckets, f"w{self.world_size}", f"m{self.microbatch}", f"l{self.workers}")
        return "-".join((*values, self.parallelism, self.interruption))


VALUES: dict[str, tuple[Any, ...]] = {
    "representation": ("latents", "images"),
    "buckets": ("one", "several"),
    "world_size": (1, 2, 3, 5, 6),
    "microbatch": (2, 4),
    "workers": (0, 2),
    "parallelism": ("fsdp", "ddp"),
    "interruption": ("none", "kill", "term"),
}


def references() -> list[RunSpec]:
    """One undisturbed run on one rank for each data setting, with which the others are compared."""
    settings = itertools.product(VALUES["representation"], VALUES["buckets"])
    return [RunSpec(representation=representation, buckets=buckets) for representation, buckets in settings]


def product() -> list[RunSpec]:
    """Every combination, references first."""
    every = [RunSpec(**dict(zip(VALUES, values, strict=True))) for values in itertools.product(*VALUES.values())]
    return [*references(), *(spec for spec in every if spec not in references())]


def pairs(spec: RunSpec) -> set[tuple[str, Any, str, Any]]:
    """The pairs of values that occur in a run."""
    values = [(field.name, getattr(spec, field.name)) for field in fields(spec)]
    return {(*first, *second) for first, second in itertools.combinations(values, 2)}


def covering_set(seed: int = 0) -> list[RunSpec]:
    """The references, and few more runs in which every pair of values of any two properties occurs.

    Greedy: the combination that covers the most missing pairs is next. References are compared with themselves, so
    they cover nothing.
    """
    candidates = product()[len(references()) :]
    random.Random(seed).shuffle(candidates)
    missing = set().union(*(pairs(spec) for spec in candidates))
    chosen = references()
    while missing:
        best = max(candidates, key=lambda spec: len(pairs(spec) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def short_set() -> list[RunSpec]:
    """One reference, and two runs that differ in ranks, microbatches, workers, sharding and interruption."""
    return [
        RunSpec(),
        RunSpec(world_size=2, microbatch=2, workers=2, interruption="kill"),
        RunSpec(world_size=3, parallelism="ddp", interruption="term"),
    ]


def resume_size(spec: RunSpec) -> int:
    """Ranks that an interrupted run continues on."""
    return {1: 2, 2: 3, 3: 1, 5: 6, 6: 5}[spec.world_size]
