"""Preparations that are killed at random moments, on real processes and on a real Ray of two workers."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diffusion.preparation.prepare import prepare
from tests.picture_files import noise, sample, tree, write_folder, write_tar

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare.py"
OPTIONS = ["--edges", "16", "34", "--partition-size", "10", "--shard-mb", "1", "--seed", "3", "--quiet", "--no-report"]
LIMIT = 600.0
"""Seconds after which a run that should have ended is a failure."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Three kinds of sources, of which each is several partitions."""
    root = tmp_path_factory.mktemp("sources")
    write_folder(root / "folder", 60, side=150)
    for part in range(3):
        members = [member for i in range(10) for member in sample(f"{i}", noise(200, 180, part * 10 + i), b"x")]
        write_tar(root / f"{part}.tar", members)
    table = pa.table({"jpg": [noise(190, 170, 500 + i) for i in range(30)], "caption": ["x"] * 30})
    pq.write_table(table, root / "x.parquet", row_group_size=5)
    return [str(root / "folder"), str(root / "*.tar"), str(root / "x.parquet")]


@pytest.fixture(scope="module")
def undisturbed(sources, tmp_path_factory):
    """Shards and facts of a run that was not killed."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    prepare(sources, out, edges=[16, 34], partition_size=10, shard_bytes=2**20, seed=3, num_workers=1)
    return tree(out)


def start(sources, out, *arguments):
    command = [sys.executable, str(SCRIPT), *sources, str(out), *OPTIONS, *arguments]
    return subprocess.Popen(
        command, cwd=SCRIPT.parents[1], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )


def num_finished(out):
    """Partitions and shards that are finished."""
    return len([*out.glob("work.partial/*/partitions/[0-9]*"), *out.glob("work.partial/*/shards/*.json")])


def kill_after_progress(process, out, chance):
    """Kill a run and its workers some time after it has begun to write; return whether it was running."""
    deadline = time.monotonic() + LIMIT
    wanted = num_finished(out) + chance.randint(1, 3)
    while process.poll() is None and time.monotonic() < deadline:
        if num_finished(out) >= wanted:
            break
        wait_a_moment(chance)
    running = process.poll() is None
    if running:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(LIMIT)
    process.stderr.close()
    return running


def wait_a_moment(chance):
    """Look again after a moment of a random length."""
    signal.sigtimedwait([], chance.uniform(0.001, 0.02))


def check(sources, out, undisturbed, arguments, num_kills, seed):
    chance = random.Random(seed)
    killed = sum(kill_after_progress(start(sources, out, *arguments), out, chance) for _ in range(num_kills))
    process = start(sources, out, *arguments)
    _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, errors.decode()
    assert tree(out) == undisturbed
    return killed


@pytest.mark.parametrize(
    "workers", [pytest.param(1, marks=pytest.mark.thorough), 2, pytest.param(4, marks=pytest.mark.thorough)]
)
def test_killed_at_random_moments(sources, undisturbed, tmp_path, kills, workers):
    assert check(sources, tmp_path / "out", undisturbed, ["--workers", str(workers)], kills, workers) >= 1


def test_killed_on_ray(sources, undisturbed, tmp_path, kills):
    pytest.importorskip("ray", reason="needs Ray: pip install 'diffusion[ray]'")
    check(sources, tmp_path / "out", undisturbed, ["--workers", "2", "--engine", "ray"], min(kills, 2), 7)
