"""Prove on real processes that a run does not depend on ranks, microbatches, workers, sharding or interruptions.

The tiny recipe is run in many ways; for each step, what was drawn (samples, noise, timesteps, dropped captions) must be
the same, and the loss the same up to rounding. Exit code 1 if not.
"""

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from diffusion.launch import CommandParser, run_command

if TYPE_CHECKING:
    from verification.forking import Launcher

ROOT = Path(__file__).resolve().parent.parent
SMALL_UNET = "model.unet={block_out_channels: [16, 32], norm_num_groups: 4, attention_head_dim: [2, 2]}"
RESOLUTION = 32
STREAMS = {"one": "[{name: 64-up}]", "several": "[{name: 32-64}, {name: 64-up}]"}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("yaml", nargs="?", type=Path, default=ROOT / "yamls/tiny/phase1.yaml", help="the recipe")
    parser.add_argument("overrides", nargs="*", help="key=value, for all runs")
    parser.add_argument("--out", type=Path, default=Path("runs/verify_elastic"), help="replaced if it exists")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the steps at which runs are disturbed")
    parser.add_argument(
        "--composer", action="store_true", help="start ranks as usual, instead of forking them, which is quicker"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--full", action="store_true", help="every combination instead of a covering set")
    size.add_argument("--short", action="store_true", help="three runs")
    return parser.parse_args()


def main() -> None:
    """Make data, run, compare."""
    arguments = parse_arguments()
    from verification.forking import launchers

    with launchers(composer=arguments.composer) as launcher:
        verify(arguments, launcher)


def verify(arguments: argparse.Namespace, launcher: "Launcher") -> None:
    """Make data, run, compare."""
    from verification.compare import compare, draw_losses, format_table
    from verification.data import make_data
    from verification.plan import covering_set, in_order, product, short_set
    from verification.runner import Recipe, run

    out: Path = arguments.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    data = make_data(out / "data", RESOLUTION)
    common = (
        f"seed={arguments.seed + 17}",
        f"model.vae={data / 'vae'}",
        "model.architecture=tiny",
        "model.pretrained=null",
        SMALL_UNET,
        "data.remote=null",
        f"data.resolution={RESOLUTION}",
        "data.global_batch_size=16",
        "data.num_canonical_nodes=8",
        "data.shuffle_block_size=64",
        "validation=null",
        "samples.prompts=[]",
        "schedule.warmup=10ba",
        "trainer.save_interval=10ba",
        "trainer.progress_bar=false",
        "trainer.precision=fp32",
        "algorithms.ema={start: 0.5dur, decays: [0.9]}",
        *arguments.overrides,
    )
    recipe = Recipe(
        yaml=arguments.yaml.resolve(),
        overrides=common,
        num_steps=arguments.steps,
        root=out,
        program=ROOT / "run.py",
        seed=arguments.seed,
    )
    specs = in_order(product() if arguments.full else short_set() if arguments.short else covering_set())
    outcomes, comparisons = [], []
    for i, spec in enumerate(specs):
        place = data / ("prepared" if spec.representation == "images" else "latents") / "train"
        streams = STREAMS[spec.buckets]
        outcome = run(
            recipe,
            spec,
            [f"data.local={place}", f"data.streams={streams}", f"data.representation={spec.representation}"],
            launcher,
        )
        outcomes.append(outcome)
        reference = next(other for other in outcomes if other.spec.data_setting == spec.data_setting)
        comparisons.append(compare(outcome, reference))
        print(f"[{i + 1}/{len(specs)}] {format_table(comparisons[-1:]).splitlines()[1]}", flush=True)
    table = format_table(comparisons)
    (out / "table.txt").write_text(table + "\n", encoding="utf-8")
    draw_losses(outcomes, out / "losses.png")
    print(f"\n{table}\n")
    wrong = [comparison.outcome.spec.name for comparison in comparisons if not comparison.is_equal]
    if wrong:
        print(f"{len(wrong)} of {len(specs)} runs differ: {', '.join(wrong)}")
        raise SystemExit(1)
    print(f"{len(specs)} runs: everything drawn is equal in every step, losses are equal within 1e-5")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
