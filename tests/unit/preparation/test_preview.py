from pathlib import Path

import pytest

from diffusion.config.loading import from_dict
from diffusion.errors import ConfigurationError, DataError
from diffusion.preparation.config import PrepareConfig
from diffusion.preparation.prepare import preview
from tests.tools.image_files import noise, tree, write_folder


def config(folder: Path, *sources: str, **values) -> PrepareConfig:
    given = {"sources": [str(folder / source) for source in sources], "buckets": {"edges": [32]}, "partition_size": 4}
    return from_dict(PrepareConfig, {**given, **values, "out": "???"}, "test")


def test_some_images_of_each_source_are_tried_and_nothing_is_written(tmp_path):
    write_folder(tmp_path / "a", 40)
    write_folder(tmp_path / "b", 3)
    (tmp_path / "b" / "0001.txt").write_text("")
    (tmp_path / "b" / "0002.png").write_bytes(noise(20, 20))
    before = tree(tmp_path)
    scorers = [{"path": "tests.tools.scored_data.Redness", "column": "redness"}]
    filters = {"conditions": [{"column": "redness", "min": 0}], "min_caption_words": 2}
    selection = preview(config(tmp_path, "a", "b", scorers=scorers, filters=filters), 10)
    assert selection.sources["a"] == {"": 10}
    assert selection.sources["b"] == {"": 1, "empty_caption": 1, "too_small": 1}
    assert {name: place["images"] for name, place in selection.places.items()} == {"train/32-up": 11}
    shown = {reason: [one.key for one in examples] for reason, examples in selection.examples.items()}
    assert shown == {"empty_caption": ["b/0001.png"], "too_small": ["b/0002.png"]}
    assert tree(tmp_path) == before


def test_images_are_spread_over_the_partitions(tmp_path):
    write_folder(tmp_path / "a", 400)
    for path in (tmp_path / "a").glob("*.txt"):
        path.unlink()
    selection = preview(config(tmp_path, "a", captioner={"path": "tests.tools.scored_data.Captioner"}), 20)
    assert selection.sources["a"] == {"": 20}


def test_few_images_do_not_make_a_bucket_too_small(tmp_path):
    write_folder(tmp_path / "a", 6)
    buckets = {"sizes": ["32x32"], "min_samples": 100, "reject_small": True}
    selection = preview(config(tmp_path, "a", buckets=buckets), 5)
    assert selection.sources["a"] == {"": 5}, "three of the first partition, two of the second"
    with pytest.raises(ConfigurationError, match="min_samples"):
        preview(config(tmp_path, "a", buckets={"edges": [16], "min_samples": 100}), 5)


@pytest.mark.parametrize("values", [{"compression": "foo"}, {"hashes": ["foo"]}])
def test_shards_that_cannot_be_written_are_an_error(tmp_path, values):
    write_folder(tmp_path / "a", 1)
    with pytest.raises(ConfigurationError, match=f"{next(iter(values))}.*foo"):
        preview(config(tmp_path, "a", **values), 5)


def test_without_any_image(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(DataError):
        preview(config(tmp_path, "a"), 5)
