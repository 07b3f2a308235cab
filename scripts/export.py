"""Export a run's model: python scripts/export.py RUN FOLDER --weights ema --license apache-2.0.

python scripts/export.py RUN model.safetensors --layout ldm
python scripts/export.py LORA_RUN lora.safetensors --layout kohya
python scripts/export.py RUN FOLDER --push-to-hub USER/NAME

FOLDER is in the diffusers layout, with a model card. `DiffusionPipeline.from_pretrained(FOLDER)` gives the same images
from the same noise as scripts/generate.py. `init_from.checkpoint=FOLDER` with `model.pretrained=FOLDER` fine-tunes such
a folder. `ldm` is the layout of the original Stable Diffusion code, which ComfyUI, A1111 and sd-scripts read.
"""

from pathlib import Path

from diffusion.config.frozen import add_model, frozen_paths
from diffusion.launch import CommandParser, named_score, run_command, unicode_text


def main() -> None:
    """Export."""
    parser = CommandParser(description="Export a run's model.")
    add_model(parser)
    parser.add_argument(
        "out", type=Path, help="new folder; or FILE.safetensors for the network alone, without a text adapter"
    )
    parser.add_argument(
        "--layout",
        default="diffusers",
        choices=["diffusers", "ldm", "kohya"],
        help="ldm: U-Net, VAE and text encoder in FILE.safetensors; kohya: LoRA alone in FILE.safetensors",
    )
    parser.add_argument(
        "--score", type=named_score, nargs="+", default=[], metavar="NAME=NUMBER",
        help="scores that the export asks for, as aesthetic=7 (model.score_conditioning); default: none",
    )  # fmt: skip
    parser.add_argument("--lora", action="store_true", help="LoRA alone, for load_lora_weights; default: merged")
    parser.add_argument(
        "--license", type=unicode_text, default="unknown", help="of the model, by the Hugging Face hub's name"
    )
    parser.add_argument("--data-license", type=unicode_text, default="unknown", help="of images and captions, in words")
    parser.add_argument("--data", type=Path, help="prepared data; its sources are listed in the model card")
    parser.add_argument(
        "--push-to-hub",
        metavar="USER/NAME",
        help="upload to this repository of the hub, created as a private one; token: HF_TOKEN or `hf auth login`",
    )
    arguments = parser.parse_args()

    from diffusion.export import ExportLayout, Licences, export, push_to_hub

    out, repository = arguments.out, arguments.push_to_hub
    export(
        arguments.checkpoint,
        out,
        weights=arguments.weights,
        layout=ExportLayout(arguments.layout),
        lora_only=arguments.lora,
        scores=dict(arguments.score),
        paths=frozen_paths(arguments),
        licences=Licences(model=arguments.license, data=arguments.data_license),
        prepared=arguments.data,
        repository=repository,
    )
    print(f"{arguments.checkpoint} is in {arguments.out}")
    if repository:
        print(push_to_hub(out, repository))


if __name__ == "__main__":
    raise SystemExit(run_command(main))
