"""Numbers of data sets on a machine, given out, given back, and taken back from the dead."""

import gc
import itertools
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from diffusion.datasets.shared_memory import OWNER, PLACE, REMOVED, MemoryNumber, claim_number, take_away
from streaming.base.constant import RESUME
from streaming.base.shared import SharedMemory

from diffusion.config.data import DataConfig, Representation
from diffusion.datasets import shared_memory
from diffusion.datasets.batch import BatchKey
from diffusion.datasets.loader import BatchLoader, train_loader
from diffusion.errors import DataError
from tests.tools.written_data import data_config, write_encoded

LATENTS = {"representation": Representation.latents}
HANDLES_PER_DATA_SET = 16
"""Eight memories, each a file and a mapping of it, and the lock."""
ROOT = Path(__file__).parents[3]

HOLDER = """
import sys
from pathlib import Path
from diffusion.config.data import Representation
from tests.unit.datasets.test_shared_memory import opened
from tests.tools.written_data import data_config
local, remote = sys.argv[1], sys.argv[2] or None
config = data_config(Path(local), "a", remote=remote, representation=Representation.latents, num_workers=1)
loader = opened(config)
batches = iter(loader)
next(batches)
print(loader.dataset._number.number, flush=True)
sys.stdin.read()
"""
"""Holds a data set open, with a data worker, until its stdin is closed."""


def opened(config: DataConfig) -> BatchLoader:
    return train_loader(config, seed=3, tokenize=None, rank_batch_size=config.global_batch_size)


def files_of(number: int) -> list[str]:
    return sorted(path.name for path in PLACE.glob(f"{number:06}_*"))


def inodes_of(number: int) -> set[int]:
    """Tells the files of one data set from those of another job that was given its number afterwards."""
    with os.scandir(PLACE) as entries:
        return {entry.inode() for entry in entries if entry.name.startswith(f"{number:06}_")}


def numbers() -> set[int]:
    """Numbers that this package has given out."""
    return {int(path.name.partition("_")[0]) for path in PLACE.glob("*_diffusion")}


def number_of(loader: BatchLoader) -> int:
    return loader.dataset._number.number  # pyright: ignore[reportAttributeAccessIssue]


def foreign_memory() -> Path:
    """Make memory as of a job that knows nothing of this package, at the first number that no other job has."""
    with shared_memory._turn():
        number = next(number for number in itertools.count(1) if not files_of(number))
        path = PLACE / f"{number:06}_locals"
        with path.open("xb") as file:
            file.write(b"of another program")
    return path


def num_handles() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_encoded(tmp_path_factory.mktemp("data"), {"a": 40, "b": 40})


class Holder:
    """A process of its own that has a data set open."""

    def __init__(self, local: Path, remote: str | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(local), remote or ""],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def number(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def end(self) -> None:
        self.process.communicate("", timeout=600)

    def kill(self) -> None:
        """Kill everything at once, data workers and Python's resource tracker included."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate(timeout=600)


@pytest.fixture
def hold():
    holders = []

    def start(*arguments) -> Holder:
        holders.append(Holder(*arguments))
        return holders[-1]

    yield start
    for holder in holders:
        if holder.process.poll() is None:
            holder.kill()


def test_handles_grow_with_the_data_sets_that_are_open_and_come_back(data: Path) -> None:
    opened(data_config(data, "a", "b", **LATENTS))  # What the first one opens for the process stays.
    gc.collect()
    before = num_handles()
    loaders = []
    for num in range(1, 41):
        loader = opened(data_config(data, "a", "b", **LATENTS))
        state = loader.dataset.state_dict(0, from_beginning=True)  # pyright: ignore[reportAttributeAccessIssue]
        for _ in range(3):
            loader.dataset.load_state_dict(state | {"epoch": 0})  # pyright: ignore[reportAttributeAccessIssue]
        loaders.append(loader)
        assert num_handles() - before <= num * HANDLES_PER_DATA_SET
    given = {number_of(loader) for loader in loaders}
    assert len(given) == 40
    held = set().union(*map(inodes_of, given))
    assert len(held) >= 7 * 40
    assert len(list(loaders[-1])) == 10  # To the end: the threads of an unfinished epoch hold a data set.
    del loader, loaders
    gc.collect()
    assert num_handles() <= before
    assert not held & set().union(*map(inodes_of, given))


def test_a_closed_data_set_leaves_nothing_and_its_number_is_given_out_again(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = opened(data_config(data, "a", **LATENTS))
    epoch = [batch[BatchKey.SAMPLE].tolist() for batch in loader]
    number = number_of(loader)
    held = inodes_of(number)
    assert len(held) >= 7
    with shared_memory._turn(), monkeypatch.context() as patch:  # Another job of this machine may be quicker.
        patch.setattr(shared_memory, "_turn", nullcontext)
        loader.dataset.close()  # pyright: ignore[reportAttributeAccessIssue]
        assert not held & inodes_of(number)
        again = opened(data_config(data, "a", **LATENTS))
    assert number_of(again) <= number
    assert [batch[BatchKey.SAMPLE].tolist() for batch in again] == epoch


def test_what_killed_processes_leave_is_removed_and_what_living_ones_have_is_not(data: Path, hold, tmp_path) -> None:
    dead, living = hold(data), hold(data)
    number, kept = dead.number(), living.number()
    assert number != kept, "two processes share the memory of one data set"
    foreign = foreign_memory()
    try:
        left, before = inodes_of(number), files_of(kept)
        assert len(left) >= 7
        dead.kill()  # The kernel keeps what a killed process has shared.
        loader = opened(data_config(data, "a", **LATENTS))
        assert number_of(loader) not in (kept, int(foreign.name.partition("_")[0]))
        assert not left & inodes_of(number)
        assert files_of(kept) == before
        assert foreign.read_bytes() == b"of another program"
    finally:
        foreign.unlink()
    held = inodes_of(kept)
    living.end()
    assert len(held) >= 7
    assert not held & inodes_of(kept), "an ordinary end leaves nothing"


def test_a_cache_belongs_to_one_job_until_that_has_ended(data: Path, hold, tmp_path, monkeypatch) -> None:
    holder = hold(tmp_path / "cache", str(data))
    holder.number()
    monkeypatch.setattr("diffusion.datasets.shared_memory.ENDING_SECONDS", 0.0)
    config = data_config(tmp_path / "cache", "a", remote=str(data), **LATENTS)
    with pytest.raises(DataError, match=rf"cache/a is filled by another job .*process {holder.process.pid}\)"):
        opened(config)
    assert opened(data_config(tmp_path / "other", "a", remote=str(data), **LATENTS))
    holder.kill()
    monkeypatch.setattr("diffusion.datasets.shared_memory.ENDING_SECONDS", 60.0)
    assert len(next(iter(opened(config)))[BatchKey.SAMPLE]) == 8


def test_what_is_read_without_a_remote_is_not_taken_away_until_it_is_closed(tmp_path) -> None:
    data = write_encoded(tmp_path, {"a": 40})
    loader = opened(data_config(data, "a", **LATENTS))
    assert not take_away(data / "a", tmp_path / "away")
    loader.dataset.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert take_away(data / "a", tmp_path / "away")


def test_half_a_claim_is_removed(data: Path) -> None:
    number = max(numbers(), default=0) + 500
    (PLACE / f"{number:06}_barrier").write_bytes(b"x")  # Before the folder, which another job may remove at once.
    (PLACE / f"{number:06}_diffusion").mkdir()
    opened(data_config(data, "a", **LATENTS))
    assert files_of(number) == []


def test_streams_that_cannot_be_opened_give_their_number_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claimed: list[tuple[int, set[int]]] = []

    def claim(*arguments: Any) -> MemoryNumber:
        number = claim_number(*arguments)
        claimed.append((number.number, inodes_of(number.number)))
        return number

    monkeypatch.setattr("diffusion.datasets.shards.claim_number", claim)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "index.json").write_text('{"version": 2, "shards": []}')
    with pytest.raises(DataError, match="the streams a cannot be opened: Stream contains no samples"):
        opened(data_config(tmp_path, "a", **LATENTS))
    ((number, inodes),) = claimed
    assert inodes
    assert not inodes & inodes_of(number)


def test_memory_that_another_rank_is_creating_is_waited_for(data: Path) -> None:
    """Python creates memory and then gives it its size; what has none cannot be mapped."""
    number = claim_number([])
    name = f"{number.number:06}_barrier"
    try:
        with number.chosen(), pytest.raises(FileNotFoundError):
            SharedMemory(name, False)
        (PLACE / name).touch(0o600)
        grow = threading.Timer(0.5, os.truncate, (PLACE / name, 12))
        grow.start()
        with number.chosen():
            memory = SharedMemory(name, size=12)
        number.adopt(memory)
        assert len(memory.buf) == 12
        grow.join()
    finally:
        number.release()


def test_a_position_that_another_rank_is_loading_is_waited_for(data: Path) -> None:
    loader = opened(data_config(data, "a", **LATENTS))
    dataset: Any = loader.dataset
    state = dataset.state_dict(8, from_beginning=True)
    path = PLACE / f"{number_of(loader):06}_{RESUME}"
    path.touch(0o600)
    grow = threading.Timer(0.5, os.truncate, (path, mmap.PAGESIZE))
    grow.start()
    dataset.load_state_dict(state | {"epoch": 0})
    grow.join()
    assert len(list(loader)) == 4


def test_a_number_is_given_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job may take the number while its folder is removed, which then is the other job's."""
    number = claim_number([])
    rmtree = shutil.rmtree
    others: list[MemoryNumber] = []

    def remove(path: Path, **options: Any) -> None:
        monkeypatch.setattr(shutil, "rmtree", rmtree)
        (Path(path) / OWNER).unlink()  # The first of the files.
        others.append(claim_number([]))
        rmtree(path, **options)

    with shared_memory._turn(), monkeypatch.context() as patch:
        patch.setattr(shared_memory, "_turn", nullcontext)
        monkeypatch.setattr(shutil, "rmtree", remove)
        number.release()
    try:
        assert others[0].number <= number.number
        assert (others[0].folder / OWNER).exists()
    finally:
        others[0].release()


def test_a_folder_that_was_being_removed_is_removed(data: Path) -> None:
    left = PLACE / f"{REMOVED}{os.getpid()}"
    with shared_memory._turn():  # In theirs, others remove what was left.
        left.mkdir()
        (left / OWNER).touch()
    opened(data_config(data, "a", **LATENTS))
    assert not left.exists()
