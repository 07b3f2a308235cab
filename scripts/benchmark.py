"""How fast the way of the data is, as ratios to its limits measured in turns in the same process.

    python scripts/benchmark.py prepare load encode [--out benchmark.json] [--quick]

prepare: beside a loop that only decodes and copies. load: latents beside a stock StreamingDataset and webdataset,
pictures beside bare decoding and resizing. encode: beside the bare networks (the full-size VAE of SD2 with random
weights). Ratios are rates: above 1 is faster than what is named. Run it on a machine that does nothing else.
"""

import argparse
import datetime
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffusion.launch import CommandParser, run_command


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("prepare", "load", "encode"))
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--quick", action="store_true", help="few samples: shows that it runs, not how fast")
    parser.add_argument("--device", default="cpu", help="of encode's networks")
    return parser.parse_args()


def measurements(options: argparse.Namespace) -> dict[str, Callable[[], dict[str, Any]]]:
    """What is to be measured, by name."""
    from diffusion.benchmarks.encoding import measure_encoding
    from diffusion.benchmarks.loading import measure_latent_loading, measure_picture_loading
    from diffusion.benchmarks.preparing import measure_preparing
    from diffusion.config.model import Architecture

    quick = options.quick
    tiny: dict[str, Any] = {"architecture": Architecture.tiny, "resolution": 32, "picture_side": 40} if quick else {}
    every = {
        "prepare": {"prepare": lambda: measure_preparing(num_pictures=50 if quick else 4000, rounds=1 if quick else 3)},
        "load": {
            "load latents": lambda: measure_latent_loading(num_samples=1024 if quick else 8192),
            "load pictures": lambda: measure_picture_loading(num_samples=32 if quick else 256),
        },
        "encode": {"encode": lambda: measure_encoding(num_pictures=16, device=options.device, rounds=2, **tiny)},
    }
    return {name: run for part in options.parts for name, run in every[part].items()}


def main() -> None:
    """Measure and print."""
    options = parse_arguments()
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} x {platform.processor() or platform.machine()}, {options.device}",
    }
    for name, run in measurements(options).items():
        results[name] = run()
        shown = {key: value for key, value in results[name].items() if key.startswith("ratio") or "per_second" in key}
        print(f"{name}: " + ", ".join(f"{key} {_number(value)}" for key, value in shown.items()), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def _number(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_number(one) for one in value) + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
