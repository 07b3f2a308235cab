"""Preparations that are killed at random moments, each time continued by other workers: processes, and a real Ray."""

import importlib.util
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.tools.preparing import prepare
from tests.tools.image_files import noise, sample, tree, write_folder, write_tar
from tests.tools.training_runs import ROOT, Job, environment

RAY = ["--workers", "2", "--engine", "ray"]
WORKERS = [
    ["--workers", "1"],
    ["--workers", "4"],
    *([RAY] if importlib.util.find_spec("ray") else []),
    ["--workers", "2"],
]
"""Of one start after the other."""


@pytest.fixture(scope="module")
def sources(request, tmp_path_factory) -> list[str]:
    """Three kinds of sources, of which each is several partitions: real images, if there are."""
    if request.config.getoption("--data"):
        emoji = request.getfixturevalue("data_folder") / "emoji"
        return [str(emoji / name) for name in ("folder_512", "webdataset_128", "parquet_72.parquet")]
    root = tmp_path_factory.mktemp("sources")
    write_folder(root / "folder", 60, side=150)
    for part in range(3):
        members = [member for i in range(10) for member in sample(f"{i}", noise(200, 180, part * 10 + i), b"x")]
        write_tar(root / f"{part}.tar", members)
    table = pa.table({"jpg": [noise(190, 170, 500 + i) for i in range(30)], "caption": ["x"] * 30})
    pq.write_table(table, root / "x.parquet", row_group_size=5)
    return [str(root / "folder"), str(root / "*.tar"), str(root / "x.parquet")]


@pytest.fixture(scope="module")
def partition_size(request) -> int:
    return 100 if request.config.getoption("--data") else 10


@pytest.fixture(scope="module")
def undisturbed(sources, partition_size, tmp_path_factory) -> dict[str, bytes]:
    """Shards and facts of a run that was not killed."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    prepare(sources, out, edges=[16, 34], partition_size=partition_size, shard_bytes=2**20, seed=3, num_workers=1)
    return tree(out)


def num_finished(out: Path) -> int:
    """Partitions and shards that are finished."""
    return len([*out.glob("work.partial/*/partitions/[0-9]*"), *out.glob("work.partial/*/shards/*.json")])


def progress_of(out: Path, number: int) -> Callable[[], bool]:
    """What says whether so many partitions and shards more than now are finished."""
    wanted = num_finished(out) + number
    return lambda: num_finished(out) >= wanted


def test_killed_and_continued_by_other_workers(server, sources, partition_size, undisturbed, tmp_path, kills):
    out, chance = tmp_path / "out", random.Random(kills)
    options = ["--edges", "16", "34", "--partition-size", str(partition_size), "--shard-mb", "1", "--seed", "3"]
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


def work_long(mark: Path) -> None:
    mark.touch()
    time.sleep(120)


def test_workers_end_with_the_preparation_that_is_killed(tmp_path):
    """In the middle of their work: what reads the output of a killed one gets its end soon."""
    program = (
        "import sys; from pathlib import Path; from diffusion.preparation.partitions.engine import Workers, started\n"
        "from tests.integration.test_killed_preparation import work_long\n"
        "with started(Workers(number=2)) as run: list(run(work_long, [Path(mark) for mark in sys.argv[1:]]))"
    )
    marks = [tmp_path / "one", tmp_path / "two"]
    command = [sys.executable, "-c", program, *map(str, marks)]
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        while not all(mark.exists() for mark in marks):
            assert parent.poll() is None
            time.sleep(0.02)
        parent.kill()
        began = time.monotonic()
        parent.stdout.read()
        assert time.monotonic() - began < 10
