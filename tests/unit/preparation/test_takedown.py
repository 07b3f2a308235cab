import contextlib
import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from diffusion import storage
from diffusion.errors import DataError
from diffusion.files import write_json
from diffusion.formats.data_set import PreparedManifest
from diffusion.formats.shards import read_index
from diffusion.preparation import takedown
from diffusion.preparation.config import DuplicatesConfig, ScorerConfig
from diffusion.preparation.metadata import removal_hash, removed_row
from diffusion.preparation.output import clear
from diffusion.preparation.removed import Removed, add_removed, read_keys
from diffusion.preparation.takedown import take_down
from tests.tools.image_files import encode, noise, tree, write_folder, write_tar
from tests.tools.preparing import prepare, read_samples
from tests.tools.selected_data import make_images, select_images
from tests.tools.written_data import TEXT, encoded_sample, smooth_image, write_encoded, write_mds

SIZES = (7, 5, 9, 6, 8)
TAKEN, DUPLICATE = 9, 20
"""Image that is kept, and one that is rejected as its duplicate."""
OPTIONS = {"captioner": {}, "scorers": [{"column": "score"}], "shard_mb": 0.01}


class StopError(Exception):
    """An interruption."""


def stop(*arguments):
    raise StopError


@pytest.fixture
def data(template, tmp_path):
    """A data set in which an image, its key and its caption stand wherever they can."""
    shutil.copytree(template.out, tmp_path / "out")
    return replace(copy.deepcopy(template), out=str(tmp_path / "out"))


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("template")
    source = make_images(tmp_path / "images", range(60))
    data = select_images(str(tmp_path / "out"), source, SIZES, rejected=[DUPLICATE, 22], original=TAKEN, scored=True)
    key = data.key(TAKEN)
    manifest = data.write(**OPTIONS)
    assert manifest.rejected["duplicate"].examples[0].detail == f"of {key}"
    for name in ("report.html", "report.json"):
        (tmp_path / "out" / name).write_text(f"{key} caption of {TAKEN}")
    (tmp_path / "out" / "listings").mkdir()
    part = next(part for part, numbers in enumerate(data.images) if TAKEN in numbers)
    pq.write_table(
        pa.table({"item": [json.dumps({"file": f"{TAKEN:04}.png"})]}),
        tmp_path / "out" / "listings" / f"{part:06}.parquet",
    )
    return data


def contents(out):
    """Bytes of each file; of parquet files also their columns as text, which may be compressed."""
    for name, content in tree(Path(out)).items():
        yield name, content
        if name.endswith(".parquet"):
            table = pq.read_table(Path(out, name))
            yield name, repr(table.to_pylist()).encode()
            yield name, repr(table.schema.metadata).encode()


def files_with(out, *needles):
    return {name for name, content in contents(out) for needle in needles if needle in content}


def needles(data, number):
    image = Path(data.source.path, f"{number:04}.png").read_bytes()
    return (
        image,
        image[100:160],
        data.key(number).encode(),
        f"caption of {number}'".encode(),
        f"ted for {number}'".encode(),
        f'n of {number}"'.encode(),
    )


def test_marks_name_the_samples(data):
    before = tree(Path(data.out))
    asked = {data.key(3), data.key(TAKEN), "set/nothing.png"}
    found = take_down(data.out, asked)
    assert (found.absent, found.num_rewritten) == (["set/nothing.png"], 0)
    marks = json.loads(Path(data.out, "withdrawn.json").read_text())
    every = read_samples(data.out)
    assert {every[place][i]["key"] for place, indices in marks.items() for i in indices} == asked - {"set/nothing.png"}
    contents = {xxhash.xxh3_128_hexdigest(needles(data, number)[0]) for number in (3, TAKEN)}
    assert json.loads(Path(data.out, "removed.json").read_text()) == sorted({*map(removal_hash, asked), *contents})
    now = tree(Path(data.out))
    changed = {name.split("/")[0] for name in now if now[name] != before.get(name)}
    assert changed == {"withdrawn.json", "removed.json", "metadata"}
    rows = [row for path in Path(data.out, "metadata").iterdir() for row in pq.read_table(path).to_pylist()]
    assert {row["key"] for row in rows if row["reason"] == "removed"} == asked - {"set/nothing.png"}
    again = take_down(data.out, {data.key(4)})
    assert sum(map(len, again.marks.values())) == 3, "what was removed before stays so"
    assert take_down(data.out, {data.key(4)}) == again


@pytest.mark.parametrize("number", [TAKEN, DUPLICATE])
def test_nothing_of_an_erased_image_is_left(data, number):
    expected = {"positions", "train", "manifest.json", "report.html", "metadata", "scores", "selection"}
    if number == TAKEN:
        assert expected <= {name.split("/")[0] for name in files_with(data.out, *needles(data, number))}
    take_down(data.out, {data.key(number)}, erase=True)
    assert files_with(data.out, *needles(data, number)) == set()
    assert removal_hash(data.key(number)) in Removed.read(data.out)


def test_other_samples_stay_as_they_were(data):
    asked = {data.key(3), data.key(TAKEN)}
    before = read_samples(data.out)
    found = take_down(data.out, asked, erase=True)
    after = read_samples(data.out)
    for place, old in before.items():
        for one, other in zip(old, after[place], strict=True):
            if one["key"] in asked:
                assert (other["image"], other["key"], other["captions"]) == (b"", "", ["removed"])
                assert (other["width"], other["height"]) == (one["width"], one["height"])
            else:
                assert one == other
    assert found.num_rewritten == sum(".r1.mds" in name for name in tree(Path(data.out)))
    for split, buckets in PreparedManifest.read(data.out).splits.items():
        for bucket, entry in buckets.items():
            assert read_index(Path(data.out, split, bucket)).summary == entry
    before = tree(Path(data.out))
    assert take_down(data.out, asked, erase=True).num_rewritten == 0
    assert tree(Path(data.out)) == before


def test_what_was_marked_before_is_erased_too(data):
    take_down(data.out, {data.key(TAKEN)})
    assert files_with(data.out, *needles(data, TAKEN))
    take_down(data.out, {data.key(4)}, erase=True)
    assert files_with(data.out, *needles(data, TAKEN), *needles(data, 4)) == set()


def test_a_rejected_image_that_was_marked_before_is_erased_too(data):
    take_down(data.out, {data.key(DUPLICATE)})
    rest = Path(data.out, "reread", "000000.parquet")
    rest.parent.mkdir()
    pq.write_table(pa.table({"key": [data.key(DUPLICATE)]}), rest)
    take_down(data.out, set(), erase=True)
    assert files_with(data.out, *needles(data, DUPLICATE)) == set()


def test_rows_that_were_erased_already():
    row = {"key": "set/a~1.png", "key_hash": 1, "file": "~1.png", "version": "v", "offset": None, "length": None}
    row |= {"row_group": None, "row": None}
    erased = removed_row(row, "")
    assert erased["file"].startswith("~") and "1.png" not in erased["file"]
    assert removed_row(erased, "") == erased
    assert (removed_row(row, "~1.png")["file"], removed_row(row, "~1.png")["version"]) == ("~1.png", "v")


def test_a_second_erasure_in_the_same_shard(data):
    for number in range(0, 20, 2):
        take_down(data.out, {data.key(number)}, erase=True)
    left = {one["key"] for listed in read_samples(data.out).values() for one in listed} - {""}
    assert left == {data.key(i) for i in range(35) if i not in (20, 22) and (i > 19 or i % 2)}
    assert sum(not one["key"] for listed in read_samples(data.out).values() for one in listed) == 10
    assert any(".r2.mds" in name for name in tree(Path(data.out)))


@pytest.mark.parametrize("step", range(26))
def test_stopped_at_any_write_and_continued(data, monkeypatch, step):
    asked = {data.key(3), data.key(TAKEN), data.key(DUPLICATE)}
    functions, count = {name: getattr(storage, name) for name in ("write", "delete")}, iter(range(10**6))

    def stopping(name):
        def call(*arguments, **options):
            if next(count) == step:
                raise StopError
            functions[name](*arguments, **options)

        return call

    for name in functions:
        monkeypatch.setattr(storage, name, stopping(name))
    try:
        take_down(data.out, asked, erase=True)
    except StopError:
        assert sum(map(len, read_samples(data.out).values())) == sum(SIZES) - 2, "it can be read"
    monkeypatch.undo()
    take_down(data.out, asked, erase=True)
    for number in (3, TAKEN, DUPLICATE):
        assert files_with(data.out, *needles(data, number)) == set()
    assert sum(map(len, read_samples(data.out).values())) == sum(SIZES) - 2
    marks = json.loads(Path(data.out, "withdrawn.json").read_text())
    blank = {
        (place, i) for place, listed in read_samples(data.out).items() for i, one in enumerate(listed) if not one["key"]
    }
    assert blank == {(place, i) for place, indices in marks.items() for i in indices}
    for split, buckets in PreparedManifest.read(data.out).splits.items():
        for bucket, entry in buckets.items():
            assert read_index(Path(data.out, split, bucket)).summary == entry


def test_data_can_grow_after_an_erasure(data):
    take_down(data.out, {data.key(TAKEN)}, erase=True)
    before = {name: content for name, content in tree(Path(data.out)).items() if name.endswith(".mds")}
    grown = select_images(data.out, data.source, (6,), before=data, scored=True)
    assert [one.kept for one in grown.write(**OPTIONS).generations] == [33, 6]
    now = tree(Path(data.out))
    assert {name: now[name] for name in before} == before
    assert sum(one["key"] == "" for listed in read_samples(data.out).values() for one in listed) == 1


@pytest.mark.parametrize("number", [TAKEN, 37])
def test_data_that_is_being_added_to(data, monkeypatch, number):
    grown = select_images(data.out, data.source, (6,), before=data, scored=True)
    with monkeypatch.context() as patch, pytest.raises(StopError):
        patch.setattr(PreparedManifest, "write", stop)
        grown.write(**OPTIONS)
    assert files_with(data.out, *needles(data, number))
    take_down(data.out, {data.key(number)}, erase=True)
    assert files_with(data.out, *needles(data, number)) == set()
    assert not Path(data.out, "selection", "1.json").exists(), "a copy of the image may have been selected"


def test_data_with_two_unfinished_growths(data):
    """An image of the second one is not written, whatever is selected."""
    grown = select_images(data.out, data.source, (6,), before=data, scored=True)
    grown = select_images(data.out, data.source, (6,), before=grown, scored=True)
    taken = 43
    take_down(data.out, {data.key(taken)})
    assert [Path(data.out, "selection", f"{number}.json").exists() for number in range(3)] == [True, False, False]


def test_an_unfinished_growth_stays_where_nothing_is_removed_anew(data, tmp_path, monkeypatch):
    """In prepared and in encoded data."""
    latents = tmp_path / "latents"
    write_encoded(latents, {"32-up": 9})
    write_json(latents / "manifest.json", {"kind": "encoded", "counts": {"train": {"32-up": 9}}})
    removed = {data.key(3), data.key(DUPLICATE), "set/nothing.png"}
    take_down(data.out, removed, derived=[str(latents)])
    grown = select_images(data.out, data.source, (6,), before=data, scored=True)
    with monkeypatch.context() as patch, pytest.raises(StopError):
        patch.setattr(PreparedManifest, "write", stop)
        grown.write(**OPTIONS)
    storage.write_json(f"{latents}/work.partial/shards/train.32-up.000001.json", {})
    before = tree(tmp_path)
    take_down(data.out, removed, derived=[str(latents)])
    assert tree(tmp_path) == before
    take_down(data.out, {data.key(4)}, derived=[str(latents)])
    assert not {"out/selection/1.json", "latents/work.partial/shards/train.32-up.000001.json"} & tree(tmp_path).keys()


def test_a_removed_image_that_is_selected_is_not_written(data):
    select_images(data.out, data.source, (6,), before=data, scored=True)
    path = Path(data.out, "metadata", "000005.parquet")
    rows = pq.read_table(path)
    reasons = pa.array(["removed", *[""] * 5])
    pq.write_table(rows.set_column(rows.schema.get_field_index("reason"), "reason", reasons), path)
    with pytest.raises(DataError, match="000005"):
        data.write(**OPTIONS)


def test_encoded_data(tmp_path):
    out = tmp_path / "latents"
    write_encoded(out, {"32-up": 9})
    counts = {"train": {"32-up": 9}}
    with pytest.raises(DataError, match="latents"):
        take_down(str(out), {"32-up/4"})
    write_json(out / "manifest.json", {"kind": "encoded", "counts": counts})
    assert take_down(str(out), {"32-up/4", "32-up/8"}).marks == {"train/32-up": [4, 8]}
    before = read_samples(out)["train/32-up"]
    assert take_down(str(out), set(), erase=True).num_rewritten >= 1
    after = read_samples(out)["train/32-up"]
    for i, (one, other) in enumerate(zip(before, after, strict=True)):
        assert other["key"] == ("" if i in (4, 8) else one["key"])
        assert (other["latent_mean"] == (0 if i in (4, 8) else one["latent_mean"])).all()
        assert (other["token_ids"] == (0 if i in (4, 8) else one["token_ids"])).all()
    assert files_with(out, b"32-up/4", b"32-up/8") == set()


@pytest.mark.parametrize("folder", ["train", "train/16-up"])
def test_folders_that_are_links(tmp_path, folder):
    """Takedown from prepared data with scores, and from encoded data."""
    source, out, latents = tmp_path / "set", tmp_path / "out", tmp_path / "latents"
    scorers = [ScorerConfig(path="tests.tools.scored_data.Redness", column="redness")]
    write_folder(source, 4)
    prepare([source], out, edges=[16], scorers=scorers)
    write_encoded(latents, {"16-up": 4})
    write_json(latents / "manifest.json", {"kind": "encoded", "counts": {"train": {"16-up": 4}}})
    for number, path in enumerate((out / folder, latents / folder, out / "scores" / "redness")):
        path.rename(tmp_path / f"disk{number}")
        path.symlink_to(tmp_path / f"disk{number}")
    found = take_down(str(out), {"set/0001.png", "16-up/2"}, derived=[str(latents)], erase=True)
    assert (found.absent, found.num_rewritten) == ([], 2)
    shards = [*tmp_path.glob("disk[01]/**/*.mds")]
    assert [path.name for path in shards if b"16-up/2" in path.read_bytes() or b"set/0001" in path.read_bytes()] == []
    assert pq.read_table(tmp_path / "disk2")["redness"].null_count == 1
    (out / "scores" / "redness").unlink()
    (tmp_path / "disk2").rename(out / "scores" / "redness")
    write_folder(source, 2, start=10)
    assert prepare([source], out, edges=[16], scorers=scorers).kept == 6
    assert sum(map(len, read_samples(out).values())) == 6
    assert (out / folder).is_symlink()


@pytest.mark.parametrize("where", ["positions", "manifest", "link"])
def test_files_outside_of_a_data_set_stay(data, tmp_path, where):
    """A data set from elsewhere names or links folders outside of it."""
    victim, out = tmp_path / "photos", Path(data.out)
    if where == "link":
        (out / "validation").rename(victim)
        (out / "validation").symlink_to(victim)
    victim.mkdir(exist_ok=True)
    (victim / "photo.png").write_bytes(b"")
    if where == "manifest":
        manifest = json.loads((out / "manifest.json").read_text())
        manifest["splits"][".."] = {"photos": next(iter(manifest["splits"]["train"].values()))}
        write_json(out / "manifest.json", manifest)
    elif where == "positions":
        table = pq.read_table(out / "positions" / "00000.parquet")
        entries = json.loads(table.schema.metadata[b"entries"])
        entries.append(
            {**entries[0], "split": "..", "bucket": "photos", "entry": {**entries[0]["entry"], "samples": 0}}
        )
        table = table.replace_schema_metadata({"entries": json.dumps(entries)})
        pq.write_table(table, out / "positions" / "00000.parquet")
    with contextlib.nullcontext() if where == "link" else pytest.raises(DataError, match="photos"):
        take_down(data.out, {data.key(TAKEN)}, erase=True)
    clear(data.out)
    assert [path.name for path in victim.rglob("*") if path.is_file()] == ["photo.png"]
    assert not (out / "train").exists()


@pytest.mark.parametrize("near", [False, True])
def test_copies_of_removed_images_stay_out(tmp_path, near):
    """Copies by their bytes, and on request by their look: over growth, a new selection, and those in the data."""
    source, out = tmp_path / "set", tmp_path / "out"
    options = {"edges": [16], "duplicates": DuplicatesConfig()}
    image = smooth_image(0, 64, 48)
    looks = {kind: encode(image, kind) for kind in (["PNG", "JPEG"] if near else ["PNG"])}

    def upload(name, *of):
        for kind in of:
            (source / f"{name}.{kind.lower()}").write_bytes(looks[kind])
            (source / f"{name}.txt").write_text("a copy")

    write_folder(source, 4)
    upload("first", "PNG")
    upload("second", *[*looks][-1:])
    assert prepare([source], out, **options).kept == 5
    (taken,) = {one["key"] for one in read_samples(out)["train/16-up"]} - {f"set/{i:04}.png" for i in range(4)}
    assert take_down(str(out), {taken}, erase=True, near=near).copies == []
    upload("third", *[*looks][-1:])
    grown = prepare([source], out, **options)
    assert (grown.kept, grown.rejected["removed"].count) == (5, 1)
    anew = prepare([source], out, overwrite=True, edges=[16])
    assert (anew.kept, anew.rejected["removed"].count) == (4, 3)


UNFIT_TEXTS = {
    "missing_caption": {},
    "invalid_utf8": {"txt": b"caf\xe9"},
    "invalid_json": {"json": b"{broken"},
    "too_large": {"txt": b"a " * 20_000},
}

SECOND_IMAGES = {
    "x.png": ["x.jpg", "x.png", "x.txt"],
    "x.v2.png": ["x.jpg", "x.v2.png", "x.txt"],
    "x.v.png": ["x.v.jpg", "x.v.txt", "x.v.png"],
    "x.19.png": ["x.jpg", *(f"x.{number}.jpg" for number in range(19)), "x.19.png", "x.txt"],
    "x.0.png": ["x.jpg", "x.0.png", *(f"x.{number}.jpg" for number in range(1, 20)), "x.txt"],
}
"""Members of a sample of a tar, by the one that is rejected."""


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(kind, reason) for kind in ("folder", "tar") for reason in UNFIT_TEXTS]
    + [(kind, reason) for kind in ("parquet", "mds") for reason in UNFIT_TEXTS if reason != "invalid_json"],
)
def test_copies_of_an_image_that_was_rejected_for_its_texts_stay_out(tmp_path, kind, reason):
    image, texts, out = encode(smooth_image(0, 40, 40)), UNFIT_TEXTS[reason], tmp_path / "out"
    source, later = tmp_path / "set", tmp_path / "later"
    write_folder(source, 2)
    write_folder(later, 1)
    unfit = {"folder": "set/x.png", "tar": "set/x.tar/x", "parquet": "set/x.parquet#0", "mds": "mds#0"}[kind]
    sources = [source]
    if kind == "folder":
        for suffix, content in {"png": image, **texts}.items():
            (source / f"x.{suffix}").write_bytes(content)
    elif kind == "tar":
        shutil.rmtree(source)
        source.mkdir()
        write_tar(source / "x.tar", [("x.png", image), *((f"x.{one}", text) for one, text in texts.items())])
    elif kind == "parquet":
        shutil.rmtree(source)
        source.mkdir()
        text = pa.array([texts.get("txt")], pa.binary()).view(pa.string())
        pq.write_table(pa.table({"image": [image], "caption": text}), source / "x.parquet")
    else:
        sources = [tmp_path / "mds"]
        row = {"image": image, "caption": texts.get("txt", b"")}
        index = write_mds(sources[0], dict.fromkeys(row, "bytes"), [row]) / "index.json"
        index.write_text(index.read_text().replace('["bytes", "bytes"]', '["str", "bytes"]'))
    sources.append(later)
    manifest = prepare(sources, out, edges=[16])
    assert manifest.rejected.keys() <= {reason, "empty_caption"}
    assert take_down(str(out), {unfit}).absent == [unfit]
    (later / "copy.png").write_bytes(image)
    (later / "copy.txt").write_text("a copy")
    grown = prepare(sources, out, edges=[16])
    assert (grown.kept, grown.rejected["removed"].count) == (manifest.kept, 1)


@pytest.mark.parametrize("taken", SECOND_IMAGES)
def test_copies_of_a_second_image_of_a_sample_stay_out(tmp_path, taken):
    image, later, out = encode(smooth_image(0, 40, 40)), tmp_path / "later", tmp_path / "out"
    contents = [(name, image if name == taken else noise(40, 40, name)) for name in SECOND_IMAGES[taken]]
    sources = [write_tar(tmp_path / "a.tar", [(n, b"text" if n.endswith("txt") else c) for n, c in contents]), later]
    write_folder(later, 1)
    manifest = prepare(sources, out, edges=[16])
    assert take_down(str(out), {f"a.tar/{taken}"}).absent == [f"a.tar/{taken}"]
    (later / "copy.png").write_bytes(image)
    (later / "copy.txt").write_text("a copy")
    grown = prepare(sources, out, edges=[16])
    assert (grown.kept, grown.rejected["removed"].count) == (manifest.kept, 1)


def write_latents(root, prepared):
    """Write encoded data with the keys of prepared data, which are returned."""
    keys = [one["key"] for one in read_samples(prepared)["train/16-up"]]
    samples = [encoded_sample("x", i) | {"key": key} for i, key in enumerate(keys)]
    write_mds(root / "train/16-up", {"latent_mean": "ndarray:float16:4,4,4"} | TEXT, samples)
    write_json(root / "manifest.json", {"kind": "encoded", "counts": {"train": {"16-up": len(keys)}}})
    return keys


@pytest.mark.parametrize("erased", [False, True])
def test_latents_of_what_was_removed_before_are_erased(tmp_path, erased):
    """The prepared data alone had marked or erased it."""
    write_folder(tmp_path / "set", 5)
    out, latents = tmp_path / "out", tmp_path / "latents"
    prepare([tmp_path / "set"], out, edges=[16])
    keys = write_latents(latents, out)
    take_down(str(out), {"set/0001.png"}, erase=erased)
    take_down(str(out), {"set/0002.png"}, derived=[str(latents)], erase=True)
    left = [one["key"] for one in read_samples(latents)["train/16-up"]]
    assert left == ["" if key in ("set/0001.png", "set/0002.png") else key for key in keys]


def test_latents_of_copies_are_removed_in_any_order_of_the_folders(tmp_path):
    source, out, latents = tmp_path / "set", tmp_path / "out", tmp_path / "latents"
    write_folder(source, 4)
    (source / "copy.png").write_bytes((source / "0001.png").read_bytes())
    (source / "copy.txt").write_text("a copy")
    prepare([source], out, edges=[16])
    keys = write_latents(latents, out)
    found = take_down(str(latents), {"set/0001.png"}, derived=[str(out)], copies=True)
    expected = [i for i, key in enumerate(keys) if key in ("set/0001.png", "set/copy.png")]
    assert (found.marks, found.copies) == ({"train/16-up": expected}, [])


def test_a_marked_image_is_erased_from_the_selections_of_a_growth(tmp_path):
    source, out = tmp_path / "set", tmp_path / "out"
    options = {"edges": [16], "duplicates": DuplicatesConfig()}
    write_folder(source, 4)
    (source / "copy.png").write_bytes((source / "0001.png").read_bytes())
    (source / "copy.txt").write_text("a copy")
    [example] = prepare([source], out, **options).rejected["duplicate"].examples
    kept = example.detail.removeprefix("of ")
    take_down(str(out), {kept})
    write_folder(source, 2, start=50)
    prepare([source], out, **options)
    take_down(str(out), set(), erase=True)
    assert files_with(out, kept.encode()) == set()


@pytest.mark.parametrize("copies", [False, True])
def test_copies_in_the_data_are_listed_or_removed(tmp_path, monkeypatch, copies):
    """In what was encoded of it, too, and after a takedown that was stopped."""
    source, out = tmp_path / "set", tmp_path / "out"
    write_folder(source, 4)
    for name in ("a", "b"):
        (source / f"{name}.png").write_bytes(noise(37, 33, 1))
        (source / f"{name}.txt").write_text("a copy")
    (source / "0001.png").write_bytes(noise(37, 33, 1))
    prepare([source], out, edges=[16])
    keys = write_latents(tmp_path / "latents", out)
    derived = str(tmp_path / "latents")
    with monkeypatch.context() as patch, pytest.raises(StopError):
        patch.setattr(takedown._Encoded, "erase", stop)  # pyright: ignore[reportPrivateUsage]
        take_down(str(out), {"set/0001.png"}, derived=[derived], erase=True, copies=copies)
    found = take_down(str(out), {"set/0001.png"}, derived=[derived], erase=True, copies=copies)
    expected = {"set/0001.png", "set/a.png", "set/b.png"} if copies else {"set/0001.png"}
    assert found.copies == ([] if copies else ["set/a.png", "set/b.png"])
    indices = [i for i, key in enumerate(keys) if key in expected]
    for root in (out, tmp_path / "latents"):
        assert json.loads((root / "withdrawn.json").read_text()) == {"train/16-up": indices}
        assert {one["key"] for one in read_samples(root)["train/16-up"]} == {*keys, ""} - expected
    assert prepare([source], out, overwrite=True, edges=[16]).kept == 3


@pytest.mark.parametrize("key", ["a ", "a\nb", "a\r", "a\rb", '"a"', '"a', "a\u2028b", "a\x85"])
def test_keys_are_read_as_they_are(tmp_path, key):
    line = json.dumps(key) if key.startswith('"') or "\n" in key or key.endswith("\r") else key
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / "keys.txt").write_text(f"{line}\r\n\nanother\n", encoding, newline="")
        assert read_keys(tmp_path / "keys.txt") == {key, "another"}


def test_hashes_of_removed_keys_are_added(tmp_path):
    add_removed(str(tmp_path), map(removal_hash, "ab"))
    assert add_removed(str(tmp_path), map(removal_hash, "bc")) == set(map(removal_hash, "abc"))
    assert Removed.read(str(tmp_path)) == {removal_hash("a"), removal_hash("b"), removal_hash("c")}
    assert removal_hash("a") == "a96faf705af16834e6c632b61e964e1f"
