import json
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest

from diffusion.config.loading import from_dict
from diffusion.errors import ConfigurationError, DataError
from diffusion.preparation import explain as explain_module
from diffusion.preparation import select as module
from diffusion.preparation.config import PrepareConfig
from diffusion.preparation.explain import explain
from diffusion.preparation.metadata import open_metadata
from diffusion.preparation.select import read_selection, select, splitmix64
from tests.tools.metadata_parts import image, scan_of, write_part

ONE = scan_of(0)


def configuration(**values: Any) -> PrepareConfig:
    return from_dict(PrepareConfig, {"sources": ["s"], "out": "o", **values}, "test")


def run(out: Path, *parts: list[dict[str, Any]], **values: Any):
    """Select of some parts of one generation."""
    for number, rows in enumerate(parts):
        write_part(out, number, rows)
    return select(str(out), configuration(**values), scan_of(*[0] * len(parts)))


def rows_of(out: Path, kind: str, generation: int = 0) -> list[dict[str, Any]]:
    return pq.read_table(out / "selection" / f"{generation}-{kind}.parquet").to_pylist()


def rejected(out: Path, generation: int = 0) -> dict[tuple[int, int], str]:
    return {(row["part"], row["row"]): row["reason"] for row in rows_of(out, "rejected", generation)}


def kept(out: Path, generation: int = 0) -> set[tuple[int, int]]:
    return {(row["part"], row["row"]) for row in rows_of(out, "kept", generation)}


def test_each_image_is_kept_or_rejected_for_its_first_reason(tmp_path):
    images = [
        image(0),
        image(1, reason="undecodable", detail="no image", width=None, height=None),
        image(2, width=200, height=100),
        image(3, width=400, height=300),
        image(4, metadata={"language": "fr"}),
        image(5, metadata={"language": "fr", "n": 3}, sharpness=1.0),
        image(6, metadata={"language": "en", "n": 3}),
        image(7, metadata={"language": "EN", "n": 4}),
        image(8, metadata={}),
    ]
    images[0] |= {"metadata": json.dumps({"language": "en", "n": 7})}
    filters = {"min_shorter_side": 310, "languages": ["en"], "conditions": [{"column": "sharpness", "min": 3}]}
    selection = run(tmp_path, images, filters=filters, where="n > 3")
    expected = {1: "undecodable", 2: "too_small", 3: "shorter_side", 4: "language", 5: "language", 6: "where",
                8: "missing_language"}  # fmt: skip
    assert rejected(tmp_path) == {(0, row): reason for row, reason in expected.items()}
    assert kept(tmp_path) == {(0, 0), (0, 7)}
    assert selection.reasons == {"language": 2, "missing_language": 1, "shorter_side": 1, "too_small": 1,
                                 "undecodable": 1, "where": 1}  # fmt: skip
    assert (selection.seen, selection.kept) == (9, 2)
    assert selection.sources == {"s": {"": 2, **selection.reasons}}
    assert selection == read_selection(str(tmp_path), 0)


def test_scores_and_captions_take_part(tmp_path):
    images = [
        image(0),
        image(1),
        image(2, reason="missing_caption", captions=[]),
        image(3, reason="empty_caption", captions=[]),
    ]
    captions = [["stock photo"], ["fine"], ["written"], []]
    write_part(tmp_path, 0, images, aesthetic=[5.0, 4.0, 5.0, 5.0], captions=captions)
    write_part(tmp_path, 1, [image(10), image(11, captions=["stock photo"])])
    filters = {"keywords": ["stock photo"], "min_aesthetic": 4.5}
    select(str(tmp_path), configuration(filters=filters), scan_of(0, 0))
    assert rejected(tmp_path) == {
        (0, 0): "keyword", (0, 1): "aesthetic", (0, 3): "empty_caption", (1, 0): "missing_aesthetic", (1, 1): "keyword",
    }  # fmt: skip
    where = "aesthetic > 4.5 or generated_captions is null"
    select(str(tmp_path), configuration(where=where), scan_of(0, 0))
    assert rejected(tmp_path) == {(0, 1): "where", (0, 3): "empty_caption"}


def test_where_takes_numbers_texts_and_odd_names(tmp_path):
    rows = [
        image(i, metadata={"n": value, "a/b~\"c'": i, "Kind": "x" if i else None, "mixed": value or "none"})
        for i, value in enumerate([1, "2", 2.5, None])
    ]
    run(tmp_path, rows, where="n >= 2 -- comment")
    assert kept(tmp_path) == {(0, 1), (0, 2)}
    run(tmp_path, rows, where='"a/b~""c\'" < 3 and kind = \'x\''.replace("kind", "Kind"))
    assert kept(tmp_path) == {(0, 1), (0, 2)}
    run(tmp_path, rows, where="mixed <> 'none' and len(captions) = 1 and source = 's'")
    assert kept(tmp_path) == {(0, 0), (0, 1), (0, 2)}


def test_long_integers_and_leading_zeros_are_exact(tmp_path):
    values = [(2**53, "001"), (2**53 + 1, "1"), (2**53 + 2, "01")]
    run(
        tmp_path,
        [image(i, metadata={"id": a, "code": b}) for i, (a, b) in enumerate(values)],
        where=f"id = {2**53 + 1}",
    )
    assert kept(tmp_path) == {(0, 1)}
    select(str(tmp_path), configuration(where="code = '1'"), ONE)
    assert kept(tmp_path) == {(0, 1)}


@pytest.mark.parametrize(
    "where",
    [
        "n >",
        "n > 1; drop table images",
        "n > 1) or (1 = 1",
        "n in (select 1)",
        "1) from read_text('/etc/passwd') where (1=1",
        "row_number() over () > 1",
        "count(n) > 1",
        "n > $1",
        "n, m",
        "nn > 1",
        "sharpnes > 1",
        "unknown_function(n)",
        "captions > 3",
        "n = 'text'",
        "n::integer::date is null",
        "regexp_matches(key, '(')",
        "regexp_matches(key, concat('(', n::varchar))",
        "random() > 0.5",
        "n > 1 and now() is null",
        "Current_Date is null",
        "",
    ],
)
def test_where_that_is_no_condition_is_a_configuration_error(tmp_path, where):
    write_part(tmp_path, 0, [image(0, metadata={"n": 1, "m": 2})])
    with pytest.raises(ConfigurationError, match="where"):
        select(str(tmp_path), configuration(where=where), ONE)


def test_misspelt_columns_come_with_similar_names(tmp_path):
    write_part(tmp_path, 0, [image(0, metadata={"pwatermark": 1})])
    for where, name in (("sharpnes > 1", "sharpness"), ("pwatermrk < 1", "pwatermark")):
        with pytest.raises(ConfigurationError, match=name):
            select(str(tmp_path), configuration(where=where), ONE)
    assert not (tmp_path / "selection").exists()


def test_values_that_where_cannot_convert_are_a_configuration_error(tmp_path):
    write_part(tmp_path, 0, [image(0, metadata={"n": "1"}), image(1, metadata={"n": "x"})])
    for stage in (select, explain):
        with pytest.raises(ConfigurationError, match="where"):
            stage(str(tmp_path), configuration(where="n::integer > 0"), ONE)


def copies(first: int, of: dict[str, Any], **given: Any) -> dict[str, Any]:
    return image(first, **{"xxh128": of["xxh128"], "phash": of["phash"], **given})


def test_duplicates_over_all_parts(tmp_path):
    one, other = image(0), image(1)
    near = {"xxh128": image(50)["xxh128"], "phash": one["phash"] ^ 0b1011, "width": 320, "height": 400}
    first = [one, other, image(2, reason="undecodable", phash=one["phash"])]
    second = [copies(3, one), copies(4, other, **near), copies(5, other, sharpness=0.0)]
    filters = {"conditions": [{"column": "sharpness", "min": 1}]}
    selection = run(tmp_path, first, second, filters=filters, duplicates={})
    assert selection.reasons == {"condition_sharpness": 1, "duplicate": 1, "near_duplicate": 1, "undecodable": 1}
    rows = {
        (row["part"], row["row"]): (row["reason"], (row["of_part"], row["of_row"]))
        for row in rows_of(tmp_path, "rejected")
    }
    stays, goes = ((0, 0), (1, 0)) if (0, 0) in kept(tmp_path) else ((1, 0), (0, 0))
    assert rows[goes] == ("duplicate", stays)
    assert rows[1, 1] == ("near_duplicate", stays)
    only_exact = run(tmp_path, first, second, duplicates={"near": False})
    assert only_exact.reasons == {"duplicate": 2, "undecodable": 1}
    only_near = run(tmp_path, first, second, duplicates={"exact": False})
    assert only_near.reasons == {"duplicate": 2, "near_duplicate": 1, "undecodable": 1}
    assert run(tmp_path, first, second).kept == 5


def test_images_kept_before_stay_and_others_are_their_duplicates(tmp_path):
    small, other = image(0, width=300, height=300), image(1)
    write_part(tmp_path, 0, [small, copies(2, other, width=300, height=300), other])
    config = configuration(duplicates={})
    first = select(str(tmp_path), config, ONE)
    assert first.kept == 2
    before = {path.name: path.read_bytes() for path in (tmp_path / "selection").iterdir()}
    write_part(tmp_path, 1, [copies(3, small, width=900, height=900), image(4), copies(5, other)])
    second = select(str(tmp_path), config, scan_of(0, 1))
    assert {name: (tmp_path / "selection" / name).read_bytes() for name in before} == before
    assert kept(tmp_path, 1) == {(1, 1)}
    assert [(row["of_part"], row["of_row"]) for row in rows_of(tmp_path, "rejected", 1)] == [(0, 0), (0, 2)]
    assert [one.detail for one in second.examples["duplicate"]] == ["of s/0", "of s/1"]
    assert (second.generation, second.first_task, second.seen) == (1, len(first.tasks), 3)


SIZES = ["32x32", "24x40", "40x24", "16x64"]
IMAGES = [(36, 34)] * 12 + [(40, 24)] * 9 + [(24, 40)] * 3 + [(66, 20)] + [(64, 16)]


def places(out: Path, sizes: list[tuple[int, int]], earlier: int | None = None, **buckets: Any) -> dict[str, int]:
    images = [image(i, width=width, height=height) for i, (width, height) in enumerate(sizes)]
    write_part(out, 0, images[:earlier])
    scan = ONE
    if earlier is not None:
        write_part(out, 1, images[earlier:])
        scan = scan_of(0, 1)
    selection = select(str(out), configuration(buckets={"sizes": SIZES, **buckets}), scan)
    return {name: counts["images"] for name, counts in selection.places.items()}


def test_images_of_small_buckets_go_to_the_nearest_other_one_that_they_cover(tmp_path):
    assert places(tmp_path, IMAGES) == {"train/40x24": 3, "train/32x32": 12, "train/24x40": 9, "train/16x64": 2}
    assert places(tmp_path, IMAGES, min_samples=4) == {"train/32x32": 12, "train/24x40": 9}
    assert set(rejected(tmp_path).values()) == {"small_bucket"}, "too narrow or too low for the others"
    shown = read_selection(str(tmp_path), 0).examples
    assert shown["small_bucket"][0].detail == "40x24 would hold fewer than 4 images"
    upscaled = {"min_samples": 4, "upscale": True}
    assert places(tmp_path, IMAGES, **upscaled) == {"train/32x32": 15, "train/24x40": 11}
    assert places(tmp_path, IMAGES, reject_small=True, **upscaled) == {"train/32x32": 12, "train/24x40": 9}
    assert len(rejected(tmp_path)) == 5


def test_a_bucket_that_is_there_stays_one_when_the_data_grows(tmp_path):
    sizes = IMAGES[:21] + [(40, 24)] * 2 + [(24, 40)] * 3
    assert places(tmp_path, sizes, 21, min_samples=9, upscale=True) == {"train/32x32": 3, "train/24x40": 2}


def test_only_training_images_count_for_small_buckets(tmp_path):
    images = [image(i, width=36, height=34) for i in range(40)]
    write_part(tmp_path, 0, images)
    config = configuration(buckets={"sizes": SIZES, "min_samples": 30}, validation_fraction=0.5)
    with pytest.raises(DataError, match=r"buckets\.min_samples"):
        select(str(tmp_path), config, ONE)


def test_the_numbers_of_mix_never_change():
    keys = np.array([0, 1, 2**64 - 1, 0x0123456789ABCDEF], np.uint64)
    assert splitmix64(keys, 17, "order").tolist() == [
        8454635164946898469,
        5003773779602763467,
        5100406021157278424,
        1965057623846400253,
    ]
    assert splitmix64(keys, 17, "validation").tolist() == [
        7788140620317837755,
        8555762461023431160,
        3374769655716067793,
        9905331783511332430,
    ]
    assert splitmix64(keys, 2**31, "order").tolist() == [
        1505395098079949675,
        17365255191851017857,
        14735710948455566429,
        1293234426274021921,
    ]


def test_mix_is_uniform_and_purposes_are_independent():
    keys = np.arange(100_000, dtype=np.uint64)
    order, validation = (splitmix64(keys, 17, purpose) / 2**64 for purpose in ("order", "validation"))
    assert abs(order.mean() - 0.5) < 0.005
    assert abs(np.corrcoef(order, validation)[0, 1]) < 0.01
    assert (np.histogram(validation, 100)[0] > 850).all()


def test_split_and_order_depend_on_key_and_seed_alone(tmp_path):
    images = [image(i) for i in range(200)]
    run(tmp_path / "one", images, validation_fraction=0.25)
    run(tmp_path / "two", images[150:], images[:150], validation_fraction=0.25)
    run(tmp_path / "more", images, validation_fraction=0.5)

    def drawn(name: str, starts: tuple[int, ...]) -> dict[int, tuple[str, int]]:
        rows = rows_of(tmp_path / name, "kept")
        return {starts[row["part"]] + row["row"]: (row["split"], row["order"]) for row in rows}

    one = drawn("one", (0,))
    assert one == drawn("two", (150, 0))
    hashes = np.array([row["key_hash"] for row in images], np.uint64)
    assert [one[i][1] for i in range(200)] == splitmix64(hashes, 17, "order").tolist()
    held = {i for i in one if one[i][0] == "validation"}
    assert 30 < len(held) < 70
    assert held < {i for i, (split, _) in drawn("more", (0,)).items() if split == "validation"}


def test_windows_and_tasks(tmp_path):
    sizes = [300_000, 500_000, 100_000, 900_000, 2_000_000, 0] * 10
    parts = [[image(100 * i, bytes=size), image(100 * i + 1, width=10, bytes=10**9)] for i, size in enumerate(sizes)]
    parts[3][0]["reason"] = "undecodable"
    selection = run(tmp_path, *parts, window_mb=1)
    numbers = [part for task in selection.tasks for window in task for part in window]
    assert sorted(numbers) == [i for i in range(60) if i != 3]
    assert numbers != sorted(numbers)
    windows = [window for task in selection.tasks for window in task]
    for window in windows[:-1]:
        assert sum(sizes[part] for part in window[:-1]) < 2**20 <= sum(sizes[part] for part in window)
    assert [len(task) for task in selection.tasks[:-1]] == [module.WINDOWS_PER_TASK] * (len(selection.tasks) - 1)
    assert 0 < len(selection.tasks[-1]) <= module.WINDOWS_PER_TASK
    assert selection.places["train/256-512"]["bytes"] == sum(sizes) - sizes[3]
    rows = rows_of(tmp_path, "kept")
    order = [(row["task"], row["window"], row["part"], row["row"]) for row in rows]
    assert order == sorted(order)
    assert {(row["task"], row["window"], row["part"]) for row in rows} == {
        (i, j, part) for i, task in enumerate(selection.tasks) for j, window in enumerate(task) for part in window
    }
    assert run(tmp_path, *parts, window_mb=1, seed=18).tasks != selection.tasks


def test_row_groups_are_small(tmp_path, monkeypatch):
    monkeypatch.setattr("diffusion.preparation.metadata.ROWS_PER_GROUP", 2048)
    run(tmp_path, *[[image(10_000 * i + j) for j in range(1000)] for i in range(12)])
    metadata = pq.read_metadata(tmp_path / "selection" / "0-kept.parquet")
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [2048] * 5 + [1760]


def test_files_do_not_depend_on_the_number_of_threads(tmp_path, monkeypatch):
    connect, contents = duckdb.connect, []
    monkeypatch.setattr("diffusion.preparation.metadata.ROWS_PER_GROUP", 2048)
    parts = [[image(10_000 * i + j, width=300 + j % 90 * 9, height=300) for j in range(1500)] for i in range(8)]
    for threads in (1, 2, 5):
        with monkeypatch.context() as patch:
            settings = {"threads": threads}
            patch.setattr(duckdb, "connect", lambda *a, config=None: connect(*a, config=(config or {}) | settings))  # noqa: B023
            run(tmp_path / f"{threads}", *parts, filters={"max_aspect_ratio": 3}, duplicates={}, window_mb=1)
        contents.append({path.name: path.read_bytes() for path in (tmp_path / f"{threads}" / "selection").iterdir()})
    assert contents[0] == contents[1] == contents[2]


def test_nothing_is_done_twice_and_changes_are_noticed(tmp_path):
    write_part(tmp_path, 0, [image(i) for i in range(9)], quality=[float(i) for i in range(9)])
    file = tmp_path / "selection" / "0-kept.parquet"
    config = configuration(where="quality > 3")
    first = select(str(tmp_path), config, ONE)
    before = file.stat().st_mtime_ns
    assert select(str(tmp_path), config, ONE) == first
    assert select(str(tmp_path), configuration(where="quality > 3", workers=7, scratch=str(tmp_path)), ONE) == first
    assert file.stat().st_mtime_ns == before
    changed = [select(str(tmp_path), configuration(where=where), ONE) for where in ("quality > 4", "quality > 3")]
    assert [one.kept for one in changed] == [4, 5]
    assert changed[1].identity == first.identity
    (tmp_path / "scores.json").write_text('{"quality": {"batch_size": 3}}')
    assert select(str(tmp_path), config, ONE).identity != first.identity


def test_a_column_that_is_not_finished(tmp_path):
    write_part(tmp_path, 0, [image(0)], quality=[1.0])
    write_part(tmp_path, 1, [image(1)])
    config = configuration(scorers=[{"column": "quality", "path": "x.y"}], filters={"missing": "reject"})
    with pytest.raises(DataError, match="quality/000001"):
        select(str(tmp_path), config, scan_of(0, 0))
    others = configuration(where="quality > 0")  # Another tool may score some parts only.
    assert select(str(tmp_path), others, scan_of(0, 0)).kept == 1
    write_part(tmp_path, 1, [image(1)], quality=[1.0])
    assert select(str(tmp_path), others, scan_of(0, 0)).kept == 2
    assert select(str(tmp_path), config, scan_of(0, 0)).kept == 2


def test_an_interrupted_selection_is_made_again(tmp_path, monkeypatch):
    write_part(tmp_path, 0, [image(i) for i in range(9)])
    first = select(str(tmp_path), configuration(seed=1), ONE)
    with monkeypatch.context() as patch:
        patch.setattr(module.storage, "write_json", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            select(str(tmp_path), configuration(seed=2), ONE)
    orders = [row["order"] for row in rows_of(tmp_path, "kept")]
    assert select(str(tmp_path), configuration(seed=1), ONE) == first
    assert [row["order"] for row in rows_of(tmp_path, "kept")] != orders


def test_a_partition_that_was_not_scanned_is_named(tmp_path):
    write_part(tmp_path, 0, [image(0)])
    with pytest.raises(DataError, match="000001"):
        select(str(tmp_path), configuration(), scan_of(0, 0))


def test_folders_with_odd_names(tmp_path):
    out = tmp_path / "a 'b' [c]* ?"
    assert run(out, [image(0)], [image(1), image(2, metadata={"n": 1})], where="n is null", duplicates={}).kept == 2


def test_details_of_examples(tmp_path, monkeypatch):
    images = [image(i, metadata={"language": "fr"}) for i in range(4)]
    images += [image(10, reason="undecodable", detail="truncated"), image(11, width=100), image(12, sharpness=0.5)]
    images += [image(13, metadata={"language": "en"}), image(20, metadata={"language": "en", "n": 1})]
    images += [copies(21, images[-1], metadata={"language": "en", "n": 1}, width=300, height=300)]
    config = configuration(
        filters={"languages": ["en"], "conditions": [{"column": "sharpness", "min": 1}], "missing": "keep"},
        where="n = 1",
        duplicates={},
    )
    write_part(tmp_path, 0, images)
    monkeypatch.setattr(explain_module, "NUM_EXAMPLES", 3)
    shown = select(str(tmp_path), config, ONE).examples
    assert {reason: [(one.row, one.detail) for one in some] for reason, some in shown.items()} == {
        "condition_sharpness": [(6, "0.5 < 1")], "duplicate": [(9, "of s/20")],
        "language": [(i, "language is 'fr'") for i in range(3)], "too_small": [(5, "100 x 480")],
        "undecodable": [(4, "truncated")], "where": [(7, "")],
    }  # fmt: skip
    assert shown["condition_sharpness"][0].key == "s/12"


def test_explain_counts_keywords_of_several_scripts_together(tmp_path):
    images = [image(0, captions=["a watermark"]), image(1, captions=["一张带水印的照片"]), image(2)]
    write_part(tmp_path, 0, [*images, image(3, reason="unreadable", captions=["水印"])])
    config = configuration(filters={"keywords": ["watermark", "水印"]})
    assert explain(str(tmp_path), config, scan_of(0)) == [("", 1, 1, 3), ("too_small", 0, 0, 3), ("keyword", 2, 2, 1)]


def test_explain_counts_each_condition_alone_and_in_turn(tmp_path):
    images = [image(0), image(1, sharpness=1), image(2, metadata={"n": 9}), image(3, sharpness=1, metadata={"n": 9})]
    images += [image(4, reason="unreadable", sharpness=None), image(5, width=100, sharpness=0)]
    write_part(tmp_path, 0, images[:3])
    write_part(tmp_path, 1, images[3:])
    config = configuration(filters={"conditions": [{"column": "sharpness", "min": 3}]}, where="coalesce(n, 0) < 9")
    assert explain(str(tmp_path), config, scan_of(0, 0)) == [
        ("", 1, 1, 5), ("too_small", 1, 1, 4), ("missing_sharpness", 0, 0, 4), ("condition_sharpness", 3, 2, 2),
        ("where", 2, 1, 1),
    ]  # fmt: skip
    assert not (tmp_path / "selection").exists()


def test_metadata_can_be_queried(tmp_path):
    write_part(tmp_path, 0, [image(0, metadata={"License": "cc0", "n": 3})], quality=[1.5])
    write_part(tmp_path, 1, [image(1, metadata={"n": "4.5"}), image(2)])
    with open_metadata(str(tmp_path), scan_of(0, 1, sources=[0, 1]), columns=["License", "n"]) as connection:
        query = "SELECT part, row_number, source, generation, quality, License, n + 1 FROM images ORDER BY key"
        assert connection.execute(query).fetchall() == [
            (0, 0, "s", 0, 1.5, "cc0", 4.0), (1, 0, "s1", 1, None, None, 5.5), (1, 1, "s1", 1, None, None, None)
        ]  # fmt: skip
        with pytest.raises(Exception, match="passwd"):
            connection.execute("SELECT * FROM read_text('/etc/passwd')").fetchall()
    with (
        pytest.raises(ConfigurationError, match="License"),
        open_metadata(str(tmp_path), scan_of(0, 1), columns=["Licens"]),
    ):
        pass
