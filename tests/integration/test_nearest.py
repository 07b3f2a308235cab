"""scripts/nearest.py: copies of training images are named, others are not; mistakes end with one message."""

import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from diffusion.config.loading import load_config, to_yaml
from diffusion.config.locations import is_location
from diffusion.errors import ConfigurationError, DataError, UserError
from diffusion.evaluation.nearest import Comparison, Neighbour, nearest
from diffusion.preparation.takedown import take_down
from tests.tools.altered_copies import recompressed, shifted
from tests.tools.evaluation_toys import write_clip
from tests.tools.preparing import prepare, read_samples
from tests.tools.training_runs import ROOT

SHIFTED = "shifted \x1b[31m"


def drawing(number: int) -> Image.Image:
    """An image of eight ellipses that belongs to a number."""
    generator = np.random.default_rng(number)
    image = Image.new("RGB", (96, 96), tuple(generator.integers(160, 256, 3).tolist()))
    draw = ImageDraw.Draw(image)
    for _ in range(8):
        left, top, width, height = generator.integers(0, 60, 4).tolist()
        draw.ellipse([left, top, left + 12 + width, top + 12 + height], tuple(generator.integers(0, 256, 3).tolist()))
    return image


def write(folder: Path, images: dict[str, Image.Image]) -> Path:
    folder.mkdir(parents=True)
    for name, image in images.items():
        image.save(folder / f"{name}.png")
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Prepared drawings 0 to 239 with licences, some of them for validation."""
    root = tmp_path_factory.mktemp("data")
    source = write(root / "drawn", {f"{i:03d}": drawing(i) for i in range(240)})
    for i in range(240):
        (source / f"{i:03d}.json").write_text(json.dumps({"license": "CC0-1.0", "caption": f"drawing {i}"}))
    prepare([source], root / "data", edges=[64], validation_fraction=0.5)
    return root / "data"


@pytest.fixture
def run(monkeypatch, tmp_path):
    def run(*options: object) -> dict[str, dict]:
        """Rows of the table by the name of the image."""
        out = tmp_path / "out"
        monkeypatch.setattr(sys, "argv", ["nearest.py", *map(str, options), "--out", str(out)])
        runpy.run_path(str(ROOT / "scripts" / "nearest.py"))["main"]()
        rows = map(json.loads, (out / "nearest.jsonl").read_text().splitlines())
        return {Path(row["file"]).stem: row for row in rows}

    return run


def training(data: Path) -> list[tuple[str, int]]:
    """Key and number of each drawing of training."""
    samples = [one for name, part in read_samples(data).items() if name.startswith("train/") for one in part]
    return [(one["key"], int(Path(one["key"]).stem)) for one in samples]


@pytest.fixture(scope="module")
def generated(tmp_path_factory, data) -> tuple[Path, dict[str, str]]:
    """A folder of three copies and ten new drawings, with prompts, and the keys of the copies."""
    ways = {"same": lambda image: image, "jpeg": recompressed, SHIFTED: lambda image: shifted(image, 1)}
    chosen = dict(zip(ways, training(data), strict=False))
    images = {way: ways[way](drawing(number)) for way, (_, number) in chosen.items()}
    images |= {f"new-{i}": drawing(1000 + i) for i in range(10)}
    folder = write(tmp_path_factory.mktemp("generated") / "images", images)
    write(folder / "other", {"grid": drawing(2000)})
    rows = ({"file_name": path.name, "prompt": f"<{path.stem}>"} for path in sorted(folder.glob("*.png")))
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder, {way: key for way, (key, _) in chosen.items()}


def test_exactly_the_copies_are_named(run, data, generated, tmp_path, capsys):
    folder, copies = generated
    rows = run(folder, data)
    assert len(rows) == 13
    assert {name for name, row in rows.items() if row["is_copy"]} == {*copies}
    for name, key in copies.items():
        first = rows[name]["nearest"][0]
        assert (first["key"], first["licence"], first["source"]) == (key, "CC0-1.0", "drawn")
        assert rows[name]["prompt"] == f"<{name}>"
    assert rows["same"]["nearest"][0]["distance"] == 0
    assert all(len(row["nearest"]) >= 3 for row in rows.values())
    distances = [near["distance"] for near in rows["new-0"]["nearest"]]
    assert distances == sorted(distances)
    output = capsys.readouterr().out
    assert "3 of 13 images" in output and output.replace("\n", "").isprintable()
    page = (tmp_path / "out" / "nearest.html").read_text()
    assert re.findall(r'src="(?!data:)', page) == []
    assert page.index("&lt;same&gt;") < page.index("&lt;new-0&gt;")


def test_removed_samples_are_not_compared(run, data, generated, tmp_path):
    folder, copies = generated
    copy = shutil.copytree(data, tmp_path / "data")
    take_down(str(copy), {copies["same"]})
    rows = run(folder, copy)
    assert {name for name, row in rows.items() if row["is_copy"]} == {"jpeg", SHIFTED}
    assert copies["same"] not in (tmp_path / "out" / "nearest.html").read_text()
    assert copies["same"] not in {near["key"] for row in rows.values() for near in row["nearest"]}


def test_validation_images_may_be_a_folder(run, data, generated, tmp_path, capsys):
    folder, copies = generated
    others = write(tmp_path / "others", {f"{i}": drawing(3000 + i) for i in range(100)})
    rows = run(folder, data / "train", "--validation", others)
    assert {name for name, row in rows.items() if row["is_copy"]} == {*copies}
    assert capsys.readouterr().err.count("only 100 validation images") == 0
    few = write(tmp_path / "few", {"one": drawing(4000)})
    run(folder, data, "--validation", few)
    assert "only 1 validation images" in capsys.readouterr().err


def test_features_of_clip(run, data, generated, tmp_path):
    folder, copies = generated
    of_pixels = run(folder, data)
    rows = run(folder, data, "--clip", write_clip(tmp_path / "clip"))
    first = rows["same"]["nearest"][0]
    assert first["key"] == copies["same"] and rows["same"]["is_copy"]
    assert first["distance"] == pytest.approx(0, abs=1e-5)
    assert rows["new-0"]["nearest"][0]["distance"] != of_pixels["new-0"]["nearest"][0]["distance"]
    assert "clip-clip" in (tmp_path / "out" / "nearest.html").read_text()


def encoded_run(folder: Path, data: Path) -> Path:
    """A run folder whose configuration names a bucket of encoded data."""
    latents = folder / "latents"
    latents.mkdir(parents=True)
    (latents / "manifest.json").write_text('{"kind": "encoded"}')
    (bucket,) = (path.name for path in (data / "train").iterdir() if path.is_dir())
    overrides = [f"data.local={latents}/train", f"data.streams=[{{name: {bucket}}}]"]
    config = load_config(str(ROOT / "yamls/tiny/phase1.yaml"), overrides, may_lack=is_location)
    (folder / "config.yaml").write_text(to_yaml(config))
    return folder


def test_a_run_on_latents_names_its_prepared_data(run, data, generated, tmp_path):
    folder, copies = generated
    trained = encoded_run(tmp_path / "run", data)
    with pytest.raises(ConfigurationError, match="--data"):
        run(folder, trained)
    more = shutil.copytree(data, tmp_path / "more")
    (bucket,) = (path for path in (more / "train").iterdir() if path.is_dir())
    shutil.copytree(bucket, bucket.with_name("of-another-run"))
    for prepared in (data, data / "train", more):
        rows = run(folder, trained, "--data", prepared)
        assert {name for name, row in rows.items() if row["is_copy"]} == {*copies}
        assert all(len({near["key"] for near in row["nearest"]}) == len(row["nearest"]) for row in rows.values())
    shutil.rmtree(bucket)
    with pytest.raises(DataError, match=bucket.name):
        run(folder, trained, "--data", more)


def test_the_hash_counts_only_where_validation_images_have_none_like_it():
    def comparison(num_alike: int) -> Comparison:
        validation = [[Neighbour(0.4, 1, "b", 0 if i < num_alike else 20)] for i in range(100)]
        return Comparison(neighbours=[[Neighbour(0.5, 0, "a", 3)]], validation=validation, quantile=0.01)

    assert comparison(1).copies() == [0]
    assert comparison(2).copies() == []


def test_the_image_of_the_most_similar_hash_is_listed(run, data, tmp_path):
    originals = dict(training(data)[:10])
    pale = {
        Path(key).stem: drawing(number).point([round(0.35 * level + 60) for level in range(256)] * 3)
        for key, number in originals.items()
    }
    rows = run(write(tmp_path / "images", pale), data, "--num", 1)
    pairs = [row["nearest"] for row in rows.values() if len(row["nearest"]) == 2]
    assert pairs
    assert all(second["is_copy"] and second["key"] in originals for _, second in pairs)


def test_blocks_do_not_change_the_result(run, data, generated, monkeypatch):
    folder, _ = generated
    whole = run(folder, data)
    monkeypatch.setattr("diffusion.evaluation.nearest._BLOCK", 7)
    monkeypatch.setattr("diffusion.evaluation.nearest._QUERIES", 5)
    assert run(folder, data) == whole


def test_nearest_is_exact_and_prefers_the_first_of_equal_ones():
    generator = np.random.default_rng(0)
    queries, references = generator.normal(size=(20, 30)) + 100, generator.normal(size=(200, 30)) + 100
    references[[7, 150]] = queries[3]
    indexes, distances = nearest(queries, references, 4)
    every = np.linalg.norm(queries[:, None].astype(np.float32) - references.astype(np.float32), axis=2)
    assert indexes[3, :2].tolist() == [7, 150]
    assert indexes.tolist() == np.argsort(every, axis=1, kind="stable")[:, :4].tolist()
    assert distances == pytest.approx(np.sort(every, axis=1)[:, :4], abs=1e-5)
    assert nearest(queries, references[:2], 4)[0].shape == (20, 2)


def test_mistakes(run, data, generated, tmp_path):
    folder, _ = generated
    empty = tmp_path / "empty"
    empty.mkdir()
    encoded = tmp_path / "encoded"
    encoded.mkdir()
    (encoded / "manifest.json").write_text('{"kind": "encoded"}')
    for options, message in [
        ((empty, data), "has no images"),
        ((folder, folder), "is not a data set"),
        ((folder, tmp_path / "nowhere"), "is no folder"),
        ((folder, encoded), "give the prepared data set"),
        ((folder, data, "--validation", empty), "has no validation images"),
        ((folder, data, "--data", data), "--data is for a run"),
        ((folder, data, "--quantile", "2"), "is no share"),
        ((folder, data, "--clip", empty), "--clip"),
    ]:
        with pytest.raises(UserError, match=message):
            run(*options)
    assert not (tmp_path / "out").exists()
