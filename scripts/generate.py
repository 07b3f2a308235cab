"""Generate images from a checkpoint: python scripts/generate.py RUN --prompts "a red circle" --out images/."""

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from diffusion.errors import ConfigurationError, MachineError
from diffusion.launch import CommandParser, check_device, named_device, run_command

if TYPE_CHECKING:
    from PIL import Image

    from diffusion.models import LatentDiffusion


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description="Generate images from a run's checkpoint.")
    parser.add_argument(
        "checkpoint",
        help="checkpoint, run folder or its `checkpoints` folder (the newest is taken); or a file of averaged weights",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the images, grid.png and metadata.jsonl")
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


def check_arguments(arguments: argparse.Namespace) -> None:
    """Refuse numbers that no model could use.

    Raises:
        ConfigurationError: names the option.
    """
    from diffusion.models.sampling import finite_number, whole_number
    from diffusion.randomness import MAX_SEED

    try:
        for name in ("images_per_prompt", "steps", "height", "width", "batch_size", "columns"):
            if (value := getattr(arguments, name)) is not None:
                whole_number(f"--{name.replace('_', '-')}", value, least=1)
        if arguments.seed is not None:
            whole_number("--seed", arguments.seed, least=0, most=MAX_SEED - 1)
        finite_number("--guidance-scale", arguments.guidance_scale)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def check_model(arguments: argparse.Namespace, model: "LatentDiffusion") -> None:
    """Refuse numbers that this model cannot use.

    Raises:
        ConfigurationError: names the option.
    """
    from diffusion.models.sampling import image_size, whole_number

    try:
        whole_number("--steps", arguments.steps, least=1, most=model.noise_process.num_timesteps)
        image_size(arguments.height, arguments.width, default=model.resolution, factor=model.vae_factor)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def read_prompts(arguments: argparse.Namespace) -> list[str]:
    """The prompts that are given, without blank ones.

    Raises:
        ConfigurationError: there are none.
    """
    if arguments.prompts is not None:
        prompts, where = arguments.prompts, "--prompts"
    else:
        where = f"--prompts-file {arguments.prompts_file}"
        try:
            prompts = arguments.prompts_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{where} cannot be read: {error}. Give a text file, one prompt a line") from error
    prompts = [prompt.strip() for prompt in prompts if prompt.strip()]
    if not prompts:
        raise ConfigurationError(f"{where} holds no prompt: give at least one that is not blank")
    return prompts


def open_folder(out: Path) -> None:
    """Make the folder for the images.

    Raises:
        MachineError: it cannot be written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise MachineError(_unwritable(out, error)) from error


def write_images(
    out: Path, images: "list[Image.Image]", prompts: list[str], seeds: list[int], num_columns: int
) -> None:
    """Write images, what they are of, and all of them in one.

    Args:
        out: the folder.
        images: of each prompt as many, next to one another.
        prompts: of which they are.
        seeds: one per image.
        num_columns: of the grid.

    Raises:
        MachineError: the folder cannot be written to.
    """
    from diffusion.evaluation.listing import write_listing
    from diffusion.models.sampling import image_grid

    num_each = len(images) // len(prompts)
    try:
        rows = []
        for i, image in enumerate(images):
            image.save(out / f"{i:05d}.png")
            rows.append({"file_name": f"{i:05d}.png", "prompt": prompts[i // num_each], "seed": seeds[i]})
        write_listing(out, rows)
        image_grid(images, num_columns).save(out / "grid.png")
    except OSError as error:
        raise MachineError(_unwritable(out, error)) from error


def _unwritable(out: Path, error: OSError) -> str:
    return f"--out {out} cannot be written to: {error.strerror or error}. Choose a folder that can be"


def main() -> None:
    """Load, generate, write."""
    arguments = parse_arguments()
    prompts = read_prompts(arguments)
    check_arguments(arguments)
    device = named_device(arguments.device)
    check_device(device)
    open_folder(arguments.out)

    from diffusion.loading import load_model
    from diffusion.models.sampling import image_seeds

    model = load_model(arguments.checkpoint, weights=arguments.weights)
    check_model(arguments, model)
    model.to(device)
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
    write_images(arguments.out, images, prompts, seeds, arguments.columns)
    print(f"{len(images)} images in {arguments.out}")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
