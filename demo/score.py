"""Generate the demo's prompts with the averaged weights of phase 2, score them, and write report.html."""

import argparse
import json
from pathlib import Path

from diffusion.launch import CommandParser, run_command


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("demo", type=Path, help="folder of the demo, with autoencoder/, phase1/ and phase2/")
    parser.add_argument("--guidance-scale", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=25, help="DDIM steps")
    parser.add_argument("--seeds", type=int, default=4, help="images of each prompt")
    parser.add_argument("--weights", choices=["raw", "ema"], default="ema")
    return parser.parse_args()


def main() -> None:
    """Generate, score, report."""
    arguments = parse_arguments()
    from demo.report import Step, labelled_grid, write_report
    from demo.scoring import score_model
    from diffusion.loading import load_model

    folder: Path = arguments.demo
    runs = {name: folder / name for name in ("autoencoder", "phase1", "phase2")}
    model = load_model(runs["phase2"], weights=arguments.weights)
    scores, single, pairs = score_model(
        model,
        guidance_scale=arguments.guidance_scale,
        num_inference_steps=arguments.steps,
        seeds_per_prompt=arguments.seeds,
    )
    scores.write(folder / "scores.json")
    labelled_grid(single, arguments.seeds).save(folder / "grid.png")
    log = folder / "steps.json"
    steps = [Step(name=name, **step) for name, step in json.loads(log.read_text()).items()] if log.is_file() else []
    weights = "Averaged weights (EMA)" if arguments.weights == "ema" else "Training weights"
    write_report(
        folder / "report.html",
        steps=steps,
        runs=runs,
        scores=scores,
        single=single,
        pairs=pairs,
        seeds_per_prompt=arguments.seeds,
        settings=f"{weights}, {arguments.steps} DDIM steps, guidance {arguments.guidance_scale:g}.",
    )
    print(
        f"colour {scores.single.colour:.3f}, shape {scores.single.shape:.3f} of {scores.num_single} images; "
        f"relation {scores.pairs.relation or 0:.3f} of {scores.num_pairs}; oracle on real images: "
        f"colour {scores.oracle.colour:.3f}, shape {scores.oracle.shape:.3f}"
    )


if __name__ == "__main__":
    raise SystemExit(run_command(main))
