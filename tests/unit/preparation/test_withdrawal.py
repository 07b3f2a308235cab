import json
import shutil

import pytest
from streaming import LocalDataset

from diffusion.datasets.manifest import PreparedManifest
from diffusion.datasets.mds import read_index
from diffusion.errors import DataError
from diffusion.files import write_json
from tests.tools.preparing import prepare
from diffusion.preparation.withdrawal import KEYS, add_keys, read_keys, withdraw
from diffusion.preparation.withdrawal_erase import erase
from tests.tools.image_files import tree, write_folder
from tests.tools.written_data import write_encoded

OPTIONS = {"edges": [16, 34], "num_workers": 1, "shard_bytes": 8000, "partition_size": 6, "validation_fraction": 0.2}


@pytest.fixture
def prepared(tmp_path):
    write_folder(tmp_path / "set", 30)
    prepare([tmp_path / "set"], tmp_path / "out", **OPTIONS)
    return tmp_path / "out"


def samples(out):
    """All samples in their order, by `<split>/<bucket>`."""
    found = {}
    for index in sorted(out.glob("*/*/index.json")):
        dataset = LocalDataset(str(index.parent))
        found[f"{index.parent.parent.name}/{index.parent.name}"] = [dataset[i] for i in range(len(dataset))]
    return found


def test_marks_name_the_samples(prepared):
    before = tree(prepared)
    asked = {"set/0003.png", "set/0017.png", "set/nothing.png"}
    found = withdraw(prepared, asked)
    assert found.absent == ["set/nothing.png"]
    marks = json.loads((prepared / "withdrawn.json").read_text())
    data = samples(prepared)
    assert {data[place][i]["key"] for place, numbers in marks.items() for i in numbers} == asked - {"set/nothing.png"}
    assert all(numbers == sorted(numbers) for numbers in marks.values())
    assert {name: content for name, content in tree(prepared).items() if "withdrawn" not in name} == before
    again = withdraw(prepared, {"set/0004.png"})
    assert sum(map(len, again.marks.values())) == 3, "what was withdrawn before stays so"
    assert withdraw(prepared, {"set/0004.png"}) == again


def test_keys_of_every_name_can_be_taken_back(tmp_path):
    write_folder(tmp_path / "set", 1)
    odd = ["line\nbreak", "return\r", "\u2028", "\x85", "\x0c", "end ", " begin", 'q"uote', "tab\t"]
    for name in odd:
        for suffix in (".png", ".txt"):
            shutil.copy(tmp_path / "set" / f"0000{suffix}", tmp_path / "set" / f"{name}{suffix}")
    out, file = tmp_path / "out", tmp_path / "keys.txt"
    prepare([tmp_path / "set"], out, **OPTIONS)
    keys = {f"set/{name}.png" for name in odd}
    file.write_text("".join(f"{json.dumps(key) if chr(10) in key else key}\r\n" for key in keys), newline="")
    assert read_keys(file) == keys
    assert withdraw(out, read_keys(file)).absent == []
    assert read_keys(out / KEYS) == keys
    anew = prepare([tmp_path / "set"], out, overwrite=True, **OPTIONS)
    assert (anew.kept, anew.refused["withdrawn"].count) == (1, len(odd))


@pytest.mark.parametrize("key", ["a ", "a\nb", "a\r", "a\rb", '"a"', '"a', "a\u2028b", "a\x85"])
def test_keys_are_read_as_they_were_written(tmp_path, key):
    add_keys(tmp_path, {key, "another"})
    assert read_keys(tmp_path / KEYS) == {key, "another"}


def test_erased_samples_are_blank_and_the_others_as_they_were(prepared):
    asked = {"set/0003.png", "set/0017.png"}
    before, names = samples(prepared), set(tree(prepared))
    withdraw(prepared, asked)
    num = erase(prepared)
    assert num >= 1
    after = samples(prepared)
    for place, old in before.items():
        for one, other in zip(old, after[place], strict=True):
            assert one["key"] == other["key"]
            assert other["image"] == (b"" if one["key"] in asked else one["image"])
            assert (other["captions"] == one["captions"]) == (one["key"] not in asked)
    gone = names - set(tree(prepared))
    assert len(gone) == num
    for split, buckets in PreparedManifest.read(prepared).splits.items():
        for bucket, entry in buckets.items():
            assert read_index(prepared / split / bucket).sha256 == entry.sha256
    assert erase(prepared) == 0


def test_a_later_preparation_does_not_bring_them_back(prepared, tmp_path):
    keys = tmp_path / "keys.txt"
    keys.write_text("set/0003.png\n\nset/0100.png\n")
    prepare([tmp_path / "set"], prepared, withdrawn=keys, **OPTIONS)
    write_folder(tmp_path / "set", 3, start=100)
    manifest = prepare([tmp_path / "set"], prepared, **OPTIONS)
    assert (manifest.kept, manifest.refused["withdrawn"].count) == (32, 1)
    assert sum(map(len, json.loads((prepared / "withdrawn.json").read_text()).values())) == 1
    anew = prepare([tmp_path / "set"], prepared, overwrite=True, **OPTIONS)
    assert (anew.kept, anew.refused["withdrawn"].count) == (31, 2)
    assert not (prepared / "withdrawn.json").exists()
    everything = [one["key"] for listed in samples(prepared).values() for one in listed]
    assert not {"set/0003.png", "set/0100.png"} & set(everything)
    assert len(everything) == 31


def test_encoded_data(tmp_path):
    out = tmp_path / "latents"
    write_encoded(out, {"32-up": 9})
    with pytest.raises(DataError, match="no finished data set"):
        withdraw(out, {"32-up/4"})
    write_json(out / "manifest.json", {"kind": "encoded", "version": 1})
    assert withdraw(out, {"32-up/4", "32-up/8"}).marks == {"train/32-up": [4, 8]}
    before = samples(out)["train/32-up"]
    assert erase(out) >= 1
    after = samples(out)["train/32-up"]
    for i, (one, other) in enumerate(zip(before, after, strict=True)):
        assert one["key"] == other["key"]
        assert (other["latent_mean"] == (0 if i in (4, 8) else one["latent_mean"])).all()
        assert (other["token_ids"] == (0 if i in (4, 8) else one["token_ids"])).all()
