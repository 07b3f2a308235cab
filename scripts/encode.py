"""Encode prepared data: the VAE's posterior and the captions' token ids, so that training need not compute them.

    python scripts/encode.py data/prepared data/encoded-256 --resolution 256 --config yamls/phase1.yaml
    python scripts/encode.py data/prepared data/encoded-64 --resolution 64 --architecture tiny --device cpu

The same command again continues one that was stopped.
"""

import logging
import sys
from functools import partial
from pathlib import Path

from diffusion.config.loading import load
from diffusion.config.model import Architecture, ModelConfig
from diffusion.config.schema import Config
from diffusion.errors import ConfigurationError, MachineError
from diffusion.launch import CommandParser, run_command


def parse() -> CommandParser:
    """Describe the command line."""
    parser = CommandParser(prog="encode.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("prepared", type=Path, help="output of scripts/prepare.py")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--resolution", type=int, required=True, help="side of the squares in pixels")
    model = parser.add_argument_group("model, as the run that will read the data has it")
    model.add_argument("--config", type=Path, help="YAML of the run; its section `model` is taken")
    model.add_argument("--architecture", choices=[architecture.value for architecture in Architecture])
    model.add_argument("--pretrained", help="folder in the diffusers layout, or hub name")
    model.add_argument("--vae", help="folder of a VAE that replaces the one of --pretrained")
    model.add_argument("--local-files-only", action="store_true", help="never ask the hub")
    parser.add_argument(
        "--mean-only", action="store_true", help="leave the log-variance out (objective.posterior: mean)"
    )
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="of the VAE's forward pass")
    parser.add_argument("--batch-size", type=int, default=32, help="pictures per forward pass")
    parser.add_argument("--device", help="cuda, cuda:1, cpu; default: cuda if there is one")
    parser.add_argument("--workers", type=int, default=4, help="processes that decode pictures")
    return parser


def model_config(arguments: object) -> ModelConfig:
    """Section `model` of the YAML, or the one that the options describe."""
    given = vars(arguments)
    options = {name: given[name] for name in ("architecture", "pretrained", "vae") if given[name]}
    if given["config"] is not None:
        if options:
            raise ConfigurationError(
                f"--config says what the model is: leave --{', --'.join(options)} out, or --config"
            )
        config = load(Config, given["config"]).model
    elif "architecture" in options:
        architecture = Architecture(options["architecture"])
        config = ModelConfig(architecture=architecture, pretrained=given["pretrained"], vae=given["vae"])
    else:
        raise ConfigurationError("say what encodes: --config YAML, or --architecture with --pretrained and --vae")
    config.local_files_only = config.local_files_only or given["local_files_only"]
    return config


def main() -> None:
    """Parse, load the frozen parts, encode."""
    arguments = parse().parse_args()
    config = model_config(arguments)
    if arguments.batch_size < 1 or arguments.workers < 0:
        raise ConfigurationError("--batch-size must be at least 1 and --workers at least 0")
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    import torch

    from diffusion.models import load_frozen_parts
    from diffusion.models.identity import module_identity, tokenizer_identity
    from diffusion.models.tokenizers import tokenize
    from diffusion.preparation.encode import encode

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise MachineError(f"--device {device}, but no GPU is visible here: check the driver, or use --device cpu")
    frozen = load_frozen_parts(config)
    manifest = encode(
        arguments.prepared,
        arguments.out,
        vae=frozen.vae,
        vae_identity=module_identity(frozen.vae),
        tokenize=partial(tokenize, frozen.tokenizer),
        tokenizer_identity=tokenizer_identity(frozen.tokenizer),
        empty_ids=tokenize(frozen.tokenizer, [""])[0].tolist(),
        resolution=arguments.resolution,
        batch_size=arguments.batch_size,
        device=device,
        precision=arguments.precision,
        mean_only=arguments.mean_only,
        num_workers=arguments.workers,
    )
    num_samples = sum(count for buckets in manifest.counts.values() for count in buckets.values())
    print(f"{arguments.out}: {num_samples} samples at {manifest.resolution} px")


if __name__ == "__main__":
    sys.exit(run_command(main))
