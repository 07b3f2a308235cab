"""From images in an object store to checkpoints in one, on a real server."""

from pathlib import Path

import pytest

from demo.shapes import write_data_set
from diffusion import storage
from diffusion.config.model import Architecture, ModelConfig
from diffusion.formats.run_folder import TRAIN_LOSS, read_metrics, series
from diffusion.models import load_frozen_parts
from diffusion.operations.costs import read_costs
from diffusion.preparation.encoding.encode import encode
from diffusion.preparation.encoding.models import EncodingModels
from tests.tools.image_files import tree
from tests.tools.preparing import prepare
from tests.tools.runs import losses, signal_at
from tests.tools.s3_server import S3Server, s3_process, s3_server, upload
from tests.tools.training_runs import SMALL_UNET, Run

__all__ = ["s3_process", "s3_server"]

pytestmark = [pytest.mark.s3, pytest.mark.slow]

STEPS = 4
OPTIONS = [
    SMALL_UNET,
    f"trainer.max_duration={STEPS}ba",
    "trainer.save_interval=2ba",
    "trainer.parallelism=fsdp",
    f"trainer.eval_interval={STEPS}ba",
    "trainer.progress_bar=false",
    "schedule.warmup=2ba",
    "samples.prompts=[]",
    "loggers.utilisation_interval=2",
    "data.global_batch_size=8",
    "data.num_workers=0",
    "data.streams=[{name: 32-64}, {name: 64-up}]",
    "validation.num_samples=8",
]
SECTIONS = [("data", "train"), ("validation", "validation")]


def test_from_images_in_a_store_to_checkpoints_in_one(server, s3_server: S3Server, tmp_path: Path) -> None:
    write_data_set(tmp_path / "drawn", 120, seed=5)
    layouts = ("images", "webdataset", "parquet")
    upload(tmp_path / "drawn", "s3://tests/drawn")
    places = {str(tmp_path / "drawn"): str(tmp_path / "prepared"), "s3://tests/drawn": "s3://tests/prepared"}
    for place, out in places.items():
        sources = [f"{place}/{layout}" for layout in layouts]
        prepare(sources, out, edges=[32, 64], validation_fraction=0.2, shard_bytes=60_000, window_bytes=100_000)
    shards = {name: content for name, content in tree(tmp_path / "prepared").items() if name.endswith(".mds")}
    assert {name: storage.read(f"s3://tests/prepared/{name}") for name in shards} == shards
    assert len(shards) > 5

    parts = load_frozen_parts(ModelConfig(architecture=Architecture.tiny))
    parts.vae.save_pretrained(tmp_path / "vae")
    models = EncodingModels.of(parts)
    for root in (str(tmp_path), "s3://tests"):
        encode(f"{root}/prepared", f"{root}/latents", models=models, resolutions=[32])

    def run(name: str, *more: str) -> Run:
        vae = f"model.vae={tmp_path / 'vae'}"
        return "yamls/tiny/phase1.yaml", [*OPTIONS, f"output_folder={tmp_path / name}", vae, *more]

    def in_store(name: str, *more: str) -> Run:
        remotes = [f"{section}.remote=s3://tests/latents/{split}" for section, split in SECTIONS]
        caches = [f"{section}.local={tmp_path / name}-cache/{split}" for section, split in SECTIONS]
        return run(name, *remotes, *caches, "trainer.checkpoint_folder=s3://tests/checkpoints", *more)

    from_disk = [f"{section}.local={tmp_path / 'latents' / split}" for section, split in SECTIONS]
    server.train(1, [run("disk", *from_disk)])
    assert server.run(1, [in_store("killed", signal_at(3))]).codes == [-9]
    server.train(1, [in_store("continued")])
    expected = losses(tmp_path / "disk")
    assert len(expected) == STEPS
    assert losses(tmp_path / "killed") == expected[:3]
    rows = read_metrics(tmp_path / "continued" / "metrics.jsonl")
    assert series(rows, TRAIN_LOSS) == ([2, 3], expected[2:]), "another machine, with nothing on its disk"
    shards = [*(tmp_path / "continued-cache" / "train").glob("*/*.mds")]
    rows = [row for row in rows if "storage/read_bytes" in row and row["step"] > 2]  # 2 comes with the checkpoint.
    assert sum(row["storage/fetched_shards"] for row in rows) == len(shards)
    assert sum(row["storage/fetched_bytes"] for row in rows) == sum(path.stat().st_size for path in shards)
    assert rows[-1]["storage/read_bytes"] > 0
    (costs,) = read_costs(tmp_path / "continued")
    assert costs.fetched_bytes == sum(path.stat().st_size for path in shards)
    assert not any("storage/fetched_bytes" in row for row in read_metrics(tmp_path / "disk" / "metrics.jsonl"))
