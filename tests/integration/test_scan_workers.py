"""Scans by several workers: equal to the byte, killed and continued, of a store."""

import os
import random
import signal
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diffusion.errors import DataError
from diffusion.preparation.config import PrepareConfig
from diffusion.preparation.engine import Workers
from diffusion.preparation.scan import Scan, scan_sources
from diffusion.storage import list_files, read
from tests.tools.image_files import noise, sample, tree, write_folder, write_tar
from tests.tools.s3_server import s3_process, s3_server
from tests.tools.training_runs import Job

__all__ = ["s3_process", "s3_server"]

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
from diffusion.preparation.config import PrepareConfig
from diffusion.preparation.engine import Workers
from diffusion.preparation.output import claim
from diffusion.preparation.scan import scan_sources
*sources, out, number = sys.argv[1:]
with claim(out, "prepared"):
    scan_sources(PrepareConfig(sources=sources, out=out, partition_size=10), workers=Workers(number=int(number)))
"""


def scan(sources, out, workers=Workers()) -> Scan:  # noqa: B008
    return scan_sources(PrepareConfig(sources=sources, out=str(out), partition_size=10), workers=workers)


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> list[str]:
    """A folder, tars and a table, of several partitions each."""
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
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    scan(sources, out)
    return tree(out)


def test_workers_are_equal_to_the_byte(sources, undisturbed, tmp_path):
    scan(sources, tmp_path / "two", Workers(number=2))
    assert tree(tmp_path / "two") == undisturbed


def test_killed_and_continued_by_other_workers(server, sources, undisturbed, tmp_path, kills):
    out, chance = tmp_path / "out", random.Random(kills)

    def start(number: int) -> Job:
        return server.start(0, ["-c", PROGRAM, *sources, str(out), str(number)])

    for kill in range(kills):
        job = start(1 + kill % 2)
        wanted = len(list(out.glob("metadata/*.parquet"))) + chance.randint(1, 4)
        while len(list(out.glob("metadata/*.parquet"))) < wanted and job.poll() is None:
            time.sleep(0.01)
        os.kill(job.pids[0], signal.SIGKILL)
        job.finish()
    assert start(2).finish().codes == [0]
    assert tree(out) == undisturbed


@pytest.mark.s3
def test_scan_of_a_store_and_growth_there(sources, undisturbed, tmp_path, s3_server):
    out = f"s3://tests/{tmp_path.name}"
    scan(sources, out, Workers(number=2))
    assert {name: read(f"{out}/{name}") for name in list_files(out)} == undisturbed
    assert len(scan(sources, out).partitions) == len(Scan.read(out).partitions)
    write_folder(tmp_path / "more", 3)
    grown = scan([*sources, str(tmp_path / "more")], out)
    assert len(list_files(f"{out}/metadata")) == len(grown.partitions)
    (tmp_path / "more" / "0001.txt").write_text("another")
    with pytest.raises(DataError, match=r"more/0001\.png"):
        scan([*sources, str(tmp_path / "more")], out)
    assert not list_files(f"{out}/reread")
