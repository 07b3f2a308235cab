"""Prove on real processes that a run does not depend on ranks, microbatches, workers, sharding or interruptions.

The tiny recipe is run in many ways; for each step, what was drawn (samples, noise, timesteps, dropped captions) must be
the same, and the loss the same up to rounding. Exit code 1 if not.
"""

import argparse
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from diffusion.launch import CommandParser, run_command

ROOT = Path(__file__).resolve().parent.parent
RESOLUTION = 32
STREAMS = {"one": "[{name: 64-up}]", "several": "[{name: 32-64}, {name: 64-up}]"}
SMALL_UNET = "{block_out_channels: [16, 32], norm_num_groups: 4, attention_head_dim: [2, 2]}"
SMALL_TRANSFORMER = "{hidden_size: 64, num_heads: 4, depth: 4, axes_dim: [8, 8]}"
SETTINGS = (
    "model.pretrained=null",
    "data.remote=null",
    f"data.resolution={RESOLUTION}",
    "data.global_batch_size=30",
    "data.num_canonical_nodes=8",
    "data.shuffle_block_size=64",
    "validation=null",
    "samples.prompts=[]",
    "schedule.warmup=10ba",
    "trainer.save_interval=5ba",
    "trainer.progress_bar=false",
    "trainer.precision=fp32",
    "algorithms.ema={start: 0.25dur, decays: [0.9]}",
)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("yaml", nargs="?", type=Path, default=ROOT / "yamls/tiny/phase1.yaml", help="the recipe")
    parser.add_argument("overrides", nargs="*", help="key=value, for all runs")
    parser.add_argument("--out", type=Path, default=Path("runs/verify_elastic"), help="replaced if it exists")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the steps at which runs are disturbed")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--full", action="store_true", help="every combination instead of a covering set")
    size.add_argument("--short", action="store_true", help="three runs")
    return parser.parse_intermixed_args()


def main(launcher: Callable[[int], list[str]] | None = None) -> None:
    """Make data, run, compare; ranks are started with Composer's launcher or another one (`runs.Launcher`)."""
    arguments = parse_arguments()
    from diffusion.config.loading import load_config
    from diffusion.config.locations import is_location
    from diffusion.config.model import TextEncoderConfig
    from diffusion.config.schema import Task
    from verification.runs import Recipe, compare, composer, format_table, make_data, run
    from verification.ways import covering_set, product, short_set

    config = load_config(arguments.yaml, arguments.overrides, may_lack=is_location)
    settings, is_vae = config.model, config.task is Task.autoencoder
    out: Path = arguments.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    data = make_data(out / "data", RESOLUTION)
    is_transformer, is_pixel = settings.architecture.is_transformer, settings.architecture.is_pixel
    transformer = "tiny_pixel_transformer" if is_pixel else "tiny_transformer"
    model = (
        f"model.vae={'null' if is_pixel else data / 'vae'}",
        f"model.architecture={transformer if is_transformer else 'tiny'}",
        f"model.network={SMALL_TRANSFORMER if is_transformer else SMALL_UNET}",
    )
    recipe = Recipe(
        yaml=arguments.yaml.resolve(),
        overrides=(f"seed={arguments.seed + 17}", *model, *SETTINGS, *arguments.overrides),
        num_steps=arguments.steps,
        root=out,
        seed=arguments.seed,
        launcher=launcher or composer,
    )
    specs = product() if arguments.full else short_set() if arguments.short else covering_set()
    if is_vae or is_pixel or settings.alignment is not None or settings.text_encoder != TextEncoderConfig():
        specs = [replace(spec, representation="images") for spec in specs]
    if is_vae:  # It is not sharded.
        specs = [replace(spec, parallelism="ddp") for spec in specs]
    specs = [*dict.fromkeys(specs)]
    references, comparisons = {}, []
    for i, spec in enumerate(specs):
        folder = data / ("prepared" if spec.representation == "images" else "latents") / "train"
        streams = [f"data.streams={STREAMS[spec.buckets]}", f"data.representation={spec.representation}"]
        outcome = run(recipe, spec, [f"data.local={folder}", *streams])
        reference = references.setdefault(spec.data_setting, outcome)
        comparisons.append(compare(outcome, reference))
        print(f"[{i + 1}/{len(specs)}] {format_table(comparisons[-1:]).splitlines()[1]}", flush=True)
    table = format_table(comparisons)
    (out / "table.txt").write_text(table + "\n", encoding="utf-8")
    print(f"\n{table}\n")
    wrong = [comparison.outcome.spec.name for comparison in comparisons if not comparison.is_equal]
    if wrong:
        print(f"{len(wrong)} of {len(specs)} runs differ: {', '.join(wrong)}")
        raise SystemExit(1)
    print(f"{len(specs)} runs: everything drawn is equal in every step, losses within 1e-5, averages as the weights")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
