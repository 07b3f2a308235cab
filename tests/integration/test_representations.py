"""Training from real images (--data) and from latents, several buckets mixed; drawn images: test_groups_training.py."""

from pathlib import Path

import pytest

from diffusion.formats.run_folder import TRAIN_LOSS, read_metrics, series
from tests.tools.training_runs import SMALL_UNET, TrainingServer

pytestmark = pytest.mark.slow

NUM_STEPS = 4
SMALL = [
    SMALL_UNET,
    f"trainer.max_duration={NUM_STEPS}ba",
    f"trainer.eval_interval={NUM_STEPS}ba",
    f"trainer.save_interval={NUM_STEPS}ba",
    "trainer.progress_bar=false",
    "trainer.parallelism=fsdp",
    "schedule.warmup=2ba",
    "samples.prompts=[]",
    "data.global_batch_size=16",
    "data.shuffle_block_size=256",
    "data.num_workers=0",
    "validation.num_samples=21",
    "validation.device_batch_size=8",
]


def run(
    folder: Path, data: Path, vae: Path, representation: str, streams: str, *overrides: str
) -> tuple[str, list[str]]:
    return "yamls/tiny/phase1.yaml", [
        *SMALL,
        f"output_folder={folder}",
        f"data.representation={representation}",
        f"data.local={data}/train",
        f"data.streams={streams}",
        f"validation.local={data}/validation",
        f"model.vae={vae}",
        *overrides,
    ]


def losses(folder: Path) -> list[float]:
    rows = read_metrics(folder / "metrics.jsonl")
    steps, values = series(rows, TRAIN_LOSS)
    assert steps == list(range(NUM_STEPS))
    return values + series(rows, "metrics/validation/loss")[1]


def check(server: TrainingServer, root: Path, prepared: Path, latents: Path, vae: Path, streams: str) -> None:
    """Images and latents, one process and two, give the same losses."""
    names = {(kind, num): root / f"{kind}-{num}" for kind in ("images", "latents") for num in (1, 2)}
    place = {"images": prepared, "latents": latents}
    for num in (1, 2):
        plan = [run(names[kind, num], place[kind], vae, kind, streams) for kind in place]
        server.train(num, plan)
    expected = losses(names["latents", 1])
    assert len(expected) == NUM_STEPS + 1
    assert losses(names["images", 1]) == pytest.approx(expected, rel=1e-3)
    for kind in place:
        assert losses(names[kind, 2]) == pytest.approx(losses(names[kind, 1]), rel=1e-5)


@pytest.mark.emoji
@pytest.mark.world_size(2)
def test_real_images_from_three_buckets(server, shapes, data_folder, tmp_path):
    from diffusion.config.model import Architecture, ModelConfig
    from diffusion.models import load_frozen_parts
    from diffusion.preparation.encoding.encode import encode
    from diffusion.preparation.encoding.models import EncodingModels
    from tests.tools.preparing import prepare

    emoji = data_folder / "emoji"
    sources = [emoji / "folder_512", emoji / "webdataset_128", emoji / "parquet_72.parquet"]
    manifest = prepare(sources, tmp_path / "prepared", edges=[64, 128, 512], validation_fraction=0.1, num_workers=2)
    assert (manifest.seen, manifest.kept, manifest.rejected) == (1800, 1800, {})
    parts = load_frozen_parts(ModelConfig(architecture=Architecture.tiny, vae=str(shapes / "vae")))
    models = EncodingModels.of(parts)
    [encoded] = encode(tmp_path / "prepared", tmp_path / "latents", models=models, resolutions=[32])
    assert sum(sum(buckets.values()) for buckets in encoded.counts.values()) == 1800
    streams = "[{name: 64-128}, {name: 128-512}, {name: 512-up}]"
    check(server, tmp_path, tmp_path / "prepared", tmp_path / "latents", shapes / "vae", streams)
