"""Ranks of a job, steps that they take together, and exit codes.

Torch is imported where there is a process group only: a mistake in a YAML file ends a command within a second.
"""

import datetime
import functools
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from diffusion.errors import UserError

T = TypeVar("T")

WORK_TIMEOUT = datetime.timedelta(days=1)
"""Time-out of the ranks of an evaluation or an encoding that wait for the work of others."""

USER_ERROR_EXIT_CODE = 2

PREEMPTED_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: a signal (a checkpoint was saved) or a wrong loss ended the run; the next start continues
it."""

INTERRUPTED_EXIT_CODE = 130
"""Exit code of a command that Ctrl-C ended, as in shells."""

JOIN_TIMEOUT = datetime.timedelta(minutes=10)
"""Time-out of the making of a process group, in which a lost rank is awaited without an answer to signals."""

LONG_TIMEOUT = datetime.timedelta(hours=2)
"""Time-out of a step that reads or writes whole checkpoints."""

CGROUP = Path("/sys/fs/cgroup")
"""Limits of a container (cgroup v2)."""


def rank() -> int:
    """Number of this process in the job, as the launcher set it; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Processes in the job; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Number of this process on its node."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Processes on this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def num_cores() -> int:
    """Cores that this process may use, by its affinity and its container's quota (cgroup v2)."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()  # Microseconds, the quota perhaps "max".
    except FileNotFoundError:
        return cores
    return cores if quota == "max" else min(cores, math.ceil(int(quota) / int(period)))


def _process_group() -> Any:
    """torch.distributed if there is a process group, without importing it; else None."""
    dist: Any = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def has_process_group() -> bool:
    """Return whether torch.distributed is in use, without importing it."""
    return _process_group() is not None


def start_process_group() -> None:
    """Join the process group of the launched ranks (gloo), if there are several."""
    if world_size() > 1 and not has_process_group():
        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=JOIN_TIMEOUT)
        set_timeout(WORK_TIMEOUT, dist.group.WORLD)


def is_first_rank() -> bool:
    """Return whether this rank writes and logs for all."""
    return rank() == 0


def barrier() -> None:
    """Wait for all ranks."""
    if (dist := _process_group()) is not None:
        dist.barrier()


def broadcast(value: T) -> T:
    """Return the value of rank 0 on all ranks."""
    if (dist := _process_group()) is None:
        return value
    values: list[Any] = [value]
    dist.broadcast_object_list(values)
    return values[0]


def gather(value: T) -> list[T]:
    """Return the values of all ranks in their order on the first rank, an empty list on the others."""
    if (dist := _process_group()) is None:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.gather_object(value, values if is_first_rank() else None)
    return values if is_first_rank() else []


def all_gather(value: T) -> list[T]:
    """Return the values of all ranks in their order on all ranks."""
    if (dist := _process_group()) is None:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def first_ranks() -> list[int]:
    """Return the first rank of each node, of which some may have fewer ranks; all ranks call it."""
    return sorted(set(all_gather(rank() - local_rank())))


def map_on_ranks(num: int, step: Callable[[int], T], label: str) -> list[T]:
    """Call a step with 0 to `num` - 1, rank r with r, r + world size, and so on, and fail together; collective.

    The results do not depend on the rank, and the step has no collective operation.

    Returns:
        The results in the order of their numbers on the first rank, an empty list on the others.
    """
    from tqdm.auto import tqdm

    numbers = range(rank(), num, world_size())
    progress = tqdm(numbers, desc=label, disable=not is_first_rank(), leave=False)
    own = agree(lambda: {number: step(number) for number in progress})
    results = {number: result for part in gather(own) for number, result in part.items()}
    return [results[number] for number in sorted(results)]


def on_first_rank(step: Callable[[], T], *, takes_long: bool = False) -> T:
    """Run a step on rank 0 and return its result on all ranks, or fail together as `agree` does."""
    result: Any = agree(lambda: step() if not has_process_group() or is_first_rank() else None, takes_long=takes_long)
    return broadcast(result)


def agree(step: Callable[[], T], *, takes_long: bool = False, group: Any = None) -> T:
    """Run a step on every rank and fail together.

    All ranks call it at the same point. Without a process group the step is just run. A step may contain further
    `agree`, but no other collective operation before the last operation that can fail on some ranks only: a rank that
    has failed takes part in the next `agree` of the others, whatever its step.

    Args:
        step: may raise a `UserError` on some ranks or on all.
        takes_long: wait for `LONG_TIMEOUT` over a group of its own; collectives of training have less.
        group: process group of all ranks for the agreement, as a thread beside the main one needs; None: the default.

    Returns:
        The result of the step on this rank.

    Raises:
        UserError: the step failed somewhere: on all ranks the same error, of the class that the lowest failing rank
            raised; its message names the failing ranks unless all have the same message.
        StepFailedElsewhereError: the step raised another exception than a `UserError`, on other ranks only.
    """
    if (dist := _process_group()) is None:
        return step()
    group = _long_group(dist.group.WORLD) if takes_long else group
    result: Any = None
    failure: BaseException | None = None
    try:
        result = step()
    except BaseException as error:
        if getattr(error, "is_agreed", False):  # By a step within this one: no rank gets further.
            raise
        failure = error
    report = None
    if failure is not None:
        report = (type(failure), str(failure)) if isinstance(failure, UserError) else (None, "")
    reports: list[tuple[type[UserError] | None, str] | None] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(reports, report, group=group)
    finally:
        if failure is not None and not isinstance(failure, UserError):
            failure.is_agreed = True  # pyright: ignore[reportAttributeAccessIssue]
            raise failure
    failures = {number: entry for number, entry in enumerate(reports) if entry is not None}
    mistakes = {number: message for number, (kind, message) in failures.items() if kind is not None}
    if mistakes:
        kind: Any = failures[min(mistakes)][0]
        error = kind(_joined_message(mistakes, len(reports)))
        error.is_agreed = True
        raise error
    if failures:
        raise StepFailedElsewhereError(f"{_ranks(list(failures), len(reports))} failed; the traceback is in its log.")
    return result


@functools.cache
def _long_group(world: Any) -> Any:
    """A group of all ranks of a process group; it stays, since destroying one can hang (gloo)."""
    return new_long_group()


def new_long_group() -> Any:
    """Make a group of all ranks, which meet before, whose operations may take `LONG_TIMEOUT`; collective."""
    import torch.distributed as dist

    dist.barrier()
    group = dist.new_group(backend="gloo", timeout=JOIN_TIMEOUT)
    set_timeout(LONG_TIMEOUT, group)
    return group


def set_timeout(timeout: datetime.timedelta, group: Any) -> None:
    """Change the timeout of the collectives of a group that start from now on."""
    try:
        from torch.distributed import set_timeout as set_timeout_of
    except ImportError:  # Before torch 2.15.
        from torch.distributed.distributed_c10d import _set_pg_timeout as set_timeout_of

    set_timeout_of(timeout, group)


class StepFailedElsewhereError(RuntimeError):
    """A step failed on other ranks for a reason that is not the user's mistake."""

    is_agreed = True


def _joined_message(messages: dict[int, str], num_ranks: int) -> str:
    """One text for the messages of several ranks."""
    ranks_by_message: dict[str, list[int]] = {}
    for number, message in messages.items():
        ranks_by_message.setdefault(message, []).append(number)
    if len(messages) == num_ranks and len(ranks_by_message) == 1:
        return next(iter(ranks_by_message))
    return "\n".join(f"{_ranks(numbers, num_ranks)}: {message}" for message, numbers in ranks_by_message.items())


def _ranks(numbers: list[int], num_ranks: int) -> str:
    return f"{name_ranks(numbers)} of {num_ranks}"


def name_ranks(numbers: Sequence[int]) -> str:
    """Name ranks for a message, such as `ranks 0, 3`; of many the first eight."""
    shown = ", ".join(str(number) for number in numbers[:8])
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {shown}{more}"
