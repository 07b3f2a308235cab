"""Every YAML that ships is loaded, built and trained for two steps, on one process and on two."""

from pathlib import Path

import pytest

from diffusion.callbacks.metrics_file import TRAIN_LOSS, read_metrics, series
from diffusion.checkpointing.reading import find_checkpoints
from diffusion.config.checks import is_location
from diffusion.config.loading import load_config
from diffusion.config.training import Precision
from tests.training_runs import ROOT, train_on

OF_OTHER_COMMANDS = {"prepare.yaml", "evaluate.yaml"}
YAMLS = sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "yamls").rglob("*.yaml") if path.name not in OF_OTHER_COMMANDS
)
TINY = [
    "model.architecture=tiny",
    "model.unet={block_out_channels: [16, 32], norm_num_groups: 4, attention_head_dim: [2, 2]}",
    "trainer.max_duration=2ba",
    "trainer.precision=fp32",
    "trainer.eval_interval=2ba",
    "trainer.save_interval=2ba",
    "trainer.device_train_microbatch_size=2",
    "trainer.progress_bar=false",
    "schedule.warmup=1ba",
    "samples.interval=2ba",
    "samples.num_inference_steps=1",
    "data.global_batch_size=8",
    "data.num_canonical_nodes=8",
    "data.num_workers=0",
    "data.shuffle_block_size=64",
    "validation.num_samples=9",
    "validation.device_batch_size=4",
]


def overrides(yaml: str, shapes: Path, output: Path, phase1: Path | None) -> list[str]:
    """Sizes and places for a YAML."""
    config = load_config(yaml, may_miss=is_location)
    if config.task.value == "autoencoder":
        data, streams = shapes / "prepared", "[{name: 32-64}, {name: 64-up}]"
        resolution = 32
    else:
        low = config.init_from is None
        resolution = 32 if low else 64
        data, streams = shapes / f"latents-{resolution}", "[{name: 32-64}, {name: 64-up}]" if low else "[{name: 64-up}]"
    return [
        *TINY,
        f"output_folder={output}",
        f"data.resolution={resolution}",
        f"data.streams={streams}",
        f"data.local={data}/train",
        f"validation.local={data}/validation",
        "model.pretrained=null",
        f"model.vae={shapes / 'vae'}",
        *(["algorithms.ema.start=1ba"] if config.algorithms.ema else []),
        *([f"init_from.checkpoint={phase1}"] if config.init_from else []),
    ]


@pytest.fixture(scope="module")
def runs(shapes, tmp_path_factory) -> dict[tuple[int, str], Path]:
    """Run folders by number of processes and YAML."""
    root = tmp_path_factory.mktemp("yamls")
    folders = {(num, yaml): root / f"{num}-{yaml.replace('/', '-')}" for num in (1, 2) for yaml in YAMLS}
    for num in (1, 2):
        plan = []
        for yaml in YAMLS:
            phase1 = folders[num, yaml.replace("phase2", "phase1")]
            plan.append((yaml, overrides(yaml, shapes, folders[num, yaml], phase1)))
        train_on(num, plan, root)
    return folders


def test_all_yamls_are_here():
    assert {"yamls/phase1.yaml", "yamls/phase2.yaml", "yamls/tiny/autoencoder.yaml"} <= set(YAMLS)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("yaml", YAMLS)
def test_trains_two_steps_with_the_same_losses_on_one_process_and_on_two(runs, yaml):
    results = []
    for num in (1, 2):
        rows = read_metrics(runs[num, yaml] / "metrics.jsonl")
        steps, losses = series(rows, TRAIN_LOSS)
        assert steps == [0, 1]
        metric = "psnr" if "autoencoder" in yaml else "loss"
        validation = series(rows, f"metrics/validation/{metric}")[1]
        assert len(validation) == 1
        assert len(find_checkpoints(runs[num, yaml] / "checkpoints")) == 1
        results.append([*losses, *validation])
    assert results[1] == pytest.approx(results[0], rel=1e-5)


def test_the_vae_is_saved_with_the_statistics_of_its_latents(runs):
    from diffusers import AutoencoderKL

    folders = [runs[num, "yamls/tiny/autoencoder.yaml"] for num in (1, 2)]
    configs = [AutoencoderKL.load_config(folder / "vae") for folder in folders]
    for key in ("latents_mean", "latents_std"):
        assert len(configs[0][key]) == 4
        assert configs[1][key] == pytest.approx(configs[0][key], rel=1e-4, abs=1e-5)
    assert (folders[0] / "reconstructions.png").stat().st_size > 0


def test_the_recipe_is_the_published_one():
    may_miss = {"may_miss": is_location}
    phase1, phase2 = (load_config(f"yamls/phase{number}.yaml", **may_miss) for number in (1, 2))
    for config, resolution, duration in ((phase1, 256, "550000ba"), (phase2, 512, "850000ba")):
        assert (config.data.resolution, config.trainer.max_duration) == (resolution, duration)
        assert (config.data.global_batch_size, config.trainer.device_train_microbatch_size) == (2048, 16)
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
    assert phase1.algorithms.ema is None
    ema = phase2.algorithms.ema
    assert ema is not None
    assert (ema.start, ema.decays, ema.interval) == ("800000ba", [0.9999], "1ba")
    assert [stream.name for stream in phase1.data.streams] == ["256-512", "512-768", "768-1024", "1024-up"]
    assert [stream.name for stream in phase2.data.streams] == ["512-768", "768-1024", "1024-up"]
