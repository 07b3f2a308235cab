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


def peak_bytes(source: Path, out: Path) -> int:
    """Prepare; return the most memory that a process of it had at a time."""
    options = ["--edges", "16", "--partition-size", "100", "--shard-mb", "1", "--window-mb", "2", "--workers", "1",
               "--quiet", "--no-report"]  # fmt: skip
    command = [sys.executable, "-c", MEASURING, sys.executable, "scripts/prepare.py", str(source), str(out), *options]
    done = subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, check=True)
    return int(done.stdout.splitlines()[-1]) * 1024


def test_ten_times_as_many_images_take_no_more(tmp_path):
    """A window of 2 MiB of 24."""
    images = [noise(52, 50, number) for number in range(100)]
    for count in (FEW, MANY):
        tars = tmp_path / f"tars-{count}"
        tars.mkdir()
        for part in range(count // 100):
            members = [member for i, data in enumerate(images) for member in sample(f"{i}", data, b"x")]
            write_tar(tars / f"{part}.tar", members)
    few, many = (peak_bytes(tmp_path / f"tars-{count}", tmp_path / f"out-{count}") for count in (FEW, MANY))
    assert many - few < 16 * MEGABYTE, (few, many)
