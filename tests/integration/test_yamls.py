"""Every YAML that ships is loaded, built and trained for a few steps, on one process and on two."""

import re
from pathlib import Path

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

from diffusion.callbacks.autoencoder import statistics_images
from diffusion.checkpointing.find import find_checkpoints
from diffusion.cli import train_command
from diffusion.config.data import Mixing, Representation
from diffusion.config.loading import load_config
from diffusion.config.locations import is_location
from diffusion.config.model import Architecture, InitFromConfig, Posterior, TextEncoderConfig, Weights
from diffusion.config.training import Precision
from diffusion.formats.run_folder import TRAIN_LOSS, read_metrics, series
from diffusion.models.autoencoder import to_pixels
from diffusion.models.latents import VAE_CLASSES, latent_space
from diffusion.models.pretrained import load_pretrained
from diffusion.planning.plan import plan_run
from tests.tools.image_encoders import write_image_encoder
from tests.tools.language_models import write_language_model
from tests.tools.toys import write_vgg
from tests.tools.training_runs import ROOT, SMALL_TRANSFORMER, SMALL_UNET
from verification.callbacks import step_hashes

pytestmark = pytest.mark.slow

OF_OTHER_COMMANDS = {"prepare.yaml", "captions.yaml", "evaluate.yaml"}
BEFORE = {
    "autoencoder_equivariance": "autoencoder",
    "modern_512": "modern_256",
    "phase2": "phase1",
    "phase3": "phase2",
    "sdxl_512": "sdxl_256",
    "sdxl_1024": "sdxl_512",
}
"""The recipe whose weights a recipe starts from."""

ASPECTS = ("72x56", "64x56", "64x64", "56x64", "56x72")
SDXL = "yamls/tiny/sdxl.yaml"
LONG, NUM_LONG = "yamls/tiny/phase3.yaml", 8
"""A recipe that is trained for more than two steps, so that all its buckets come."""
SCALE = "yamls/tiny/scale.yaml"
"""A recipe that is trained with the network and the batch of a small scale."""
LANGUAGE, ALIGNMENT = "yamls/tiny/language_model.yaml", "yamls/tiny/alignment.yaml"


SMALL = {
    "tiny": SMALL_UNET,
    "tiny_xl": "model.network={block_out_channels: [16, 32], norm_num_groups: 4, attention_head_dim: [2, 2]}",
    "tiny_transformer": SMALL_TRANSFORMER,
    "tiny_pixel_transformer": SMALL_TRANSFORMER,
}
"""Networks by architecture."""


def before(yaml: str) -> str | None:
    """The YAML whose run another one continues."""
    path = Path(yaml)
    return str(path.with_stem(BEFORE[path.stem])) if path.stem in BEFORE else None


def depth(yaml: str) -> int:
    """How many runs come before."""
    first = before(yaml)
    return 0 if first is None else 1 + depth(first)


YAMLS = sorted(
    (
        str(path.relative_to(ROOT))
        for path in (ROOT / "yamls").rglob("*.yaml")
        if path.name not in OF_OTHER_COMMANDS and path.parent.name != "sweeps"
    ),
    key=lambda yaml: (depth(yaml), yaml),
)
TESTED_ON_TWO = {"autoencoder_equivariance", "muon", "scores", "text_adapter", "transformer", "wsd"}
"""Tiny recipes of an ingredient with a test of its own on two processes: test_{autoencoder,network}_runs, replicas."""

NUM_RANKS = {
    yaml: (1, 2)
    if (yaml.startswith("yamls/tiny/") or "autoencoder" in yaml) and Path(yaml).stem not in TESTED_ON_TWO
    else (1,)
    for yaml in YAMLS
}
"""Of the large recipes, the tiny ones show that losses do not depend on it."""

FITTED = ("phase1", "phase2", "phase3", "sdxl_256", "sdxl_512", "sdxl_1024")
FITTED += ("modern_256", "modern_512", "modern_pixel_256")
"""Recipes whose microbatch fills GPUs of 80 GB."""

PLANNED = (LANGUAGE, ALIGNMENT, "yamls/sdxl_256.yaml", "yamls/styles/transformer.yaml", "yamls/tiny/pixel.yaml")
"""Recipes that are planned in a way of their own, beside the fitted ones and those of `test_network_runs.py`."""

BATCH = "data.global_batch_size=8"
TINY = [
    "trainer.precision=fp32",
    "trainer.device_train_microbatch_size=2",
    "trainer.progress_bar=false",
    "schedule.warmup=1ba",
    "samples.num_inference_steps=1",
    "data.num_canonical_nodes=8",
    "data.num_workers=0",
    "data.shuffle_block_size=64",
    "validation.num_samples=9",
    "validation.device_batch_size=4",
]


@pytest.fixture(scope="module")
def aspects(shapes, tmp_path_factory) -> Path:
    """The shapes in aspect-ratio buckets, encoded."""
    from diffusion.config.model import Architecture, ModelConfig
    from diffusion.models import load_frozen_parts
    from diffusion.preparation.config import BucketsConfig
    from diffusion.preparation.encoding.encode import encode
    from diffusion.preparation.encoding.models import EncodingModels
    from tests.tools.preparing import prepare

    root = tmp_path_factory.mktemp("aspects")
    buckets = BucketsConfig(sizes=list(ASPECTS), upscale=True, min_samples=4)
    sources = [shapes / "source" / layout for layout in ("images", "webdataset", "parquet")]
    prepare(sources, root / "prepared", buckets=buckets, validation_fraction=0.2, num_workers=1)
    parts = load_frozen_parts(ModelConfig(architecture=Architecture.tiny, vae=str(shapes / "vae")))
    (manifest,) = encode(root / "prepared", root / "latents", models=EncodingModels.of(parts))
    assert set(manifest.counts["train"]) == set(ASPECTS)
    return root / "latents"


def overrides(yaml: str, shapes: Path, aspects: Path, output: Path, first: Path | None) -> list[str]:
    """Sizes and places for a YAML."""
    config = load_config(yaml, may_lack=is_location)
    own = []
    if config.task.value == "autoencoder":
        data, streams = shapes / "prepared", "[{name: 32-64}, {name: 64-up}]"
        resolution = 32
        if config.autoencoder.perceptual_weight > 0:
            own = [f"autoencoder.vgg_weights={shapes / 'vgg.pth'}", "autoencoder.adversarial_start=0ba"]
    elif config.data.mixing is Mixing.groups:
        data, streams, resolution = aspects, f"[{', '.join(f'{{name: {name}}}' for name in ASPECTS)}]", 64
        own = ["data.group_size=2", "validation.streams=[{name: 64x64}]"]
    else:
        low = config.init_from is None
        resolution = 32 if low else 64
        data, streams = shapes / f"latents-{resolution}", "[{name: 32-64}, {name: 64-up}]" if low else "[{name: 64-up}]"
    if config.model.text_encoder != TextEncoderConfig():  # The latents hold token ids of one chunk.
        data = shapes / "prepared"
        own = ["data.representation=images"]
    if config.model.architecture.is_pixel:
        data = shapes / "prepared"
    if yaml == ALIGNMENT:
        data = shapes / "prepared"
        own = [f"model.alignment.path={shapes / 'dinov2'}"]
    if yaml == LANGUAGE:
        own.append(f"model.text_encoder.path={shapes / 't5'}")
    num = NUM_LONG if yaml == LONG else 2
    name = config.model.architecture.value
    kinds = {"xl": "tiny_xl", "pixel": "tiny_pixel_transformer", "transformer": "tiny_transformer", "": "tiny"}
    architecture = next(kind for part, kind in kinds.items() if part in name)
    if config.task.value != "autoencoder":
        trace = f"{{path: verification.callbacks.DrawTrace, arguments: {{folder: '{output / 'trace'}'}}}}"
        own.append(f"plugins.callbacks=[{trace}]")
    sizes = [BATCH, SMALL[architecture]] if yaml != SCALE else ["model.scale=2"]
    return [
        *TINY,
        *own,
        *sizes,
        f"model.architecture={architecture}",
        f"trainer.max_duration={num}ba",
        f"trainer.eval_interval={num}ba",
        f"trainer.save_interval={num}ba",
        f"samples.interval={num}ba",
        f"loggers.stream_loss_interval={num}",
        f"output_folder={output}",
        f"data.resolution={resolution}",
        f"data.streams={streams}",
        f"data.local={data}/train",
        f"validation.local={data}/validation",
        "model.pretrained=null",
        f"model.vae={'null' if 'pixel' in name else shapes / 'vae'}",
        *(["algorithms.ema.start=1ba"] if config.algorithms.ema else []),
        *([f"init_from.checkpoint={first}"] if config.init_from else []),
    ]


@pytest.fixture(scope="module")
def runs(server, shapes, aspects, tmp_path_factory) -> dict[tuple[int, str], Path]:
    """Run folders by number of processes and YAML."""
    root = tmp_path_factory.mktemp("yamls")
    write_vgg(shapes / "vgg.pth")
    write_language_model(shapes / "t5", "t5")
    write_image_encoder(shapes / "dinov2")
    folders = {(num, yaml): root / f"{num}-{yaml.replace('/', '-')}" for yaml in YAMLS for num in NUM_RANKS[yaml]}
    for num in (1, 2):
        plan = []
        for yaml in (yaml for yaml in YAMLS if num in NUM_RANKS[yaml]):
            first = before(yaml)
            start = folders[num, first] if first else None
            plan.append((yaml, overrides(yaml, shapes, aspects, folders[num, yaml], start)))
        if num == 1:
            there, here = str(shapes / "latents-32"), str(shapes / "prepared")
            changes = [text.replace(there, here) for text in overrides(SDXL, shapes, aspects, root / "images", None)]
            plan.append((SDXL, [*changes, "data.representation=images"]))
            folders[1, "images"] = root / "images"
        server.train(num, plan)
    return folders


@pytest.mark.world_size(2)
@pytest.mark.parametrize("yaml", YAMLS)
def test_trains_with_the_same_draws_and_losses_on_one_process_and_on_two(runs, yaml):
    results = []
    for num in NUM_RANKS[yaml]:
        rows = read_metrics(runs[num, yaml] / "metrics.jsonl")
        steps, losses = series(rows, TRAIN_LOSS)
        assert steps == list(range(NUM_LONG if yaml == LONG else 2))
        metric = "psnr" if "autoencoder" in yaml else "loss"
        validation = series(rows, f"metrics/validation/{metric}")[1]
        assert len(validation) == 1
        assert len(find_checkpoints(runs[num, yaml] / "checkpoints")) == 1
        results.append([*losses, *validation])
    assert results[-1] == pytest.approx(results[0], rel=1e-5)
    if "autoencoder" not in yaml:
        hashes = [step_hashes(runs[num, yaml] / "trace") for num in NUM_RANKS[yaml]]
        assert list(hashes[0]) == steps
        assert hashes[-1] == hashes[0]


def test_a_scale_multiplies_network_and_batch(runs):
    config = load_config(str(runs[1, SCALE] / "config.yaml"))
    network = config.model.network
    assert isinstance(network, dict)
    assert [network[name] for name in ("hidden_size", "num_heads", "depth")] == [64, 2, 2]
    assert config.data.global_batch_size == 16


def test_sdxl_has_the_same_losses_from_images_and_from_latents(runs):
    losses = [series(read_metrics(runs[1, name] / "metrics.jsonl"), TRAIN_LOSS)[1] for name in (SDXL, "images")]
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


@pytest.mark.world_size(2)
def test_all_aspect_ratios_are_trained(runs):
    (row,) = [row for row in read_metrics(runs[2, LONG] / "metrics.jsonl") if "loss/train/stream/64x64" in row]
    assert {f"loss/train/stream/{name}" for name in ASPECTS} <= row.keys()


@pytest.mark.parametrize("yaml", [*(yaml for yaml in YAMLS if "autoencoder" in yaml), *PLANNED])
def test_a_dry_run_plans_it(yaml, tmp_path):
    said: list[str] = []
    own = [f"model.text_encoder.path={write_language_model(tmp_path, 'qwen3')}"] if yaml == LANGUAGE else []
    own += [f"model.alignment.path={write_image_encoder(tmp_path)}"] if yaml == ALIGNMENT else []
    train_command([yaml, *own, "--dry-run"], say=said.append)
    config = load_config(yaml, may_lack=is_location)
    assert f"Plan of {config.run_name}\n" in said[-1]
    assert "<- chosen" in said[-1]
    if config.model.architecture is Architecture.stable_diffusion_xl:
        assert "2,567,463,684 trained" in said[-1]


def test_a_dry_run_shows_what_each_bucket_gives(aspects):
    said: list[str] = []
    train_command([LONG, "--dry-run", f"data.local={aspects}/train"], say=said.append)
    lines = [line for line in said[-1].splitlines() if line.strip().startswith("stream ")]
    assert [line.split()[1] for line in lines] == list(ASPECTS)
    for line in lines:
        assert re.search(r" \d+ samples, [\d.]+ epochs, [\d.]+% of the run, an epoch drops \d", line)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("num", "yaml"), [(num, yaml) for yaml in YAMLS if "autoencoder" in yaml for num in NUM_RANKS[yaml]]
)
def test_the_vae_is_saved_with_the_statistics_of_its_latents(runs, num, yaml):
    folder = runs[num, yaml]
    config = load_config(str(folder / "config.yaml"))
    vae = load_pretrained(AutoencoderKL, str(folder / "vae"), others=VAE_CLASSES, local_files_only=True)
    space = latent_space(vae)
    with torch.no_grad():
        singles = [image for images in statistics_images(config) for image in images.split(1)]
        latents = torch.cat([space.moments(to_pixels(image))[0].double() for image in singles])
    assert len(latents) > 100
    latents = space.scaling.normalise(latents)
    if space.has_posterior:
        std, mean = torch.std_mean(latents, dim=(0, 2, 3), correction=0)
        assert std.tolist() == pytest.approx([1.0] * space.channels, rel=1e-6)
        assert mean.tolist() == pytest.approx([0.0] * space.channels, abs=1e-6)
    assert latents.square().mean().item() == pytest.approx(1.0, rel=1e-6)
    assert (folder / "reconstructions.png").stat().st_size > 0


@pytest.mark.parametrize("name", FITTED)
def test_the_microbatch_is_the_largest_that_fits_gpus_of_80_gb_with_a_tenth_to_spare(name):
    config = load_config(f"yamls/{name}.yaml", may_lack=is_location)
    plan = plan_run(config, world_size=8)
    assert plan.memory.largest_microbatches is not None
    assert config.trainer.device_train_microbatch_size == plan.memory.largest_microbatches[80]
    assert config.trainer.device_train_microbatch_size == plan.memory.microbatch_size
    assert plan.memory.gpu_bytes <= 0.9 * 80e9


def test_the_small_recipe_fits_one_gpu_of_24_gb_with_a_tenth_to_spare():
    config = load_config("yamls/small_256.yaml", may_lack=is_location)
    plan = plan_run(config, world_size=1)
    assert plan.memory.largest_microbatches is not None
    assert config.trainer.device_train_microbatch_size == plan.memory.largest_microbatches[24]


def test_the_recipe_is_the_published_one():
    may_lack = {"may_lack": is_location}
    phase1, phase2 = (load_config(f"yamls/phase{number}.yaml", **may_lack) for number in (1, 2))
    for config, resolution, duration in ((phase1, 256, "550000ba"), (phase2, 512, "850000ba")):
        assert (config.data.resolution, config.trainer.max_duration) == (resolution, duration)
        assert config.data.global_batch_size == 2048
        optimizer = config.optimizer
        assert (optimizer.lr, optimizer.weight_decay, optimizer.eps) == (1e-4, 0.01, 1e-8)
        assert optimizer.betas == [0.9, 0.999]
        assert (config.schedule.warmup, config.schedule.decay.value) == ("10000ba", "constant")
        assert (config.trainer.parallelism.value, config.trainer.reshard_after_forward) == ("fsdp", False)
        assert config.trainer.precision == Precision.amp_bf16
        assert config.model.low_precision_norms
        assert (config.objective.caption_dropout, config.objective.prediction_type.value) == (0.1, "epsilon")
        assert (config.seed, config.data.shuffle.value, config.data.shuffle_block_size) == (17, "shard", 2**18)
        assert (config.trainer.eval_interval, config.trainer.save_interval) == ("10000ba", "10000ba")
        assert config.data.num_canonical_nodes == 128
        assert (config.data.representation, config.objective.posterior) == (Representation.latents, Posterior.sample)
        assert all((stream.proportion, stream.repeat) == (None, None) for stream in config.data.streams)
        assert (config.samples.num_inference_steps, config.samples.guidance_scale) == (50, 3.0)
    assert phase1.init_from is None
    assert phase2.init_from == InitFromConfig(checkpoint="runs/phase1", weights=Weights.raw)
    assert phase1.algorithms.ema is None
    ema = phase2.algorithms.ema
    assert ema is not None
    assert (ema.start, ema.decays, ema.interval) == ("800000ba", [0.9999], "1ba")
    assert [stream.name for stream in phase1.data.streams] == ["256-512", "512-768", "768-1024", "1024-up"]
    assert [stream.name for stream in phase2.data.streams] == ["512-768", "768-1024", "1024-up"]
