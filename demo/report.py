"""The demo's report: generated images, how often they are right, training, commands."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from PIL import Image, ImageDraw

from demo.scenes import COLOURS, SHAPES, caption, prompts
from diffusion.formats.run_folder import TRAIN_LOSS
from diffusion.reports.page import image_uri, write_page
from diffusion.reports.run import read_run
from diffusion.reports.run_page import VALIDATION_LOSS, plot_metrics

SEEDS_SHOWN = 2
NAMES = {
    "single": "one object, generated",
    "pairs": "two objects, generated",
    "oracle": "the oracle on real validation images",
    "oracle_shuffled": "the oracle with shuffled captions (chance)",
}


def labelled_grid(images: Sequence[Image.Image], seeds_per_prompt: int) -> Image.Image:
    """Images of one object: a row for each shape, a column for each colour and seed, with their names."""
    size, num_seeds, left, top = images[0].width, min(SEEDS_SHOWN, seeds_per_prompt), 64, 18
    cell = size * num_seeds + 2 * num_seeds + 6
    grid = Image.new("RGB", (left + cell * len(COLOURS), top + (size + 4) * len(SHAPES)), "white")
    pen = ImageDraw.Draw(grid)
    for i, colour in enumerate(COLOURS):
        pen.text((left + i * cell + 2, 3), colour, fill="black")
    for j, shape in enumerate(SHAPES):
        pen.text((4, top + j * (size + 4) + size // 2 - 5), shape, fill="black")
        for i in range(len(COLOURS)):
            for k in range(num_seeds):
                image = images[(i * len(SHAPES) + j) * seeds_per_prompt + k]
                grid.paste(image, (left + i * cell + k * (size + 2), top + j * (size + 4)))
    return grid


def write_report(
    path: Path,
    *,
    steps: Mapping[str, Mapping[str, Any]],
    runs: Sequence[Path],
    scores: Mapping[str, Mapping[str, float]],
    grid: Image.Image,
    pairs: Sequence[Image.Image],
    settings: str,
) -> None:
    """Write the page.

    Args:
        path: the HTML file.
        steps: `command` and `seconds` of each step.
        runs: run folders, in order; the first is the VAE's.
        scores: made by `score_model`.
        grid: images of one object.
        pairs: images of two objects, those of a prompt next to one another.
        settings: sampling settings as text.
    """
    vae, *phases = (read_run(folder) for folder in runs)
    psnr = vae.curve("metrics/validation/psnr")
    of_pair = prompts()[1]
    per_prompt = len(pairs) // len(of_pair)
    losses = {TRAIN_LOSS: "training", VALIDATION_LOSS: "validation"}
    images = [(f"Loss of {run.name}", plot_metrics(losses, [run], y="loss", clip=True)) for run in (vae, *phases)]
    images += [(f"Samples of {run.name}", image_uri(list(run.samples.values())[-1])) for run in phases if run.samples]
    values = {
        "title": "Shapes: from images with captions to a trained model",
        "scores": scores,
        "settings": settings,
        "grid": image_uri(grid),
        "score_table": score_table(scores),
        "pairs": [(caption(of_pair[i]), image_uri(pairs[i * per_prompt])) for i in range(0, len(of_pair), 2)],
        "psnr": (psnr.last_step, psnr.last) if psnr else None,
        "reconstructions": image_uri(vae.folder / "reconstructions.png") if psnr else None,
        "images": images,
        "steps": pd.DataFrame(
            {"step": name, "command": step["command"], "seconds": f"{step['seconds']:.0f}"}
            for name, step in steps.items()
        ),
    }
    write_page(path, Path(__file__).with_suffix(".html"), values)


def score_table(scores: Mapping[str, Mapping[str, float]]) -> pd.DataFrame:
    """Shares of right images, generated and real."""
    return pd.DataFrame(
        {
            "images": NAMES[name],
            **{key: f"{rates[key]:.1%}" if key in rates else "" for key in ("colour", "shape", "relation")},
            "number": rates["number"],
        }
        for name, rates in scores.items()
    )
