"""Reconstruct averages of any width after training: python scripts/reconstruct_ema.py RUN --width 0.08.

Karras et al. 2024, section 3.2. The run needs stored power-function averages (`algorithms.ema.power`).
scripts/generate.py reads the output as a checkpoint.
"""

from pathlib import Path

from diffusion.launch import CommandParser, run_command


def main() -> None:
    """Reconstruct, write and report the error."""
    parser = CommandParser(description="Reconstruct averages of any width from the stored averages of a run.")
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--width", type=float, nargs="+", required=True, help="relative widths, such as 0.08")
    parser.add_argument("--store", help="s3://bucket/prefix of the run's checkpoints, to download averages")
    parser.add_argument("--step", type=int, help="step of a stored average; default: the last")
    arguments = parser.parse_args()

    from diffusion.ema.posthoc import fetch_averages, reconstruct

    if arguments.store is not None:
        fetch_averages(arguments.store, arguments.run)
    for width in arguments.width:
        path, combination = reconstruct(arguments.run, width, step=arguments.step)
        print(
            f"{path}: from {len(combination.coefficients)} averages; error of the profile {combination.error:.2%}, "
            f"rounding errors grow by up to {combination.amplification:.1f}"
        )


if __name__ == "__main__":
    raise SystemExit(run_command(main))
