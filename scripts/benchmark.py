"""How fast it is: training steps beside what the machine can do, and the way of the data beside its limits.

    python scripts/benchmark.py step ratio parity bytes save [--out benchmark.json]
    python scripts/benchmark.py prepare load encode [--out benchmark.json] [--quick]
    composer -n 8 scripts/benchmark.py step trainer.parallelism=fsdp          # the Trainer on several GPUs

step: the bare U-Net in fp32 and with each option added, a plain loop with diffusers, and the Trainer, with the parts of
its step. ratio: the Trainer's step over the plain loop's, in turns on the same U-Net. parity: the loss with each option
beside fp32. bytes: what a step moves apart from matrix products. save: checkpoints beside a raw file. prepare: beside a
loop that only decodes and copies. load: latents beside a stock StreamingDataset and webdataset, pictures beside bare
decoding and resizing. encode: beside the bare networks (the full-size VAE of SD2 with random weights). Ratios of data
and checkpoints are rates: above 1 is faster than what is named. Run it on a machine that does nothing else.
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
from diffusion.ranks import rank

PARTS = ("step", "ratio", "parity", "bytes", "save", "prepare", "load", "encode")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", metavar="PART", help=f"{', '.join(PARTS)}; key.sub=value for the Trainer")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--quick", action="store_true", help="little of everything: shows that it runs, not how fast")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
    kinds = ("stable_diffusion_2", "tiny")
    parser.add_argument("--architecture", choices=kinds, help="default: stable_diffusion_2 on a GPU, tiny on a CPU")
    parser.add_argument("--resolutions", type=int, nargs="+", help="default: 256 512 on a GPU, 32 on a CPU")
    parser.add_argument("--microbatches", type=int, nargs="+", help="default: 16 64 128 on a GPU, 8 on a CPU")
    options = parser.parse_intermixed_args()
    options.parts = [word for word in options.words if "=" not in word]
    options.overrides = [word for word in options.words if "=" in word]
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"{part} is nothing that is measured: choose from {', '.join(PARTS)}")
    return options


def measurements(options: argparse.Namespace) -> dict[str, Callable[[], dict[str, Any]]]:
    """What is to be measured, by name."""
    every = {**_of_steps(options), **_of_data(options)}
    return {name: run for part in options.parts for name, run in every[part].items()}


def _of_steps(options: argparse.Namespace) -> dict[str, dict[str, Callable[[], dict[str, Any]]]]:
    import torch

    from diffusion.benchmarks.moved_bytes import measure_moved_bytes
    from diffusion.benchmarks.saving import measure_saving
    from diffusion.benchmarks.steps import measure_parity, measure_ratio, measure_steps
    from diffusion.config.model import Architecture
    from diffusion.ranks import local_rank

    quick, on_gpu = options.quick, options.device == "cuda"
    default = Architecture.stable_diffusion_2 if on_gpu else Architecture.tiny
    architecture = Architecture(options.architecture or default)
    device = torch.device("cuda", local_rank()) if on_gpu else torch.device("cpu")
    resolutions = options.resolutions or ([256, 512] if on_gpu else [32])
    sizes = options.microbatches or ([16, 64, 128] if on_gpu else [8])
    shared: dict[str, Any] = {"architecture": architecture, "device": device}
    overrides = [f"trainer.device={'gpu' if on_gpu else 'cpu'}", *options.overrides]
    one = {**shared, "resolution": resolutions[0], "batch_size": sizes[0]}
    blocks: dict[str, Any] = {"num_blocks": 2 if quick else 10, "block": 1 if quick or not on_gpu else 5}
    return {
        "step": {
            "step": lambda: measure_steps(
                **shared, resolutions=resolutions, microbatch_sizes=sizes, trainer_overrides=overrides, **blocks
            )
        },
        "ratio": {"ratio": lambda: measure_ratio(**one, trainer_overrides=overrides, num_steps=3 if quick else 30)},
        "parity": {"parity": lambda: measure_parity(**one, num_steps=3 if quick else 100)},
        "bytes": {"bytes": lambda: measure_moved_bytes(architecture, resolutions)},
        "save": {"save": lambda: measure_saving(num_megabytes=16 if quick else 1024, rounds=3 if quick else 5)},
    }


def _of_data(options: argparse.Namespace) -> dict[str, dict[str, Callable[[], dict[str, Any]]]]:
    from diffusion.benchmarks.encoding import measure_encoding
    from diffusion.benchmarks.loading import measure_latent_loading, measure_picture_loading
    from diffusion.benchmarks.preparing import measure_preparing
    from diffusion.config.model import Architecture

    quick = options.quick
    tiny: dict[str, Any] = {"architecture": Architecture.tiny, "resolution": 32, "picture_side": 40} if quick else {}
    return {
        "prepare": {"prepare": lambda: measure_preparing(num_pictures=50 if quick else 4000, rounds=1 if quick else 3)},
        "load": {
            "load latents": lambda: measure_latent_loading(num_samples=1024 if quick else 8192),
            "load pictures": lambda: measure_picture_loading(num_samples=32 if quick else 256),
        },
        "encode": {"encode": lambda: measure_encoding(num_pictures=16, device=options.device, rounds=2, **tiny)},
    }


def main() -> None:
    """Measure and print."""
    options = parse_arguments()
    options.device = options.device or _default_device()
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": _machine(options.device),
    }
    for name, run in measurements(options).items():
        results[name] = run()
        if rank() == 0:
            print(_shown(name, results[name]), flush=True)
    if options.out is not None and rank() == 0:
        options.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _machine(device: str) -> str:
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    return f"{os.cpu_count()} x {platform.processor() or platform.machine()}, cpu"


def _shown(name: str, result: dict[str, Any]) -> str:
    from diffusion.benchmarks.step_tables import format_parity, format_steps

    if name in ("step", "parity"):
        return (format_steps if name == "step" else format_parity)(result)
    keys = ("ratio", "per_second", "seconds", "gigabytes")
    shown = {key: value for key, value in result.items() if any(part in key for part in keys)}
    return f"{name}: " + ", ".join(f"{key} {_number(value)}" for key, value in shown.items())


def _number(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_number(one) for one in value) + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
