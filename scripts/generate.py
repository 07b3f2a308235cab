"""Generate images from a checkpoint: python scripts/generate.py RUN --prompts "a red circle" --out generated/."""

import argparse
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from diffusion.config.frozen import add_model, frozen_paths
from diffusion.errors import ConfigurationError, error_context, explained_writes
from diffusion.files import read_json_lines
from diffusion.launch import (
    CommandParser,
    choose_device,
    named_score,
    positive,
    run_command,
    unicode_text,
    whole_number,
)

GRID_IMAGES = 128
"""Images of the grid, at most: the first ones."""


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description="Generate images from a run's checkpoint.")
    add_model(parser)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the images, metadata.jsonl and a grid of the first 128"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", type=unicode_text, nargs="+", help="prompts")
    source.add_argument(
        "--prompts-file", type=Path, help="text file with one prompt per line, or a table, .jsonl or .json of prompts"
    )
    parser.add_argument(
        "--rewrite", metavar="URL", help="rewrite the prompts by a chat server, as http://localhost:8000/v1"
    )
    parser.add_argument("--rewrite-model", metavar="NAME", help="name of its model")
    parser.add_argument("--rewrite-key", metavar="VARIABLE", help="environment variable with its key; default: no key")
    parser.add_argument("--rewrite-instructions", type=Path, metavar="FILE", help="text in place of the usual request")
    parser.add_argument("--negative-prompt", type=unicode_text, help="prompt to avoid; default: the empty caption")
    parser.add_argument("--images-per-prompt", type=positive, default=1)
    parser.add_argument("--seed", type=whole_number, help="image i gets seed + i; default: random")
    parser.add_argument("--steps", type=positive, default=50, help="steps of the sampler")
    parser.add_argument("--sampler", help="euler or heun, for rectified flow; default: ddim, or euler")
    parser.add_argument("--guidance-scale", type=float, default=3.0)
    parser.add_argument(
        "--score", type=named_score, nargs="+", default=[], metavar="NAME=NUMBER",
        help="scores to ask for, as aesthetic=7 (model.score_conditioning)",
    )  # fmt: skip
    parser.add_argument("--height", type=positive, help="pixels; default: as trained")
    parser.add_argument("--width", type=positive, help="pixels; default: as trained")
    parser.add_argument("--batch-size", type=positive, default=16)
    parser.add_argument("--columns", type=positive, default=8, help="columns of the grid")
    parser.add_argument("--device", default=None, help="cpu, cuda ...; default: a GPU if available")
    parser.add_argument(
        "--c2pa", type=Path, nargs=2, metavar=("CERTIFICATES", "KEY"),
        help="sign a C2PA manifest into each image: PEM files of certificate chain and private key",
    )  # fmt: skip
    options = parser.parse_args()
    if options.rewrite is not None and options.rewrite_model is None:
        parser.error("--rewrite needs --rewrite-model NAME, the model of the server")
    of_server = ("model", "key", "instructions") if options.rewrite is None else ()
    if given := [name for name in of_server if getattr(options, f"rewrite_{name}") is not None]:
        parser.error(f"--rewrite-{given[0]} needs --rewrite URL, the server")
    return options


def read_prompts(arguments: argparse.Namespace) -> list[str]:
    """Prompts of the options, without blank ones."""
    if arguments.prompts_file is not None:
        from diffusion.evaluation import prompts

        with error_context("--prompts-file"):
            return [prompt.text for prompt in prompts.read_prompts(arguments.prompts_file)]
    texts = [text.strip() for text in arguments.prompts if text.strip()]
    if not texts:
        raise ConfigurationError("--prompts has no text: give at least one prompt that is not blank")
    return texts


def open_rewriter(arguments: argparse.Namespace) -> Callable[[list[str]], list[str]]:
    """Open the server of --rewrite, which rewrites prompts; without it they stay as they are."""
    if arguments.rewrite is None:
        return list

    from diffusion.chat import ServerConfig
    from diffusion.evaluation.rewriting import INSTRUCTIONS, Rewriter

    instructions = INSTRUCTIONS
    if arguments.rewrite_instructions is not None:
        try:
            instructions = arguments.rewrite_instructions.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"--rewrite-instructions: {error}") from error
    server = ServerConfig(url=arguments.rewrite, key_variable=arguments.rewrite_key)
    with error_context("--rewrite"):
        return Rewriter(server, arguments.rewrite_model, instructions)


def read_seeds(arguments: argparse.Namespace, num_images: int) -> list[int]:
    """Seeds of the images."""
    from diffusion.models.sampling import image_seeds

    try:
        return image_seeds(arguments.seed, num_images)
    except ValueError as error:
        raise ConfigurationError(f"--{error}") from error


def check_folder(out: Path, num_images: int, prompts_file: Path | None) -> None:
    """Reject a folder of other images than this command's, and prompts from the listing that it replaces."""
    from diffusion.evaluation.images import GRID, LISTING

    listing = out / LISTING
    if prompts_file is not None and prompts_file.expanduser().resolve() == listing.resolve():
        raise ConfigurationError(f"--prompts-file {prompts_file} would be overwritten: choose another --out")
    is_own = listing.is_file() and all("seed" in (row or {}) for row in read_json_lines(listing))
    names = [] if is_own else [LISTING, GRID, *(f"{i:05d}.png" for i in range(num_images))]
    if found := next((name for name in names if (out / name).exists()), None):
        raise ConfigurationError(f"--out {out} has {found} of someone else, which would be overwritten: choose another")


def main() -> None:
    """Load, generate, write."""
    arguments = parse_arguments()
    prompts = [prompt for prompt in read_prompts(arguments) for _ in range(arguments.images_per_prompt)]
    out: Path = arguments.out
    check_folder(out, len(prompts), arguments.prompts_file)
    rewrite = open_rewriter(arguments)

    from diffusion.formats.marks import c2pa_signer, save_marked

    sign = c2pa_signer(*arguments.c2pa) if arguments.c2pa else None
    seeds = read_seeds(arguments, len(prompts))
    device = choose_device(arguments.device)
    writing = partial(explained_writes, f"--out {out}", "Choose another folder")
    with writing():
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass

    from diffusion.evaluation.images import GRID, LISTING
    from diffusion.evaluation.prompts import write_listing
    from diffusion.loading import load_model
    from diffusion.models.sampling import image_grid

    model = load_model(arguments.checkpoint, weights=arguments.weights, paths=frozen_paths(arguments))

    def generate(part: slice) -> list[Any]:
        try:
            images = model.generate(
                texts[part],
                arguments.negative_prompt,
                scores=dict(arguments.score),
                height=arguments.height,
                width=arguments.width,
                num_inference_steps=arguments.steps,
                sampler=arguments.sampler,
                guidance_scale=arguments.guidance_scale,
                seed=seeds[part],
                batch_size=arguments.batch_size,
            )
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        assert isinstance(images, list)
        return images

    texts = prompts
    if arguments.rewrite is not None:  # Mistakes of all options show before the server, which may ask for money.
        generate(slice(0))
    with error_context("--rewrite"):
        texts = rewrite(prompts)
    mark = model.mark
    model.to(device)
    rows, first_images = [], []
    for start in range(0, len(texts), arguments.batch_size):
        images = generate(slice(start, start + arguments.batch_size))
        with writing():
            if not rows:  # Nobody may read old and new images as one set.
                write_listing(out, [])
            for i, image in enumerate(images, start):
                save_marked(image, out / f"{i:05d}.png", mark, sign=sign)
                row = {"file_name": f"{i:05d}.png", "prompt": prompts[i], "seed": seeds[i]}
                rows.append(row if arguments.rewrite is None else {**row, "rewritten_prompt": texts[i]})
        first_images += images[: GRID_IMAGES - len(first_images)]
    with writing():
        save_marked(image_grid(first_images, arguments.columns), out / GRID, mark, sign=sign)
        write_listing(out, rows)
    print(f"{len(rows)} images in {out}")
    names = {GRID, *(row["file_name"] for row in rows)}
    if others := sorted(path.name for path in out.glob("*.png") if path.name not in names):
        print(f"{out} holds {len(others)} other images ({others[0]} ...) that {LISTING} does not name: remove them or "
              "read the folder by that file", file=sys.stderr)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(run_command(main))
