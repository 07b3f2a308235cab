"""Runs in tests: disturbances at a step, and afterwards their starts, draws, losses, weights and states."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diffusion.checkpointing.find import resolve_checkpoint
from diffusion.checkpointing.read import StoredState, read_weights
from diffusion.files import read_json_lines
from diffusion.formats.run_folder import STARTS, TRAIN_LOSS, read_metrics, series
from verification.callbacks import step_hashes

_STATE = ("state.model.", "state.optimizers.", "state.schedulers.", "state.callbacks.LateStartEMA.")


def signal_at(step: int, number: int = 9, rank: int = 0) -> str:
    """Override: a rank gets a signal when a step begins."""
    arguments = f"{{step: {step}, number: {int(number)}, rank: {rank}}}"
    return f"plugins.callbacks=[{{path: tests.tools.toys.SignalAt, arguments: {arguments}}}]"


def disturb_host(what: str, host: str, number: int = 9) -> str:
    """Plug-in: something happens to a host in step 3 (`toys.DisturbHost`)."""
    arguments = f"{{step: 3, host: {host}, what: {what}, number: {int(number)}}}"
    return f"{{path: tests.tools.toys.DisturbHost, arguments: {arguments}}}"


def traced(run: Path, *callbacks: str, dist_timeout: int) -> list[str]:
    """Overrides of a run that records its draws, with further plug-ins."""
    trace = f"{{path: verification.callbacks.DrawTrace, arguments: {{folder: {run}/trace}}}}"
    plugins = f"plugins.callbacks=[{', '.join([trace, *callbacks])}]"
    return [f"output_folder={run}", "samples.prompts=[]", f"trainer.dist_timeout={dist_timeout}", plugins]


def assert_same_steps(run: Path, undisturbed: Path) -> None:
    """No step is missing or doubled, all that was drawn is equal, and so are losses, up to rounding."""
    assert step_hashes(run / "trace") == step_hashes(undisturbed / "trace")
    assert losses(run) == pytest.approx(losses(undisturbed), rel=1e-5)
    assert not (run / "preempted.json").exists()


def starts(run: Path, key: str = "world_size") -> list[int]:
    """A value of each start of a run; none before the first."""
    return [row[key] for row in read_json_lines(run / STARTS) if row is not None and row["event"] == "start"]


def losses(run: Path) -> list[float]:
    """Training loss of each step."""
    steps, values = series(read_metrics(run / "metrics.jsonl"), TRAIN_LOSS)
    assert steps == list(range(len(steps))), "a step is missing or doubled"
    return values


def newest(run: Path) -> Path:
    """Newest complete checkpoint."""
    return resolve_checkpoint(str(run))


def weights_of(run: Path, weights: str = "raw") -> dict[str, Tensor]:
    """Weights or an average in the newest checkpoint."""
    return read_weights(newest(run), weights)


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Largest difference of tensors with the same names."""
    assert one.keys() == other.keys()
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


def flip_bit(file: Path) -> None:
    """Change a bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def state_of(checkpoint: Path) -> dict[str, Any]:
    """Model, optimizer, schedule and averages in a checkpoint."""
    return {name: value for name, value in StoredState(checkpoint).read_below("").items() if name.startswith(_STATE)}


def assert_equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Assert that two states are equal to the bit."""
    assert one.keys() == other.keys()
    assert [name for name, value in one.items() if not _is_equal(value, other[name])] == []


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one == other
