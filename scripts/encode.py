"""Encode prepared data: the VAE's posterior and the captions' token ids, stored so that training need not compute them.

    python scripts/encode.py data/prepared data/encoded-256 --resolution 256 --config run.yaml
    python scripts/encode.py data/prepared data/encoded --resolution 256 512 --config phase2.yaml --vae FOLDER
    python scripts/encode.py s3://bucket/prepared s3://bucket/latents --resolution 256 --config run.yaml --processes 8
    composer -n 8 scripts/encode.py data/prepared data/encoded-256 --resolution 256 --config run.yaml
    python scripts/encode.py data/prepared data/encoded-64 --resolution 64 --architecture tiny --device cpu

Several resolutions are written to OUT/256, OUT/512 and so on. Buckets with a fixed size (896x1152) are encoded at that
size. The same command, on any number of processes, continues after an interruption, encodes new prepared samples, and
marks samples that were removed from the prepared data.
"""

import argparse
import logging
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from diffusion.config.fields import section_problems
from diffusion.config.frozen import frozen_paths
from diffusion.config.loading import load, missing_keys
from diffusion.config.model import Architecture, ModelConfig
from diffusion.config.schema import Config
from diffusion.distributed import (
    is_first_rank,
    local_rank,
    local_world_size,
    num_cores,
    on_first_rank,
    start_process_group,
    world_size,
)
from diffusion.errors import ConfigurationError, MachineError, raise_all
from diffusion.launch import CommandParser, choose_device, end_process, positive, run_command, whole_number
from diffusion.preparation.config import Engine, RayConfig

if TYPE_CHECKING:
    from diffusion.preparation.encoding.models import EncodingModels
    from diffusion.preparation.engine import Workers


def parse() -> CommandParser:
    """Describe the command line."""
    parser = CommandParser(prog="encode.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("prepared", help="output of scripts/prepare.py: a folder or s3://BUCKET/PREFIX")
    parser.add_argument("out", help="folder to write, likewise")
    parser.add_argument("--resolution", type=int, nargs="+", default=[], metavar="PIXELS",
                        help="side of the squares; unnecessary if all buckets have fixed sizes")  # fmt: skip
    model = parser.add_argument_group("model, as in the training run")
    model.add_argument("--config", type=Path, help="YAML of the run; its section `model` is used, also for the scores "
                       "to store")  # fmt: skip
    model.add_argument("--architecture", choices=[architecture.value for architecture in Architecture])
    model.add_argument("--pretrained", help="folder in the diffusers layout, or hub name; overrides --config")
    model.add_argument("--vae", help="folder of a VAE instead of that of --pretrained; overrides --config")
    model.add_argument("--text-encoder", metavar="FOLDER", help="folder of a language model instead of CLIP")
    model.add_argument("--max-tokens", type=positive, help="tokens of a caption for it; overrides --config")
    model.add_argument("--chunks", type=positive, help="chunks of CLIP's length in a caption; overrides --config")
    model.add_argument("--local-files-only", action="store_true", help="never ask the hub")
    parser.add_argument("--mean-only", action="store_true", help="store no log-variance (objective.posterior: mean)")
    parser.add_argument("--text-embeddings", action="store_true", help="also store the text encoder's output: 2 L D "
                        "bytes per caption, 158 kB with stable_diffusion_2")  # fmt: skip
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="of the forward passes; "
                        "bf16 equals training from images with trainer.precision=amp_bf16, fp32 with fp32")  # fmt: skip
    parser.add_argument("--batch-size", type=positive, default=32, help="images per forward pass")
    parser.add_argument("--device", help="cuda, cuda:1, cpu; default: cuda (one GPU per process) if available")
    parser.add_argument("--workers", type=whole_number, help="decoding processes per encoding process; default: one "
                        "per core, at most 4")  # fmt: skip
    parser.add_argument("--processes", type=positive, help="encoding processes of this machine "
                        "(default: 1), or actors of --engine ray (default: all that fit); a GPU each")  # fmt: skip
    parser.add_argument("--engine", choices=[engine.value for engine in Engine], default=Engine.processes.value,
                        help="processes: of this machine or the launcher; ray: actors of the cluster of RAY_ADDRESS, "
                        "or of one on this machine")  # fmt: skip
    return parser


def model_config(options: argparse.Namespace) -> ModelConfig:
    """Section `model` of the YAML, or the one that the options describe."""
    if options.config is not None and options.architecture is not None:
        raise ConfigurationError("--config says what the model is: leave --architecture out, or --config")
    if options.config is not None:
        config = load(Config, options.config).model
    elif options.architecture is not None:
        config = ModelConfig(architecture=Architecture(options.architecture))
    else:
        raise ConfigurationError("choose the model: --config YAML, or --architecture with --pretrained and --vae")
    if config.architecture.is_pixel:
        raise ConfigurationError(f"{config.architecture.value} works on pixels, and has nothing to encode")
    config = frozen_paths(options).applied(config)
    if "pretrained" in missing_keys(config):
        raise ConfigurationError(f"{options.config}: model.pretrained is missing: add --pretrained FOLDER")
    text = config.text_encoder
    text.chunks = options.chunks or text.chunks
    text.max_tokens = options.max_tokens or text.max_tokens
    raise_all(ConfigurationError, list(section_problems(config, "model")))
    missing = config.missing_parts
    if "VAE" in missing or (options.text_embeddings and missing):
        parts = "--pretrained FOLDER" if options.text_embeddings else "--pretrained FOLDER, or --vae FOLDER"
        raise ConfigurationError(f"{config.architecture.value} would encode with random weights: add {parts}")
    config.local_files_only = config.local_files_only or options.local_files_only
    return config


def load_models(config: ModelConfig, text_embeddings: bool) -> "EncodingModels":
    """Load the networks that encode."""
    from diffusion.models import load_frozen_parts
    from diffusion.preparation.encoding.models import EncodingModels

    return EncodingModels.of(load_frozen_parts(config), text_embeddings=text_embeddings)


def device_of(given: str | None, workers: "Workers", by_workers: bool) -> str:
    """Return the device of this process, or of the workers; of several ranks each has the GPU of its number."""
    import torch

    from diffusion.preparation.engine import cluster_has_gpus

    if workers.engine is Engine.ray:  # Its nodes may have GPUs that this machine does not have.
        device = given or ("cuda" if cluster_has_gpus(workers) else "cpu")
        logging.getLogger(__name__).info("the workers of the Ray cluster encode on: %s", device)
        return device
    device = given or ("cuda" if torch.cuda.is_available() else "cpu")
    if by_workers and device.startswith("cuda:"):
        raise ConfigurationError(f"--device {device} is one GPU for all processes: set CUDA_VISIBLE_DEVICES, give cuda")
    num = workers.number if by_workers else local_world_size()
    if device == "cuda" and 0 < torch.cuda.device_count() < num:
        raise MachineError(f"{num} processes on a node with {torch.cuda.device_count()} GPUs: start one for each")
    if device == "cuda" and torch.cuda.is_available() and not by_workers:
        torch.cuda.set_device(local_rank())
        device = f"cuda:{local_rank()}"
    return choose_device(device)


def main() -> None:
    """Parse, load the frozen parts, encode."""
    options = parse().parse_args()
    config = model_config(options)
    engine, number = Engine(options.engine), options.processes
    by_workers = engine is Engine.ray or (number or 1) > 1
    if by_workers and world_size() > 1:
        raise ConfigurationError("--processes and --engine ray start processes: use them without a launcher")
    logging.basicConfig(level=logging.INFO if is_first_rank() else logging.WARNING, format="%(message)s")

    from diffusion.preparation.encoding.encode import check_folders, encode
    from diffusion.preparation.engine import Workers

    num_local = number if by_workers and engine is Engine.processes else local_world_size()
    workers = Workers(engine=engine, number=number or num_cores(), ray=RayConfig(concurrency=number))
    device = device_of(options.device, workers, by_workers)
    start_process_group()
    on_first_rank(lambda: check_folders(options.prepared, options.out, options.resolution))
    load_here = partial(load_models, config, options.text_embeddings)
    manifests = encode(
        options.prepared,
        options.out,
        models=load_here(),
        resolutions=options.resolution,
        batch_size=options.batch_size,
        device=device,
        precision=options.precision,
        mean_only=options.mean_only,
        scores=config.score_names,
        num_workers=max(1, min(4, num_cores() // num_local)) if options.workers is None else options.workers,
        workers=workers if by_workers else None,
        load=load_here,
        progress=True,
    )
    if is_first_rank():
        for manifest in manifests:
            num_samples = sum(count for buckets in manifest.counts.values() for count in buckets.values())
            print(f"{options.out}: {num_samples} samples at {manifest.resolution} px")
    end_process(0)


if __name__ == "__main__":
    sys.exit(run_command(main))
