"""A run that is killed and continued is, to the bit, the run that was not."""

import random
import shutil
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from diffusion.checkpointing.find import resolve_checkpoint
from diffusion.checkpointing.layout import batch_of
from diffusion.formats.run_folder import TRAIN_LOSS, read_metrics, series
from tests.tools.runs import assert_equal, signal_at, state_of

NUM_STEPS = 9
STEPS_PER_EPOCH = 3
COMMON = [
    "plugins.train_dataset.arguments={num_samples: 24}",
    f"trainer.max_duration={NUM_STEPS}ba",
    "trainer.save_interval=2ba",
    "algorithms.ema.start=4ba",
]
KILL = int(signal.SIGKILL)
TERMINATE = int(signal.SIGTERM)

_random = random.Random(20261121)
_first = _random.randrange(1, NUM_STEPS - 1)
SCENARIOS: dict[str, list[tuple[int, int]]] = {
    # Checkpoints are at 2, 4, 6 and 8; the average starts at 4; epochs end at 3, 6 and 9.
    "twice at random": [(_first, KILL), (_random.randrange(_first, NUM_STEPS), KILL)],
    "before, at and after the start of the average": [(3, KILL), (5, KILL), (7, KILL)],
    "at the end of an epoch": [(STEPS_PER_EPOCH - 1, TERMINATE), (2 * STEPS_PER_EPOCH, KILL)],
}
CASES = [
    ((1, "fsdp"), "twice at random", False),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ((2, "fsdp"), "before, at and after the start of the average", False),
            ((2, "ddp"), "at the end of an epoch", False),
            ((2, "fsdp"), "at the end of an epoch", True),
            ((2, "ddp"), "twice at random", True),
        )
    ),
]
"""World, scenario, and whether checkpoints are written in the background."""


def options(run: Path, parallelism: str, *more: str) -> tuple[str, list[str]]:
    return "tests/tools/toy.yaml", [f"output_folder={run}", f"trainer.parallelism={parallelism}", *COMMON, *more]


def options_in(world: tuple[int, str], run: Path, *more: str) -> tuple[str, list[str]]:
    """One of the worlds is in deterministic mode."""
    return options(run, world[1], f"trainer.deterministic={world == (1, 'fsdp')}", *more)


@pytest.fixture(scope="module")
def uninterrupted(server, tmp_path_factory) -> Callable[[tuple[int, str]], Path]:
    root = tmp_path_factory.mktemp("uninterrupted")

    @cache
    def run(world: tuple[int, str]) -> Path:
        folder = root / f"{world[0]}-{world[1]}"
        server.train(world[0], [options_in(world, folder)])
        return folder

    return run


def final_state(run: Path) -> dict[str, Any]:
    newest = resolve_checkpoint(str(run / "checkpoints"))
    assert newest is not None
    assert batch_of(newest) == NUM_STEPS
    return state_of(newest)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("world", "scenario", "in_background"), CASES)
def test_equal_to_the_bit(server, uninterrupted, tmp_path, world, scenario, in_background):
    num_ranks = world[0]
    background = f"trainer.async_checkpoints={in_background}"
    run = tmp_path / "run"
    for number, (step, how) in enumerate(SCENARIOS[scenario]):
        rank = number % num_ranks
        job = server.run(num_ranks, [options_in(world, run, background, signal_at(step, how, rank))])
        assert job.codes[rank] == (-9 if how == KILL else 75), job.output[-4000:]
    server.train(num_ranks, [options_in(world, run, background)])

    found = final_state(run)
    assert_equal(final_state(uninterrupted(world)), found)
    assert any(key.startswith("state.callbacks.LateStartEMA.averages.") for key in found)
    assert any(key.endswith("exp_avg_sq") for key in found)

    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(NUM_STEPS + 1)), "a step is missing or doubled"
    reference = read_metrics(uninterrupted(world) / "metrics.jsonl")
    assert series(rows, TRAIN_LOSS) == series(reference, TRAIN_LOSS)
    assert series(rows, "lr-AdamW/group0") == series(reference, "lr-AdamW/group0")


@pytest.mark.gpu
def test_equal_to_the_bit_on_a_gpu_in_deterministic_mode(server, tmp_path):
    settings = ["trainer.device=gpu", "trainer.precision=amp_bf16", "trainer.deterministic=true"]
    alone, run = tmp_path / "alone", tmp_path / "run"
    server.train(1, [options(alone, "fsdp", *settings)])
    for step, how in SCENARIOS["twice at random"]:
        server.run(1, [options(run, "fsdp", *settings, signal_at(step, how))])
    server.train(1, [options(run, "fsdp", *settings)])
    assert_equal(final_state(alone), final_state(run))


@pytest.fixture(scope="module")
def first(server, tmp_path_factory) -> Path:
    """A run to start from."""
    run = tmp_path_factory.mktemp("first") / "run"
    server.train(1, [options(run, "fsdp", "algorithms.ema=null")])
    return run


@pytest.mark.slow
@pytest.mark.parametrize("lora", [[], ["model.lora={rank: 2, alpha: 4.0}"]])
def test_a_run_that_has_a_checkpoint_needs_no_weights_to_start_from(server, first, tmp_path, lora):
    copy, alone, run = (tmp_path / name for name in ("first", "alone", "run"))
    shutil.copytree(first, copy)
    start = [f"init_from.checkpoint={copy}", *lora]
    server.train(1, [options(alone, "fsdp", *start)])
    assert server.run(1, [options(run, "fsdp", *start, signal_at(5))]).codes == [-9]
    shutil.rmtree(copy)
    server.train(1, [options(run, "fsdp", *start)])
    assert_equal(final_state(alone), final_state(run))
