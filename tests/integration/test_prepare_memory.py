"""How much memory a whole preparation takes at its peak, in processes of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.image_files import noise, sample, write_tar
from tests.tools.training_runs import ROOT, environment

pytestmark = pytest.mark.slow

FEW, MANY = 300, 3000

MEASURING = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
"""A process of its own between: what a program had when it became another one counts, and the tests have much."""

MEGABYTE = 2**20


def peak_bytes(sources: list[Path], out: Path) -> int:
    """Prepare; return the most memory that a process of it had at a time."""
    options = ["--edges", "16", "--partition-size", "100", "--shard-mb", "1", "--window-mb", "2", "--workers", "1",
               "--quiet", "--no-report"]  # fmt: skip
    command = [
        sys.executable,
        "-c",
        MEASURING,
        sys.executable,
        "scripts/prepare.py",
        *map(str, sources),
        str(out),
        *options,
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, check=True)
    return int(done.stdout.splitlines()[-1]) * 1024


def test_ten_times_as_many_images_take_no_more(tmp_path):
    """A window of 2 MiB of 48: the bytes of tars or of a folder would be 21 more."""
    images = [noise(52, 50, number) for number in range(100)]
    members = [member for i, data in enumerate(images) for member in sample(f"{i}", data, b"x")]

    def peak(count: int) -> int:
        tars, folder = (tmp_path / f"{kind}-{count}" for kind in ("tars", "folder"))
        tars.mkdir()
        folder.mkdir()
        for part in range(count // 100):
            write_tar(tars / f"{part}.tar", members)
            for i, data in enumerate(images):
                (folder / f"{part}-{i}.png").write_bytes(data)
                (folder / f"{part}-{i}.txt").write_bytes(b"x")
        return peak_bytes([tars, folder], tmp_path / f"out-{count}")

    few, many = peak(FEW), peak(MANY)
    assert many - few < 24 * MEGABYTE, (few, many)
