"""Generate images from a checkpoint: python scripts/generate.py RUN --prompts "a red circle" --out images/."""

import argparse
import json
from pathlib import Path

from diffusion.launch import CommandParser, run_command


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description="Generate images from a run's checkpoint.")
    parser.add_argument(
        "checkpoint",
        help="checkpoint, run folder or its `checkpoints` folder (the newest is taken); or a file of averaged weights",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the images, grid.png and images.jsonl")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", nargs="+", help="prompts")
    source.add_argument("--prompts-file", type=Path, help="text file, one prompt a line")
    parser.add_argument("--negative-prompt", help="what to lead away from; default: the empty caption")
    parser.add_argument(
        "--weights", default="raw", help="raw: training weights; ema: their average; or one of several: decay-0.999"
    )
    parser.add_argument("--images-per-prompt", type=int, default=1)
    parser.add_argument("--seed", type=int, help="image i gets seed + i; default: random")
    parser.add_argument("--steps", type=int, default=50, help="DDIM steps")
    parser.add_argument("--guidance-scale", type=float, default=3.0)
    parser.add_argument("--height", type=int, help="pixels; default: as trained")
    parser.add_argument("--width", type=int, help="pixels; default: as trained")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--columns", type=int, default=8, help="columns of the grid")
    parser.add_argument("--device", default=None, help="cpu, cuda ...; default: a GPU where there is one")
    return parser.parse_args()


def main() -> None:
    """Load, generate, write."""
    arguments = parse_arguments()
    import torch

    from diffusion.loading import load_model
    from diffusion.models.sampling import image_grid, image_seeds

    prompts = arguments.prompts or arguments.prompts_file.read_text(encoding="utf-8").splitlines()
    prompts = [prompt.strip() for prompt in prompts if prompt.strip()]
    model = load_model(arguments.checkpoint, weights=arguments.weights)
    model.to(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    seeds = image_seeds(arguments.seed, len(prompts) * arguments.images_per_prompt)
    images = model.generate(
        prompts,
        arguments.negative_prompt,
        height=arguments.height,
        width=arguments.width,
        num_inference_steps=arguments.steps,
        guidance_scale=arguments.guidance_scale,
        seed=seeds,
        num_images_per_prompt=arguments.images_per_prompt,
        batch_size=arguments.batch_size,
    )
    assert isinstance(images, list)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / "images.jsonl").open("w", encoding="utf-8") as file:
        for i, image in enumerate(images):
            image.save(arguments.out / f"{i:05d}.png")
            row = {"file": f"{i:05d}.png", "prompt": prompts[i // arguments.images_per_prompt], "seed": seeds[i]}
            file.write(json.dumps(row) + "\n")
    image_grid(images, arguments.columns).save(arguments.out / "grid.png")
    print(f"{len(images)} images in {arguments.out}")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
