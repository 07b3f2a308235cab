"""The demo's report: commands, training, generated images, and how often they are right."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from PIL import Image, ImageDraw

from demo.scoring import DemoScores, Rates
from diffusion.callbacks.metrics_file import TRAIN_LOSS, read_metrics, series
from diffusion.evaluation.shapes import COLOURS, SHAPES, caption, prompts
from diffusion.reports.page import image_uri, write_page
from diffusion.reports.run import Run, read_run
from diffusion.reports.run_page import find_line, plot_lines

RELATIONS_SHOWN = 16
SEEDS_SHOWN = 2


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command of the demo."""

    name: str
    command: str
    seconds: float


def labelled_grid(images: Sequence[Image.Image], seeds_per_prompt: int) -> Image.Image:
    """Images of one object: a row for each shape, a column for each colour and seed, with their names."""
    size, num_seeds, left, top = images[0].width, min(SEEDS_SHOWN, seeds_per_prompt), 64, 18
    columns, rows = list(COLOURS), list(SHAPES)
    cell = size * num_seeds + 2 * num_seeds + 6
    grid = Image.new("RGB", (left + cell * len(columns), top + (size + 4) * len(rows)), "white")
    pen = ImageDraw.Draw(grid)
    for i, colour in enumerate(columns):
        pen.text((left + i * cell + 2, 3), colour, fill="black")
    for j, shape in enumerate(rows):
        pen.text((4, top + j * (size + 4) + size // 2 - 5), shape, fill="black")
        for i in range(len(columns)):
            for k in range(num_seeds):
                image = images[(i * len(rows) + j) * seeds_per_prompt + k]
                grid.paste(image, (left + i * cell + k * (size + 2), top + j * (size + 4)))
    return grid


def write_report(
    path: Path,
    *,
    steps: Sequence[Step],
    runs: dict[str, Path],
    scores: DemoScores,
    single: Sequence[Image.Image],
    pairs: Sequence[Image.Image],
    seeds_per_prompt: int,
    settings: str,
) -> None:
    """Write the page.

    Args:
        path: the HTML file.
        steps: the commands and their durations.
        runs: run folders by name, in order; the first is the VAE's.
        scores: the oracle's verdict.
        single: images of one object, `seeds_per_prompt` for each prompt.
        pairs: images of two objects, likewise.
        seeds_per_prompt: images of each prompt.
        settings: sampling settings as text.
    """
    vae = next(iter(runs.values()))
    psnr_steps, psnr = series(read_metrics(vae / "metrics.jsonl"), "metrics/validation/psnr")
    of_pair = prompts()[1]
    shown = range(0, len(of_pair), max(1, len(of_pair) // RELATIONS_SHOWN))
    values = {
        "title": "Shapes: from images with captions to a trained model",
        "scores": scores,
        "settings": settings,
        "grid": image_uri(labelled_grid(single, seeds_per_prompt)),
        "example": caption(prompts()[0][0]),
        "seeds": "one seed" if seeds_per_prompt == 1 else f"{SEEDS_SHOWN} of {seeds_per_prompt} seeds",
        "score_table": score_table(scores),
        "by_shape": rates_table("shape", scores.by_shape),
        "by_colour": rates_table("colour", scores.by_colour),
        "pairs": [(caption(of_pair[i]), image_uri(pairs[i * (len(pairs) // len(of_pair))])) for i in shown],
        "psnr": (psnr_steps[-1], psnr[-1]) if psnr else None,
        "reconstructions": _file_uri(vae / "reconstructions.png"),
        "losses": {name: _loss_uri(read_run(run)) for name, run in runs.items()},
        "samples": [
            (f"{name}: the run's fixed prompts at {grid.stem.replace('-', ' ')}", image_uri(grid))
            for name, run in list(runs.items())[1:]
            for grid in _first_and_last(sorted((run / "samples").glob("step-*.png")))
        ],
        "steps": pd.DataFrame(
            {"step": step.name, "command": step.command, "seconds": f"{step.seconds:.0f}"} for step in steps
        ),
    }
    write_page(path, Path(__file__).with_suffix(".html"), values)


def _loss_uri(run: Run) -> str | None:
    lines = [find_line([run], TRAIN_LOSS, "training"), find_line([run], "metrics/validation/loss", "validation")]
    return plot_lines(lines, [run], label="loss", clip=True)


def score_table(scores: DemoScores) -> pd.DataFrame:
    """Shares of right images, generated and real."""
    rows = {
        "one object, generated": (scores.single, str(scores.num_single)),
        "two objects, generated": (scores.pairs, str(scores.num_pairs)),
        "the oracle on real validation images": (scores.oracle, ""),
        "the oracle with shuffled captions (chance)": (scores.oracle_shuffled, ""),
    }
    return pd.DataFrame(
        {
            "images": name,
            **_percentages(rates),
            "relation": "" if rates.relation is None else f"{rates.relation:.1%}",
            "number": number,
        }
        for name, (rates, number) in rows.items()
    )


def rates_table(what: str, rates: dict[str, Rates]) -> pd.DataFrame:
    """Shares of right images by the name of a shape or colour."""
    return pd.DataFrame({what: name, **_percentages(one, "right ")} for name, one in rates.items())


def _percentages(rates: Rates, prefix: str = "") -> dict[str, str]:
    return {f"{prefix}colour": f"{rates.colour:.1%}", f"{prefix}shape": f"{rates.shape:.1%}"}


def _first_and_last(paths: Sequence[Path]) -> list[Path]:
    return [paths[0], paths[-1]] if len(paths) > 1 else list(paths)


def _file_uri(path: Path) -> str | None:
    return image_uri(path) if path.is_file() else None
