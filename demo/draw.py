"""Draw the demo's data set: captioned shapes, as a folder of images, WebDataset tars and parquet files."""

import argparse
import shutil
from pathlib import Path

from demo.shapes import write_data_set
from diffusion.files import atomic_path
from diffusion.launch import CommandParser, run_command


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder; replaced if it exists")
    parser.add_argument("--num-images", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=17)
    return parser.parse_args()


def main() -> None:
    """Draw, atomically."""
    arguments = parse_arguments()
    with atomic_path(arguments.out) as partial:
        counts = write_data_set(partial, arguments.num_images, arguments.seed)
        shutil.rmtree(arguments.out, ignore_errors=True)
    print(f"{arguments.out}: " + ", ".join(f"{count} in {layout}" for layout, count in counts.items()))


if __name__ == "__main__":
    raise SystemExit(run_command(main))
