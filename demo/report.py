"""The demo's report: what was made, how training went, what the model draws, and how often it is right."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

from demo.scoring import DemoScores, Rates
from demo.shapes import COLOURS, SHAPES, caption, prompts
from diffusion.callbacks.metrics_file import read_metrics, series
from diffusion.models.sampling import image_grid

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
        steps: the commands and how long they took.
        runs: run folders by name, in order; the first is the VAE's.
        scores: the oracle's verdict.
        single: images of one object, `seeds_per_prompt` for each prompt.
        pairs: images of two objects, likewise.
        seeds_per_prompt: images of each prompt.
        settings: how they were sampled, in words.
    """
    page = Page("Shapes: from images with captions to a trained model")
    page.text(
        f"Asked for one object, the model drew the right colour in {scores.single.colour:.0%} and the right shape in "
        f"{scores.single.shape:.0%} of {scores.num_single} images; asked for two, the right relation in "
        f"{scores.pairs.relation or 0:.0%} of {scores.num_pairs}. {settings}"
    )
    seeds = "one seed" if seeds_per_prompt == 1 else f"{SEEDS_SHOWN} of {seeds_per_prompt} seeds"
    page.image(
        labelled_grid(single, seeds_per_prompt),
        f'"{caption(prompts()[0][0])}" and so on: {seeds} for each colour and shape',
    )
    page.heading("Scores")
    page.table("Shares of images that are right", ["", "colour", "shape", "relation", "images"], _score_rows(scores))
    page.table("By shape", ["", "colour", "shape"], [(name, *_cells(r)[:2]) for name, r in scores.by_shape.items()])
    page.table("By colour", ["", "colour", "shape"], [(name, *_cells(r)[:2]) for name, r in scores.by_colour.items()])
    page.heading("Two objects")
    wanted = prompts()[1]
    shown = range(0, len(wanted), max(1, len(wanted) // RELATIONS_SHOWN))
    page.image(
        image_grid([pairs[i * (len(pairs) // len(wanted))] for i in shown], 8),
        "; ".join(caption(wanted[i]) for i in shown),
    )
    page.heading("The VAE")
    vae_run = next(iter(runs.values()))
    steps_of, values = series(read_metrics(vae_run / "metrics.jsonl"), "metrics/validation/psnr")
    if values:
        page.text(f"PSNR on held-out images after {steps_of[-1]:.0f} steps: {values[-1]:.1f} dB.")
    _add_image(page, vae_run / "reconstructions.png", "Images (above) and what is left of them in the latents (below)")
    page.heading("Training")
    for name, run in runs.items():
        _add_image(page, run / "loss.png", f"Loss of {name}")
    for name, run in list(runs.items())[1:]:
        grids = sorted((run / "samples").glob("step-*.png"))
        for grid in [grids[0], grids[-1]] if len(grids) > 1 else grids:
            _add_image(page, grid, f"{name}: the run's fixed prompts at {grid.stem.replace('-', ' ')}", width=560)
    page.heading("Commands")
    page.table("What ran", ["step", "command", "seconds"], [(s.name, s.command, f"{s.seconds:.0f}") for s in steps])
    page.write(path)


def _add_image(page: Page, path: Path, text: str, width: int | None = None) -> None:
    if path.is_file():
        page.image(path, text, width)


def _cells(rate: Rates) -> tuple[str, str, str]:
    return f"{rate.colour:.1%}", f"{rate.shape:.1%}", "" if rate.relation is None else f"{rate.relation:.1%}"


def _score_rows(scores: DemoScores) -> list[tuple[str, ...]]:
    return [
        ("one object, generated", *_cells(scores.single), str(scores.num_single)),
        ("two objects, generated", *_cells(scores.pairs), str(scores.num_pairs)),
        ("the oracle on real held-out images", *_cells(scores.oracle), ""),
        ("the oracle with shuffled captions (chance)", *_cells(scores.oracle_shuffled), ""),
    ]
