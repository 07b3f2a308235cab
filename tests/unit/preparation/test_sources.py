import csv
import datetime
import gzip
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diffusion.datasets.images import MAX_BYTES
from diffusion.errors import DataError
from diffusion.preparation.sources.opening import Reason, Record, Refused, open_source, open_sources
from tests.tools.image_files import noise, sample, write_folder, write_tar

IMAGE = noise(4, 4)
SCORES = {
    "width": 4,
    "height": 4,
    "original_width": 9,
    "url": "http://x/é.jpg",
    "similarity": 0.31,
    "punsafe": 1e-5,
    "pwatermark": 0.5,
    "AESTHETIC_SCORE": 6.25,
    "LANGUAGE": "en",
    "exif": "{}",
    "sha256": "00",
    "key": "000000000",
}
"""What img2dataset and LAION's tables say of an image."""


def read(path, **options):
    return list(open_source(path, **options).read())


def reasons(items):
    return [item.reason.value if isinstance(item, Refused) else item.captions for item in items]


def write_parquet(path, columns, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **options)
    return path


class TestFolder:
    def test_captions_beside(self, tmp_path):
        root = tmp_path / "set"
        names = ["b.JPG", "a.png", "sub/é \u4e2d'\"&.webp", "sub/deep/x.y.png", "sub/a.jpeg"]
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(IMAGE + name.encode())
            (root / name).with_suffix(".txt").write_bytes(b"\xef\xbb\xbf " + name.encode() + b" \r\n")
        for name in ("README.md", ".hidden.png", "._a.png", "sub/alone.txt"):
            (root / name).write_bytes(b"x")
        (root / ".git").mkdir()
        (root / ".git" / "a.png").write_bytes(IMAGE)
        records = read(root)
        order = ["a.png", "b.JPG", "sub/a.jpeg", "sub/é \u4e2d'\"&.webp", "sub/deep/x.y.png"]
        assert records == [Record(f"set/{name}", IMAGE + name.encode(), [name]) for name in order]
        assert open_source(root).num_records == 5
        assert read(root) == records

    def test_refusals(self, tmp_path):
        for name, caption in {"a": b" \n\t", "b": b"caf\xe9", "c": b"good", "d": None, "e": b"\xff\xfeh\0i\0"}.items():
            (tmp_path / f"{name}.png").write_bytes(b"")
            if caption is not None:
                (tmp_path / f"{name}.txt").write_bytes(caption)
        items = read(tmp_path)
        assert reasons(items) == ["empty_caption", "invalid_utf8", ["good"], "missing_caption", "invalid_utf8"]
        assert "caf\\udce9" in items[1].detail

    def test_jsonl(self, tmp_path):
        for name in ("a.png", "b.png", "c.dat", "d.png", "sub/e.png"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(IMAGE)
        (tmp_path / "d.txt").write_text("from the text file")
        lines = [
            {"file_name": "a.png", "text": " one ", "score": 0.5, "tags": ["x"]},
            {"file_name": "b.png", "captions": ["two", " ", "three"]},
            {"file_name": "./c.dat", "caption": "odd extension"},
            {"file_name": "a.png", "text": "again"},
            {"file_name": "sub/e.png", "text": None},
            {"file_name": "gone.png", "text": "no file"},
            {"file_name": "../outside.png", "text": "outside"},
        ]
        (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
        items = read(tmp_path)
        captions = [["one", "again"], ["two", "three"], ["odd extension"], ["from the text file"]]
        assert reasons(items) == [*captions, "missing_caption", "missing_image", "missing_image"]
        assert items[0].metadata == {"score": 0.5, "tags": ["x"]}

    def test_csv(self, tmp_path):
        for name in "abc":
            (tmp_path / f"{name}.png").write_bytes(IMAGE)
        table = b'file,caption,licence\r\na.png,"one, and",CC0\r\nb.png,\xff\xfe,\r\nc.png,  ,\r\na.png,two,CC0\r\n'
        (tmp_path / "captions.csv").write_bytes(table)
        items = read(tmp_path)
        assert reasons(items) == [["one, and", "two"], "invalid_utf8", "empty_caption"]
        assert items[0].metadata == {"licence": "CC0"}

    def test_a_column_without_a_name_is_passed_over(self, tmp_path):
        (tmp_path / "a.png").write_bytes(IMAGE)
        (tmp_path / "captions.csv").write_text(",file,caption\n0,a.png,one\n")
        assert read(tmp_path) == [Record(f"{tmp_path.name}/a.png", IMAGE, ["one"])]

    def test_a_table_without_a_caption_leaves_it_to_the_text_file(self, tmp_path, caplog):
        for name, text in {"a": "text a", "b": "text b", "c": "text c", "d": "", "e": None}.items():
            (tmp_path / f"{name}.png").write_bytes(IMAGE)
            if text is not None:
                (tmp_path / f"{name}.txt").write_text(text)
        captions = {"a": "table a", "b": None, "c": " ", "d": None, "e": None}
        lines = [{"file_name": f"{name}.png", "text": text, "score": 1} for name, text in captions.items()]
        (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
        source = open_source(tmp_path)
        assert "1 images have a .txt and a caption in metadata.jsonl" in caplog.text
        items = list(source.read())
        assert reasons(items) == [["table a"], ["text b"], ["text c"], "empty_caption", "missing_caption"]
        assert items[1].metadata == {"score": 1}
        before = source.partitions(1)
        (tmp_path / "a.txt").write_text("of no consequence")
        (tmp_path / "b.txt").write_text("another")
        changed = [old != new for old, new in zip(before, source.partitions(1, before), strict=True)]
        assert changed == [False, True, False, False, False]

    def test_files_that_are_not_read_are_told(self, tmp_path):
        described = ("a.heic", "b", "c.svg", "d.jpg", "sub/e.TGA")
        (tmp_path / "sub").mkdir()
        for name in (*described, "d.npz", "alone.heic", "README.md"):
            (tmp_path / name).write_bytes(IMAGE)
        for name in described:
            (tmp_path / name).with_suffix(".json" if name == "c.svg" else ".txt").write_text('{"caption": "x"}')
        items = read(tmp_path)
        root = tmp_path.name
        assert [item.key for item in items] == [f"{root}/{name}" for name in described]
        assert [item.detail for item in items if isinstance(item, Refused)] == [
            "extension .heic is not read",
            "it has no extension",
            "extension .svg is not read",
            "extension .TGA is not read",
        ]
        assert [item.reason for item in items if isinstance(item, Refused)] == [Reason.MISSING_IMAGE] * 4
        before = open_source(tmp_path).partitions(1)
        (tmp_path / "a.heic").rename(tmp_path / "a.png")
        source = open_source(tmp_path)
        after = source.partitions(1, before)
        assert len({partition.id for partition in after}) == len(after) == 6
        assert [item for one in after[:-1] for item in source.read(one)] == items, "what was refused is no change"
        assert [item.key for item in source.read(after[-1])] == [f"{root}/a.png"]

    def test_captions_that_are_no_text_are_told(self, tmp_path):
        lines = [{"file_name": f"{number}.png", "text": text} for number, text in enumerate([5, None, [], {"a": 1}])]
        for line in lines:
            (tmp_path / line["file_name"]).write_bytes(IMAGE)
        (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
        items = read(tmp_path)
        assert reasons(items) == ["missing_caption"] * 4
        assert [item.detail for item in items if isinstance(item, Refused)] == [
            "no text: 5",
            "null or not given",
            "null or not given",
            "no text: {'a': 1}",
        ]

    def test_pipes_and_giant_files_are_refused(self, tmp_path):
        for name in ("pipe.png", "giant.png", "a.png", "b.png"):
            (tmp_path / name).with_suffix(".txt").write_text("x")
        os.mkfifo(tmp_path / "pipe.png")
        (tmp_path / "giant.png").touch()
        os.truncate(tmp_path / "giant.png", MAX_BYTES + 1)
        for name, suffix in (("a", ".json"), ("b", ".txt")):
            (tmp_path / f"{name}.png").write_bytes(IMAGE)
            (tmp_path / f"{name}{suffix}").unlink(missing_ok=True)
            os.mkfifo(tmp_path / f"{name}{suffix}")
        items = read(tmp_path)
        assert reasons(items) == ["unreadable", "unreadable", "too_large", "unreadable"]
        assert [item.detail.partition(":")[0] for item in items if isinstance(item, Refused)][:2] == [".json", ".txt"]

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("captions.csv", "file;caption\na.png;x\n", "no column file_name or file.*there is 'file;caption'"),
            ("captions.csv", "file,words\na.png,x\n", "no column captions or caption or text.*'file', 'words'"),
            ("captions.csv", "file,caption\n,x\n", "line 2: no file name"),
            ("captions.csv", "file,caption\na.png,a car, red\n", "line 2: 3 values for 2 columns; .* in quotes"),
            ("captions.csv", "file,caption\na.png,x\na.png,x,\n", "line 3: 3 values for 2 columns"),
            ("metadata.jsonl", '{"file_name": "a.png", "text": "x"}\n{"file_name": \n', "line 2: .*JSON object"),
            ("metadata.jsonl", '{"path": "a.png", "text": "x"}\n', "line 1: no file name.*there is 'path', 'text'"),
            ("metadata.jsonl", '["a.png", "x"]\n', "line 1: not a JSON object"),
        ],
    )
    def test_damaged_tables_stop_at_once(self, tmp_path, name, content, message):
        (tmp_path / "a.png").write_bytes(IMAGE)
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=message):
            open_source(tmp_path)

    def test_two_tables(self, tmp_path):
        (tmp_path / "a.png").write_bytes(IMAGE)
        for name in ("captions.csv", "metadata.jsonl"):
            (tmp_path / name).write_text("")
        with pytest.raises(DataError, match=r"metadata.jsonl and captions.csv; keep the one"):
            open_source(tmp_path)

    def test_names_that_are_not_utf8(self, tmp_path):
        for stem in (b"\xff", b"\\xff", b"\xfe"):
            for suffix, content in ((b".png", IMAGE), (b".txt", b"x")):
                (tmp_path / os.fsdecode(stem + suffix)).write_bytes(content)
        keys = [record.key for record in read(tmp_path)]
        assert len(set(keys)) == 3
        assert all(key.encode() for key in keys)

    def test_img2dataset_files(self, tmp_path):
        folder = tmp_path / "set" / "00000"
        folder.mkdir(parents=True)
        for stem, caption, values in (
            ("0", "one", {**SCORES, "status": "success", "caption": "one"}),
            ("1", None, {"caption": "from json", "status": "success"}),
            ("2", "three", {"captions": ["three", "four"]}),
            ("3", "gone", {"status": "failed_to_download", "error_message": "404"}),
        ):
            (folder / f"{stem}.jpg").write_bytes(IMAGE)
            (folder / f"{stem}.json").write_text(json.dumps(values))
            if caption:
                (folder / f"{stem}.txt").write_text(caption)
        (folder / "4.jpg").write_bytes(IMAGE)
        (folder / "4.json").write_text("[]")
        write_parquet(tmp_path / "set" / "00000.parquet", {"url": ["x"], "caption": ["x"]})
        items = read(tmp_path / "set")
        assert reasons(items) == [["one"], ["from json"], ["three", "four"], "not_successful", "invalid_json"]
        assert items[0].key == "set/00000/0.jpg"
        assert items[0].metadata == {**SCORES, "status": "success"}

    def test_partitions_notice_a_changed_json(self, tmp_path):
        write_folder(tmp_path / "set", 3)
        source = open_source(tmp_path / "set")
        before = source.partitions(2)
        (tmp_path / "set" / "0002.json").write_text("{}")
        after = source.partitions(2, before)
        assert [one.fingerprint == two.fingerprint for one, two in zip(before, after, strict=True)] == [True, False]

    def test_links_do_not_loop(self, tmp_path):
        write_folder(tmp_path / "elsewhere", 2)
        (tmp_path / "set").mkdir()
        (tmp_path / "set" / "link").symlink_to(tmp_path / "elsewhere")
        (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "set")
        assert [record.key for record in read(tmp_path / "set")] == ["set/link/0000.png", "set/link/0001.png"]


class TestWebDataset:
    def test_samples(self, tmp_path):
        members = [
            *sample("000", IMAGE, b" one ", caption="json", status="success", width=4),
            *sample("001", IMAGE, None, caption="from json", url="http://x"),
            *sample("002", IMAGE, None, status="failed_to_download", error_message="404"),
            *sample("003", IMAGE, b""),
            *sample("004", IMAGE, b"\xff"),
            *sample("005", IMAGE, None, status="success"),
            ("006.txt", b"no image"),
            ("007.json", b"{broken"),
            ("008.jpg", IMAGE),
            ("008.json", b'{"caption": "lone \\ud800 surrogate"}'),
            ("a/b.seg.png", b"mask"),
            ("a/b.PNG", IMAGE),
            ("a/b.txt", b"dotted"),
            ("000.png", IMAGE),
        ]
        tar = write_tar(tmp_path / "x.tar", members)
        items = read(tar)
        assert reasons(items) == [
            *(["one"], ["from json"], "not_successful", "empty_caption", "invalid_utf8", "missing_caption"),
            *("missing_image", "invalid_json", "invalid_utf8", ["dotted"], "duplicate_key"),
        ]
        assert [item.key for item in items][:2] == ["x.tar/000", "x.tar/001"]
        assert items[9] == Record("x.tar/a/b", IMAGE, ["dotted"])
        assert items[0].metadata == {"status": "success", "width": 4}
        assert items[1].metadata == {"url": "http://x"}
        assert "404" in items[2].detail

    def test_several_captions_and_scores(self, tmp_path):
        members = [
            *sample("0", IMAGE, b"one", captions=["one", "two", " "], caption="one", **SCORES),
            *sample("1", IMAGE, None, captions=["a", "b"]),
            *sample("2", IMAGE, None, text=["a", "b"], captions=[]),
            *sample("3", IMAGE, b"good", captions=["\udcff"]),
        ]
        items = read(write_tar(tmp_path / "x.tar", members))
        assert reasons(items) == [["one", "two"], ["a", "b"], ["a", "b"], "invalid_utf8"]
        assert items[0].metadata == SCORES

    def test_folder_and_pattern_are_in_order(self, tmp_path):
        for index in (2, 0, 1):
            write_tar(tmp_path / f"{index:05d}.tar", sample("000", IMAGE, b"x"))
            write_parquet(tmp_path / f"{index:05d}.parquet", {"url": ["x"], "caption": ["x"]})
            (tmp_path / f"{index:05d}_stats.json").write_text("{}")
        expected = [f"{tmp_path.name}/{index:05d}.tar/000" for index in range(3)]
        assert [record.key for record in read(tmp_path)] == expected
        assert [record.key for record in read(tmp_path / "*.tar")] == expected

    def test_damaged_tars_do_not_stop(self, tmp_path):
        members = [member for index in range(5) for member in sample(f"{index:03d}", noise(40, 40, index), b"x")]
        content = write_tar(tmp_path / "1.tar", members).read_bytes()
        (tmp_path / "0.tar").write_bytes(content[: len(content) // 2])
        (tmp_path / "2.tar").write_bytes(b"no tar at all" * 100)
        (tmp_path / "3.tar").write_bytes(b"")
        items = read(tmp_path)
        kept = [item.key.split("/")[1:] for item in items if isinstance(item, Record)]
        assert kept == [["0.tar", "000"], ["0.tar", "001"], *(["1.tar", f"00{index}"] for index in range(5))]
        refused = [item for item in items if isinstance(item, Refused)]
        assert [item.reason for item in refused] == [Reason.DAMAGED_FILE] * 3
        assert [item.key.rpartition("/")[2] for item in refused] == ["0.tar", "2.tar", "3.tar"]

    @pytest.mark.parametrize(
        ("damage", "detail"),
        [
            (lambda tar, at: tar[: at + 10] + bytes([tar[at + 10] ^ 255]) + tar[at + 11 :], "bad checksum at byte"),
            (lambda tar, at: tar[:at] + bytes(512) + tar[at + 512 :], "goes on behind an end mark"),
            (lambda tar, at: tar[:at] + bytes(4096) + tar[at + 4096 :], "goes on behind an end mark"),
            (lambda tar, at: tar[:at], "ends without an end mark"),
            (lambda tar, at: tar[: at + 100], "truncated header"),
            (lambda tar, at: tar[: at + 700], "unexpected end"),
            (lambda tar, at: tar + tar, "goes on behind an end mark"),
        ],
        ids=["flipped bit", "zeros for a header", "hole", "cut at a header", "cut in a header", "cut", "joined tars"],
    )
    @pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gzip"])
    def test_images_behind_damage_are_not_lost_in_silence(self, tmp_path, compress, damage, detail):
        members = [(f"{i}.{extension}", noise(30, 30, i)) for i in range(5) for extension in ("png", "txt")]
        tar = write_tar(tmp_path / "x.tar", [(name, b"x" if name[2:] == "txt" else data) for name, data in members])
        content = tar.read_bytes()
        damaged = damage(content, content.index(b"3.png"))
        num_whole = 5 if len(damaged) > len(content) else 3
        tar.write_bytes(compress(damaged))
        *records, refused = read(tar)
        assert [item.key for item in records if isinstance(item, Record)] == [f"x.tar/{i}" for i in range(num_whole)]
        assert isinstance(refused, Refused) and refused.reason is Reason.DAMAGED_FILE
        assert detail in refused.detail

    def test_what_other_tools_write_is_whole(self, tmp_path):
        tar = write_tar(tmp_path / "x.tar", sample("0", IMAGE, b"x"))
        content = tar.read_bytes().rstrip(b"\0")
        end = -len(content) % 512
        for zeros in (512, 1024, 2**21):
            tar.write_bytes(content + bytes(end + zeros))
            assert reasons(read(tar)) == [["x"]]
        assert read(write_tar(tmp_path / "empty.tar", [])) == []

    def test_a_second_image_of_a_sample_is_counted(self, tmp_path):
        tar = write_tar(tmp_path / "x.tar", [("0.jpg", IMAGE), ("0.png", IMAGE), ("0.txt", b"one"), ("1.jpg", IMAGE)])
        items = read(tar)
        assert [item.key for item in items] == ["x.tar/0", "x.tar/0.png", "x.tar/1"]
        assert reasons(items) == [["one"], "duplicate_key", "missing_caption"]

    def test_a_member_that_is_too_large_is_not_read(self, tmp_path, monkeypatch):
        monkeypatch.setattr("diffusion.preparation.sources.webdataset.MAX_BYTES", 1000)
        members = [("0.png", bytes(1001)), ("0.txt", b"x"), ("1.png", bytes(1000)), ("1.txt", b"x")]
        items = read(write_tar(tmp_path / "x.tar", members))
        assert reasons(items) == ["too_large", ["x"]]
        assert items[0].detail == ".png: 1001 bytes are more than 1000"


class TestParquet:
    def test_columns(self, tmp_path):
        struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        images = [
            {"bytes": IMAGE, "path": "a.png"},
            {"bytes": None, "path": "b.png"},
            None,
            {"bytes": IMAGE, "path": None},
        ]
        columns = {
            "image": pa.array(images, struct),
            "text": ["one", "two", "three", None],
            "score": [0.5, 1.0, 2.0, float("nan")],
            "when": [datetime.date(2024, 1, 2)] * 4,
            "vector": [[1.0]] * 4,
            "raw": [b"x"] * 4,
        }
        path = write_parquet(tmp_path / "set.parquet", columns)
        items = read(path)
        assert reasons(items) == [["one"], "missing_image", "missing_image", "missing_caption"]
        assert items[0].key == "set.parquet#0"
        assert items[0].metadata == {"score": 0.5, "when": "2024-01-02", "image_path": "a.png"}
        assert open_source(path).num_records == 4

    @pytest.mark.parametrize("column", ["image", "jpg", "image_bytes"])
    def test_plain_bytes_and_lists(self, tmp_path, column):
        columns = {column: [IMAGE, IMAGE, IMAGE], "captions": [["a", " ", "b"], [], ["  "]]}
        items = read(write_parquet(tmp_path / "x.parquet", columns))
        assert reasons(items) == [["a", "b"], "missing_caption", "empty_caption"]

    def test_named_columns(self, tmp_path):
        path = write_parquet(tmp_path / "x.parquet", {"photo": [IMAGE], "words": ["w"], "caption": ["c"]})
        items = read(path, image_column="photo", caption_column="words")
        assert items == [Record("x.parquet#0", IMAGE, ["w"], {"caption": "c"})]

    @pytest.mark.parametrize("column", ["jpg", "png", "webp"])
    def test_img2dataset(self, tmp_path, column):
        columns = {
            column: [IMAGE, None],
            "caption": ["one", "two"],
            "status": ["success", "failed_to_download"],
            "error_message": [None, "404"],
            **{name: [value] * 2 for name, value in SCORES.items()},
        }
        items = read(write_parquet(tmp_path / "00000.parquet", columns))
        assert reasons(items) == [["one"], "not_successful"]
        assert items[0].metadata == {**SCORES, "status": "success", "error_message": None}
        assert "404" in items[1].detail

    def test_paths(self, tmp_path):
        names = ["a.png", "sub/b.png", str(tmp_path / "c.png"), "../c.png", "gone.png", None, "ftp://x/a.png"]
        write_folder(tmp_path / "set" / "sub", 1)
        for place in ("set/a.png", "set/sub/b.png", "c.png"):
            (tmp_path / place).write_bytes(IMAGE + place.encode())
        columns = {"file_name": names, "caption": [f"{number}" for number in range(7)], "tags": [["x", "y"]] * 7}
        path = write_parquet(tmp_path / "set" / "x.parquet", columns)
        items = read(path)
        assert reasons(items) == [["0"], ["1"], ["2"], ["3"], "missing_image", "missing_image", "unreadable"]
        expected = ["set/a.png", "set/sub/b.png", "c.png", "c.png"]
        assert [item.image for item in items[:4]] == [IMAGE + place.encode() for place in expected]
        assert items[1].metadata == {"image_path": "sub/b.png", "tags": ["x", "y"]}
        structs = pa.array(
            [{"bytes": None, "path": "a.png"}], pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        )
        path = write_parquet(tmp_path / "set" / "y.parquet", {"image": structs, "caption": ["x"]})
        assert read(path)[0].image == IMAGE + b"set/a.png"

    def test_invalid_utf8(self, tmp_path):
        bad = pa.array([b"ok", b"\xff\xfe"]).view(pa.string())
        items = read(write_parquet(tmp_path / "x.parquet", {"image": [IMAGE] * 2, "caption": bad, "note": bad}))
        assert reasons(items) == [["ok"], "invalid_utf8"]
        items = read(write_parquet(tmp_path / "y.parquet", {"image": [IMAGE] * 2, "caption": ["a", "b"], "note": bad}))
        assert items[1].metadata == {"note": "\\udcff\\udcfe"}

    @pytest.mark.parametrize(
        ("columns", "message"),
        [
            ({"image": [b"x"], "words": ["w"]}, "no column caption or .*it has image, words.*--caption-column"),
            ({"photo": [b"x"], "caption": ["w"]}, "no column image or .*it has photo, caption.*--image-column"),
            ({"image": [1], "caption": ["w"]}, "column image is int64; it must be bytes"),
            ({"image": [b"x"], "caption": [1]}, "column caption is int64; it must be text"),
        ],
    )
    def test_missing_columns_stop_at_once(self, tmp_path, columns, message):
        write_parquet(tmp_path / "set" / "0.parquet", {"image": [b"x"], "caption": ["c"]})
        write_parquet(tmp_path / "set" / "1.parquet", columns)
        with pytest.raises(DataError, match=message):
            open_source(tmp_path / "set")

    def test_damaged_files(self, tmp_path):
        path = write_parquet(
            tmp_path / "set" / "0.parquet",
            {"image": [noise(40, 40, index) for index in range(200)], "caption": ["c"] * 200},
            row_group_size=50, compression="gzip", use_dictionary=False,
        )  # fmt: skip
        write_parquet(tmp_path / "set" / "1.parquet", {"image": [IMAGE], "caption": ["c"]})
        content = bytearray(path.read_bytes())
        middle = len(content) // 2
        content[middle : middle + 20000] = bytes(20000)
        path.write_bytes(content)
        items = read(tmp_path / "set")
        assert [item.reason for item in items if isinstance(item, Refused)] == [Reason.DAMAGED_FILE]
        assert isinstance(items[0], Record) and isinstance(items[-1], Record)
        path.write_bytes(content[:1000])
        with pytest.raises(DataError, match=r"0\.parquet cannot be read as parquet"):
            open_source(tmp_path / "set")

    def test_row_groups_are_streamed(self, tmp_path):
        path = tmp_path / "x.parquet"
        schema = pa.schema([("image", pa.binary()), ("caption", pa.string())])
        with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
            for index in range(8):
                rows = {"image": [os.urandom(100_000)] * 64, "caption": [f"{index}"] * 64}
                writer.write_table(pa.table(rows, schema))
        before, most = pa.total_allocated_bytes(), 0
        for item in open_source(path).read():
            assert isinstance(item, Record)
            most = max(most, pa.total_allocated_bytes() - before)
        assert most < 20e6, "the file holds 51 MB"


def test_long_captions_come_whole_from_every_layout(tmp_path):
    caption = "é 'x' \n" * 12_500 + "end"
    assert len(caption.encode()) > 100_000
    for folder in ("beside", "jsonl", "csv"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.png").write_bytes(IMAGE)
    (tmp_path / "beside" / "a.txt").write_text(caption, newline="")
    (tmp_path / "jsonl" / "metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "text": caption}))
    with (tmp_path / "csv" / "metadata.csv").open("w", newline="") as table:
        csv.writer(table).writerows([("file_name", "text"), ("a.png", caption)])
    write_tar(tmp_path / "x.tar", sample("a", IMAGE, caption.encode()))
    write_parquet(tmp_path / "x.parquet", {"image": [IMAGE], "caption": [caption]})
    for name in ("beside", "jsonl", "csv", "x.tar", "x.parquet"):
        assert [item.captions for item in read(tmp_path / name)] == [[caption]], name


class TestOpening:
    def test_messages(self, tmp_path):
        (tmp_path / "empty").mkdir()
        (tmp_path / "notes.doc").write_bytes(b"x")
        mixed = tmp_path / "mixed"
        write_folder(mixed, 1)
        write_tar(mixed / "x.tar", [])
        for path, message in (
            (tmp_path / "none", "no such file or folder; a source is a folder of images"),
            (tmp_path / "empty", "holds no image, no tar and no parquet file"),
            (tmp_path / "notes.doc", "neither a tar nor a parquet file"),
            (tmp_path / "*.tar", "no file matches"),
            (tmp_path / "mixed" / "*", "tar files only or parquet files only"),
            (mixed, "holds images and tar files; name the ones that are meant"),
        ):
            with pytest.raises(DataError, match=message):
                open_source(path)
        with pytest.raises(DataError, match="no source was given"):
            open_sources([])

    def test_keys_of_sources_of_one_name_stay_apart(self, tmp_path):
        for parent in "abc":
            write_folder(tmp_path / parent / "set", 2)
        sources = open_sources([tmp_path / parent / "set" for parent in "abc"])
        assert [source.name for source in sources] == ["set", "set~2", "set~3"]
        keys = [item.key for source in sources for item in source.read()]
        assert len(set(keys)) == 6

    def test_columns_of_sources_without_columns(self, tmp_path, caplog):
        write_folder(tmp_path / "set", 1)
        write_parquet(tmp_path / "x.parquet", {"photo": [IMAGE], "caption": ["c"]})
        open_sources([tmp_path / "set", tmp_path / "x.parquet"], image_column="photo")
        assert not caplog.records
        open_sources([tmp_path / "set"], image_column="photo")
        assert "--image-column photo has no effect" in caplog.text

    def test_the_same_files_twice(self, tmp_path):
        write_folder(tmp_path / "set" / "sub", 2)
        (tmp_path / "tars").mkdir()
        write_tar(tmp_path / "tars" / "x.tar", [])
        (tmp_path / "link").symlink_to(tmp_path / "set")
        for pair in (("set", "set"), ("set", "set/sub"), ("link", "set/sub"), ("tars", "tars/x.tar")):
            with pytest.raises(DataError, match="hold the same files; give them once"):
                open_sources([tmp_path / name for name in pair])

    def test_kind_by_content(self, tmp_path):
        write_tar(tmp_path / "one", sample("0", IMAGE, b"x"))
        write_parquet(tmp_path / "two", {"image": [IMAGE], "caption": ["c"]})
        assert [open_source(tmp_path / name).kind for name in ("one", "two")] == ["webdataset", "parquet"]
