import base64
import io
import json
import re
import shutil
import subprocess

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from markupsafe import escape
from PIL import Image

from diffusion.config.loading import from_dict
from diffusion.errors import DataError
from diffusion.preparation.config import DuplicatesConfig, FiltersConfig
from tests.tools.preparing import prepare
from diffusion.preparation.report import NUM_SHOWN, summarize, write_report
from tests.tools.image_files import encode, noise

CHROMIUM = shutil.which("chromium")
HOSTILE = (
    '<script>document.title="pwned"</script><img src="http://192.0.2.1/x.png" onerror="alert(1)">&"\'$\\$\u202e.png'
)


def row(key, reason="", **values):
    base = {"key": key, "source": key.split("/")[0], "split": "" if reason else "train",
            "bucket": "" if reason else "64-up", "width": 100, "height": 80, "bytes": 1000, "reason": reason,
            "detail": "", "caption_length": 20}  # fmt: skip
    return base | values


def write_facts(path, rows, **columns):
    table = pa.Table.from_pylist(rows)
    for name, values in columns.items():
        table = table.append_column(name, values)
    pq.write_table(table, path)
    return path


@pytest.fixture
def facts(tmp_path):
    """Two partitions whose columns differ."""
    first = [
        row("a/1", aesthetic=5.0, language="en"),
        row("a/2", aesthetic=6.0, language="en", split="validation", bucket="256-512", bytes=3000),
        row("a/3", "aesthetic", aesthetic=2.0, language="de", detail="2 < 4.5"),
        row("a/4", "undecodable", width=0, height=0, caption_length=0, aesthetic=None, language=None),
    ]
    second = [row(f"b/{i}", width=50 + i, height=50, bucket="1024-up") for i in range(20)]
    second += [row("b/20", "near_duplicate", detail="of a/1"), row("b/21", "duplicate", detail="of a/2")]
    empty = pa.nulls(len(second))
    return [write_facts(tmp_path / "1.parquet", first), write_facts(tmp_path / "2.parquet", second, aesthetic=empty)]


def test_counts(facts):
    report = summarize(facts)
    assert (report.kept.images, report.kept.bytes, report.refused.images) == (22, 24_000, 4)
    assert report.reasons == {"aesthetic": 1, "duplicate": 1, "near_duplicate": 1, "undecodable": 1}
    assert report.sources["a"] == {"": 2, "aesthetic": 1, "undecodable": 1}
    assert {name: counts.images for name, counts in report.buckets.items()} == {
        "train/64-up": 1,
        "train/1024-up": 20,
        "validation/256-512": 1,
    }
    assert list(report.buckets) == ["train/64-up", "train/1024-up", "validation/256-512"]
    assert report.values == {"language": {"en": {"kept": 2, "refused": 0}, "de": {"kept": 0, "refused": 1}}}
    assert {(pair.key, pair.of, pair.reason) for pair in report.duplicates} == {
        ("b/20", "a/1", "near_duplicate"),
        ("b/21", "a/2", "duplicate"),
    }


def test_histograms_hold_every_number_once(facts):
    report = summarize(facts)
    assert set(report.histograms) == {"shorter_side", "aspect_ratio", "caption_length", "bytes", "aesthetic"}
    for histogram in report.histograms.values():
        assert histogram.edges == sorted(histogram.edges)
        assert sum(histogram.kept) + sum(histogram.refused) + histogram.missing == 26
    aesthetic = report.histograms["aesthetic"]
    assert (aesthetic.edges[0], aesthetic.edges[-1], aesthetic.missing) == (2.0, 6.0, 23)
    assert (aesthetic.refused[0], aesthetic.kept[24], aesthetic.kept[-1]) == (1, 1, 1)
    sides = report.histograms["shorter_side"]
    assert (sides.edges[0], sides.edges[-1], sides.missing) == (50, 80, 1)


def test_samples_are_few_the_same_in_any_order_and_only_what_can_be_read(facts):
    report = summarize(facts)
    assert len(report.shown_kept["train/1024-up"]) == NUM_SHOWN
    assert summarize(facts[::-1]) == report
    assert set(report.shown_refused) == {"aesthetic", "undecodable", "duplicate", "near_duplicate"}
    assert set(summarize(facts, readable={"a/3", "b/20"}).shown_refused) == {"aesthetic", "near_duplicate"}


def test_no_facts_and_wrong_files(tmp_path, facts):
    assert summarize([]).kept.images == 0
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 no")
    pq.write_table(pa.table({"key": ["a"]}), tmp_path / "other.parquet")
    for name, message in (("damaged", "cannot be read"), ("other", "no column source"), ("absent", "cannot be read")):
        with pytest.raises(DataError, match=message):
            summarize([tmp_path / f"{name}.parquet"])


def hostile_report(folder):
    """A report whose names, details and values are hostile; returns what it read."""
    rows = [
        row(HOSTILE, source=HOSTILE, bucket="64-up", **{"score <b>$x$": 1.0}, language=HOSTILE),
        row("red", **{"score <b>$x$": 2.0}, language="en"),
        row("refused", HOSTILE, detail=HOSTILE, **{"score <b>$x$": 3.0}, language="en"),
        row("copy", "duplicate", detail="of red", **{"score <b>$x$": 3.0}, language="en"),
    ]
    contents = {"red": noise(60, 40), HOSTILE: encode(Image.new("RGB", (40, 90), "red")), "refused": b"not an image"}
    asked = []

    def read(key):
        asked.append(key)
        return contents.get(key)

    write_report(folder, [write_facts(folder / "facts.parquet", rows)], read, title=f"Report {HOSTILE}")
    return asked


def test_the_page_is_self_contained_and_escapes_everything(tmp_path):
    assert {HOSTILE, "red", "refused", "copy"} <= set(hostile_report(tmp_path))
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "<b>" not in page
    assert re.findall(r"<img[^>]*src=\"(?!data:)", page) == []
    assert str(escape(HOSTILE)) in page
    images = [
        Image.open(io.BytesIO(base64.b64decode(data))) for data in re.findall(r"data:image/jpeg;base64,([^\"]+)", page)
    ]
    assert len(images) == 3, "two kept images, and one of them beside its duplicate"
    numbers = json.loads((tmp_path / "report.json").read_text())
    assert numbers["kept"] == {"images": 2, "bytes": 2000}
    assert numbers["sources"][HOSTILE] == {"": 1}


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium: apt-get install chromium")
def test_a_browser_shows_the_page_runs_nothing_and_asks_nobody(tmp_path):
    hostile_report(tmp_path)
    log = tmp_path / "network.json"
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
               "--disable-component-update", "--no-first-run", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom",
               f"--log-net-log={log}", "--enable-logging=stderr", (tmp_path / "report.html").as_uri()]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    title = re.search("<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title is not None
    assert title[1].startswith("Report &lt;script&gt;")
    assert "CONSOLE" not in done.stderr
    assert "192.0.2.1" not in log.read_text(encoding="utf-8", errors="replace")
    assert done.stdout.count("<img ") >= 3


def test_of_a_finished_data_set(tmp_path):
    source = tmp_path / "images"
    source.mkdir()
    for i in range(12):
        (source / f"{i:02d}.png").write_bytes(noise(40 + i, 40, i))
        (source / f"{i:02d}.txt").write_text("x" if i == 3 else f"image {i}")
    (source / "copy.png").write_bytes((source / "05.png").read_bytes())
    (source / "copy.txt").write_text("image 5 again")
    (source / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (source / "broken.txt").write_text("a broken image")
    filters = from_dict(FiltersConfig, {"min_caption_words": 2}, "test")
    out = tmp_path / "prepared"
    prepare([source], out, edges=[32], filters=filters, duplicates=DuplicatesConfig(), num_workers=1, report=True)
    report = summarize(sorted((out / "facts").glob("*.parquet")))
    assert report.kept.images == 11
    assert report.reasons == {"caption_words": 1, "duplicate": 1, "undecodable": 1}
    [pair] = report.duplicates
    assert {pair.key, pair.of} == {"images/copy.png", "images/05.png"}
    assert {one.key for one in report.shown_kept["train/32-up"]} == {
        f"images/{i:02d}.png" for i in range(12) if i not in (3, 5)
    } | {pair.of}
    page = (out / "report.html").read_text(encoding="utf-8")
    shown = 1 + 11 + 2 + 2  # Histograms, kept images, one refused by its caption and the duplicate, the pair of it.
    assert page.count("<img ") == shown
    assert json.loads((out / "report.json").read_text())["reasons"] == report.reasons
