"""Steps that the ranks of a job take together."""

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffusion import distributed
from diffusion.distributed import (
    StepFailedElsewhereError,
    agree,
    broadcast,
    gather,
    map_on_ranks,
    new_long_group,
    num_cores,
    on_first_rank,
)
from diffusion.errors import ConfigurationError, DataError, MachineError, UserError

NUM_RANKS = 2


@pytest.mark.parametrize(("quota", "cores"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", 8), (None, 8)])
def test_the_quota_of_a_container_limits_its_cores(quota, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(distributed, "CGROUP", tmp_path)
    if quota:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert num_cores() == cores


def on_ranks(folder: Path, step: Callable[[int], Any]) -> list[Any]:
    """Run a step on two ranks; return the result or the error of each."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def run(rank: int) -> None:
        import torch.distributed as dist

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RANK", str(rank))
            patch.setenv("WORLD_SIZE", str(NUM_RANKS))
            dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
            try:
                result = step(rank)
            except (UserError, StepFailedElsewhereError, ZeroDivisionError) as error:
                result = (type(error), str(error))
            results.put((rank, result))
            dist.barrier()

    processes = [context.Process(target=run, args=(rank,)) for rank in range(NUM_RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()  # They do not wait for a reader of so little, and one that has died gives nothing.
    found = dict(results.get() for _ in processes if not results.empty())
    return [found[rank] for rank in range(NUM_RANKS)]


@pytest.mark.world_size(2)
def test_ranks_that_are_forked_leave_the_groups_of_their_parent_alone(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", f"file://{tmp_path}/own", rank=0, world_size=1)
    agree(lambda: None, takes_long=True)
    dist.destroy_process_group()
    assert on_ranks(tmp_path, lambda rank: agree(lambda: rank, takes_long=True)) == [0, 1]


@pytest.mark.world_size(2)
def test_a_rank_that_is_lost_before_a_long_group_is_made_ends_the_other_one_at_once(tmp_path):
    def step(rank: int) -> str:
        if rank == 1:
            os._exit(9)
        with pytest.raises(RuntimeError) as raised:
            new_long_group()
        (tmp_path / "error").write_text(str(raised.value))
        os._exit(0)

    begin = time.monotonic()
    with pytest.raises(KeyError):
        on_ranks(tmp_path, step)
    assert time.monotonic() - begin < 60
    assert (tmp_path / "error").read_text()


def fail(error: Exception) -> None:
    raise error


@pytest.mark.world_size(2)
def test_values_of_other_ranks(tmp_path):
    def step(rank: int) -> tuple[Any, ...]:
        return broadcast(f"of {rank}"), gather(rank * 10), on_first_rank(lambda: f"by {rank}"), agree(lambda: rank)

    assert on_ranks(tmp_path, step) == [("of 0", [0, 10], "by 0", 0), ("of 0", [], "by 0", 1)]


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ({1: DataError("x")}, [(DataError, "rank 1 of 2: x")] * 2),
        ({0: DataError("x"), 1: DataError("x")}, [(DataError, "x")] * 2),
        ({0: MachineError("x"), 1: DataError("y")}, [(MachineError, "rank 0 of 2: x\nrank 1 of 2: y")] * 2),
        (
            {1: ZeroDivisionError("z")},
            [(StepFailedElsewhereError, "rank 1 of 2 failed; the traceback is in its log."), (ZeroDivisionError, "z")],
        ),
    ],
)
def test_all_ranks_fail_together(tmp_path, errors, expected):
    def step(rank: int) -> None:
        agree(lambda: agree(lambda: fail(errors[rank]) if rank in errors else None))

    assert on_ranks(tmp_path, step) == expected


@pytest.mark.world_size(2)
def test_ranks_share_the_calls_of_a_step_and_fail_together(tmp_path):
    def step(rank: int) -> list[int]:
        assert map_on_ranks(5, lambda number: number * 10, "tens") == ([0, 10, 20, 30, 40] if rank == 0 else [])
        return map_on_ranks(5, lambda number: fail(DataError("x")) if number == 3 else number, "one fails")

    assert on_ranks(tmp_path, step) == [(DataError, "rank 1 of 2: x")] * 2


def test_a_single_process_needs_no_group(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert (distributed.rank(), distributed.world_size(), distributed.local_rank()) == (0, 1, 0)
    assert (broadcast(1), gather(2), on_first_rank(lambda: 3), agree(lambda: 4)) == (1, [2], 3, 4)
    with pytest.raises(ConfigurationError, match="key"):
        agree(lambda: fail(ConfigurationError("key")))
