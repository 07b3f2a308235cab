"""Work items run by several workers: processes of this machine, or actors of a Ray cluster, through joblib either way.

Items are independent, results come as they are ready, and nothing that is written may depend on their order.
"""

import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from joblib import Parallel, delayed, parallel_config

from diffusion.errors import ConfigurationError, MachineError
from diffusion.launch import end_with_parent
from diffusion.preparation.config import Engine
from diffusion.preparation.ray_session import ray_session

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")

_DIED = (
    "a worker died or ran out of memory; what was finished is kept: run the command again, with fewer workers; if it "
    "dies at the same place, take that file out"
)
_RAY_ROUND = 8
"""Items per worker after which results are taken from Ray's pool, which hands out whole lists only."""


@dataclass(frozen=True)
class Workers:
    """Who does the work.

    Attributes:
        engine: `processes` or `ray`.
        number: Workers; with `processes` and 1 the calling process works.
    """

    engine: Engine = Engine.processes
    number: int = 1

    def __post_init__(self) -> None:
        if self.number < 1:
            raise ConfigurationError(f"workers: {self.number}; it must be 1 or more")


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def started(workers: Workers) -> Iterator[Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[Any]]]:
    """Start the workers; they are kept until the block ends.

    Yields:
        `run(function, items)`: calls the function with each item in some worker and yields the results as they come.
        Function, items and results can be pickled; about two items per worker are under way at a time.

    Raises:
        ConfigurationError: Ray is asked for and not installed.
        MachineError: A worker died, or memory ran out; nothing that an item finished is lost.
    """
    if workers.engine is Engine.ray:
        with _ray(workers.number), Parallel(n_jobs=workers.number, max_nbytes=None) as parallel:
            yield lambda function, items: _guarded(_in_rounds(parallel, workers.number, function, items))
        return
    with Parallel(
        n_jobs=workers.number,
        return_as="generator_unordered",
        pre_dispatch=f"2*{workers.number}",
        batch_size=1,  # pyright: ignore[reportArgumentType]
        max_nbytes=None,
        initializer=end_with_parent,
        initargs=(signal.SIGKILL, os.getpid()),
    ) as parallel:
        yield lambda function, items: _guarded(parallel(delayed(function)(item) for item in items))


def _guarded(results: Any) -> Iterator[Any]:
    """Yield the results; the death of a worker becomes a message."""
    try:
        yield from results
    except (BrokenProcessPool, MemoryError) as error:
        raise MachineError(_DIED) from error


def _in_rounds(
    parallel: Parallel, number: int, function: Callable[[Item], Result], items: Sequence[Item]
) -> Iterator[Result]:
    """Run a bounded number of items at a time."""
    size = _RAY_ROUND * number
    for start in range(0, len(items), size):
        yield from parallel(delayed(function)(item) for item in items[start : start + size])  # pyright: ignore


@contextmanager
def _ray(number: int) -> Iterator[None]:
    """Let joblib use Ray."""
    with ray_session(max(number, available_cores())) as ray:
        from ray.util.joblib import register_ray

        try:
            register_ray()
            with parallel_config(backend="ray"):
                yield
        except ray.exceptions.RayError as error:
            raise MachineError(f"{_DIED} (Ray: {type(error).__name__})") from error
