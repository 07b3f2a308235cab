"""Hostile sources: nothing but whole images comes through a preparation."""

import os
import pickle
import re
import subprocess
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image, PngImagePlugin

from diffusion.preparation.config import LimitsConfig
from tests.tools.image_files import encode, noise, sample, write_folder, write_mds, write_table, write_tar
from tests.tools.preparing import prepare, read_samples
from tests.tools.training_runs import ROOT, environment

pytestmark = pytest.mark.slow


def reasons_of(out: Path) -> dict[str, str]:
    """Reason of each image that the scan rejected, by key."""
    rows = [row for path in sorted((out / "metadata").iterdir()) for row in pq.read_table(path).to_pylist()]
    return {row["key"]: row["reason"] for row in rows if row["reason"]}


# Files


def many_scans(number: int, side: int) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    data = encode(Image.radial_gradient("L").resize((side, side)).convert("RGB"), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * number + b"\xff\xd9"


def write_hostile_files(folder: Path) -> dict[str, str]:
    """Write images that go wrong, each in its way; return the expected reason of each, empty if it is kept."""
    folder.mkdir()
    png, jpeg = noise(24, 24), noise(24, 24, image_format="JPEG")
    text = PngImagePlugin.PngInfo()
    text.add_text("comment", "x" * 70_000_000, zip=True)
    huge = bytearray(encode(Image.new("RGB", (16, 16)), "BMP"))
    huge[18:26] = (60_000).to_bytes(4, "little") * 2
    contents = {
        "empty.png": (b"", "undecodable"),
        "page.jpg": (b"<html>404</html>", "undecodable"),
        "drawing.png": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "undecodable"),
        "archive.jpg": (b"\x1f\x8b\x08" + bytes(60), "undecodable"),
        "header only.jpg": (jpeg[:20], "undecodable"),
        "cut.jpg": (jpeg[:-200], "undecodable"),
        "cut.png": (png[:-200], "undecodable"),
        "flipped.png": (png[:80] + bytes([png[80] ^ 1]) + png[81:], "undecodable"),
        "float.tiff": (encode(Image.new("F", (24, 24)), "TIFF"), "undecodable"),
        "huge.bmp": (bytes(huge), "too_large"),
        "scans.jpg": (many_scans(2000, 64), "too_large"),
        "script.jpg": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "undecodable"),
        "comment.png": (encode(Image.new("RGB", (24, 24)), pnginfo=text), "undecodable"),
        "cmyk.jpg": (encode(Image.new("CMYK", (24, 24)), "JPEG"), ""),
        "png.jpg": (png, ""),
        "trailing.jpg": (jpeg + b"PK\x03\x04" * 100, ""),
        "n" * 246 + ".png": (png, ""),
        "\u202egnp.png": (png, ""),
        "\u00e9.png": (png, ""),
    }
    expected = {}
    for name, (content, reason) in contents.items():
        (folder / name).write_bytes(content)
        (folder / name).with_suffix(".txt").write_text(f"of {name}")
        expected[name] = reason
    (folder / "giant.png").write_bytes(png)
    (folder / "giant.txt").write_bytes(b"word " * 2_000_000)
    (folder / "nested.png").write_bytes(png)
    (folder / "nested.json").write_text("[" * 100_000)
    (folder / "loop.png").symlink_to(folder / "loop.png")
    (folder / "loop.txt").write_text("x")
    return expected | {"giant.png": "too_large", "nested.png": "invalid_json", "loop.png": "unreadable"}


def test_each_hostile_file_is_one_rejection_with_its_reason(tmp_path):
    expected = write_hostile_files(tmp_path / "set")
    began = time.process_time()
    manifest = prepare([tmp_path / "set"], tmp_path / "out", edges=[16])
    assert time.process_time() - began < 20
    reasons = reasons_of(tmp_path / "out")
    kept = {one["key"]: one for listed in read_samples(tmp_path / "out").values() for one in listed}
    found = {**{key[4:]: "" for key in kept}, **{key[4:]: reason for key, reason in reasons.items()}}
    assert found == expected
    assert (manifest.seen, manifest.kept) == (len(expected), len(kept))
    for key, one in kept.items():
        assert one["image"] == (tmp_path / key).read_bytes()


def test_a_jpeg_with_thousands_of_scans_ends_at_once(tmp_path):
    """Pillow takes minutes for it."""
    (tmp_path / "set").mkdir()
    write_folder(tmp_path / "set", 1)
    (tmp_path / "set" / "x.jpg").write_bytes(many_scans(2000, 1500))
    (tmp_path / "set" / "x.txt").write_text("x")
    prepare([tmp_path / "set"], tmp_path / "warm", edges=[16], limits=LimitsConfig(max_image_mb=100))
    began = time.process_time()
    prepare([tmp_path / "set"], tmp_path / "out", edges=[16])
    assert time.process_time() - began < 5
    assert reasons_of(tmp_path / "out") == {"set/x.jpg": "too_large"}


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_nothing_is_executed(tmp_path):
    mark = tmp_path / "executed"
    payload, script = pickle.dumps(Payload(mark)), f"import os\nos.mkdir({str(mark)!r})\n"
    folder = tmp_path / "set"
    write_folder(folder, 3)
    for name in ("set.py", "__init__.py", "conftest.py", "sitecustomize.py", "dataset.py"):
        (folder / name).write_text(script)
    (folder / "0001.pkl").write_bytes(payload)
    members = [*sample("1", noise(20, 20), b"x"), ("1.pkl", payload), ("1.pyd", payload), ("1.npy", payload)]
    write_tar(tmp_path / "x.tar", members)
    write_table(tmp_path / "y.parquet", {"jpg": [noise(20, 20, 9)], "caption": ["x"], "embedding": [payload]})
    columns = {"image": "bytes", "caption": "str", "extra": "pkl"}
    write_mds(tmp_path / "mds", columns, [{"image": noise(20, 20, 10), "caption": "x", "extra": Payload(mark)}])
    assert not mark.exists()
    manifest = prepare(
        [folder, tmp_path / "x.tar", tmp_path / "y.parquet", tmp_path / "mds"], tmp_path / "out", edges=[16]
    )
    assert not mark.exists()
    assert (manifest.seen, manifest.kept) == (6, 6)


# The terminal


def run(python: str, *arguments) -> "subprocess.CompletedProcess[bytes]":
    command = [python, "scripts/prepare.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, check=False, timeout=600)


CONTROL = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]|\xe2\x80\xae")


def test_control_characters_of_names_do_not_reach_the_terminal(python, tmp_path):
    folder, out = tmp_path / "se\x1b[31mt\u202e", tmp_path / "out"
    write_folder(folder, 3)
    for name in ("a\x1b[2J\x07.png", "b\r\x7f\n.png", "c\u009b.png", "\u202edd.png"):
        (folder / name).write_bytes(b"x")
        (folder / name).with_suffix(".txt").write_text("\x1b[2J")
    done = run(python, folder, out, "--edges", 16, "--workers", 1)
    assert done.returncode == 0, done.stderr
    assert b"undecodable" in done.stdout
    again = run(python, folder, out, "--edges", 16, "--workers", 1)
    others = [
        run(python, folder, out, "--seed", 3),
        run(python, folder, "--dry-run"),
        run(python, tmp_path / "no\x1bne", out),
    ]
    (folder / "a\x1b[2J\x07.png").write_bytes(b"y")
    others.append(run(python, folder, out, "--edges", 16))
    assert [one.returncode for one in others] == [2, 0, 2, 2]
    for one in (done, again, *others):
        bars = one.stderr.replace(b"\r", b"").replace(b"\x1b[A", b"")  # tqdm's own
        assert not CONTROL.search(one.stdout), one.stdout
        assert not CONTROL.search(bars), bars
