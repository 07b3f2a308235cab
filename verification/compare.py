"""Compare runs with the undisturbed one of their data setting, and show the result."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from diffusion.checkpointing.find import resolve_checkpoint
from diffusion.checkpointing.read import read_unet
from diffusion.config.model import Weights
from diffusion.reports.tables import text_table
from verification.runner import Outcome

MAX_LOSS_DIFFERENCE = 1e-5
"""Relative; more is a failure."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A run against its reference."""

    outcome: Outcome
    num_wrong_steps: int
    """Steps in which something else was drawn than in the reference."""

    loss: float
    """Largest relative difference of the loss of a step."""

    weights: float
    """Largest over the tensors of max |difference| / max |weight|, at the end."""

    average: float
    """The same of the averaged weights."""

    @property
    def is_equal(self) -> bool:
        """Whether the promise was kept."""
        return self.num_wrong_steps == 0 and self.loss <= MAX_LOSS_DIFFERENCE


def compare(outcome: Outcome, reference: Outcome) -> Comparison:
    """Compare a run with the reference of its data setting."""
    steps = sorted(reference.losses)
    return Comparison(
        outcome=outcome,
        num_wrong_steps=sum(outcome.hashes.get(step) != reference.hashes.get(step) for step in steps),
        loss=max(abs(outcome.losses[step] / reference.losses[step] - 1.0) for step in steps),
        weights=_largest_difference(outcome.folder, reference.folder, Weights.raw),
        average=_largest_difference(outcome.folder, reference.folder, Weights.ema),
    )


def _largest_difference(run: Path, reference: Path, weights: Weights) -> float:
    expected = read_unet(resolve_checkpoint(str(reference)), weights)
    found = read_unet(resolve_checkpoint(str(run)), weights)
    assert expected.keys() == found.keys()
    return max(_relative(found[name], expected[name]) for name in expected)


def _relative(found: Tensor, expected: Tensor) -> float:
    scale = expected.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return ((found - expected).abs().max() / scale).item()


def format_table(comparisons: Sequence[Comparison]) -> str:
    """One line per run, aligned."""
    head = ("run", "resumed at", "draws", "loss", "weights", "EMA", "seconds")
    return "\n".join(text_table([head, *(_row(comparison) for comparison in comparisons)]))


def _row(comparison: Comparison) -> tuple[str, ...]:
    outcome, wrong = comparison.outcome, comparison.num_wrong_steps
    return (
        outcome.spec.name,
        "" if outcome.interrupted_at is None else f"step {outcome.interrupted_at}",
        "equal" if wrong == 0 else f"{wrong} of {len(outcome.losses)} DIFFER",
        f"{comparison.loss:.1e}" + ("" if comparison.loss <= MAX_LOSS_DIFFERENCE else " TOO MUCH"),
        f"{comparison.weights:.1e}",
        f"{comparison.average:.1e}",
        f"{outcome.seconds:.0f}",
    )


def draw_losses(outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw the losses of all runs over one another, a panel for each data setting, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    settings = list(dict.fromkeys(outcome.spec.data_setting for outcome in outcomes))
    figure = Figure(figsize=(10, 2.6 * ((len(settings) + 1) // 2) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots((len(settings) + 1) // 2, 2, squeeze=False).flat
    for axes, setting in zip(panels, settings, strict=False):
        chosen = [outcome for outcome in outcomes if outcome.spec.data_setting == setting]
        for i, outcome in enumerate(chosen):
            axes.plot(outcome.losses.keys(), outcome.losses.values(), linewidth=1 + 1.5 * (len(chosen) - i), alpha=0.5)
            if outcome.interrupted_at is not None:
                axes.axvline(outcome.interrupted_at, color="gray", linewidth=0.8, linestyle=":")
        axes.set(title=f"{setting[0]}, {setting[1]} bucket(s): {len(chosen)} runs", xlabel="step", ylabel="loss")
    figure.savefig(path, dpi=110)
