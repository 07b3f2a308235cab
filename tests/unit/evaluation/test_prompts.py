"""Prompts of files and data sets, and the listing of a folder."""

import hashlib
import json
from pathlib import Path

import pytest
from PIL import Image
from streaming import MDSWriter

from apps.preference.images import collect
from diffusion.errors import ConfigurationError, DataError
from diffusion.evaluation.config import ReferenceConfig
from diffusion.evaluation.images import LISTING, PreparedSamples, open_reference, smallest_hashes
from diffusion.evaluation.prompts import Prompt, open_images, read_listing, read_prompts, write_listing
from diffusion.preparation.takedown import take_down
from tests.tools.image_files import write_folder
from tests.tools.preparing import prepare


def folder_of_images(root, num: int):
    root.mkdir()
    for i in range(num):
        Image.new("RGB", (4, 4), (i, 0, 0)).save(root / f"{i:05d}.png")
    return root


def test_what_generate_writes_is_what_evaluation_and_preference_read(tmp_path):
    folders = {name: folder_of_images(tmp_path / name, 3) for name in ("a", "b")}
    prompts = ["one", "two", "two"]
    for folder in folders.values():
        write_listing(folder, [{"file_name": f"{i:05d}.png", "prompt": prompts[i], "seed": i} for i in range(3)])
        Image.new("RGB", (4, 4)).save(folder / "grid.png")
        assert [(image.path.name, image.prompt) for image in read_listing(folder)] == [
            ("00000.png", "one"),
            ("00001.png", "two"),
            ("00002.png", "two"),
        ]
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    items = collect(folders, tmp_path / "prompts.txt").items
    assert [[path.name for path in item.images] for item in items] == [[f"{i:05d}.png"] * 2 for i in range(3)]


@pytest.mark.parametrize("kind", ["absolute", "relative", "link", "link without a listing"])
def test_an_image_outside_of_its_folder_is_not_shown_to_raters(tmp_path, kind):
    private = folder_of_images(tmp_path / "private", 1) / "00000.png"
    good, bad = folder_of_images(tmp_path / "good", 1), folder_of_images(tmp_path / "bad", 0)
    (bad / "link.png").symlink_to(private)
    name = {"absolute": str(private), "relative": "../private/00000.png"}.get(kind, "link.png")
    if kind != "link without a listing":
        write_listing(bad, [{"file_name": name, "prompt": "one"}])
    (tmp_path / "prompts.txt").write_text("one\n")
    (tmp_path / "alias").symlink_to(good)
    assert collect({"a": good, "b": tmp_path / "alias"}, tmp_path / "prompts.txt").items
    with pytest.raises(DataError, match="outside"):
        collect({"a": good, "b": bad}, tmp_path / "prompts.txt")
    if "link" not in kind:
        with pytest.raises(DataError, match="outside"):
            open_images(bad)


def test_a_wrong_line_is_named(tmp_path):
    folder = folder_of_images(tmp_path / "a", 1)
    assert read_listing(folder) is None
    for line in ('{"file_name": "gone.png", "prompt": "x"}', '{"file_name": "00000.png"}', "["):
        (folder / LISTING).write_text('{"file_name": "00000.png", "prompt": "x"}\n' + line)
        with pytest.raises(DataError, match=f"{LISTING}, line 2"):
            read_listing(folder)
    (folder / LISTING).write_bytes(b"\xff")
    with pytest.raises(DataError, match=LISTING):
        read_listing(folder)


@pytest.mark.parametrize("line", ['"prompt": null', '"prompt": "x", "category": ["A"]', r'"prompt": "\ud800"'])
def test_a_line_without_texts_is_named(tmp_path, line):
    folder = folder_of_images(tmp_path / "a", 1)
    (folder / LISTING).write_text(f'{{"file_name": "00000.png", {line}}}\n')
    with pytest.raises(DataError, match=f"{LISTING}, line 1"):
        read_listing(folder)


def test_images_of_all_formats_are_read(tmp_path):
    names = [f"{i:05d}.{end}" for i, end in enumerate(("gif", "TIF", "tiff", "jp2", "jpeg", "ppm"))]
    folder = folder_of_images(tmp_path / "a", 0)
    for i, name in enumerate(names):
        Image.new("RGB", (4 + i, 4)).save(folder / name)
    images, _ = open_reference(ReferenceConfig(path=str(folder)))
    assert sorted(images[i].width for i in range(len(images))) == [*range(4, 10)]
    (tmp_path / "prompts.txt").write_text("0\n1\n2\n3\n4\n5\n")
    items = collect({"a": folder, "b": folder}, tmp_path / "prompts.txt").items
    assert [item.images[0].name for item in items] == names


def test_generated_images_are_a_reference_when_all_are_there_and_without_their_grid(tmp_path):
    folder = folder_of_images(tmp_path / "a", 3)
    Image.new("RGB", (9, 9)).save(folder / "grid.png")
    config = ReferenceConfig(path=str(folder))
    images, _ = open_reference(config)
    assert [images[i].size for i in range(len(images))] == [(4, 4)] * 3
    write_listing(folder, [])
    with pytest.raises(DataError, match="interrupted"):
        open_reference(config)


def test_prompts_of_a_data_set_are_read_without_its_other_shards(tmp_path):
    columns = {"image": "bytes", "captions": "json"}
    with MDSWriter(out=str(tmp_path / "set"), columns=columns, size_limit=2000) as writer:
        for i in range(30):
            writer.write({"image": bytes(1000), "captions": ["" if i % 3 == 0 else f"caption {i}"]})
    every = read_prompts(tmp_path / "set")
    assert [prompt.text for prompt in every] == [f"caption {i}" for i in range(30) if i % 3]
    chosen = read_prompts(tmp_path / "set", num=3)
    assert len({prompt.text for prompt in chosen}) == 3
    shards = sorted((tmp_path / "set").glob("*.mds"))
    held = [shard for shard in shards if any(prompt.text.encode() in shard.read_bytes() for prompt in chosen)]
    removed = [shard for shard in shards if shard not in held and b"caption " in shard.read_bytes()]
    assert len(removed) > len(held)
    for shard in removed:
        shard.unlink()
    assert read_prompts(tmp_path / "set", num=3) == chosen


def test_prompts_of_tables_and_lists(tmp_path):
    parti = tmp_path / "PartiPrompts.tsv"
    parti.write_text('Prompt\tCategory\tChallenge\na "bond\tAbstract\tBasic\na dog, a cat\tAnimals\tBasic\n')
    assert read_prompts(parti) == [
        Prompt(text='a "bond', category="Abstract"),
        Prompt(text="a dog, a cat", category="Animals"),
    ]
    bench = tmp_path / "DrawBench.csv"
    bench.write_text('Prompts,Category\n"a red, small car",Colors\n\n')
    assert read_prompts(bench) == [Prompt(text="a red, small car", category="Colors")]
    lines = tmp_path / "list.txt"
    lines.write_text("one\n\ntwo\u2028lines\n", encoding="utf-8")
    assert [prompt.text for prompt in read_prompts(lines)] == ["one", "two\u2028lines"]
    with pytest.raises(ConfigurationError, match=r"DrawBench\.csv .*Text"):
        read_prompts(bench, column="Text")
    with pytest.raises(ConfigurationError, match="num=3"):
        read_prompts(lines, num=3)
    bench.write_text("Prompts\na car\na dog, a cat\n")
    with pytest.raises(ConfigurationError, match="row 2 has more cells"):
        read_prompts(bench)
    bench.write_text("Prompts\na car,\n")
    assert read_prompts(bench) == [Prompt(text="a car")]


GENEVAL = {"tag": "single_object", "include": [{"class": "bench", "count": 1}], "prompt": "a photo of a bench"}


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("evaluation_metadata.jsonl", json.dumps(GENEVAL) + "\n\n" + json.dumps(GENEVAL), ["a photo of a bench"] * 2),
        ("geneval.json", json.dumps([GENEVAL, GENEVAL], indent=1), ["a photo of a bench"] * 2),
        ("texts.json", '["one", " two\\nlines ", ""]', ["one", "two\nlines"]),
        ("texts.jsonl", '\ufeff"one"\n"two"\n', ["one", "two"]),
        ("captions.JSONL", '{"Caption": "one", "id": 5}\n{"id": 6}\n', ["one"]),
        ("PROMPTS.CSV", "prompt,id\none,1\n", ["one"]),
        ("PROMPTS.TSV", "prompt\tid\none\t1\n", ["one"]),
    ],
)
def test_prompts_of_json_and_tables_are_no_lines(tmp_path, name, content, expected):
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    assert [prompt.text for prompt in read_prompts(path)] == expected


def test_categories_of_json(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a cat", "Category": "Animals", "tag": "x"}\n{"prompt": "a red car", "tag": "y"}\n')
    categories = [Prompt(text="a cat", category="Animals"), Prompt(text="a red car")]
    assert read_prompts(path) == categories
    assert [prompt.category for prompt in read_prompts(path, category_column="tag")] == ["x", "y"]


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": ', r"a\.jsonl, line 2"),
        ("a.jsonl", '{"tag": "a"}', r"a\.jsonl has no column .*tag"),
        ("a.json", '[{"prompt": 5}]', r"a\.json: row 1"),
        ("a.jsonl", r'{"prompt": "\ud800"}', r"a\.jsonl: row 1"),
        ("a.json", "[5]", r"a\.json, line 1"),
        ("a.json", "", r"a\.json has no prompts"),
    ],
)
def test_json_without_prompts(tmp_path, name, content, match):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigurationError, match=match):
        read_prompts(tmp_path / name)


def test_captions_and_images_of_a_prepared_data_set(shapes):
    prompts = read_prompts(shapes / "prepared" / "validation", num=7)
    assert len(prompts) == 7
    assert all("background" in prompt.text for prompt in prompts)
    images, identity = open_reference(ReferenceConfig(path=str(shapes / "prepared" / "validation"), num=7, size=32))
    assert {images[i].size for i in range(len(images))} == {(32, 32)}
    assert len(images) == 7
    other = open_reference(ReferenceConfig(path=str(shapes / "prepared" / "train"), num=7, size=32))[1]
    assert identity != other


@pytest.mark.parametrize("compression", [None, "zstd:3"])
def test_removed_images_are_neither_reference_nor_prompts(tmp_path, compression):
    write_folder(tmp_path / "set", 20)
    out = tmp_path / "out"
    prepare([tmp_path / "set"], out, edges=[16], shard_bytes=8000, compression=compression)
    whole = read_prompts(out / "train")
    config = ReferenceConfig(path=str(out / "train"))
    images, identity = open_reference(config)
    before = [images[i].tobytes() for i in range(len(images))]
    chosen = [prompt.text for prompt in read_prompts(out / "train", num=6)]
    gone = next(i for i, prompt in enumerate(whole) if prompt.text not in chosen)
    key = PreparedSamples(out / "train").sample(gone)["key"]
    for erase in (False, True):
        take_down(str(out), {key}, erase=erase)
        assert read_prompts(out / "train") == whole[:gone] + whole[gone + 1 :]
        assert [prompt.text for prompt in read_prompts(out / "train", num=6)] == chosen
        images, now = open_reference(config)
        assert [images[i].tobytes() for i in range(len(images))] == before[:gone] + before[gone + 1 :]
        assert now != identity


class Run:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_no_code_of_a_data_set_is_run(tmp_path):
    for name, columns in (("extra", {"captions": "json", "code": "pkl"}), ("captions", {"captions": "pkl"})):
        with MDSWriter(out=str(tmp_path / name), columns=columns) as writer:
            writer.write(
                {"captions": ["one"] if name == "extra" else Run(tmp_path / "run"), "code": Run(tmp_path / "run")}
            )
    assert PreparedSamples(tmp_path / "extra").sample(0, ["captions"]) == {"captions": ["one"]}
    for read in (read_prompts, lambda folder: PreparedSamples(folder).sample(0)):
        with pytest.raises(DataError, match="pkl"):
            read(tmp_path / "captions")
    assert not (tmp_path / "run").exists()


def test_a_choice_is_a_function_of_the_names():
    names = [f"image-{i}" for i in range(50)]
    chosen = smallest_hashes(names, 10)
    wanted = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())[:10]
    assert chosen == sorted(chosen)
    assert {names[i] for i in chosen} == set(wanted)


@pytest.mark.parametrize("compression", [None, "zstd:3"])
def test_prompts_of_a_data_set_are_those_of_whole_samples(tmp_path, compression):
    columns = {"image": "bytes", "captions": "json", "key": "str", "width": "int32"}
    with MDSWriter(out=str(tmp_path / "set"), columns=columns, size_limit=4000, compression=compression) as writer:
        for i in range(60):  # Most have no caption.
            captions = [f" caption {i} " if i % 5 == 0 else " ", "another"]
            writer.write({"image": bytes(100), "captions": captions, "key": f"{i}", "width": i})
    samples = PreparedSamples(tmp_path / "set")
    assert samples.sample(-1) == samples.sample(59)
    for outside in (-61, 60):
        with pytest.raises(IndexError):
            samples.captions(outside)
    names = list(samples.names())
    order = sorted(range(60), key=lambda i: hashlib.sha256(names[i].encode()).digest())
    wanted = sorted([i for i in order if samples.sample(i)["captions"][0].strip()][:7])
    chosen = read_prompts(tmp_path / "set", num=7)
    assert [prompt.text for prompt in chosen] == [f"caption {i}" for i in wanted]
    with pytest.raises(ConfigurationError, match="12 captions"):
        read_prompts(tmp_path / "set", num=13)


def test_prompts_of_a_data_set_are_read_without_its_images(tmp_path):
    image_bytes = 400_000
    for name, num in (("warm", 1), ("set", 20)):
        with MDSWriter(out=str(tmp_path / name), columns={"image": "bytes", "captions": "json"}) as writer:
            for i in range(num):
                writer.write({"image": bytes(image_bytes), "captions": [f"caption {i}"]})
        before = read_bytes()
        assert len(read_prompts(tmp_path / name)) == num  # The first time modules are imported.
    assert read_bytes() - before < image_bytes


def read_bytes() -> int:
    """Bytes that this process has read from files so far."""
    return int(Path("/proc/self/io").read_text().partition("rchar: ")[2].split()[0])
