import builtins
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from diffusion.config.loading import from_dict
from diffusion.errors import ConfigurationError, DataError, MachineError
from diffusion.preparation import score as module
from diffusion.preparation.config import PrepareConfig
from diffusion.preparation.engine import Workers
from diffusion.preparation.layout import part_name
from diffusion.preparation.score import score
from tests.tools.image_files import encode, tree
from tests.tools.scored_data import CALLS, ScannedData, write_scan

HERE = "tests.tools.scored_data"


@pytest.fixture
def data(tmp_path):
    return write_scan(tmp_path)


def config(**values) -> PrepareConfig:
    return from_dict(PrepareConfig, {"sources": ["a"], **values}, "test")


def scorer(name: str, column: str, **values) -> dict:
    return {"path": f"{HERE}.{name}", "column": column, **values}


def run(data: ScannedData, **values) -> None:
    score(config(out=str(data.out), **values), data.scan, workers=Workers())


def column(data: ScannedData, name: str, number: int = 0, field: str | None = None) -> list:
    path = data.out / "scores" / name / part_name(number)
    return pq.read_table(path)[field or name].to_pylist()


def test_scores_of_images_without_a_reason_in_batches_of_a_partition(data):
    run(data, scorers=[scorer("Redness", "redness", batch_size=2)])
    assert column(data, "redness") == [255, 0, 255, 0, None, None, 255]
    assert column(data, "redness", 1) == [255, 0, 255]
    assert [len(batch) for batch in CALLS] == [2, 2, 1, 2, 1]
    assert data.source.read == [f"0/{i}.png" for i in (0, 1, 2, 3, 6)] + [f"1/{i}.png" for i in range(3)]


class Selective:
    """Fails on red images; with `on="grey"` on all."""

    def __init__(self, on: str = "red", error: str = "ValueError") -> None:
        self.on, self.error = on, getattr(builtins, error)

    def __call__(self, images, captions):
        if self.on == "grey" or any(image.getpixel((0, 0)) == (255, 0, 0) for image in images):
            raise self.error("a library cannot take this image")
        return [1.0] * len(images)


def test_an_image_that_a_scorer_fails_on_has_no_value(data, caplog):
    selective = {"path": f"{__name__}.Selective", "column": "x", "batch_size": 3}
    run(data, scorers=[selective])
    assert column(data, "x") == [None, 1.0, 1.0, 1.0, None, None, 1.0]
    assert "failed on 2 images" in caplog.text
    with pytest.raises(ValueError, match="cannot take"):
        run(data, scorers=[{**selective, "arguments": {"on": "grey"}}])
    with pytest.raises(ConnectionError):
        run(data, scorers=[{**selective, "arguments": {"error": "ConnectionError"}}])


def test_a_batch_of_large_images_is_smaller(data, monkeypatch):
    monkeypatch.setattr(module, "BATCH_PIXELS", 2 * 8 * 6)
    run(data, scorers=[scorer("Redness", "redness", batch_size=5)])
    assert [len(batch) for batch in CALLS] == [2, 2, 1, 2, 1]


def test_only_what_is_missing_or_of_other_arguments_is_computed(data):
    one, other = scorer("Redness", "redness"), scorer("NumCaptions", "captions_seen")
    run(data, scorers=[one])
    CALLS.clear()
    run(data, scorers=[one, other])
    assert [type(call[0]) for call in CALLS] == [list, list], "the captions of two partitions, no image"
    (data.out / "scores/redness" / part_name(1)).unlink()
    CALLS.clear()
    run(data, scorers=[{**one, "num_gpus": 0.0}, other])
    assert len(CALLS) == 1
    assert column(data, "redness", 1) == [255, 0, 255]
    run(data, scorers=[{**one, "arguments": {"scale": 2.0}}])
    assert column(data, "redness") == [510, 0, 510, 0, None, None, 510]
    CALLS.clear()
    run(data, scorers=[{**one, "arguments": {"scale": 2.0}, "batch_size": 3}])
    assert [len(batch) for batch in CALLS] == [3, 2, 3]


def test_the_order_of_workers_does_not_matter_and_a_killed_run_goes_on(data, monkeypatch):
    scorers = [scorer("Redness", "redness", batch_size=2)]

    def stops_after_one(workers, make, tasks, **_):
        work = make()
        yield work(list(tasks)[-1])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "run", stops_after_one)
        with pytest.raises(KeyboardInterrupt):
            run(data, scorers=scorers)
    first = (data.out / "scores/redness" / part_name(1)).read_bytes()
    run(data, scorers=scorers)
    assert [len(batch) for batch in CALLS] == [2, 1, 2, 2, 1]
    assert (data.out / "scores/redness" / part_name(1)).read_bytes() == first


def test_scores_and_captions_of_images_of_another_conversion_are_made_again(data):
    captioner, scorers = {"path": f"{HERE}.Captioner"}, [scorer("Redness", "redness"), scorer("NumCaptions", "n")]
    run(data, scorers=scorers[1:])
    run(data, captioner=captioner, scorers=scorers)
    path = data.out / "scores.json"
    record = json.loads(path.read_text())
    added = "convert_to_srgb"
    earlier = json.loads(path.read_text(), object_hook=lambda one: {name: one[name] for name in one if name != added})
    assert earlier != record
    path.write_text(json.dumps(earlier))
    CALLS.clear()
    run(data, captioner=captioner, scorers=scorers, convert_to_srgb=False)
    assert CALLS == [], "earlier versions do not say if they converted"
    run(data, captioner=captioner, scorers=scorers)
    assert json.loads(path.read_text()) == record
    assert [len(batch) for batch in CALLS] == [6, 3] * 3
    CALLS.clear()
    for part in (data.out / "scores").glob(f"*/{part_name(1)}"):
        part.unlink()  # As after a kill.
    run(data, captioner=captioner, scorers=scorers, convert_to_srgb=False)
    assert [len(batch) for batch in CALLS] == [6, 3] * 3
    run(data, scorers=scorers, convert_to_srgb=False)
    CALLS.clear()
    run(data, scorers=scorers)
    assert [len(batch) for batch in CALLS] == [5, 3], "without those of captions"


def test_a_part_without_values_is_not_computed_again_after_a_kill(data, monkeypatch):
    texts = scorer("FirstWords", "x", arguments={"values": {"red 0": "r"}})

    def stops_after_two(workers, make, tasks, **_):
        work = make()
        yield from map(work, tasks)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run", stops_after_two)
    with pytest.raises(KeyboardInterrupt):
        run(data, scorers=[texts])
    assert pq.read_schema(data.out / "scores/x" / part_name(1)).field("x").type == pa.string()


def test_scorers_of_captions_read_no_image(data):
    for path in Path(data.source.folder).rglob("*.png"):
        path.unlink()
    languages = {"path": "diffusion.preparation.languages.CaptionLanguage", "column": "language"}
    run(data, scorers=[scorer("NumCaptions", "n"), languages])
    assert column(data, "n") == [1, 1, 1, 1, None, None, 1]
    assert column(data, "language", 1) == ["en"] * 3


@pytest.mark.parametrize(
    ("mode", "captions", "generated"),
    [
        ("missing", ["red 0", "generated", "white 0"], [None, [0], None]),
        ("beside", ["red 0|generated", "generated", "white 0"], [[1], [0], None]),
        ("instead", ["generated", "generated", "white 0"], [[0], [0], None]),
    ],
)
def test_captions_come_first_and_scorers_see_them(data, mode, captions, generated):
    captioner = {"path": f"{HERE}.Captioner", "mode": mode}
    run(data, captioner=captioner, scorers=[scorer("NumCaptions", "n")])
    found = column(data, "captions")
    assert ["|".join(found[i]) for i in (0, 4, 2)] == captions
    assert found[5] == ["gray 0"], "rejected: as it came"
    marks = column(data, "captions", field="generated_captions")
    assert [marks[i] for i in (0, 4, 2)] == generated
    assert column(data, "n") == [None if i == 5 else len(texts) for i, texts in enumerate(found)]


def test_other_captions_are_scored_again(data):
    n = scorer("NumCaptions", "n")
    run(data, scorers=[n])
    run(data, captioner={"path": f"{HERE}.Captioner", "mode": "beside"}, scorers=[n])
    assert column(data, "n") == [2, 2, 1, 2, 1, None, 2]
    run(data, scorers=[n])
    assert column(data, "n") == [1, 1, 1, 1, None, None, 1]


def test_all_parts_of_a_column_have_one_type(data):
    texts = scorer("FirstWords", "x", arguments={"values": {"red 0": "r"}})
    run(data, scorers=[texts])
    assert column(data, "x") == ["r"] + [None] * 6
    kinds = [pq.read_schema(data.out / "scores/x" / part_name(i)).field("x").type for i in range(2)]
    assert kinds == [pa.string(), pa.string()]
    (data.out / "scores/x" / part_name(1)).unlink()
    run(data, scorers=[texts])
    assert pq.read_schema(data.out / "scores/x" / part_name(1)).field("x").type == pa.string()
    run(data, scorers=[scorer("FirstWords", "y", arguments={"values": {}})])
    assert column(data, "y", 1) == [None] * 3
    for wrong in ({"red 0": 1, "green 0": "g"}, {"red 0": 1, "red 1": "r"}):
        with pytest.raises(ConfigurationError, match="FirstWords"):
            run(data, scorers=[scorer("FirstWords", "z", arguments={"values": wrong})])


def test_a_changed_image_is_named(data):
    Path(data.source.folder, "0/2.png").write_bytes(encode(Image.new("RGB", (8, 6), "pink")))
    with pytest.raises(DataError, match=r"toy/0/2\.png"):
        run(data, scorers=[scorer("Redness", "redness")])
    assert not (data.out / "scores/redness" / part_name(0)).exists()


@pytest.mark.parametrize("visible", ["", "-1"])
def test_a_worker_without_the_gpu_that_is_asked_for_ends(data, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(MachineError, match=r"scorers\.0\.num_gpus"):
        run(data, scorers=[scorer("Redness", "redness", num_gpus=1.0)])


def test_captions_of_a_former_captioner_are_removed_and_those_of_other_tools_stay(data):
    captioner = {"path": f"{HERE}.Captioner", "mode": "instead"}
    run(data, captioner=captioner, scorers=[scorer("Redness", "redness", batch_size=4)])
    record = json.loads((data.out / "scores.json").read_text())
    assert (record["redness"]["path"], record["redness"]["batch_size"]) == (f"{HERE}.Redness", 4)
    assert record["redness"]["captions"] == record["captions"]
    run(data)
    assert list((data.out / "scores").rglob("captions/*")) == []
    assert column(data, "redness") == [255, 0, 255, 0, 0, None, 255]
    other = data.out / "scores/captions" / part_name(0)
    other.parent.mkdir()
    other.write_bytes(b"of another tool")
    run(data)
    assert other.exists()


def test_a_part_without_values_gets_the_type_of_later_ones(data):
    """As where a first generation has no value at all, which makes it numbers, and the second has texts."""
    texts = scorer("FirstWords", "x", arguments={"values": {"red 1": "r"}})
    run(data, scorers=[texts])
    complete = tree(data.out)
    pq.write_table(pa.table({"x": pa.nulls(7, pa.float64())}), data.out / "scores/x" / part_name(0))
    (data.out / "scores/x" / part_name(1)).unlink()
    run(data, scorers=[texts])
    assert tree(data.out) == complete


def test_what_a_killed_process_left_is_no_part(data):
    texts = scorer("FirstWords", "x", arguments={"values": {"red 1": "r"}})
    run(data, scorers=[texts])
    (data.out / "scores/x" / part_name(1)).unlink()
    (data.out / "scores/x" / ".000001.parquet.123-x.partial").write_bytes(b"")
    run(data, scorers=[texts])
    assert column(data, "x", 1) == ["r", None, None]


@pytest.mark.parametrize(("num_gpus", "number"), [(0, 9), (0.2, 9), (0.5, 8), (0.6, 4), (1, 4), (1.5, 2), (4, 1)])
def test_as_many_workers_as_the_gpus_have_room_for(monkeypatch, num_gpus, number):
    monkeypatch.setattr(module, "visible_gpus", lambda: list("0123"))
    assert module._on_gpus(Workers(number=9), num_gpus).number == number
