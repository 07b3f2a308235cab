"""Generate the demo's prompts with a trained model, score the images by the oracle, and write report.html.

python -m demo.score runs/demo
"""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageDraw

from demo.scenes import COLOURS, SHAPES, Scene, caption, draw, prompts, scenes
from diffusion.files import write_json
from diffusion.formats.marks import save_marked
from diffusion.formats.run_folder import TRAIN_LOSS
from diffusion.launch import CommandParser, run_command

if TYPE_CHECKING:
    from diffusion.models.latent_diffusion import LatentDiffusion

SEEDS_SHOWN = 2
NAMES = {
    "single": "one object, generated",
    "pairs": "two objects, generated",
    "oracle": "the oracle on real validation images",
    "oracle_shuffled": "the oracle with shuffled captions (chance)",
}
"""Rows of the table of scores."""

Rates = Mapping[str, float]
"""Number of images, and shares of them (0 to 1) with the right colour, shape, number of objects, and, where the scenes
have them, relation and positions."""


def rates(images: Sequence[Image.Image], requested: Sequence[Scene]) -> Rates:
    """Shares of images that agree with their scenes."""
    from demo.shape_checks import score

    scores = [score(image, scene) for image, scene in zip(images, requested, strict=True)]
    found: dict[str, float] = {"number": len(scores)}
    for name in ("colour", "shape", "count", "relation", "position"):
        values = [value for one in scores if (value := getattr(one, name)) is not None]
        if values:
            found[name] = sum(values) / len(values)
    return found


def oracle_rates(num: int, size: int) -> tuple[Rates, Rates]:
    """The oracle on validation images of one object, with their own captions and with shuffled ones."""
    real = [scene for scene in scenes(2 * num, split="oracle") if scene.relation is None][:num]
    images = [draw(scene, size) for scene in real]
    shuffled = list(real)
    random.Random(0).shuffle(shuffled)
    return rates(images, real), rates(images, shuffled)


def score_model(
    model: "LatentDiffusion", *, seeds_per_prompt: int, **sampling: Any
) -> tuple[dict[str, Rates], list[Image.Image], list[Image.Image]]:
    """Generate for every evaluation prompt, and score.

    Args:
        model: with the weights to score.
        seeds_per_prompt: images of each prompt with one object; half as many of two.
        sampling: arguments of `generate`.

    Returns:
        Rates of generated images of one object (`single`) and of two (`pairs`), and of real images (`oracle`,
        `oracle_shuffled`); the images of one object, and of two, those of a prompt next to one another.
    """
    found: list[Rates] = []
    images: list[list[Image.Image]] = []
    for requested, seed, num_seeds in zip(
        prompts(), (0, 1_000_000), (seeds_per_prompt, max(1, seeds_per_prompt // 2)), strict=True
    ):
        generated = model.generate(
            [caption(scene) for scene in requested],
            num_images_per_prompt=num_seeds,
            seed=seed,
            batch_size=32,
            **sampling,
        )
        assert isinstance(generated, list)
        found.append(rates(generated, [scene for scene in requested for _ in range(num_seeds)]))
        images.append(generated)
    own, shuffled = oracle_rates(200, model.resolution)
    return {"single": found[0], "pairs": found[1], "oracle": own, "oracle_shuffled": shuffled}, images[0], images[1]


# The report


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
    import pandas as pd

    from diffusion.reports.page import image_uri, write_page
    from diffusion.reports.run import read_run
    from diffusion.reports.run_page import VALIDATION_LOSS, plot_metrics

    vae, *phases = (read_run(folder) for folder in runs)
    psnr = vae.curve("metrics/validation/psnr")
    of_pair = prompts()[1]
    per_prompt = len(pairs) // len(of_pair)
    losses = {TRAIN_LOSS: "training", VALIDATION_LOSS: "validation"}
    images = [(f"Loss of {run.name}", plot_metrics(losses, [run], y="loss", clip=True)) for run in (vae, *phases)]
    images += [(f"Samples of {run.name}", image_uri(list(run.samples.values())[-1])) for run in phases if run.samples]
    score_table = pd.DataFrame(
        {
            "images": NAMES[name],
            **{key: f"{rates[key]:.1%}" if key in rates else "" for key in ("colour", "shape", "relation")},
            "number": rates["number"],
        }
        for name, rates in scores.items()
    )
    values = {
        "title": "Shapes: from images with captions to a trained model",
        "scores": scores,
        "settings": settings,
        "grid": image_uri(grid),
        "score_table": score_table,
        "pairs": [(caption(of_pair[i]), image_uri(pairs[i * per_prompt])) for i in range(0, len(of_pair), 2)],
        "psnr": (psnr.last_step, psnr.last) if psnr else None,
        "reconstructions": image_uri(vae.folder / "reconstructions.png") if psnr else None,
        "images": images,
        "steps": pd.DataFrame(
            {"step": name, "command": step["command"], "seconds": f"{step['seconds']:.0f}"}
            for name, step in steps.items()
        ),
    }
    write_page(path, Path(__file__).with_name("report.html"), values)


def main() -> None:
    """Generate, score, report."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("demo", type=Path, help="folder of the demo, with autoencoder/ and modern_64/")
    parser.add_argument("--guidance-scale", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=25, help="steps of the sampler")
    parser.add_argument("--seeds", type=int, default=4, help="images of each prompt")
    parser.add_argument("--weights", choices=["raw", "ema"], default="ema")
    options = parser.parse_args()
    from diffusion.loading import load_model

    folder: Path = options.demo
    model = load_model(folder / "modern_64", weights=options.weights)
    sampling = {"guidance_scale": options.guidance_scale, "num_inference_steps": options.steps}
    scores, single, pairs = score_model(model, seeds_per_prompt=options.seeds, **sampling)
    write_json(folder / "scores.json", scores)
    grid = labelled_grid(single, options.seeds)
    save_marked(grid, folder / "grid.png", model.mark)
    log = folder / "steps.json"
    weights = "Averaged weights (EMA)" if options.weights == "ema" else "Training weights"
    write_report(
        folder / "report.html",
        steps=json.loads(log.read_text()) if log.is_file() else {},
        runs=[folder / name for name in ("autoencoder", "modern_64")],
        scores=scores,
        grid=grid,
        pairs=pairs,
        settings=f"{weights}, {options.steps} steps, guidance {options.guidance_scale:g}. "
        f"The grid shows {min(SEEDS_SHOWN, options.seeds)} of {options.seeds} seeds.",
    )
    for name, one in scores.items():
        print(f"{name:<16}", *(f"{key} {value:.3f}" for key, value in one.items() if key != "number"))


if __name__ == "__main__":
    raise SystemExit(run_command(main))
