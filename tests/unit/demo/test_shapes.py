"""The demo's data set: captions that agree with scenes, three readable layouts, the same bytes for the same seed."""

import hashlib
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from demo import scenes as shapes
from demo.scenes import Scene, Thing
from demo.shapes import write_data_set
from diffusion.config.model import Architecture
from diffusion.models.tokenizers import build_tokenizer

NUM_IMAGES = 120


@pytest.fixture(scope="module")
def data_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes") / "train"
    counts = write_data_set(folder, NUM_IMAGES, seed=3, shard_size=25)
    assert counts == {"images": 40, "webdataset": 40, "parquet": 40}
    return folder


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _rgb(image: Image.Image) -> Image.Image:
    """Composite on white, as the captions of transparent images say."""
    rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, (255, 255, 255, 255)), rgba).convert("RGB")


def _read(folder: Path) -> list[tuple[bytes, str]]:
    """Return the encoded image and the caption of every sample of all three layouts."""
    samples = []
    for text in sorted((folder / "images").rglob("*.txt")):
        (image_file,) = [path for path in text.parent.glob(f"{text.stem}.*") if path.suffix != ".txt"]
        samples.append((image_file.read_bytes(), text.read_text().strip()))
    for path in sorted((folder / "webdataset").glob("*.tar")):
        with tarfile.open(path) as tar:
            content = {member.name: tar.extractfile(member).read() for member in tar.getmembers()}
        for name in [name for name in content if name.endswith(".txt")]:
            (image_file,) = [
                content[f"{name[:-4]}.{suffix}"] for suffix in ("png", "jpg") if f"{name[:-4]}.{suffix}" in content
            ]
            samples.append((image_file, content[name].decode()))
    for path in sorted((folder / "parquet").glob("*.parquet")):
        for row in pq.read_table(path).to_pylist():
            samples.append((row["image"]["bytes"], row["caption"]))
    return samples


def test_same_seed_same_bytes_and_another_seed_or_split_other_images(tmp_path: Path) -> None:
    for name, seed, split in (("a", 1, "train"), ("b", 1, "train"), ("c", 2, "train"), ("d", 1, "validation")):
        write_data_set(tmp_path / name, 60, seed, split=split, shard_size=7)
    first = _digests(tmp_path / "a")
    assert _digests(tmp_path / "b") == first
    digests = {digest for name, digest in first.items() if not name.endswith(".txt")}
    for other in ("c", "d"):
        others = {digest for name, digest in _digests(tmp_path / other).items() if not name.endswith(".txt")}
        assert not digests & others


def test_generator_is_pinned() -> None:
    """A change of the generator changes every number that was measured with it: then change these lines knowingly."""
    captions = [shapes.caption(scene) for scene in shapes.scenes(3, 17)]
    assert captions == [
        "a green star on a gray background",
        "a small green star on a white background",
        "a yellow square on a white background",
    ]


def test_every_layout_holds_the_captions_of_its_scenes(data_set: Path) -> None:
    samples = _read(data_set)
    captions = [shapes.caption(scene) for scene in shapes.scenes(NUM_IMAGES, 3)]
    assert [caption for _, caption in samples] == [
        *captions[0::3],
        *captions[1::3],
        *captions[2::3],
    ]
    for content, _ in samples:
        Image.open(io.BytesIO(content)).load()


def test_images_look_as_their_scenes(data_set: Path) -> None:
    scenes = shapes.scenes(NUM_IMAGES, 3)
    for (content, _), scene in zip(_read(data_set), [*scenes[0::3], *scenes[1::3], *scenes[2::3]], strict=True):
        image = _rgb(Image.open(io.BytesIO(content)))
        expected = np.asarray(shapes.draw(scene, image.size), dtype=float)
        assert np.abs(np.asarray(image, dtype=float) - expected).mean() < 6


def test_formats_resolutions_and_transparency(data_set: Path) -> None:
    images = [(Image.open(io.BytesIO(content)), caption) for content, caption in _read(data_set)]
    assert {image.format for image, _ in images} == {"PNG", "JPEG", "WEBP"}
    shorter = [min(image.size) for image, _ in images]
    for low, high in ((32, 64), (64, 128), (128, 10**6)):
        assert sum(low <= side < high for side in shorter) >= NUM_IMAGES / 6
    assert {np.sign(image.width - image.height) for image, _ in images} == {-1, 0, 1}
    transparent = [(image, caption) for image, caption in images if image.mode == "RGBA"]
    assert transparent
    for image, caption in transparent:
        assert caption.endswith("white background")
        assert image.getpixel((0, 0)) == (0, 0, 0, 0)
        assert _rgb(image).getpixel((0, 0)) == (255, 255, 255)


def test_webdataset_has_the_records_of_img2dataset(data_set: Path) -> None:
    paths = sorted((data_set / "webdataset").glob("*.tar"))
    assert [path.name for path in paths] == ["000.tar", "001.tar"]
    for path in paths:
        with tarfile.open(path) as tar:
            names = tar.getnames()
            for name in [name for name in names if name.endswith(".json")]:
                record = json.load(tar.extractfile(name))
                (image_file,) = [
                    other for other in names if other.startswith(record["key"]) and other.endswith(("png", "jpg"))
                ]
                assert name == f"{record['key']}.json"
                assert tar.extractfile(f"{record['key']}.txt").read().decode() == record["caption"]
                assert Image.open(tar.extractfile(image_file)).size == (record["width"], record["height"])
                assert record["url"].endswith(record["key"])


def test_an_existing_data_set_is_not_overwritten(data_set: Path) -> None:
    with pytest.raises(FileExistsError, match="images"):
        write_data_set(data_set, 3)


def test_captions() -> None:
    thing = Thing(colour="blue", shape="star", size="large", x=0.3, y=0.3, radius=0.3)
    scene = Scene(things=(thing,), background="gray", position="in the top left")
    assert shapes.caption(scene) == "a large blue star in the top left on a gray background"
    plain = Thing(colour="red", shape="circle", size="medium", x=0.5, y=0.5, radius=0.25)
    assert shapes.caption(Scene(things=(plain,), background="black")) == "a red circle on a black background"
    pair = Scene(things=(plain, thing), background="navy", relation="above", phrasing=1)
    assert shapes.caption(pair) == "an image of a red circle above a blue star on a navy background"
    assert shapes.caption(Scene(things=(plain,), background="white", phrasing=2)) == "a red circle, white background"


def test_scenes_are_where_and_as_large_as_their_captions_say() -> None:
    scenes = shapes.scenes(2000, 5)
    assert 0.17 < sum(scene.relation is not None for scene in scenes) / len(scenes) < 0.23
    for scene in scenes:
        for thing in scene.things:
            low, high = shapes.SIZES[thing.size]
            assert low <= thing.radius <= high
            for x, y in shapes.outline(thing):
                assert 0 <= x <= 1 and 0 <= y <= 1
        if scene.position is not None:
            column, row = shapes.POSITIONS[scene.position]
            for third, at in ((column, scene.things[0].x), (row, scene.things[0].y)):
                assert (at < 0.45, 0.44 < at < 0.56, at > 0.55)[third]
        if scene.relation is not None:
            first, second = scene.things
            assert first.colour != second.colour
            right, down = first.x - second.x, first.y - second.y
            expected = {"left of": right < -0.4, "right of": right > 0.4, "above": down < -0.4, "below": down > 0.4}
            assert expected[scene.relation] and min(abs(right), abs(down)) == 0


def test_a_centre_crop_keeps_every_object() -> None:
    for scene in shapes.scenes(20, 6):
        square = np.asarray(shapes.draw(scene, 64), dtype=float)
        wide = np.asarray(shapes.draw(scene, (80, 64)).crop((8, 0, 72, 64)), dtype=float)
        assert np.abs(square - wide).max() < 80 and np.abs(square - wide).mean() < 0.5


def test_prompts_ask_for_every_pair_and_every_relation() -> None:
    single, double = shapes.prompts()
    assert {(scene.things[0].colour, scene.things[0].shape) for scene in single} == {
        (colour, shape) for colour in shapes.COLOURS for shape in shapes.SHAPES
    }
    assert len({shapes.caption(scene) for scene in single}) == 24
    assert shapes.caption(single[0]) == "a red circle on a gray background"
    assert len(double) == 32
    assert all(sum(scene.relation == relation for scene in double) == 8 for relation in shapes.RELATIONS)
    assert [shapes.caption(scene) for scene in shapes.prompts()[1]] == [shapes.caption(scene) for scene in double]


def test_groups_have_objects_of_different_colours_in_different_corners_and_captions_that_clip_cuts() -> None:
    tokenizer = build_tokenizer(Architecture.stable_diffusion_2)
    for scene in shapes.scenes(50, 5, shares=(0, 0, 1)):
        assert len(scene.things) in (3, 4)
        assert len({thing.colour for thing in scene.things}) == len(scene.things)
        assert len({shapes.corner(thing.x, thing.y) for thing in scene.things}) == len(scene.things)
        assert len(tokenizer(shapes.caption(scene)).input_ids) > 77


def test_the_scenes_of_the_task_are_in_no_other_split() -> None:
    task = {shapes.content(scene) for scene in shapes.task()}
    assert len(task) == len(shapes.task()) == 512
    for split in ("train", "validation"):
        assert not task & {shapes.content(scene) for scene in shapes.scenes(2000, split=split, shares=(0.4, 0.4, 0.2))}
