"""Export a run's model for others: python scripts/export.py RUN FOLDER --weights ema --license apache-2.0.

FOLDER is in the diffusers layout, with a model card: `DiffusionPipeline.from_pretrained(FOLDER)` loads it, and gives
the same images from the same noise as scripts/generate.py. The other way, `init_from.checkpoint=FOLDER` and
`model.pretrained=FOLDER` train on from such a folder.
"""

import argparse
from pathlib import Path

from diffusion.launch import CommandParser, run_command


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description="Export a run's model for others.")
    parser.add_argument(
        "checkpoint",
        help="checkpoint, run folder or its `checkpoints` folder (the newest is taken); or a file of averaged weights",
    )
    parser.add_argument("out", type=Path, help="new folder; or FILE.safetensors for the U-Net alone in one file")
    parser.add_argument(
        "--weights", default="raw", help="raw: training weights; ema: their average; or one of several: decay-0.999"
    )
    parser.add_argument("--lora", action="store_true", help="LoRA alone, for load_lora_weights; default: merged")
    parser.add_argument("--license", default="unknown", help="of the model, as the Hugging Face hub calls it")
    parser.add_argument("--data-license", default="unknown", help="of images and captions, in words")
    parser.add_argument("--data", type=Path, help="prepared data, whose sources the model card lists")
    return parser.parse_args()


def main() -> None:
    """Export."""
    arguments = parse_arguments()
    from diffusion.export import export
    from diffusion.model_card import Licences

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
