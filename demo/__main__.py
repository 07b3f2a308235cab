"""The main job, end to end, on shapes drawn here: prepare, train the VAE, encode, train, generate, score, report.

Each step is a command that also works on your own images; steps that are done are not done again. The whole demo ends
with an error if too few generated images are right.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from demo.steps import QUICK, Steps
from diffusion.errors import UserError
from diffusion.launch import CommandParser, run_command

NUM_IMAGES = 12_000
SHARES = ("0.4", "0.6", "0")
"""Shares of the scenes with one object, two objects and a group."""

MIN_RIGHT = {"single": {"colour": 0.9, "shape": 0.9}, "pairs": {"colour": 0.9, "shape": 0.75, "relation": 0.75}}
"""Minimum shares of right images of one and of two objects, after training on `NUM_IMAGES` images."""
LOGGERS = ["loggers.tensorboard=true", "loggers.wandb={offline: true}"]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="everything goes here")
    parser.add_argument("--num-images", type=int, help=f"images of the data set (default {NUM_IMAGES}; quick: 300)")
    parser.add_argument("--quick", action="store_true", help="a few steps of each, to see that everything works")
    return parser.parse_args()


def check_scores(out: Path) -> None:
    """Raise a UserError if a share of right images is below `MIN_RIGHT`."""
    scores = json.loads((out / "scores.json").read_text())
    low = [
        f"{kind} {name} {scores[kind][name]:.3f}, not {share}"
        for kind, shares in MIN_RIGHT.items()
        for name, share in shares.items()
        if scores[kind][name] < share
    ]
    if low:
        raise UserError(f"too few of the generated images are right: {', '.join(low)}; see {out}/report.html")


def main() -> None:
    """Run the demo."""
    arguments = parse_arguments()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    demo = Steps(out)
    num_images = arguments.num_images or (300 if arguments.quick else NUM_IMAGES)
    start = time.monotonic()
    _, prepared = demo.draw(num_images, SHARES)

    def train(name: str, folder: Path, *overrides: str) -> None:
        data = [f"data.local={folder}/train", f"validation.local={folder}/validation"]
        settings = [f"output_folder={out}/{name}", *overrides, *data, *LOGGERS, *(QUICK if arguments.quick else [])]
        demo.run(name, [sys.executable, "run.py", f"yamls/tiny/{name}.yaml", *settings])

    train("autoencoder", prepared)
    vae, latents = out / "autoencoder" / "vae", out / "latents-64"
    options = ["--resolution", "64", "--architecture", "tiny", "--vae", str(vae), "--mean-only"]
    demo.run("encode", [sys.executable, "scripts/encode.py", str(prepared), str(latents), *options])
    train("modern_64", latents, f"model.vae={vae}")

    options = ["--steps", "2", "--seeds", "1"] if arguments.quick else []
    demo.run("score", [sys.executable, "-m", "demo.score", str(out), *options])
    print(f"\nreport: {out / 'report.html'}   ({time.monotonic() - start:.0f} s)")
    if not arguments.quick and num_images >= NUM_IMAGES:
        check_scores(out)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
