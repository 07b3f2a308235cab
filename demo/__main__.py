"""The main job, end to end, on shapes drawn here: prepare, train the VAE, encode, two phases, generate, score, report.

Each step is a command that also works on your own images; steps that are done are not done again. The whole demo ends
with an error if too few generated images are right.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from demo.steps import COMPOSER, QUICK, Steps
from diffusion.errors import UserError
from diffusion.launch import CommandParser, run_command

GUIDANCE_SCALE, NUM_INFERENCE_STEPS = 2.0, 25
NUM_IMAGES = 6000
LEAST_RIGHT = {"colour": 0.9, "shape": 0.7}
"""Least shares of right images of one object, after training on `NUM_IMAGES` images."""
LOGGERS = ["loggers.tensorboard=true", "loggers.wandb={offline: true}"]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="everything goes here")
    parser.add_argument("--num-images", type=int, help=f"images of the data set (default {NUM_IMAGES}; quick: 300)")
    parser.add_argument("--quick", action="store_true", help="a few steps of each, to see that everything works")
    return parser.parse_args()


class Demo(Steps):
    """The steps of the demo."""

    def __init__(self, out: Path, quick: bool) -> None:
        super().__init__(out)
        self.quick = quick

    def train(self, name: str, overrides: list[str]) -> None:
        """Train one of yamls/tiny."""
        quick = QUICK if self.quick else []
        self.run(name, [*COMPOSER, "run.py", f"yamls/tiny/{name}.yaml", *overrides, *LOGGERS, *quick])

    def check_scores(self) -> None:
        """Compare the shares of right images with `LEAST_RIGHT`.

        Raises:
            UserError: one is too low.
        """
        shares = json.loads((self.out / "scores.json").read_text())["single"]
        low = [f"{name} {shares[name]:.3f}, not {least}" for name, least in LEAST_RIGHT.items() if shares[name] < least]
        if low:
            raise UserError(f"too few of the generated images are right: {', '.join(low)}; see {self.out}/report.html")


def main() -> None:
    """Run the demo."""
    arguments = parse_arguments()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    demo = Demo(out, arguments.quick)
    num_images = arguments.num_images or (300 if arguments.quick else NUM_IMAGES)
    python = [sys.executable]
    source, prepared = out / "source", out / "prepared"
    runs = {name: out / name for name in ("autoencoder", "phase1", "phase2")}
    start = time.monotonic()

    demo.run("draw", [*python, "-m", "demo.shapes", str(source), "--num-images", str(num_images)])
    layouts = [str(source / layout) for layout in ("images", "webdataset", "parquet")]
    options = ["--edges", "32", "64", "--validation-fraction", "0.05", "--workers", "2"]
    demo.run("prepare", [*python, "scripts/prepare.py", *layouts, str(prepared), *options])

    def data(folder: Path) -> list[str]:
        return [f"data.local={folder}/train", f"validation.local={folder}/validation"]

    demo.train("autoencoder", [f"output_folder={runs['autoencoder']}", *data(prepared)])
    vae = runs["autoencoder"] / "vae"
    for resolution in (32, 64):
        encode = ["scripts/encode.py", str(prepared), str(out / f"latents-{resolution}")]
        options = ["--resolution", str(resolution), "--architecture", "tiny", "--vae", str(vae), "--mean-only"]
        demo.run(f"encode-{resolution}", [*python, *encode, *options])
    demo.train("phase1", [f"output_folder={runs['phase1']}", f"model.vae={vae}", *data(out / "latents-32")])
    init = f"init_from.checkpoint={runs['phase1']}"
    demo.train("phase2", [f"output_folder={runs['phase2']}", f"model.vae={vae}", init, *data(out / "latents-64")])

    report = ["-m", "demo.score", str(out), "--guidance-scale", str(GUIDANCE_SCALE)]
    options = ["--steps", str(2 if demo.quick else NUM_INFERENCE_STEPS), *(["--seeds", "1"] if demo.quick else [])]
    demo.run("score", [*python, *report, *options])
    print(f"\nreport: {out / 'report.html'}   ({time.monotonic() - start:.0f} s)")
    if not arguments.quick and num_images >= NUM_IMAGES:
        demo.check_scores()


if __name__ == "__main__":
    raise SystemExit(run_command(main))
