"""Export a run's model: python scripts/export.py RUN FOLDER --weights ema --license apache-2.0.

FOLDER is in the diffusers layout, with a model card. `DiffusionPipeline.from_pretrained(FOLDER)` gives the same images
from the same noise as scripts/generate.py. `init_from.checkpoint=FOLDER` with `model.pretrained=FOLDER` fine-tunes such
a folder.
"""

import argparse
from pathlib import Path

from diffusion.launch import CommandParser, run_command


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description="Export a run's model.")
    parser.add_argument(
        "checkpoint",
        help="checkpoint, run folder or its `checkpoints` folder (newest checkpoint), or a file of averaged weights",
    )
    parser.add_argument("out", type=Path, help="new folder; or FILE.safetensors for the U-Net alone in one file")
    parser.add_argument(
        "--weights", default="raw", help="raw: training weights; ema: their average; decay-0.999: one of several"
    )
    parser.add_argument("--lora", action="store_true", help="LoRA alone, for load_lora_weights; default: merged")
    parser.add_argument("--license", default="unknown", help="of the model, by the Hugging Face hub's name")
    parser.add_argument("--data-license", default="unknown", help="of images and captions, in words")
    parser.add_argument("--data", type=Path, help="prepared data; its sources are listed in the model card")
    return parser.parse_args()


def main() -> None:
    """Export."""
    arguments = parse_arguments()
    from diffusion.export import Licences, export

    export(
        arguments.checkpoint,
        arguments.out.expanduser(),
        weights=arguments.weights,
        lora_only=arguments.lora,
        licences=Licences(model=arguments.license, data=arguments.data_license),
        prepared=arguments.data,
    )
    print(f"{arguments.checkpoint} is in {arguments.out}")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
