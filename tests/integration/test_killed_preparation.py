"""Preparations that are killed at random moments, each time continued by other workers: processes, and a real Ray."""

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.tools.image_files import noise, sample, tree, write_folder, write_tar
from tests.tools.preparing import prepare
from tests.tools.training_runs import Job

pytestmark = pytest.mark.slow

RAY = ["--workers", "2", "--engine", "ray"]
WORKERS = [
    ["--workers", "1"],
    *([RAY] if importlib.util.find_spec("ray") else []),
    ["--workers", "4"],
    ["--workers", "2"],
]
"""Of one start after the other."""

PARTITION_SIZE = 10
SHARD_MB, WINDOW_MB = 0.5, 0.375
"""A dozen windows or more, in several write tasks."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> list[str]:
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
def undisturbed(sources, tmp_path_factory) -> dict[str, bytes]:
    """All files of a preparation that was not killed."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    options: dict[str, Any] = {"edges": [16, 34], "partition_size": PARTITION_SIZE, "seed": 3}
    prepare(sources, out, shard_bytes=round(SHARD_MB * 2**20), window_bytes=round(WINDOW_MB * 2**20), **options)
    assert len(list(out.glob("positions/*.parquet"))) > 1
    return tree(out)


def num_finished(out: Path) -> int:
    """Partitions, selections, shards and write tasks that are finished.

    The pattern `*` would look into folders that are removed meanwhile.
    """
    patterns = ("metadata/*.parquet", "selection/0.json", "train/*/*.mds", "positions/*.parquet", "train/*/index.json")
    return sum(len(list(out.glob(pattern))) for pattern in patterns)


def progress_of(out: Path, number: int) -> Callable[[], bool]:
    """What says whether so many more than now are finished."""
    wanted = num_finished(out) + number
    return lambda: num_finished(out) >= wanted


def test_killed_and_continued_by_other_workers(server, sources, undisturbed, tmp_path, kills):
    out, chance = tmp_path / "out", random.Random(kills)
    options = ["--edges", "16", "34", "--partition-size", str(PARTITION_SIZE), "--seed", "3",
               "--shard-mb", str(SHARD_MB), "--window-mb", str(WINDOW_MB)]  # fmt: skip
    command = [*sources, str(out), *options, "--quiet", "--no-report"]

    def start(number: int) -> Job:
        return server.start(0, ["scripts/prepare.py", *command, *WORKERS[number % len(WORKERS)]])

    most = max(len(undisturbed) // (2 * kills), 1)
    for number in range(kills):
        progress = progress_of(out, chance.randint(1, most))
        job = start(number)
        job.wait_for(progress)
        job.kill()
    job = start(kills).finish()
    assert job.codes == [0], job.output
    assert tree(out) == undisturbed
