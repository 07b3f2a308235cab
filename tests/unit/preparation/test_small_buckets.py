import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from diffusion.datasets.manifest import PreparedManifest
from diffusion.errors import ConfigurationError, DataError
from diffusion.preparation.config import BucketsConfig
from tests.tools.preparing import prepare
from diffusion.preparation.selection.presets import build_buckets
from tests.tools.image_files import noise

SIZES = ["32x32", "24x40", "40x24", "16x64"]
IMAGES = [(36, 34)] * 12 + [(40, 24)] * 9 + [(24, 40)] * 3 + [(66, 20)] + [(64, 16)]


def write(folder: Path, images: list[tuple[int, int]], first: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    for i, (width, height) in enumerate(images, start=first):
        (folder / f"{i:03}.png").write_bytes(noise(width, height, i))
        (folder / f"{i:03}.txt").write_text(f"number {i}")
    return folder


def counts(manifest: PreparedManifest) -> dict[str, int]:
    return {name: entry.num_samples for name, entry in manifest.splits["train"].items()}


def run(source: Path, out: Path, *, workers: int = 1, size: int = 7, **buckets) -> PreparedManifest:
    config = BucketsConfig(sizes=SIZES, **buckets)
    return prepare([source], out, buckets=config, num_workers=workers, partition_size=size, report=True)


def test_images_of_small_buckets_go_to_the_nearest_other_one_that_they_cover(tmp_path):
    source = write(tmp_path / "source", IMAGES)
    assert counts(run(source, tmp_path / "all")) == {"40x24": 3, "32x32": 12, "24x40": 9, "16x64": 2}
    manifest = run(source, tmp_path / "four", min_samples=4)
    assert counts(manifest) == {"32x32": 12, "24x40": 9}
    assert manifest.refused["small_bucket"].count == 5, "which are too narrow or too low for the others"
    example = manifest.refused["small_bucket"].examples[0]
    assert example.detail == "40x24 would hold 3 images, fewer than 4"
    upscaled = run(source, tmp_path / "upscaled", min_samples=4, upscale=True)
    assert counts(upscaled) == {"32x32": 15, "24x40": 11}
    assert not upscaled.refused
    facts = pq.read_table(tmp_path / "upscaled" / "facts").to_pylist()
    assert {row["bucket"] for row in facts} == {"32x32", "24x40"}
    for name in ("32x32", "24x40"):
        assert sorted(row["index"] for row in facts if row["bucket"] == name) == list(range(counts(upscaled)[name]))
    shown = json.loads((tmp_path / "upscaled" / "report.json").read_text())
    assert "16x64" not in json.dumps(shown)


def test_neither_workers_nor_partitions_matter(tmp_path):
    source = write(tmp_path / "source", IMAGES)
    one = run(source, tmp_path / "one", min_samples=4, upscale=True)
    other = run(source, tmp_path / "two", workers=2, size=100, min_samples=4, upscale=True)
    assert one.splits == other.splits


def test_they_are_refused_if_that_is_asked_for(tmp_path):
    source = write(tmp_path / "source", IMAGES)
    manifest = run(source, tmp_path / "out", min_samples=4, upscale=True, refuse_small=True)
    assert counts(manifest) == {"32x32": 12, "24x40": 9}
    assert manifest.refused["small_bucket"].count == 5


def test_a_bucket_that_is_there_stays_one_when_the_data_grows(tmp_path):
    source = write(tmp_path / "source", IMAGES[:21])
    options = {"min_samples": 9, "upscale": True}
    assert counts(run(source, tmp_path / "out", **options)) == {"32x32": 12, "24x40": 9}
    write(source, [(40, 24)] * 2 + [(24, 40)] * 3, first=21)
    assert counts(run(source, tmp_path / "out", **options)) == {"32x32": 15, "24x40": 11}


def test_impossible_settings_are_named(tmp_path):
    source = write(tmp_path / "source", IMAGES[:3])
    with pytest.raises(DataError, match=r"no bucket has 4 images \(buckets.min_samples\), the largest has 3"):
        run(source, tmp_path / "out", min_samples=4)
    with pytest.raises(ConfigurationError, match="buckets by the shorter side are not merged"):
        build_buckets(BucketsConfig(edges=[256], min_samples=4))
    with pytest.raises(ConfigurationError, match=r"without buckets\.min_samples"):
        build_buckets(BucketsConfig(sizes=SIZES, refuse_small=True))
