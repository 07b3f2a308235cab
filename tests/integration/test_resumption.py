"""A run that is killed and continued is, to the bit, the run that was not."""

import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from diffusion.callbacks.metrics_file import TRAIN_LOSS, read_metrics, series
from diffusion.checkpointing.find import resolve_checkpoint
from diffusion.checkpointing.layout import batch_of
from diffusion.checkpointing.read import StoredState

NUM_STEPS = 9
STEPS_PER_EPOCH = 3
COMMON = [
    "plugins.train_dataset.arguments={num_samples: 24}",
    f"trainer.max_duration={NUM_STEPS}ba",
    "trainer.save_interval=2ba",
    "algorithms.ema.start=4ba",
    "samples.prompts=[]",
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
WORLDS = [(1, "fsdp"), (2, "fsdp"), (2, "ddp")]
CASES = [
    ((1, "fsdp"), "twice at random", False),
    ((1, "fsdp"), "at the end of an epoch", False),
    ((2, "fsdp"), "twice at random", False),
    ((2, "fsdp"), "before, at and after the start of the average", False),
    ((2, "ddp"), "at the end of an epoch", False),
    ((2, "fsdp"), "at the end of an epoch", True),
    ((2, "ddp"), "twice at random", True),
]
"""World, scenario, and whether checkpoints are written in the background."""


def options(run: Path, parallelism: str, *more: str) -> tuple[str, list[str]]:
    return "tests/tools/toy.yaml", [f"output_folder={run}", f"trainer.parallelism={parallelism}", *COMMON, *more]


@pytest.fixture(scope="module")
def uninterrupted(server, tmp_path_factory) -> dict[tuple[int, str], Path]:
    root = tmp_path_factory.mktemp("uninterrupted")
    runs = {world: root / f"{world[0]}-{world[1]}" for world in WORLDS}
    server.train(1, [options(runs[world], world[1]) for world in WORLDS if world[0] == 1])
    server.train(2, [options(runs[world], world[1]) for world in WORLDS if world[0] == 2])
    return runs


def final_state(run: Path) -> dict[str, Any]:
    newest = resolve_checkpoint(str(run / "checkpoints"))
    assert newest is not None
    assert batch_of(newest) == NUM_STEPS
    wanted = ("state.model.", "state.optimizers.", "state.schedulers.", "state.callbacks.LateStartEMA.")
    return {key: value for key, value in StoredState(newest).read_below("").items() if key.startswith(wanted)}


def is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one == other


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("world", "scenario", "in_background"), CASES)
def test_equal_to_the_bit(server, uninterrupted, tmp_path, world, scenario, in_background):
    num_ranks, parallelism = world
    background = f"trainer.async_checkpoints={in_background}"
    run = tmp_path / "run"
    for number, (step, how) in enumerate(SCENARIOS[scenario]):
        rank = number % num_ranks
        plugin = f"{{path: tests.tools.toys.SignalAt, arguments: {{step: {step}, number: {how}, rank: {rank}}}}}"
        job = server.run(num_ranks, [options(run, parallelism, background, f"plugins.callbacks=[{plugin}]")])
        assert job.codes[rank] == (-9 if how == KILL else 75), job.output[-4000:]
    server.train(num_ranks, [options(run, parallelism, background)])

    expected, found = final_state(uninterrupted[world]), final_state(run)
    assert expected.keys() == found.keys()
    different = [key for key in expected if not is_equal(expected[key], found[key])]
    assert different == []
    assert any(key.startswith("state.callbacks.LateStartEMA.averages.") for key in found)
    assert any(key.endswith("exp_avg_sq") for key in found)

    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(NUM_STEPS + 1)), "a step is missing or doubled"
    reference = read_metrics(uninterrupted[world] / "metrics.jsonl")
    assert series(rows, TRAIN_LOSS) == series(reference, TRAIN_LOSS)
    assert series(rows, "lr-AdamW/group0") == series(reference, "lr-AdamW/group0")


@pytest.mark.parametrize(
    ("device", "precision"), [("cpu", "fp32"), pytest.param("gpu", "amp_bf16", marks=pytest.mark.gpu)]
)
def test_equal_to_the_bit_in_deterministic_mode(server, tmp_path, device, precision):
    settings = [f"trainer.device={device}", f"trainer.precision={precision}", "trainer.deterministic=true"]
    alone, run = tmp_path / "alone", tmp_path / "run"
    server.train(1, [options(alone, "fsdp", *settings)])
    for step, how in SCENARIOS["twice at random"]:
        plugin = f"{{path: tests.tools.toys.SignalAt, arguments: {{step: {step}, number: {how}, rank: 0}}}}"
        server.run(1, [options(run, "fsdp", *settings, f"plugins.callbacks=[{plugin}]")])
    server.train(1, [options(run, "fsdp", *settings)])
    expected, found = final_state(alone), final_state(run)
    assert expected.keys() == found.keys()
    assert [key for key in expected if not is_equal(expected[key], found[key])] == []


@pytest.mark.parametrize("lora", [[], ["model.lora={rank: 2, alpha: 4.0}"]])
def test_a_run_that_has_a_checkpoint_needs_no_weights_to_start_from(server, tmp_path, lora):
    first, alone, run = (tmp_path / name for name in ("first", "alone", "run"))
    start = [f"init_from.checkpoint={first}", *lora]
    plugin = "plugins.callbacks=[{path: tests.tools.toys.SignalAt, arguments: {step: 5, number: 9}}]"
    server.train(1, [options(first, "fsdp", "algorithms.ema=null"), options(alone, "fsdp", *start)])
    assert server.run(1, [options(run, "fsdp", *start, plugin)]).codes == [-9]
    shutil.rmtree(first)
    server.train(1, [options(run, "fsdp", *start)])
    expected, found = final_state(alone), final_state(run)
    assert expected.keys() == found.keys()
    assert [key for key in expected if not is_equal(expected[key], found[key])] == []
