"""How much memory a preparation takes at its peak, in processes of its own."""

import os
import subprocess
import sys
from pathlib import Path

from tests.picture_files import noise, sample, write_tar
from tests.training_runs import ROOT, environment

FEW, MANY = 300, 3000
MEGABYTE = 2**20


def peak_bytes(source: Path, out: Path) -> int:
    """Prepare; return the most memory that a process of it had at a time."""
    options = [
        "--edges",
        "16",
        "--partition-size",
        "100",
        "--shard-mb",
        "1",
        "--workers",
        "1",
        "--quiet",
        "--no-report",
    ]
    command = [sys.executable, "scripts/prepare.py", str(source), str(out), *options]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_maxrss * 1024


def test_ten_times_as_many_pictures_take_no_more(tmp_path):
    pictures = [noise(52, 50, number) for number in range(100)]
    for count in (FEW, MANY):
        folder, tars = tmp_path / f"folder-{count}", tmp_path / f"tars-{count}"
        folder.mkdir()
        tars.mkdir()
        for part in range(count // 100):
            members = [member for i, data in enumerate(pictures) for member in sample(f"{i}", data, b"x")]
            write_tar(tars / f"{part}.tar", members)
            for i, data in enumerate(pictures):
                (folder / f"{part}-{i}.png").write_bytes(data)
                (folder / f"{part}-{i}.txt").write_bytes(b"x")
    for kind in ("tars", "folder"):
        few, many = (
            peak_bytes(tmp_path / f"{kind}-{count}", tmp_path / f"out-{kind}-{count}") for count in (FEW, MANY)
        )
        assert many - few < 4 * MEGABYTE, (kind, few, many)
