import bz2
import csv
import datetime
import errno
import gzip
import io
import json
import lzma
import os
import shutil
import tarfile
import tracemalloc

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diffusion import storage
from diffusion.errors import DataError, MachineError
from diffusion.preparation.config import LimitsConfig, SourceConfig
from diffusion.preparation.records import Location, Reason, Record, Rejected, make_record
from diffusion.preparation.sources import from_description, open_sources, parquet
from diffusion.preparation.sources.reading import open_file, read_file
from tests.tools.image_files import noise, sample, write_folder, write_mds, write_table, write_tar
from tests.tools.sources import bare, details, open_source, partitions, read, reasons, scan, write_known

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
        order = ["a.png", "b.JPG", "sub/a.jpeg", "sub/deep/x.y.png", "sub/é \u4e2d'\"&.webp"]
        assert bare(records) == [(f"set/{name}", IMAGE + name.encode(), [name], {}) for name in order]
        assert read(root) == records

    def test_rejected_captions(self, tmp_path):
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
        assert reasons(items) == ["unreadable", *captions, "missing_image", "missing_caption"]
        assert items[1].metadata == {"score": 0.5, "tags": ["x"]}

    def test_csv(self, tmp_path):
        for name in "abc":
            (tmp_path / f"{name}.png").write_bytes(IMAGE)
        table = b'file,caption,licence\r\na.png,"one, and",CC0\r\nb.png,\xff\xfe,\r\nc.png,  ,\r\na.png,two,CC0\r\n'
        (tmp_path / "captions.csv").write_bytes(table)
        items = read(tmp_path)
        assert reasons(items) == [["one, and", "two"], "invalid_utf8", "empty_caption"]
        assert items[0].metadata == {"licence": "CC0"}

    def test_a_column_without_a_name_is_skipped(self, tmp_path):
        (tmp_path / "a.png").write_bytes(IMAGE)
        (tmp_path / "captions.csv").write_text(",file,caption\n0,a.png,one\n")
        assert bare(read(tmp_path)) == [(f"{tmp_path.name}/a.png", IMAGE, ["one"], {})]

    def test_a_table_without_a_caption_leaves_it_to_the_text_file(self, tmp_path, caplog):
        for name, text in {"a": "text a", "b": "text b", "c": "text c", "d": "", "e": None}.items():
            (tmp_path / f"{name}.png").write_bytes(IMAGE)
            if text is not None:
                (tmp_path / f"{name}.txt").write_text(text)
        captions = {"a": "table a", "b": None, "c": " ", "d": None, "e": None}
        lines = [{"file_name": f"{name}.png", "text": text, "score": 1} for name, text in captions.items()]
        (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
        items = read(tmp_path)
        assert "1 images have a .txt and a caption in a table" in caplog.text
        assert reasons(items) == [["table a"], ["text b"], ["text c"], "empty_caption", "missing_caption"]
        assert items[1].metadata == {"score": 1}
        known = write_known(tmp_path / "known.parquet.old", items)
        (tmp_path / "a.txt").write_text("of no consequence")
        (tmp_path / "b.txt").write_text("another")
        found = open_source(tmp_path).partitions(known)
        assert (list(found.new), list(found.gone)) == ([], [])
        assert [json.loads(item)["file"] for one in found.changed for item in one.items] == ["b.png"]

    def test_files_that_are_not_read_are_rejected(self, tmp_path):
        described = ("a.heic", "b", "c.svg", "d.jpg", "sub/e.TGA")
        (tmp_path / "sub").mkdir()
        for name in (*described, "d.npz", "alone.heic", "README.md"):
            (tmp_path / name).write_bytes(IMAGE)
        for name in described:
            (tmp_path / name).with_suffix(".json" if name == "c.svg" else ".txt").write_text('{"caption": "x"}')
        items = read(tmp_path)
        root = tmp_path.name
        assert [item.key for item in items] == [f"{root}/{name}" for name in described]
        assert [item.detail for item in items if isinstance(item, Rejected)] == [
            "extension .heic is not read",
            "it has no extension",
            "extension .svg is not read",
            "extension .TGA is not read",
        ]
        assert [item.reason for item in items if isinstance(item, Rejected)] == [Reason.MISSING_IMAGE] * 4
        known = write_known(tmp_path.parent / "known.parquet", items)
        (tmp_path / "a.heic").rename(tmp_path / "a.png")
        found = open_source(tmp_path).partitions(known)
        (new,) = found.new
        assert [item.key for item in open_source(tmp_path).scan(new)] == [f"{root}/a.png"]
        assert (list(found.gone), list(found.changed)) == ([], []), "what was rejected is no change"

    def test_captions_that_are_no_text_are_rejected(self, tmp_path):
        lines = [{"file_name": f"{number}.png", "text": text} for number, text in enumerate([5, None, [], {"a": 1}])]
        for line in lines:
            (tmp_path / line["file_name"]).write_bytes(IMAGE)
        (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
        items = read(tmp_path)
        assert reasons(items) == ["missing_caption"] * 4
        assert [item.detail for item in items if isinstance(item, Rejected)] == [
            "no text: 5",
            "null or not given",
            "null or not given",
            "no text: {'a': 1}",
        ]

    def test_pipes_and_giant_files_are_rejected(self, tmp_path):
        for name in ("pipe.png", "giant.png", "a.png", "b.png"):
            (tmp_path / name).with_suffix(".txt").write_text("x")
        os.mkfifo(tmp_path / "pipe.png")
        (tmp_path / "giant.png").touch()
        os.truncate(tmp_path / "giant.png", 512 * 2**20 + 1)
        for name, suffix in (("a", ".json"), ("b", ".txt")):
            (tmp_path / f"{name}.png").write_bytes(IMAGE)
            (tmp_path / f"{name}{suffix}").unlink(missing_ok=True)
            os.mkfifo(tmp_path / f"{name}{suffix}")
        items = read(tmp_path)
        assert reasons(items) == ["unreadable", "unreadable", "too_large", "unreadable"]
        assert [detail.partition(":")[0] for detail in details(items)][:2] == [".json", ".txt"]

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("captions.csv", "file;caption\na.png;x\n", "no column file_name or file.*there is 'file;caption'"),
            ("captions.csv", "file,words\na.png,x\n", "no column captions or caption or text.*'file', 'words'"),
            ("captions.csv", "file,caption,caption\na.png,x,y\n", r"captions\.csv.*'caption'"),
            ("captions.csv", "file,caption\n,x\n", "line 2: no file name"),
            ("captions.csv", "file,caption\na.png,a car, red\n", "line 2: 3 values for 2 columns; .* in quotes"),
            ("captions.csv", "file,caption\na.png,x\na.png,x,\n", "line 3: 3 values for 2 columns"),
            ("metadata.jsonl", '{"file_name": "a.png", "text": "x"}\n{"file_name": \n', "line 2: .*JSON object"),
            ("metadata.jsonl", '{"path": "a.png", "text": "x"}\n', "line 1: no file name.*there is 'path', 'text'"),
            ("metadata.jsonl", '["a.png", "x"]\n', "line 1: not a JSON object"),
            *(
                (name, "file,caption\n".encode(code).decode("latin-1"), "line 1: not UTF-8")
                for name in ("captions.csv", "metadata.jsonl")
                for code in ("utf-16-le", "utf-16-be")
            ),
            ("captions.csv", "file,caption\ra.png,x\r", "line 1: .*line ends"),
        ],
    )
    def test_damaged_tables_stop_at_once(self, tmp_path, name, content, message):
        (tmp_path / "a.png").write_bytes(IMAGE)
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=message):
            read(tmp_path)

    def test_two_tables(self, tmp_path):
        (tmp_path / "a.png").write_bytes(IMAGE)
        for name in ("captions.csv", "metadata.jsonl"):
            (tmp_path / name).write_text("")
        with pytest.raises(DataError, match=r"captions.csv and metadata.jsonl"):
            read(tmp_path)

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
            ("1", None, {"caption": "from json", "status": None}),
            ("2", "three", {"captions": ["three", "four"]}),
            ("3", "gone", {"status": "failed_to_download", "error_message": "404"}),
        ):
            (folder / f"{stem}.jpg").write_bytes(IMAGE)
            (folder / f"{stem}.json").write_text(json.dumps(values))
            if caption:
                (folder / f"{stem}.txt").write_text(caption)
        (folder / "4.jpg").write_bytes(IMAGE)
        (folder / "4.json").write_text("[]")
        write_table(tmp_path / "set" / "00000.parquet", {"url": ["x"], "caption": ["x"]})
        items = read(tmp_path / "set")
        assert reasons(items) == [["one"], ["from json"], ["three", "four"], "not_successful", "invalid_json"]
        assert items[0].key == "set/00000/0.jpg"
        assert items[0].metadata == {**SCORES, "status": "success"}

    def test_growth(self, tmp_path):
        write_folder(tmp_path / "set", 5)
        known = write_known(tmp_path / "known.parquet", read(tmp_path / "set"))
        found = open_source(tmp_path / "set").partitions(known)
        assert (list(found.new), list(found.gone), list(found.changed)) == ([], [], [])
        write_folder(tmp_path / "set" / "more", 2)
        (tmp_path / "set" / "0002.json").write_text("{}")
        (tmp_path / "set" / "0003.txt").write_text("other words")
        (tmp_path / "set" / "0004.png").unlink()
        found = open_source(tmp_path / "set").partitions(known)
        (new,) = found.new
        assert (new.file, new.num_records) == ("", 2)
        assert found.gone == ["0004.png"]
        items = [item for one in found.changed for item in open_source(tmp_path / "set").scan(one)]
        assert [item.key for item in items] == ["set/0002.png", "set/0003.png"]

    def test_partitions_depend_on_the_content_alone(self, tmp_path):
        for number in range(100):
            (tmp_path / f"{number:03d}.png").write_bytes(b"")
        source = open_source(tmp_path)
        assert [one.num_records for one in partitions(source)] == [16] * 6 + [4]
        assert [one.num_records for one in partitions(open_source(tmp_path, partition_size=60))] == [60, 40]
        for number in range(100, 1500):
            (tmp_path / f"{number:04d}.png").write_bytes(b"")
        assert {one.num_records for one in partitions(source)} == {24, 12}

    def test_files_that_look_changed_are_few_partitions(self, tmp_path):
        write_folder(tmp_path / "set", 20)
        known = write_known(tmp_path / "known.parquet", read(tmp_path / "set"))
        for path in (tmp_path / "set").iterdir():
            os.utime(path, ns=(0, 0))
        found = open_source(tmp_path / "set").partitions(known)
        assert ([one.num_records for one in found.changed], list(found.new)) == ([20], [])

    def test_tables_in_subfolders(self, tmp_path):
        for split in ("train", "test"):
            (tmp_path / split / "a").mkdir(parents=True)
            (tmp_path / split / "a" / "0.png").write_bytes(IMAGE)
            (tmp_path / split / "metadata.jsonl").write_text(json.dumps({"file_name": "a/0.png", "text": split}))
        (tmp_path / "metadata.csv").write_text("file,caption\ntrain/a/0.png,more\n")
        assert reasons(read(tmp_path)) == [["test"], ["more", "train"]]

    def test_extensions_in_any_case(self, tmp_path):
        for name, content in {"a.JPG": IMAGE, "a.TXT": b"one", "b.Png": IMAGE, "b.JSON": b'{"caption": "two"}'}.items():
            (tmp_path / name).write_bytes(content)
        assert reasons(read(tmp_path)) == [["one"], ["two"]]

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("0.caption", "one", "name it as the image"),
            ("0.png.txt", "one", "name it as the image"),
            ("captions.jsonl", '{"file_name": "0.png", "text": "one"}', "a table is named metadata.jsonl"),
            ("metadata.tsv", "file_name\ttext\n0.png\tone\n", "a table is named metadata.jsonl"),
            ("metadata.jsonl", '{"file_name": "sub\\\\1.png", "text": "one"}', "write both alike"),
            ("metadata.jsonl", '{"file_name": "e\\u0301.png", "text": "one"}', "write both alike"),
            ("e\u0301.txt", "one", "write both alike"),
        ],
    )
    def test_files_that_look_like_captions_and_are_not_read_are_named(self, tmp_path, caplog, name, content, message):
        (tmp_path / "sub").mkdir()
        for image in ("0.png", "sub/1.png", "\u00e9.png"):
            (tmp_path / image).write_bytes(IMAGE)
        (tmp_path / name).write_text(content)
        assert "missing_caption" in reasons(read(tmp_path))
        assert message in caplog.text
        caplog.clear()
        for image in ("0.txt", "sub/1.txt", "\u00e9.txt"):
            (tmp_path / image).write_text("own")
        if not name.startswith("metadata.jsonl"):
            read(tmp_path)
            assert message not in caplog.text

    def test_links_that_lead_out_are_not_followed(self, tmp_path, caplog):
        write_folder(tmp_path / "elsewhere", 2)
        write_folder(tmp_path / "set", 1)
        root = tmp_path / "set"
        (root / "folder").symlink_to(tmp_path / "elsewhere")
        (root / "back").symlink_to(root)
        (root / "inside.png").symlink_to(root / "0000.png")
        (root / "inside.txt").write_text("within")
        (root / "outside.png").symlink_to(tmp_path / "elsewhere" / "0001.png")
        (root / "outside.txt").write_text("x")
        (root / "text.png").write_bytes(IMAGE)
        (root / "text.txt").symlink_to("/etc/hostname")
        items = read(root)
        assert reasons(items) == [["image 0"], ["within"], "unreadable", "unreadable"]
        assert all("leads out" in detail for detail in details(items))
        assert f"{root / 'folder'} leads out" in caplog.text

    @pytest.mark.parametrize("name", ["0000.png", "0000.txt", "0000.json", "folder/0001.png"])
    def test_links_that_lead_out_and_appear_after_the_listing_are_not_followed(self, tmp_path, name):
        for folder in ("set", "set/folder", "elsewhere"):
            (tmp_path / folder).mkdir()
            for file in ("0000.png", "0001.png"):
                (tmp_path / folder / file).write_bytes(IMAGE)
                (tmp_path / folder / file).with_suffix(".txt").write_text("secret" if folder == "elsewhere" else "own")
                (tmp_path / folder / file).with_suffix(".json").write_text("{}")
        source = open_source(tmp_path / "set")
        partitions = list(source.partitions().new)
        replaced = tmp_path / "set" / name
        if "/" in name:
            shutil.rmtree(replaced.parent)
            replaced.parent.symlink_to(tmp_path / "elsewhere")
        else:
            replaced.unlink()
            replaced.symlink_to(tmp_path / "elsewhere" / name)
        items = [item for partition in partitions for item in source.scan(partition)]
        rejected = [item for item in items if isinstance(item, Rejected)]
        assert len(rejected) == (2 if "/" in name else 1)
        assert all(item.reason is Reason.UNREADABLE and "leads out" in item.detail for item in rejected)

    def test_odd_files_are_one_rejection_each(self, tmp_path):
        long = "n" * 251
        for name in (f"{long}.png", "good.png", "loop.png", "tab\x1b[2J.png"):
            (tmp_path / name).write_bytes(IMAGE)
        (tmp_path / "good.txt").write_text("good")
        (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
        items = read(tmp_path)
        assert reasons(items) == [["good"], "unreadable", "missing_caption", "missing_caption"]

    def test_control_characters_of_names_are_escaped(self, tmp_path):
        (tmp_path / "set\x1b[2J").mkdir()
        with pytest.raises(DataError) as error:
            open_source(tmp_path / "set\x1b[2J")
        assert str(error.value).isprintable()

    def test_paths_of_a_table_with_nul(self, tmp_path):
        (tmp_path / "a.png").write_bytes(IMAGE)
        lines = [{"file_name": "a.png", "text": "x"}, {"file_name": "b\0.png", "text": "y"}]
        (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
        assert reasons(read(tmp_path)) == [["x"], "missing_image"]

    def test_names_that_data_sets_use_too(self, tmp_path):
        (tmp_path / "scan.png").write_bytes(IMAGE)
        (tmp_path / "scan.json").write_text('{"caption": "x"}')
        assert reasons(read(tmp_path)) == [["x"]]

    @pytest.mark.timeout(300)
    def test_tables_that_are_no_files(self, tmp_path):
        (tmp_path / "a.png").write_bytes(IMAGE)
        os.mkfifo(tmp_path / "metadata.jsonl")
        with pytest.raises(DataError, match=r"metadata\.jsonl"):
            read(tmp_path)
        (tmp_path / "metadata.jsonl").unlink()
        (tmp_path / "metadata.jsonl").symlink_to("/dev/zero")
        with pytest.raises(DataError, match=r"metadata\.jsonl"):
            read(tmp_path)

    def test_unclosed_quotes_are_reported_with_their_line(self, tmp_path):
        (tmp_path / "a.png").write_bytes(IMAGE)
        for rest in ("", 'c.png,"three"\n'):
            (tmp_path / "captions.csv").write_text(f'file,caption\na.png,one\nb.png,"two\n{rest}')
            with pytest.raises(DataError, match=r"captions\.csv, line 3"):
                read(tmp_path)

    def test_limits(self, tmp_path):
        captions = {"a": "fits", "b": "x " * 60, "c": "w" * 21, "d": "é" * 10, "e": "fits"}
        for stem, caption in captions.items():
            (tmp_path / f"{stem}.png").write_bytes(IMAGE)
            (tmp_path / f"{stem}.txt").write_text(caption)
        (tmp_path / "e.json").write_text(json.dumps({"note": "x" * 1100}))
        limits = LimitsConfig(max_caption_characters=100, max_word_characters=20, max_metadata_kb=1)
        items = read(tmp_path, limits=limits)
        assert reasons(items) == [["fits"], "too_large", "too_large", ["é" * 10], "too_large"]
        (tmp_path / "f.png").write_bytes(bytes(2**20 + 1))
        assert reasons(read(tmp_path, limits=LimitsConfig(max_image_mb=1)))[-1] == "too_large"
        (tmp_path / "metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "text": "x" * 2000}))
        with pytest.raises(DataError, match=r"metadata\.jsonl, line 1"):
            read(tmp_path, limits=limits)
        lines = [{"file_name": "a.png", "text": f"{number}"} for number in range(1001)]
        (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
        assert reasons(read(tmp_path))[0] == "too_large"


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
            *("missing_image", "invalid_json", "invalid_utf8", "duplicate_key", ["dotted"], "duplicate_key"),
        ]
        assert [item.key for item in items][:2] == ["x.tar/000", "x.tar/001"]
        assert bare(items)[10] == ("x.tar/a/b", IMAGE, ["dotted"], {})
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

    @pytest.mark.parametrize(("suffix", "module"), [("gz", gzip), ("bz2", bz2), ("xz", lzma)])
    def test_compressed_tars_in_a_folder(self, tmp_path, suffix, module):
        plain = write_tar(tmp_path / "0.tar", sample("000", IMAGE, b"x"))
        (tmp_path / f"1.tar.{suffix}").write_bytes(module.compress(plain.read_bytes()))
        assert reasons(read(tmp_path)) == [["x"]] * 2

    def test_folder_and_pattern_are_in_order(self, tmp_path):
        for index in (2, 0, 1):
            write_tar(tmp_path / f"{index:05d}.tar", sample("000", IMAGE, b"x"))
            write_table(tmp_path / f"{index:05d}.parquet", {"url": ["x"], "caption": ["x"]})
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
        rejected = [item for item in items if isinstance(item, Rejected)]
        assert [item.reason for item in rejected] == [Reason.DAMAGED_FILE] * 3
        assert [item.key.rpartition("/")[2] for item in rejected] == ["0.tar", "2.tar", "3.tar"]

    @pytest.mark.parametrize(
        ("damage", "detail"),
        [
            (lambda tar, at: tar[: at + 10] + bytes([tar[at + 10] ^ 255]) + tar[at + 11 :], "bad checksum at byte"),
            (lambda tar, at: tar[:at] + bytes(512) + tar[at + 512 :], "goes on after an end mark"),
            (lambda tar, at: tar[:at] + bytes(4096) + tar[at + 4096 :], "goes on after an end mark"),
            (lambda tar, at: tar[:at], "ends without an end mark"),
            (lambda tar, at: tar[: at + 100], "truncated header"),
            (lambda tar, at: tar[: at + 700], "unexpected end"),
            (lambda tar, at: tar + tar, "goes on after an end mark"),
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
        *records, rejected = read(tar)
        assert [item.key for item in records if isinstance(item, Record)] == [f"x.tar/{i}" for i in range(num_whole)]
        assert isinstance(rejected, Rejected) and rejected.reason is Reason.DAMAGED_FILE
        assert detail in rejected.detail

    def test_what_other_tools_write_is_whole(self, tmp_path):
        tar = write_tar(tmp_path / "x.tar", sample("0", IMAGE, b"x"))
        content = tar.read_bytes().rstrip(b"\0")
        end = -len(content) % 512
        for zeros in (512, 1024, 2**21):
            tar.write_bytes(content + bytes(end + zeros))
            assert reasons(read(tar)) == [["x"]]
        assert read(write_tar(tmp_path / "empty.tar", [])) == []

    def test_a_member_named_image_is_no_image(self, tmp_path):
        tar = write_tar(tmp_path / "x.tar", [*sample("0", IMAGE, b"x"), ("0.image", b"no image")])
        (item,) = read(tar)
        assert isinstance(item, Record)
        assert item.image == IMAGE

    def test_several_captions_of_one_image_are_not_chosen_from(self, tmp_path):
        contents = [("0.jpg", IMAGE), ("0.txt", b"one"), ("0.TXT", b"two"), ("1.jpg", IMAGE), ("1.txt", b"x")]
        contents += [("2.JSON", b"{}"), ("2.json", b'{"caption": "x"}'), ("2.jpg", IMAGE)]
        tar = write_tar(tmp_path / "x.tar", contents)
        assert reasons(read(tar)) == ["duplicate_key", ["x"], "duplicate_key"]
        for name, content in contents:
            (tmp_path / "set").mkdir(exist_ok=True)
            (tmp_path / "set" / name).write_bytes(content)
        assert reasons(read(tmp_path / "set")) == ["unreadable", ["x"], "unreadable"]

    @pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gzip"])
    def test_members_that_are_too_large_are_not_read(self, tmp_path, compress):
        members = [
            *(("0.png", bytes(2**20 + 1)), ("0.txt", b"x"), ("1.png", bytes(2**20)), ("1.txt", b"x")),
            *(("2.png", IMAGE), ("2.json", b" " * 1025), ("3.png", IMAGE), ("3.txt", b"y" * 404)),
        ]
        tar = write_tar(tmp_path / "x.tar", members)
        tar.write_bytes(compress(tar.read_bytes()))
        items = read(tar, limits=LimitsConfig(max_image_mb=1, max_metadata_kb=1, max_caption_characters=100))
        assert reasons(items) == ["too_large", ["x"], "too_large", "too_large"]
        assert details(items)[0] == ".png: 1048577 bytes are more than 1048576"

    def test_a_bomb_is_bounded(self, tmp_path):
        members = [("0.png", IMAGE), ("0.json", b" " * 2**27), ("1.png", IMAGE), ("1.txt", b"x")]
        tar = write_tar(tmp_path / "x.tar", members)
        bomb = tmp_path / "bomb.tar.gz"
        bomb.write_bytes(gzip.compress(tar.read_bytes(), 1))
        tar.unlink()
        source = open_source(bomb)
        (partition,) = partitions(source)
        tracemalloc.start()
        items = list(source.scan(partition))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert reasons(items) == ["too_large", ["x"]]
        assert peak < 2**24

    @pytest.mark.timeout(300)
    @pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gzip"])
    @pytest.mark.parametrize("name", ["1.png", "1.bin"])
    def test_sizes_are_believed_as_far_as_the_file_reaches(self, tmp_path, compress, name):
        tar = write_tar(tmp_path / "x.tar", [("0.png", IMAGE), ("0.txt", b"x")])
        header = tarfile.TarInfo(name)
        header.size = 2**50
        content = tar.read_bytes().rstrip(b"\0")
        content += bytes(-len(content) % 512)
        tar.write_bytes(compress(content + header.tobuf(tarfile.GNU_FORMAT) + bytes(1000)))
        assert reasons(read(tar))[0] == ["x"]
        assert [item.reason for item in read(tar) if isinstance(item, Rejected)] == [Reason.DAMAGED_FILE]
        for kind in (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE):
            header.type = kind
            tar.write_bytes(compress(content + header.tobuf(tarfile.GNU_FORMAT) + bytes(1000)))
            assert reasons(read(tar)) == [["x"], "damaged_file"]

    @pytest.mark.timeout(300)
    @pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gzip"])
    @pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.GNUTYPE_LONGNAME])
    def test_a_negative_size_is_damage(self, tmp_path, compress, kind):
        header = tarfile.TarInfo("1.png")
        header.size, header.type = -512, kind
        content = write_tar(tmp_path / "x.tar", [("0.png", IMAGE), ("0.txt", b"x")]).read_bytes().rstrip(b"\0")
        content += bytes(-len(content) % 512)
        (tmp_path / "x.tar").write_bytes(compress(content + header.tobuf(tarfile.GNU_FORMAT) + bytes(1024)))
        assert reasons(read(tmp_path / "x.tar")) == [["x"], "damaged_file"]

    def test_thousands_of_chained_headers_are_damage(self, tmp_path):
        header = tarfile.TarInfo("name")
        header.size, header.type = 5, tarfile.GNUTYPE_LONGNAME
        content = write_tar(tmp_path / "x.tar", sample("0", IMAGE, b"x")).read_bytes().rstrip(b"\0")
        chain = 3000 * (header.tobuf(tarfile.GNU_FORMAT) + b"1.png".ljust(512, b"\0"))
        (tmp_path / "x.tar").write_bytes(content + bytes(-len(content) % 512) + chain + bytes(1024))
        items = read(tmp_path / "x.tar")
        assert reasons(items) == [["x"], "damaged_file"]
        assert "too many extended headers" in details(items)[0]

    @pytest.mark.parametrize("kind", ["long names", "many names", "global headers", "chained headers"])
    def test_names_and_headers_are_bounded(self, tmp_path, kind):
        path = tmp_path / "x.tgz"
        with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT, compresslevel=1) as tar:
            for name, content in (("0.png", IMAGE), ("0.txt", b"x")):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            for number in range(2_000 if kind == "many names" else 40):
                headers = {f"comment{number}": "x" * 900_000} if "headers" in kind else {}
                long = {"long names": 900_000, "many names": 4_000}.get(kind, 1)
                member = tarfile.TarInfo(f"a.{'x' * long}{number}")
                if kind == "global headers":
                    tar.fileobj.write(tarfile.TarInfo.create_pax_global_header(headers))
                elif kind == "chained headers":
                    member.pax_headers = headers
                    tar.fileobj.write(member.tobuf(tarfile.PAX_FORMAT)[:-512])
                    continue
                tar.addfile(member)
            tar.addfile(tarfile.TarInfo("z.png"))
        source = open_source(path)
        tracemalloc.start()
        items = list(source.scan(partitions(source)[0]))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert [one for one in reasons(items) if one != "missing_image"] == [["x"], "damaged_file"]
        assert peak < 2**24

    def test_links_in_a_tar(self, tmp_path):
        with tarfile.open(tmp_path / "x.tar", "w") as tar:
            for name, content in (("0.png", IMAGE), ("0.txt", b"one")):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            for name, kind in (("1.png", tarfile.LNKTYPE), ("2.png", tarfile.SYMTYPE)):
                member = tarfile.TarInfo(name)
                member.type, member.linkname = kind, "0.png"
                tar.addfile(member)
                member = tarfile.TarInfo(name.replace("png", "txt"))
                member.type, member.linkname = tarfile.LNKTYPE, "0.txt"
                tar.addfile(member)
            member = tarfile.TarInfo("3.png")
            member.type, member.linkname = tarfile.LNKTYPE, "gone.png"
            tar.addfile(member)
        items = read(tmp_path / "x.tar")
        assert reasons(items) == [["one"], ["one"], "unreadable", "unreadable"]
        assert isinstance(items[1], Record) and items[1].image == IMAGE
        packed = tmp_path / "x.tgz"
        packed.write_bytes(gzip.compress((tmp_path / "x.tar").read_bytes()))
        assert reasons(read(packed)) == [["one"], "unreadable", "unreadable", "unreadable"]

    @pytest.mark.timeout(300)
    def test_pipes_and_links_among_tars(self, tmp_path):
        (tmp_path / "set").mkdir()
        write_tar(tmp_path / "elsewhere.tar", sample("0", IMAGE, b"x"))
        write_tar(tmp_path / "set" / "0.tar", sample("0", IMAGE, b"x"))
        os.mkfifo(tmp_path / "set" / "1.tar")
        (tmp_path / "set" / "2.tar").symlink_to(tmp_path / "elsewhere.tar")
        items = read(tmp_path / "set")
        assert reasons(items) == [["x"], "unreadable", "unreadable"]
        with pytest.raises(DataError, match=r"1\.tar is a pipe"):
            open_source(tmp_path / "set" / "1.tar")
        known = write_known(tmp_path / "known.parquet", items)
        assert partitions(open_source(tmp_path / "set"), known) == [], "they are rejected once"
        (tmp_path / "elsewhere.tar").replace(tmp_path / "set" / "2.tar")
        assert [one.file for one in partitions(open_source(tmp_path / "set"), known)] == ["2.tar"]

    def test_growth(self, tmp_path):
        root = tmp_path / "set"
        root.mkdir()
        for number in range(3):
            write_tar(root / f"{number}.tar", sample("0", IMAGE, b"x"))
        known = write_known(tmp_path / "known.parquet", read(root))
        write_tar(root / "0.tar", sample("1", IMAGE, b"other"))
        (root / "1.tar").unlink()
        write_tar(root / "3.tar", sample("0", IMAGE, b"x"))
        found = open_source(root).partitions(known)
        assert [one.file for one in found.new] == ["3.tar"]
        assert [one.file for one in found.changed] == ["0.tar"]
        assert found.gone == ["1.tar"]


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
        path = write_table(tmp_path / "set.parquet", columns)
        items = read(path)
        assert reasons(items) == [["one"], "missing_image", "missing_image", "missing_caption"]
        assert items[0].key == "set.parquet#0"
        assert items[0].metadata == {"score": 0.5, "when": "2024-01-02", "image_path": "a.png"}

    @pytest.mark.parametrize("column", ["image", "jpg", "image_bytes"])
    def test_plain_bytes_and_lists(self, tmp_path, column):
        columns = {column: [IMAGE, IMAGE, IMAGE], "captions": [["a", " ", "b"], [], ["  "]]}
        items = read(write_table(tmp_path / "x.parquet", columns))
        assert reasons(items) == [["a", "b"], "missing_caption", "empty_caption"]

    def test_named_columns(self, tmp_path):
        path = write_table(tmp_path / "x.parquet", {"photo": [IMAGE], "words": ["w"], "caption": ["c"]})
        items = read(path, image_column="photo", caption_column="words")
        assert bare(items) == [("x.parquet#0", IMAGE, ["w"], {"caption": "c"})]

    @pytest.mark.parametrize("column", ["jpg", "png", "webp"])
    def test_img2dataset(self, tmp_path, column):
        columns = {
            column: [IMAGE, None],
            "caption": ["one", "two"],
            "status": ["success", "failed_to_download"],
            "error_message": [None, "404"],
            **{name: [value] * 2 for name, value in SCORES.items()},
        }
        items = read(write_table(tmp_path / "00000.parquet", columns))
        assert reasons(items) == [["one"], "not_successful"]
        assert items[0].metadata == {**SCORES, "status": "success", "error_message": None}
        assert "404" in items[1].detail

    def test_paths(self, tmp_path):
        good = ["a.png", "sub/b.png", "sub/../a.png"]
        bad = {"gone.png": "missing_image", None: "missing_image", "ftp://x/a.png": "missing_image"}
        bad |= {"../c.png": "unreadable", str(tmp_path / "c.png"): "unreadable", "out.png": "unreadable"}
        bad |= {"n" * 256: "unreadable", "a\0.png": "missing_image", "pipe.png": "unreadable", "sub": "unreadable"}
        write_folder(tmp_path / "set" / "sub", 1)
        for name in ("set/a.png", "set/sub/b.png", "c.png"):
            (tmp_path / name).write_bytes(IMAGE + name.encode())
        (tmp_path / "set" / "out.png").symlink_to(tmp_path / "c.png")
        os.mkfifo(tmp_path / "set" / "pipe.png")
        names = [*good, *bad]
        columns = {"file_name": names, "caption": ["x"] * len(names), "tags": [["x", "y"]] * len(names)}
        path = write_table(tmp_path / "set" / "x.parquet", columns)
        items = read(path)
        assert reasons(items) == [["x"]] * 3 + list(bad.values())
        assert [item.image for item in items if isinstance(item, Record)] == [
            IMAGE + name for name in (b"set/a.png", b"set/sub/b.png", b"set/a.png")
        ]
        assert "img2dataset" in items[5].detail
        assert items[1].metadata == {"image_path": "sub/b.png", "tags": ["x", "y"]}
        names = [str(tmp_path / "set" / "sub" / "b.png"), "b.png"]
        write_table(tmp_path / "set" / "sub" / "x.parquet", {"file_name": names, "caption": ["x"] * 2})
        assert [item.image for item in read(tmp_path / "set" / "*" / "*.parquet")] == [IMAGE + b"set/sub/b.png"] * 2
        structs = pa.array(
            [{"bytes": None, "path": "a.png"}], pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        )
        path = write_table(tmp_path / "set" / "y.parquet", {"image": structs, "caption": ["x"]})
        assert read(path)[0].image == IMAGE + b"set/a.png"

    def test_a_column_named_as_the_path_stays(self, tmp_path):
        columns = {"image": [{"bytes": IMAGE, "path": "a.png"}], "caption": ["x"], "image_path": ["own"]}
        assert read(write_table(tmp_path / "x.parquet", columns))[0].metadata == {"image_path": "own"}

    def test_json_and_uuids(self, tmp_path):
        def of_json(texts):
            return pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts, pa.string()))

        ids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes(16), None], pa.binary(16)))
        columns = {"image": [IMAGE] * 2, "caption": of_json(["a", None]), "info": of_json(["{}", None]), "id": ids}
        items = read(write_table(tmp_path / "x.parquet", columns))
        assert reasons(items) == [["a"], "missing_caption"]
        assert items[0].metadata == {"info": "{}", "id": "00000000-0000-0000-0000-000000000000"}

    def test_a_folder_without_images_beside_a_file_of_the_same_name(self, tmp_path):
        for name in ("train", "val"):
            write_table(tmp_path / f"{name}.parquet", {"image": [IMAGE], "caption": [name]})
        (tmp_path / "train").mkdir()
        (tmp_path / "train" / "notes.md").write_text("x")
        assert reasons(read(tmp_path)) == [["train"], ["val"]]

    def test_times_that_python_cannot_hold(self, tmp_path):
        columns = {
            "far": pa.array([2**62], pa.timestamp("us")),
            "fine": pa.array([1], pa.timestamp("ns")),
            "zone": pa.array([0], pa.timestamp("s", "Mars/Phobos")),
            "day": pa.array([2**31 - 1], pa.int32()).cast(pa.date32()),
            "span": pa.array([2**62], pa.duration("s")),
        }
        (record,) = read(write_table(tmp_path / "x.parquet", {"image": [IMAGE], "text": ["c"], **columns}))
        assert isinstance(record, Record)
        assert record.metadata["fine"] == "1970-01-01 00:00:00.000000001"
        assert record.metadata["zone"] is None
        assert record.metadata.keys() == columns.keys()

    def test_invalid_utf8(self, tmp_path):
        bad = pa.array([b"ok", b"\xff\xfe"]).view(pa.string())
        items = read(write_table(tmp_path / "x.parquet", {"image": [IMAGE] * 2, "caption": bad, "note": bad}))
        assert reasons(items) == [["ok"], "invalid_utf8"]
        items = read(write_table(tmp_path / "y.parquet", {"image": [IMAGE] * 2, "caption": ["a", "b"], "note": bad}))
        assert items[1].metadata == {"note": "\\udcff\\udcfe"}

    @pytest.mark.parametrize(
        ("columns", "message"),
        [
            ({"image": [b"x"], "words": ["w"]}, "no column caption or .*it has image, words.*caption_column"),
            ({"photo": [b"x"], "caption": ["w"]}, "no column image or .*it has photo, caption.*image_column"),
            ({"image": [1], "caption": ["w"]}, "column image is int64; it must be bytes"),
            ({"image": [b"x"], "caption": [1]}, "column caption is int64; it must be text"),
        ],
    )
    def test_missing_columns_stop_at_once(self, tmp_path, columns, message):
        write_table(tmp_path / "set" / "0.parquet", {"image": [b"x"], "caption": ["c"]})
        write_table(tmp_path / "set" / "1.parquet", columns)
        with pytest.raises(DataError, match=message):
            read(tmp_path / "set")

    def test_two_columns_of_a_name(self, tmp_path):
        table = pa.table([pa.array([IMAGE]), pa.array(["a"]), pa.array(["b"])], names=["image", "caption", "caption"])
        with pytest.raises(DataError, match=r"x\.parquet.*caption"):
            read(write_table(tmp_path / "x.parquet", table))

    def test_read_on_behind_damage(self, tmp_path):
        images = [noise(40, 40, index) for index in range(200)]
        path = write_table(
            tmp_path / "set" / "0.parquet", {"image": images, "caption": ["c"] * 200},
            row_group_size=20, compression="gzip", use_dictionary=False,
        )  # fmt: skip
        write_table(tmp_path / "set" / "1.parquet", {"image": [IMAGE], "caption": ["c"]})
        content = bytearray(path.read_bytes())
        start = pq.read_metadata(path).row_group(4).column(0).data_page_offset
        content[start : start + 20000] = bytes(20000)
        path.write_bytes(content)
        items = read(tmp_path / "set", partition_size=70)
        assert [item.key for item in items] == [*(f"set/0.parquet#{row}" for row in range(200)), "set/1.parquet#0"]
        lost = [number for number, item in enumerate(items) if isinstance(item, Rejected)]
        assert lost == list(range(80, 100))
        assert {item.reason for item in items if isinstance(item, Rejected)} == {Reason.DAMAGED_FILE}
        kept = [item.image for item in items if isinstance(item, Record)]
        assert kept == [*images[:80], *images[100:], IMAGE]
        path.write_bytes(content[:1000])
        assert reasons(read(tmp_path / "set")) == ["damaged_file", ["c"]]

    @pytest.mark.timeout(300)
    def test_pipes(self, tmp_path):
        write_table(tmp_path / "set" / "0.parquet", {"image": [IMAGE], "caption": ["c"]})
        os.mkfifo(tmp_path / "set" / "1.parquet")
        assert reasons(read(tmp_path / "set")) == [["c"], "unreadable"]

    def test_limits(self, tmp_path):
        columns = {
            "image": [IMAGE, IMAGE, IMAGE, IMAGE, bytes(2**20 + 1)],
            "caption": ["fits", "x " * 60, "w" * 21, "fits", "fits"],
            "note": ["", "", "", "n" * 1100, ""],
        }
        path = write_table(tmp_path / "x.parquet", columns)
        limits = LimitsConfig(max_image_mb=1, max_caption_characters=100, max_word_characters=20, max_metadata_kb=1)
        assert reasons(read(path, limits=limits)) == [["fits"], *["too_large"] * 4]

    def test_partitions_end_with_row_groups(self, tmp_path):
        write_table(tmp_path / "x.parquet", {"image": [IMAGE] * 100, "caption": ["c"] * 100}, row_group_size=7)
        source = open_source(tmp_path / "x.parquet")
        assert [(one.start, one.stop) for one in partitions(source)] == [
            (0, 21),
            (21, 42),
            (42, 63),
            (63, 84),
            (84, 100),
        ]
        known = write_known(tmp_path / "known.parquet.old", scan(source))
        found = source.partitions(known)
        assert (list(found.new), list(found.gone), list(found.changed)) == ([], [], [])

    def test_large_rows_are_read_one_by_one(self, tmp_path):
        """Repeated values take no room in the file: it has 40 kB, and its rows 480 MB."""
        captions = pa.array([["w " * 5_000] * 1_000] * 16, pa.list_(pa.string()))
        images = pa.array([bytes(2**23)] * 32 + [IMAGE] * 16, pa.binary())
        columns = {"image": images, "caption": pa.concat_arrays([pa.array([["x"]] * 32), captions])}
        path = write_table(tmp_path / "x.parquet", columns, compression="zstd")
        before, most = pa.total_allocated_bytes(), 0
        limits, items = LimitsConfig(max_image_mb=1), []
        source = open_source(path, limits=limits)
        for item in source.scan(partitions(source)[0]):
            most = max(most, pa.total_allocated_bytes() - before)
            items.append(item)
        assert reasons(items) == ["too_large"] * 48
        assert most < 150e6

    def test_captions_together_are_limited(self, tmp_path):
        columns = {"image": [IMAGE] * 3, "caption": [["w " * 400] * 2, ["w " * 400] * 3, ["w " * 600]]}
        path = write_table(tmp_path / "x.parquet", columns)
        items = read(path, limits=LimitsConfig(max_captions_kb=2, max_word_characters=1))
        assert reasons(items) == [["w " * 399 + "w"] * 2, "too_large", ["w " * 599 + "w"]]
        assert "max_captions_kb" in details(items)[0]

    def test_row_groups_far_larger_than_their_bytes_are_rejected(self, tmp_path, monkeypatch):
        monkeypatch.setattr(parquet, "_CHUNK_BYTES", 2**20)
        pages = {"compression": "zstd", "use_dictionary": False, "row_group_size": 4}
        large = [bytes(2**20)] * 4
        noisy = [os.urandom(2**20) for _ in range(4)]
        columns: dict = {"image": [IMAGE] * 4 + large + noisy + [IMAGE] * 8}
        columns["caption"] = ["c"] * 12 + ["w " * 2**18] * 4 + ["c"] * 4
        source = open_source(write_table(tmp_path / "x.parquet", columns, **pages))
        assert reasons(scan(source)) == [["c"]] * 4 + ["too_large"] * 4 + [["c"]] * 4 + ["too_large"] * 4 + [["c"]] * 4
        before, most = pa.total_allocated_bytes(), 0
        write_table(tmp_path / "y.parquet", {"image": large, "caption": ["c"] * 4}, **pages)
        source = open_source(tmp_path / "y.parquet")
        for _ in source.scan(partitions(source)[0]):
            most = max(most, pa.total_allocated_bytes() - before)
        assert most < 2**20

    def test_row_groups_are_streamed(self, tmp_path):
        path = tmp_path / "x.parquet"
        schema = pa.schema([("image", pa.binary()), ("caption", pa.string())])
        with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
            for index in range(8):
                rows = {"image": [os.urandom(100_000)] * 64, "caption": [f"{index}"] * 64}
                writer.write_table(pa.table(rows, schema))
        source = open_source(path)
        before, most = pa.total_allocated_bytes(), 0
        for partition in partitions(source):
            for item in source.scan(partition):
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
    write_table(tmp_path / "x.parquet", {"image": [IMAGE], "caption": [caption]})
    limits = LimitsConfig(max_caption_characters=200_000)
    for name in ("beside", "jsonl", "csv", "x.tar", "x.parquet"):
        assert [item.captions for item in read(tmp_path / name, limits=limits)] == [[caption.strip()]], name
        assert reasons(read(tmp_path / name)) == ["too_large"], name


@pytest.mark.parametrize("layout", ["images", "x.tar", "x.tgz", "x.parquet", "x.arrow", "mds"])
def test_images_that_are_gone_after_the_scan(tmp_path, layout):
    def write(num: int) -> None:
        columns = {"image": [IMAGE] * num, "caption": ["x"] * num}
        members = [member for number in range(num) for member in sample(f"{number}", IMAGE, b"x")]
        shutil.rmtree(tmp_path / layout, ignore_errors=True)
        if layout == "images":
            write_folder(tmp_path / layout, num)
        elif layout == "mds":
            samples = [{"image": IMAGE, "caption": "x"}] * num
            write_mds(tmp_path / layout, {"image": "bytes", "caption": "str"}, samples)
        elif layout == "x.parquet":
            write_table(tmp_path / layout, columns, row_group_size=2)
        elif layout == "x.arrow":
            with pa.ipc.new_stream(tmp_path / layout, pa.table(columns).schema) as stream:
                stream.write_table(pa.table(columns), max_chunksize=2)
        else:
            tar = write_tar(tmp_path / "written", members).read_bytes()
            (tmp_path / layout).write_bytes(gzip.compress(tar) if layout == "x.tgz" else tar)

    write(8)
    source = open_source(tmp_path / layout)
    (partition,) = partitions(source)
    locations = [item.location for item in source.scan(partition)]
    write(3)
    with pytest.raises(DataError, match=layout.partition(".")[0]):
        list(source.images(partition, locations))


@pytest.mark.parametrize("layout", ["images", "x.tar", "x.parquet", "x.arrow"])
def test_a_file_that_is_gone_since_the_listing_is_no_rejection(tmp_path, layout):
    columns = {"image": [IMAGE], "caption": ["x"]}
    root = tmp_path / "set"
    if layout == "images":
        write_folder(root, 2)
    elif layout == "x.tar":
        root.mkdir()
        write_tar(root / layout, sample("0", IMAGE, b"x"))
    else:
        write_table(root / layout, columns)
    source = open_source(root)
    (partition,) = partitions(source)
    root.rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="0000.png" if layout == "images" else layout):
        list(source.scan(partition))


class FailingDisk(io.FileIO):
    """A file whose first read(2) yields a part, and whose second fails."""

    read = io.RawIOBase.read

    def readinto(self, buffer):
        if self.tell():
            raise OSError(errno.EIO, "Input/output error")
        return super().readinto(memoryview(buffer)[:10])


def test_a_disk_that_fails_after_a_part_of_a_file(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(IMAGE)

    def open_failing(descriptor, _, size):
        return io.BufferedReader(FailingDisk(descriptor), size) if size else FailingDisk(descriptor)

    monkeypatch.setattr(os, "fdopen", open_failing)
    with pytest.raises(MachineError, match=r"a\.png: Input/output error"):
        read_file(str(tmp_path / "a.png"), 2**20)


@pytest.mark.parametrize("write", [lambda folder: write_tar(folder / "0.tar", sample("0", IMAGE, b"x")),
                                   lambda folder: write_folder(folder, 1)], ids=["tar", "folder"])  # fmt: skip
def test_known_files_below_a_folder_that_looks_like_a_column(tmp_path, write):
    for name in ("set", "version=3"):
        (tmp_path / name).mkdir()
    write(tmp_path / "set")
    source = open_source(tmp_path / "set")
    known = write_known(tmp_path / "version=3" / "known.parquet", scan(source))
    found = source.partitions(known)
    assert (list(found.new), list(found.gone), list(found.changed)) == ([], [], [])


def test_denied_access_to_a_store_is_no_rejection(monkeypatch):
    def deny(uri, *arguments, **options):
        raise storage.ForbiddenFileError(13, "access is denied", uri)

    monkeypatch.setattr(storage, "read", deny)
    monkeypatch.setattr(storage, "open_file", deny)
    for read_one in (lambda: read_file("s3://b/x.png", 10), lambda: open_file("s3://b/x.tar")):
        with pytest.raises(MachineError, match="x"):
            read_one()


@pytest.mark.parametrize("caption", ["", " \n\t", "\u00a0", "\u200b", "\ufeff\u2060 \u200d"])
def test_a_caption_without_a_visible_character_is_empty(caption):
    assert reasons([make_record("k", b"", caption, {}, Location(file=""))]) == ["empty_caption"]
    assert reasons([make_record("k", b"", [caption, "a\u200db"], {}, Location(file=""))]) == [["a\u200db"]]


def test_metadata_that_is_nested_too_deeply_rejects_its_image_only(tmp_path):
    """Deeper than Python's recursion allows for some callers, and less deep than what its JSON reader takes."""
    nested = '{"text": "x", "a": ' + "[" * 900 + "]" * 900 + "}"
    write_folder(tmp_path / "set", 2)
    (tmp_path / "set" / "0001.txt").unlink()
    (tmp_path / "set" / "0001.json").write_text(nested)
    assert reasons(read(tmp_path / "set")) == [["image 0"], "invalid_json"]
    made = make_record("k", b"", "x", json.loads(nested), Location(file=""))
    assert reasons([made]) == ["invalid_json"]
    (tmp_path / "set" / "metadata.jsonl").write_text('{"file_name": "0000.png", ' + nested[1:])
    with pytest.raises(DataError, match=r"metadata\.jsonl, line 1"):
        read(tmp_path / "set")


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

    def test_archives_and_tables_of_folders_beside_images_are_no_sources(self, tmp_path):
        write_folder(tmp_path, 1)
        (tmp_path / "meta").mkdir()
        (tmp_path / "meta" / "x.json").write_text("{}")
        for name in ("backup.tar.xz", "meta.parquet"):
            (tmp_path / name).write_bytes(b"x")
        assert open_source(tmp_path).kind == "folder"

    def test_keys_of_sources_of_one_name_stay_apart(self, tmp_path):
        for parent in "abc":
            write_folder(tmp_path / parent / "set", 2)
        sources = open_sources([tmp_path / parent / "set" for parent in "abc"])
        assert [source.name for source in sources] == ["set", "set~2", "set~3"]
        keys = [item.key for source in sources for item in scan(source)]
        assert len(set(keys)) == 6

    def test_columns_per_source(self, tmp_path):
        one = write_table(tmp_path / "1.parquet", {"photo": [IMAGE], "TEXT": ["one"]})
        two = write_table(tmp_path / "2.parquet", {"photo": [IMAGE], "caption": ["two"]})
        entries = [{"path": str(one), "caption_column": "TEXT"}, SourceConfig(path=str(two))]
        sources = open_sources(entries, image_column="photo")
        assert [reasons(scan(source)) for source in sources] == [[["one"]], [["two"]]]
        with pytest.raises(DataError, match="captions"):
            open_sources([{"path": str(one), "captions": "TEXT"}])
        with pytest.raises(DataError, match="2026 is no path"):
            open_sources([2026])

    @pytest.mark.timeout(300)
    def test_a_pipe_is_no_source(self, tmp_path):
        for name in ("x", "x.parquet", "x.arrow"):
            os.mkfifo(tmp_path / name)
            with pytest.raises(DataError, match="pipe"):
                open_source(tmp_path / name)

    def test_descriptions_open_nothing(self, tmp_path):
        write_folder(tmp_path / "set", 1)
        source = open_source(tmp_path / "set", partition_size=3, limits=LimitsConfig(max_image_mb=7))
        (tmp_path / "set").rename(tmp_path / "moved")
        assert from_description(json.loads(json.dumps(source.description()))) == source

    def test_the_same_files_twice(self, tmp_path):
        write_folder(tmp_path / "set" / "sub", 2)
        (tmp_path / "tars").mkdir()
        write_tar(tmp_path / "tars" / "x.tar", [])
        (tmp_path / "link").symlink_to(tmp_path / "set")
        for pair in (("set", "set"), ("set", "set/sub"), ("link", "set/sub"), ("tars", "tars/x.tar")):
            with pytest.raises(DataError, match="hold the same files; give them once"):
                open_sources([tmp_path / name for name in pair])

    def test_wildcards_in_names(self, tmp_path, monkeypatch):
        memory, folder = fsspec.filesystem("memory"), tmp_path / "photos [2024]" / "a*b"
        folder.mkdir(parents=True)
        path = write_tar(folder / "what?.tar", sample("0", IMAGE, b"x"))
        memory.pipe_file("/bucket/photos [2024]/a*b/what?.tar", path.read_bytes())
        monkeypatch.chdir(folder)
        try:
            for root in (str(folder), "memory://bucket/photos [2024]/a*b"):
                for name in ("", "/what?.tar", "/*.tar"):
                    assert reasons(read(f"{root}{name}")) == [["x"]]
                with pytest.raises(DataError, match="no file matches"):
                    open_source(f"{root}/[x].tar")
        finally:
            memory.rm("/bucket", recursive=True)
        assert open_source("*.tar").root == str(folder)
        with pytest.raises(DataError, match="no such file"):
            open_source(folder / "none.tar")

    def test_kind_by_content(self, tmp_path):
        write_tar(tmp_path / "one", sample("0", IMAGE, b"x"))
        write_table(tmp_path / "two", {"image": [IMAGE], "caption": ["c"]})
        assert [open_source(tmp_path / name).kind for name in ("one", "two")] == ["webdataset", "parquet"]
