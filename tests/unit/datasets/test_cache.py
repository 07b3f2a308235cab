"""Shards on their way into a cache that processes and jobs share, and what happens when something breaks."""

import errno
import multiprocessing
import os
import shutil
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from streaming import MDSWriter

from diffusion import storage
from diffusion.config.data import Representation, ValidationConfig
from diffusion.datasets import cache
from diffusion.datasets.batch import BatchKey
from diffusion.datasets.cache import LOCKS, CacheLimit, StreamShards, TierCounts, files_of_cache
from diffusion.datasets.dataset import TrainingDataset
from diffusion.datasets.loader import BatchLoader, train_loader, validation_dataset
from diffusion.datasets.streams import StreamLocation
from diffusion.errors import DataError, MachineError
from diffusion.formats import shards as shards_module
from diffusion.formats.shards import read_index, write_index
from tests.tools.waiting import wait_until
from tests.tools.written_data import TEXT, data_config, encoded_sample, tokenize, write_encoded, write_prepared

COLUMNS = dict.fromkeys(["latent_mean", "latent_logvar"], "ndarray:float16:4,4,4") | TEXT


def open_loader(
    local: Path, remote: Path | None = None, representation: Representation = Representation.latents, **options: Any
) -> BatchLoader:
    config = data_config(
        local, "a", remote=None if remote is None else str(remote), representation=representation, **options
    )
    return train_loader(config, seed=3, tokenize=tokenize)


def dataset_of(loader: BatchLoader) -> TrainingDataset:
    assert isinstance(loader.dataset, TrainingDataset)
    return loader.dataset


def read(loader: Any, num: int | None = None) -> list[list[int]]:
    return [batch[BatchKey.SAMPLE].tolist() for batch in islice(loader, num)]


def latents(loader: BatchLoader) -> list[tuple[int, torch.Tensor]]:
    key = BatchKey.LATENT_MEAN
    return [pair for batch in loader for pair in zip(batch[BatchKey.SAMPLE].tolist(), batch[key], strict=True)]


def shards_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name not in (LOCKS, "index.json"))


def num_handles() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def write_compressed(root: Path) -> Path:
    """Write ROOT/a: one shard, compressed."""
    with MDSWriter(out=str(root / "a"), columns=COLUMNS, hashes=["xxh64"], compression="zstd:3") as writer:
        for number in range(8):
            writer.write(encoded_sample("a", number))
    return root


def overwrite(shard: Path, data: bytes, at: int) -> None:
    content = bytearray(shard.read_bytes())
    content[at : at + len(data)] = data
    shard.write_bytes(content)


def flip(path: Path) -> None:
    """Damage the last byte of a file and leave it its size."""
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


# A shard gets its name when it is whole


@pytest.mark.parametrize("write", [write_compressed, lambda root: write_encoded(root, {"a": 8})])
def test_a_cache_holds_whole_shards_under_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], Path]
) -> None:
    root, folder = write(tmp_path / "remote"), tmp_path / "cache" / "a"
    seen: list[list[str]] = []
    hash_file = storage.hash_file

    def note(path: Path, kind: str) -> str:
        seen.append(shards_in(folder))
        return hash_file(path, kind)

    monkeypatch.setattr(storage, "hash_file", note)
    assert len(read(open_loader(tmp_path / "cache", root))) == 1
    ((name,),) = seen
    assert name.endswith(".partial")
    assert shards_in(folder) == ["shard.00000.mds"]


def test_a_damaged_compressed_shard_in_the_cache_is_fetched_again(tmp_path: Path) -> None:
    root = write_compressed(tmp_path / "remote")
    damaged, empty = tmp_path / "damaged", tmp_path / "empty"
    shutil.copytree(root, damaged)
    flip(damaged / "a" / "shard.00000.mds.zstd")
    assert len(read(open_loader(damaged, root, validate_hash="xxh64"))) == 1
    flip(root / "a" / "shard.00000.mds.zstd")
    with pytest.raises(DataError, match=r"shard.00000.mds.zstd is damaged"):
        read(open_loader(empty, root, validate_hash="xxh64"))
    wait_until(lambda: shards_in(empty / "a") == [])  # Another thread may fetch it, too.


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO])
@pytest.mark.parametrize(
    ("owner", "function"), [(os, "pread"), (shards_module, "hash_file"), (LocalFileSystem, "get_file")]
)
def test_a_failure_of_a_network_file_system_that_passes_is_bridged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, owner: Any, function: str
) -> None:
    root = write_encoded(tmp_path / "remote", {"a": 8})
    shards = StreamShards(StreamLocation(name="a", remote=str(root / "a"), local=str(tmp_path / "cache")))
    shards.read(0)
    shards.close()
    monkeypatch.setattr(storage, "FIRST_PAUSE", 0.01)
    real, calls = getattr(owner, function), []

    def fail_twice(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) <= 2:
            raise OSError(code, os.strerror(code))
        return real(*args, **options)

    monkeypatch.setattr(owner, function, fail_twice)
    if owner is LocalFileSystem:
        (tmp_path / "cache" / "shard.00000.mds").unlink()
    elif owner is shards_module:
        shards = StreamShards(StreamLocation(name="a", remote=None, local=str(root / "a")))
    assert shards.read(3)["latent_mean"].shape == (4, 4, 4)
    assert len(calls) > 2


def test_a_failure_of_a_file_system_that_lasts_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_encoded(tmp_path, {"a": 8})
    shards = StreamShards(StreamLocation(name="a", remote=None, local=str(root / "a")))
    shards.read(0)
    monkeypatch.setattr(storage, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(storage, "LONGEST_PAUSE", 0.0)

    def fail(*_: Any) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(MachineError, match=r"shard\.00000\.mds cannot be read"):
        shards.read(3)


def test_a_failure_of_a_file_system_in_a_worker_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    loader = open_loader(write_encoded(tmp_path, {"a": 8}), num_workers=1)

    def fail(*_: Any) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(MachineError, match=rf"^{tmp_path}\S+ cannot be read: .*\Z"):
        read(loader)


def test_a_compressed_original_is_unpacked_and_kept(tmp_path: Path) -> None:
    root = write_compressed(tmp_path)
    assert len(read(open_loader(root))) == 1
    assert shards_in(root / "a") == ["shard.00000.mds", "shard.00000.mds.zstd"]


def test_a_hash_that_the_index_does_not_give(tmp_path: Path) -> None:
    root = write_encoded(tmp_path / "remote", {"a": 8})
    with pytest.raises(DataError, match=r"data\.validate_hash"):
        read(open_loader(tmp_path / "cache", root, validate_hash="sha256"))


def test_old_unfinished_copies_are_removed(tmp_path: Path) -> None:
    root, folder = write_encoded(tmp_path / "remote", {"a": 8}), tmp_path / "cache" / "a"
    folder.mkdir(parents=True)
    leftovers = [folder / f".{name}.123-0123abcd.partial" for name in ("shard.00000.mds", "index.json")]
    kept = [folder / "notes.partial", folder / ".shard.00001.mds.7-89abcdef.partial"]
    for path in [*leftovers, *kept]:
        path.write_bytes(b"half")
    for path in [*leftovers, kept[0]]:
        os.utime(path, (0, 0))
    open_loader(tmp_path / "cache", root)
    assert not any(path.exists() for path in leftovers)
    assert all(path.exists() for path in kept), "another machine may be writing the second"


# Damage that leaves a file its size: found before a sample of the shard is used, mended where there is a remote


def flip_bits(root: Path) -> Path:
    """Flip the highest bit of an exponent of ten latents of a shard, and return the shard."""
    shard = root / "a" / "shard.00002.mds"
    size = shard.stat().st_size
    for at in range(size // 2, size // 2 + 20, 2):
        overwrite(shard, bytes([shard.read_bytes()[at] ^ 0x40]), at)
    return shard


def move_offset(root: Path) -> Path:
    """Let the first sample of a shard begin behind its end, and return the shard."""
    shard = root / "a" / "shard.00000.mds"
    overwrite(shard, struct.pack("<I", 2**31), 4)
    return shard


def truncate(root: Path) -> Path:
    """Cut a shard off after 100 bytes, and return it."""
    shard = root / "a" / "shard.00001.mds"
    shard.write_bytes(shard.read_bytes()[:100])
    return shard


def test_zeros_within_an_image_of_an_original_end_the_epoch(tmp_path: Path) -> None:
    root = write_prepared(tmp_path, {"a": 40})
    shard = root / "a" / "shard.00001.mds"
    overwrite(shard, bytes(64), shard.read_bytes().index(b"IDAT") + 200)
    with pytest.raises(DataError, match=str(shard)):
        read(open_loader(root, representation=Representation.images))


@pytest.mark.parametrize("damage", [flip_bits, move_offset])
def test_damaged_latents_of_an_original_end_the_epoch(tmp_path: Path, damage: Any) -> None:
    root = write_encoded(tmp_path, {"a": 40})
    shard = damage(root)
    with pytest.raises(DataError, match=str(shard)):
        read(open_loader(root))
    validation = ValidationConfig(local=str(root))
    data = data_config(root, "a", representation=Representation.latents)
    dataset = validation_dataset(validation, data, tokenize=None)
    with pytest.raises(DataError, match=str(shard)):
        [dataset[index] for index in range(len(dataset))]


@pytest.mark.parametrize("validate_hash", [None, "xxh64"])
@pytest.mark.parametrize("damage", [flip_bits, move_offset, truncate])
def test_a_damaged_shard_in_the_cache_is_fetched_again(tmp_path: Path, damage: Any, validate_hash: str | None) -> None:
    remote = write_encoded(tmp_path / "remote", {"a": 40})
    for name in ("whole", "damaged"):
        shutil.copytree(remote, tmp_path / name)
    shard = damage(tmp_path / "damaged")
    whole, mended = (
        latents(open_loader(tmp_path / name, remote, validate_hash=validate_hash)) for name in ("whole", "damaged")
    )
    assert len(whole) == 40
    assert [address for address, _ in mended] == [address for address, _ in whole]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(mended, whole, strict=True))
    assert shard.read_bytes() == (remote / "a" / shard.name).read_bytes()


def test_a_damaged_offset_table_without_hashes_is_one_error(tmp_path: Path) -> None:
    root = write_encoded(tmp_path, {"a": 40})
    shards = [shard._replace(raw=shard.raw._replace(hashes={})) for shard in read_index(root / "a").shards]
    write_index(root / "a", shards)
    assert len(latents(open_loader(root))) == 40
    shard = move_offset(root)
    with pytest.raises(DataError, match=str(shard)):
        read(open_loader(root))


@pytest.mark.parametrize("is_cache", [False, True])
def test_a_shard_is_hashed_once_in_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cache: bool) -> None:
    """By all workers of a rank, and, where it is in a cache, by all ranks of a node."""
    root, log = write_encoded(tmp_path / "set", {"a": 200}), tmp_path / "hashed"
    if is_cache:
        shutil.copytree(root, tmp_path / "cache")
    hash_file = shards_module.hash_file

    def note(path: Path, kind: str) -> str:
        with log.open("a") as file:
            file.write(f"{path.name}\n")
        return hash_file(path, kind)

    monkeypatch.setattr(shards_module, "hash_file", note)
    for start in (1, 2):
        options: dict[str, Any] = {"remote": root} if is_cache else {}
        folder = tmp_path / "cache" if is_cache else root
        ranks = [open_loader(folder, num_workers=2, **options) for _ in range(2 if is_cache else 1)]
        for loader in [*ranks, *ranks]:
            assert len(read(loader)) == 25
        assert sorted(log.read_text().split()) == sorted(start * [path.name for path in (root / "a").glob("*.mds")])


def test_an_index_that_names_files_elsewhere_is_refused(tmp_path: Path) -> None:
    root = write_encoded(tmp_path, {"a": 8})
    index = root / "a" / "index.json"
    index.write_text(index.read_text().replace("shard.00000.mds", "../outside.mds"))
    with pytest.raises(DataError, match=r"index\.json"):
        open_loader(root)


# Files that vanish


def test_shards_that_have_vanished(tmp_path: Path) -> None:
    root = write_encoded(tmp_path / "remote", {"a": 40})
    cached = open_loader(tmp_path / "cache", root)
    original = open_loader(root)
    assert len(read(cached)) == len(read(original)) == 5
    names = shards_in(tmp_path / "cache" / "a")
    for name in names:
        (tmp_path / "cache" / "a" / name).unlink()
    assert len(read(cached)) == 5
    assert shards_in(tmp_path / "cache" / "a") == names
    for name in names:
        (root / "a" / name).unlink()
    with pytest.raises(DataError, match=r"stream 'a', shard shard.0000\d.mds"):
        read(original)
    with pytest.raises(DataError, match="stream 'a', shard"):
        dataset_of(original)[0]


def test_a_shard_that_cannot_be_fetched_ends_the_run(tmp_path: Path) -> None:
    root = write_encoded(tmp_path / "remote", {"a": 80})
    shards = sorted((root / "a").glob("*.mds"))
    shards[2].unlink()
    loader = open_loader(tmp_path / "cache", root, num_workers=2)
    began = time.monotonic()
    with pytest.raises(DataError) as caught:
        read(loader)
    assert time.monotonic() - began < 100
    message = str(caught.value)
    assert message.startswith(f"stream 'a', shard {shards[2].name} could not be fetched from {root}/a: ")
    assert "Traceback" not in message


def test_a_full_disk_of_the_cache_is_reported_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_encoded(tmp_path / "remote", {"a": 8})
    shards = StreamShards(StreamLocation(name="a", remote=str(root / "a"), local=str(tmp_path / "cache")))

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage, "atomic_path", fail)
    with pytest.raises(DataError, match=r"No space left on device.*data\.cache_limit"):
        shards.ensure(0)


def test_who_waits_for_an_attempt_in_vain_fails_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that tried one after the other would take their attempts' time each."""
    root = write_encoded(tmp_path / "remote", {"a": 8})
    attempts: list[float] = []
    begun, asked, lock = threading.Event(), threading.Semaphore(0), cache.lock

    def note(path: Path, **options: Any) -> Any:
        if path.is_relative_to(tmp_path):  # A thread of an earlier test may still fetch ahead.
            asked.release()
        return lock(path, **options)

    def fail_slowly(uri: str, path: Path, **_: Any) -> None:
        if path.is_relative_to(tmp_path):
            attempts.append(time.monotonic())
            begun.set()
            for _ in range(4 if len(attempts) == 1 else 0):  # Until the others wait, too.
                assert asked.acquire(timeout=300)
        raise storage.UnavailableError("no answer")

    shards = StreamShards(StreamLocation(name="a", remote=str(root / "a"), local=str(tmp_path / "cache")))
    with monkeypatch.context() as patch:
        patch.setattr(storage, "download", fail_slowly)
        patch.setattr(cache, "lock", note)
        with ThreadPoolExecutor(4) as pool:
            first = pool.submit(shards.ensure, 0)
            begun.wait()
            for waiting in [first, *(pool.submit(shards.ensure, 0) for _ in range(3))]:
                with pytest.raises(DataError, match="no answer"):
                    waiting.result()
        assert len(attempts) == 1
        with pytest.raises(DataError, match="no answer"):  # Who comes later tries anew.
            shards.ensure(0)
        assert len(attempts) == 2
    shards.ensure(0)
    assert shards.is_here(0)


@pytest.mark.parametrize("offset", [-600.0, 0.0, 600.0])
def test_hosts_with_other_clocks_share_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: float) -> None:
    root, hashed = write_encoded(tmp_path / "remote", {"a": 8}), []
    location = StreamLocation(name="a", remote=str(root / "a"), local=str(tmp_path / "cache"))
    now, hash_file = time.time, shards_module.hash_file

    def fail(uri: str, path: Path, **_: Any) -> None:
        raise storage.UnavailableError("no answer")

    def check_elsewhere() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: now() + offset)
            StreamShards(location).ensure(0)

    first = StreamShards(location)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now() + offset)
        other = StreamShards(location)
        patch.setattr(storage, "download", fail)
        with pytest.raises(DataError, match="no answer"):
            other.ensure(0)
    first.ensure(0)  # A failure of before does not count.
    monkeypatch.setattr(shards_module, "hash_file", lambda *file: hashed.append(file) or hash_file(*file))
    second = StreamShards(location)
    check_elsewhere()
    assert len(hashed) == 1
    second.ensure(0)
    assert len(hashed) == 1, "it has been checked since the stream was opened"
    third = StreamShards(location)
    flip(third.path(0))
    third.ensure(0)
    assert third.path(0).read_bytes() == (root / "a" / third.path(0).name).read_bytes(), "it was checked before"


# Several processes and jobs, and kills

FORK = multiprocessing.get_context("fork")


class Job:
    """A process of its own that reads through a cache, and sends what it reads: the first batch, and whole epochs."""

    def __init__(self, folder: Path, remote: Path, limit: str | None = None, epochs: int = 0) -> None:
        self.connection, self._theirs = FORK.Pipe()
        self.process = FORK.Process(target=self._read, args=(folder, remote, limit, epochs))
        self.process.start()
        self._theirs.close()

    def _read(self, folder: Path, remote: Path, limit: str | None, epochs: int) -> None:
        os.setsid()
        torch.set_num_threads(1)
        loader = open_loader(folder, remote, num_workers=1, cache_limit=limit, predownload=8)
        batches = iter(loader)
        self._theirs.send(next(batches)[BatchKey.SAMPLE].tolist())
        for _ in range(epochs):
            self._theirs.send(read(batches or loader))
            batches = None
        self._theirs.recv()

    def begin(self) -> "Job":
        self.connection.recv()
        return self

    def end(self) -> None:
        self.connection.send("end")
        self.process.join(300)
        assert self.process.exitcode == 0

    def kill(self) -> None:
        """Kill everything at once, loader workers included."""
        os.killpg(self.process.ident, signal.SIGKILL)
        self.process.join(300)


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def start(*arguments: Any, **options: Any) -> Job:
        jobs.append(Job(*arguments, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.process.is_alive():
            job.kill()


@pytest.mark.slow
def test_jobs_share_a_cache_and_one_that_is_killed_leaves_it_whole(tmp_path: Path, start: Callable[..., Job]) -> None:
    remote = write_encoded(tmp_path / "remote", {"a": 400})
    loader = open_loader(remote)
    expected = [read(loader)[1:], read(loader)]
    limit = str(limit_of(remote, len(list((remote / "a").glob("*.mds"))) // 2))
    folder = tmp_path / "cache"
    jobs = [start(folder, remote, limit, epochs=2), start(folder, remote, limit), start(folder, remote, epochs=2)]
    for job in jobs:
        job.begin()
    jobs[1].kill()
    for job in (jobs[0], jobs[2]):
        assert [job.connection.recv() for _ in range(2)] == expected
    for job in (jobs[0], jobs[2]):
        job.end()
    for path in (folder / "a").glob("*.mds"):
        assert path.read_bytes() == (remote / "a" / path.name).read_bytes()


def test_a_process_that_is_killed_while_it_fetches_holds_up_nobody(tmp_path: Path) -> None:
    root = write_encoded(tmp_path / "remote", {"a": 40})
    shards = StreamShards(StreamLocation(name="a", remote=str(root / "a"), local=str(tmp_path / "cache")))
    ready, write = os.pipe()
    child = os.fork()
    if child == 0:

        def hang(uri: str, path: Path, **_: Any) -> None:
            path.with_name(f".{path.name}.1-0.partial").write_bytes(b"half")
            os.write(write, b"x")
            time.sleep(600)

        storage.download = hang
        shards.ensure(1)
        os._exit(1)
    os.read(ready, 1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(shards.ensure, 1)
        time.sleep(0.2)
        assert not waiting.done()
        os.kill(child, signal.SIGKILL)
        waiting.result(timeout=300)
    os.waitpid(child, 0)
    assert shards.path(1).read_bytes() == (root / "a" / "shard.00001.mds").read_bytes()


def test_a_whole_cache_may_be_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, folder = write_encoded(tmp_path / "remote", {"a": 40}), tmp_path / "cache"
    shutil.copytree(root, folder)

    def refuse(*_: Any, **__: Any) -> int:
        raise PermissionError(13, "read-only")

    monkeypatch.setattr(cache, "lock", refuse)
    monkeypatch.setattr(cache, "_lock_path", refuse)
    assert len(read(open_loader(folder, root))) == 5


def test_handles_and_threads_come_back(tmp_path: Path) -> None:
    root = write_encoded(tmp_path, {"a": 40})
    read(open_loader(root))
    before, threads = num_handles(), threading.active_count()
    for _ in range(20):
        loader = open_loader(root)
        assert len(read(loader)) == 5
        dataset_of(loader).close()
    del loader
    wait_until(lambda: threading.active_count() <= threads)
    wait_until(lambda: num_handles() <= before + 2)  # Threads of libraries have some for a moment.


# A limit


def limit_of(remote: Path, num_shards: int) -> int:
    """A cache limit of so many shards, beside the index, which counts as well."""
    sizes = [path.stat().st_size for path in (remote / "a").glob("*.mds")]
    return (remote / "a" / "index.json").stat().st_size + num_shards * max(sizes)


def test_the_shard_whose_last_use_is_longest_ago_makes_room(tmp_path: Path) -> None:
    root, folder = write_encoded(tmp_path / "remote", {"a": 80}), tmp_path / "cache"
    limit = CacheLimit(limit_of(root, 3))
    shards = StreamShards(StreamLocation(name="a", remote=str(root / "a"), local=str(folder)), limit=limit)
    (folder / "notes.txt").write_text("not a shard")
    os.utime(folder / "notes.txt", (0, 0))
    for time_of_use, shard in enumerate((0, 1, 2)):
        shards.ensure(shard)
        os.utime(shards.path(shard), (time_of_use, time_of_use))
    shards.ensure(0)
    shards.ensure(3)
    assert [shard for shard in range(5) if shards.is_here(shard)] in ([0, 2, 3], [0, 3])
    with storage_lock(folder, "shard.00000.mds"):  # Being fetched again.
        os.utime(shards.path(0), (0, 0))
        shards.ensure(4)
        shards.ensure(5)
    assert shards.is_here(0)
    assert (folder / "notes.txt").exists()
    held = sum(found.st_size for _, found in files_of_cache(folder))
    assert held <= limit.num_bytes + 100


def storage_lock(folder: Path, name: str) -> Any:
    return cache.lock(folder / LOCKS / name)


def test_eviction_does_not_change_the_batches(tmp_path: Path) -> None:
    root = write_encoded(tmp_path / "remote", {"a": 400})
    expected = read(open_loader(root))
    shutil.copytree(root, tmp_path / "cache")  # Shards of an earlier start make room, too.
    for shard in sorted((tmp_path / "cache" / "a").glob("*.mds"))[:4]:
        shard.unlink()
    limit = limit_of(root, 12)
    loader = open_loader(tmp_path / "cache", root, cache_limit=str(limit), predownload=8, num_workers=2)
    assert read(loader) == expected
    wait_until(lambda: not list((tmp_path / "cache" / "a").glob("*.partial")))
    held = sum(found.st_size for _, found in files_of_cache(tmp_path / "cache" / "a"))
    assert held <= limit + 4 * limit_of(root, 1)
    assert held < limit_of(root, len(list((root / "a").glob("*.mds"))))


# What is read from each tier, and what is fetched ahead

NUM_STEPS = 80


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """640 samples in shards of 4 kB, about 11 in each."""
    return write_encoded(tmp_path_factory.mktemp("remote"), {"a": NUM_STEPS * 8})


def open_small(local: Path, remote: Path | None, **options: Any) -> BatchLoader:
    defaults: dict[str, Any] = {"num_canonical_nodes": 1, "predownload": 8}
    return open_loader(local, remote, **(defaults | options))


def test_what_is_fetched_read_and_found(tmp_path: Path, remote: Path) -> None:
    loader = open_small(tmp_path, remote, num_workers=2)
    meter, sizes = dataset_of(loader).meter, [path.stat().st_size for path in remote.glob("a/*.mds")]
    assert meter.read() == TierCounts()
    list(loader)
    first = meter.read()
    assert (first.samples, first.fetched_shards, first.fetched_bytes) == (640, len(sizes), sum(sizes))
    # Each shard is missing when it is first looked for, and there when a later batch takes more of it.
    assert 0 < first.samples - first.hits < 640
    # All but 4 bytes a sample and what a shard says of itself.
    assert 0.5 * first.fetched_bytes < first.read_bytes < first.fetched_bytes - 4 * 640
    list(loader)
    second = meter.read().since(first)
    assert second == TierCounts(samples=640, hits=640, read_bytes=first.read_bytes)
    again = open_small(tmp_path, remote)
    list(again)
    assert dataset_of(again).meter.read() == second
    original = open_small(remote, None)
    list(original)
    assert dataset_of(original).meter.read() == TierCounts(read_bytes=first.read_bytes)


def shards_of(loader: BatchLoader, epoch: int, steps: range) -> set[str]:
    """Shards that some steps of an epoch read."""
    dataset = dataset_of(loader)
    epochs = range(epoch * NUM_STEPS + steps.start, epoch * NUM_STEPS + steps.stop)
    return {shard for step in epochs for _, _, shard in dataset.samples_of_step(step)}


def test_what_comes_next_is_fetched_ahead_also_over_the_end_of_an_epoch(tmp_path: Path, remote: Path) -> None:
    expected = [read(loader) for loader in [open_small(remote, None)] for _ in range(2)]
    loader = open_small(tmp_path, remote, cache_limit=str(limit_of(remote, 24)), predownload=24)
    batches = iter(loader)
    epochs = [read(batches, 1)]
    wait_until(lambda: shards_of(loader, 0, range(4)) <= set(shards_in(tmp_path / "a")))
    epochs[0] += read(batches, NUM_STEPS - 4)
    assert not shards_of(loader, 1, range(2)) <= set(shards_in(tmp_path / "a")), "not by chance"
    epochs[0] += read(batches, 2)
    wait_until(lambda: shards_of(loader, 1, range(2)) <= set(shards_in(tmp_path / "a")))
    epochs[0] += read(batches, 2)
    epochs.append(read(loader))
    assert epochs == expected


def test_a_rank_whose_batch_is_more_than_it_fetches_ahead_fetches_the_next_batch(tmp_path: Path, remote: Path) -> None:
    loader = open_small(tmp_path, remote, predownload=1)
    batches = iter(loader)
    read(batches, 1)
    wait_until(lambda: shards_of(loader, 0, range(2)) <= set(shards_in(tmp_path / "a")))


def test_a_store_that_fails_while_shards_are_fetched_ahead_ends_the_epoch_that_needs_them(
    tmp_path: Path, remote: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = tmp_path / "remote"
    shutil.copytree(remote, copy)
    loader = open_small(tmp_path / "cache", copy, cache_limit=str(limit_of(remote, 24)))
    batches = iter(loader)
    read(batches, NUM_STEPS - 3)
    for name in shards_of(loader, 1, range(2)) - shards_of(loader, 0, range(NUM_STEPS - 16, NUM_STEPS)):
        (copy / "a" / name).unlink()
    read(batches, 2)
    assert len(read(batches, 2)) == 1
    wait_until(lambda: "could not be fetched" in caplog.text)
    with pytest.raises(DataError, match="could not be fetched"):
        read(iter(loader), NUM_STEPS)
