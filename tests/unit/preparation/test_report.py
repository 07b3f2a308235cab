import base64
import io
import json
import re
import shutil
import subprocess
from pathlib import Path

import pyarrow as pa
import pytest
import xxhash
from markupsafe import escape
from PIL import Image

from diffusion.config.loading import from_dict
from diffusion.errors import DataError
from diffusion.preparation.chat_captions import ANSWER_TYPE
from diffusion.preparation.config import PrepareConfig
from diffusion.preparation.layout import part_name, write_table
from diffusion.preparation.records import Partition
from diffusion.preparation.report import NUM_SHOWN, write_report
from diffusion.preparation.scan import Scan
from diffusion.preparation.select import select
from tests.tools.image_files import encode, noise
from tests.tools.metadata_parts import ToySource, image, write_part

CHROMIUM = shutil.which("chromium")
HOSTILE = (
    '<script>document.title="pwned"</script><img src="http://192.0.2.1/x.png" onerror="alert(1)">&"\'$\\$\u202e.png'
)


def report(folder: Path, *parts: list[dict], scores=(), **settings) -> dict:
    """Write metadata, select, and report; a row has the file of its key if that was written."""
    out, sources = str(folder / "out"), [ToySource(str(folder / "images"), f"s{i or ''}") for i in range(len(parts))]
    for number, rows in enumerate(parts):
        columns = {name: [row.pop(name, None) for row in rows] for name in scores}
        write_part(out, number, rows, **columns)
    partitions = [Partition(number=i, source=i) for i in range(len(parts))]
    scan = Scan(sources, partitions)
    values = {"sources": ["a"], "out": out, "buckets": {"edges": [64, 256, 1024]}, **settings}
    select(out, from_dict(PrepareConfig, values, "test"), scan)
    return write_report(out, scan)


def two_parts() -> tuple[list[dict], list[dict]]:
    first = [
        image(1, width=100, height=80, aesthetic=5.0, language="en"),
        image(2, width=300, height=400, aesthetic=6.0, language="en", bytes=3000),
        image(3, width=100, height=80, aesthetic=2.0, language="de"),
        image(4, width=None, height=None, bytes=None, xxh128=None, phash=None, sharpness=None, captions=["a dog"],
              reason="undecodable", detail="broken"),
    ]  # fmt: skip
    second = [image(10 + i, width=1500 + i, height=1100) for i in range(20)]
    copy = image(40, width=90, height=80, xxh128=first[0]["xxh128"], phash=first[0]["phash"])
    return first, [*second, copy]


def test_captions_of_a_server_are_counted_and_shown(tmp_path):
    numbers = {"requests": 2, "failures": 1, "prompt_tokens": 10, "completion_tokens": 5, "dollars": 0.01}
    outcomes = ["captioned", "captioned", "refused", None, "refused", None]
    captions = [["kept", "a", "same"], ["same"], ["kept"], [], [], []]
    generated = [[1, 2], [0], None, None, None, None]
    details = {"captioned": "", "refused": "I'm sorry"}
    answers = [outcome and {"outcome": outcome, **numbers, "detail": details[outcome]} for outcome in outcomes]
    columns = {"captions": captions, "generated_captions": generated, "answers": pa.array(answers, ANSWER_TYPE)}
    write_table(str(tmp_path / "out/scores/captions" / part_name(0)), pa.table(columns))
    rows = [image(i, width=100, height=80) for i in range(4)]
    rows[0] |= {"reason": "missing_caption", "captions": [], "detail": "no 0.txt"}
    rows += [image(i, width=100, height=80, captions=[], reason="missing_caption") for i in (4, 5)]
    written = report(tmp_path, rows, [image(9, width=100, height=80)])
    assert written["reasons"] == {"caption_refused": 1, "missing_caption": 1}
    assert [one["detail"] for one in written["shown_rejected"]["caption_refused"]] == ["I'm sorry"]
    found, kept = written["captions"], {one["key"]: one for one in written["shown_kept"]["train/64-256"]}
    assert [(kept[key]["caption"], kept[key]["detail"]) for key in ("s/0", "s/9")] == [("kept", ""), ("a red dog", "")]
    assert found["outcomes"] == {"captioned": 2, "refused": 2}
    assert (found["requests"], found["prompt_tokens"]) == (8, 40)
    assert found["dollars_per_1000_images"] == pytest.approx(10)
    shown = {(one["outcome"], *one["captions"], one["detail"]) for one in found["examples"]}
    assert shown == {("captioned", "a", "same", ""), ("captioned", "same", ""), ("refused", "I'm sorry")}
    page = (tmp_path / "out" / "report.html").read_text()
    assert "I&#39;m sorry" in page and "dollars per 1,000 images" in page


SETTINGS = {"filters": {"min_aesthetic": 4.5, "missing": "keep"}, "duplicates": {}}


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    return report(tmp_path_factory.mktemp("counted"), *two_parts(), scores=("aesthetic", "language"), **SETTINGS)


def test_counts(counted):
    assert counted["kept"] == {"images": 22, "bytes": 24_000}
    assert counted["rejected"] == {"images": 3, "bytes": 2000}
    assert counted["reasons"] == {"aesthetic": 1, "duplicate": 1, "undecodable": 1}
    assert counted["sources"] == {"s": {"": 2, "aesthetic": 1, "undecodable": 1}, "s1": {"": 20, "duplicate": 1}}
    assert {name: counts["images"] for name, counts in counted["buckets"].items()} == {
        "train/64-256": 1,
        "train/256-1024": 1,
        "train/1024-up": 20,
    }
    assert list(counted["buckets"]) == ["train/64-256", "train/256-1024", "train/1024-up"], "by number"
    assert counted["values"]["language"] == {"en": {"kept": 2, "rejected": 0}, "de": {"kept": 0, "rejected": 1}}
    assert counted["duplicates"] == [{"key": "s/40", "of": "s/1", "reason": "duplicate"}]


def test_histograms_hold_every_number_once(counted):
    histograms = counted["histograms"]
    assert set(histograms) == {"shorter_side", "aspect_ratio", "caption_length", "bytes", "sharpness", "aesthetic"}
    for histogram in histograms.values():
        assert histogram["edges"] == sorted(histogram["edges"])
        assert sum(histogram["kept"]) + sum(histogram["rejected"]) + histogram["missing"] == 25
    aesthetic = histograms["aesthetic"]
    assert (aesthetic["edges"][0], aesthetic["edges"][-1], aesthetic["missing"]) == (2.0, 6.0, 22)
    assert (aesthetic["rejected"][0], aesthetic["kept"][23], aesthetic["kept"][-1]) == (1, 1, 1)
    sides = histograms["shorter_side"]
    assert (sides["edges"][0], sides["edges"][-1], sides["missing"]) == (80, 1100, 1)


def test_an_empty_file_is_in_the_first_bin(tmp_path):
    parts = [image(1), image(2, bytes=0, width=None, height=None, reason="undecodable"), image(3, bytes=3000)], []
    histogram = report(tmp_path, *parts)["histograms"]["bytes"]
    assert (histogram["kept"][-1], histogram["rejected"][0], histogram["missing"]) == (1, 1, 0)


def test_few_images_are_shown_those_with_the_smallest_hashes(counted):
    shown = [one["key"] for one in counted["shown_kept"]["train/1024-up"]]
    keys = sorted((f"s/{10 + i}" for i in range(20)), key=xxhash.xxh3_64_intdigest)
    assert shown == keys[:NUM_SHOWN]
    [broken] = counted["shown_rejected"]["undecodable"]
    assert broken == {"key": "s/4", "width": None, "height": None, "caption": "a dog", "detail": "broken"}


def test_removed_images_are_counted_and_not_shown(tmp_path):
    first, second = two_parts()
    report(tmp_path, first, second, scores=("aesthetic", "language"), **SETTINGS)
    out = tmp_path / "out"
    first, second = two_parts()
    gone = [first[0] | {"reason": "removed", "key": "", "key_hash": 0}, *first[1:]]
    for row in gone:
        row.pop("aesthetic", None), row.pop("language", None)
    write_part(out, 0, gone)
    partitions = [Partition(number=i, source=i) for i in range(2)]
    again = write_report(str(out), Scan([ToySource("", "s"), ToySource("", "s1")], partitions))
    assert again["reasons"]["removed"] == 1
    assert "removed" not in again["shown_rejected"]
    assert again["duplicates"] == []
    assert '"s/1"' not in (out / "report.json").read_text()


def test_without_a_selection_and_without_images(tmp_path):
    with pytest.raises(DataError, match="select"):
        (tmp_path / "out/metadata").mkdir(parents=True)
        write_report(str(tmp_path / "out"), Scan([], []))
    empty = report(tmp_path, [image(1, reason="undecodable", width=None, height=None, captions=[])])
    assert (empty["kept"]["images"], empty["buckets"]) == (0, {})


def hostile_report(folder: Path) -> dict:
    """A report whose names, details and values are hostile."""
    contents = {"red": noise(60, 70), HOSTILE: encode(Image.new("RGB", (70, 90), "red")), "rejected": b"not an image"}
    (folder / "images").mkdir(parents=True)
    rows = [
        image(1, key=HOSTILE, file="1.png", width=70, height=90, score=1.0, language=HOSTILE),
        image(2, key="red", file="2.png", width=60, height=70, score=2.0, language="en"),
        image(3, key="rejected", file="3.png", xxh128=None, reason=HOSTILE, detail=HOSTILE, score=3.0, language="en"),
        image(4, key="copy", file="4.png", width=60, height=70, score=3.0, language="en"),
    ]
    for row, key in zip(rows, (HOSTILE, "red", "rejected", "red"), strict=True):
        (folder / "images" / row["file"]).write_bytes(contents[key])
        if row["xxh128"]:
            row["xxh128"] = xxhash.xxh3_128_hexdigest(contents[key])
    (folder / "images" / "4.png").unlink()
    rows[3]["phash"] = rows[1]["phash"]
    buckets = {"edges": [32]}
    return report(folder, rows, scores=("score", "language"), duplicates={}, buckets=buckets)


def test_the_page_is_self_contained_and_escapes_everything(tmp_path):
    numbers = hostile_report(tmp_path)
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert re.findall(r"<img[^>]*src=\"(?!data:)", page) == []
    assert str(escape(HOSTILE)) in page
    [pair] = numbers["duplicates"]
    assert {pair["key"], pair["of"]} == {"red", "copy"}
    images = [
        Image.open(io.BytesIO(base64.b64decode(data))) for data in re.findall(r"data:image/jpeg;base64,([^\"]+)", page)
    ]
    assert len(images) == 3, "two images in galleries, and one of them beside its duplicate, whose file is gone"
    assert json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8")) == numbers


def test_only_images_that_the_scan_decoded_are_decoded_for_the_page(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "1.jpg").write_bytes(noise(60, 70))
    for width, shown in ((60, 1), (None, 0)):
        row = image(1, width=width, height=width, reason="too_large", xxh128=xxhash.xxh3_128_hexdigest(noise(60, 70)))
        report(tmp_path, [row])
        assert (tmp_path / "out" / "report.html").read_text().count("data:image/jpeg") == shown


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium: apt-get install chromium")
def test_a_browser_shows_the_page_runs_nothing_and_asks_nobody(tmp_path):
    hostile_report(tmp_path)
    log = tmp_path / "network.json"
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
               "--disable-component-update", "--no-first-run", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom",
               f"--log-net-log={log}", "--enable-logging=stderr",
               (tmp_path / "out" / "report.html").as_uri()]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    title = re.search("<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title is not None
    assert title[1] == "Prepared data: out"
    assert "CONSOLE" not in done.stderr
    assert "192.0.2.1" not in log.read_text(encoding="utf-8", errors="replace")
    assert done.stdout.count("<img ") >= 3
