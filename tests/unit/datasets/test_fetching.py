"""Files on their way into a cache, and what becomes of them when something vanishes."""

import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from diffusion.datasets.fetching import GONE
from diffusion.datasets.shards import ShardDataset
from filelock import FileLock
from streaming import MDSWriter, StreamingDataset

from diffusion.config.data import Representation, Shuffling
from diffusion.datasets import mds, shard_fetching
from diffusion.datasets.batch import BatchKey
from diffusion.datasets.dataset import TextImageDataset
from diffusion.datasets.loader import BatchLoader, train_loader
from diffusion.errors import DataError
from tests.tools.written_data import TEXT, data_config, encoded_sample, write_encoded

COLUMNS = dict.fromkeys(["latent_mean", "latent_logvar"], "ndarray:float16:4,4,4") | TEXT


def open_loader(local: Path, remote: Path | None = None, **options: Any) -> BatchLoader:
    defaults: dict[str, Any] = {"representation": Representation.latents, "shuffle": Shuffling.none}
    config = data_config(local, "a", remote=None if remote is None else str(remote), **(defaults | options))
    return train_loader(config, seed=3, tokenize=None, rank_batch_size=config.global_batch_size)


def dataset_of(loader: BatchLoader) -> TextImageDataset:
    assert isinstance(loader.dataset, TextImageDataset)
    return loader.dataset


def read(loader: BatchLoader) -> list[int]:
    return sorted(address for batch in loader for address in batch[BatchKey.SAMPLE].tolist())


def write_compressed(root: Path) -> Path:
    """Write ROOT/a: one shard, compressed."""
    with MDSWriter(out=str(root / "a"), columns=COLUMNS, hashes=["xxh64"], compression="zstd:3") as writer:
        for number in range(8):
            writer.write(encoded_sample("a", number))
    return root


def flip(path: Path) -> None:
    """Damage a file and leave it its size."""
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.fixture
def seen_while_hashing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], list[list[str]]]:
    """Note which files a folder holds whenever a hash is computed."""
    hash_file = mds.hash_file

    def watch(folder: Path) -> list[list[str]]:
        seen: list[list[str]] = []

        def note(path: Path, kind: str) -> str:
            seen.append(sorted(path.name for path in folder.glob("shard.*")))
            return hash_file(path, kind)

        monkeypatch.setattr(mds, "hash_file", note)
        return seen

    return watch


def test_a_shard_has_its_name_when_its_hash_has_been_checked(
    tmp_path: Path, seen_while_hashing: Callable[[Path], list[list[str]]]
) -> None:
    root = write_encoded(tmp_path / "remote", {"a": 8})
    loader = open_loader(tmp_path / "cache", root, validate_hash="xxh64")
    seen = seen_while_hashing(tmp_path / "cache" / "a")
    assert len(read(loader)) == 8
    ((name,),) = seen
    assert re.fullmatch(r"shard\.00000\.mds\.[0-9a-f]{8}\.partial", name)
    assert sorted(path.name for path in (tmp_path / "cache" / "a").iterdir()) == ["index.json", "shard.00000.mds"]


def test_a_compressed_shard_has_its_names_when_its_hash_has_been_checked(
    tmp_path: Path, seen_while_hashing: Callable[[Path], list[list[str]]]
) -> None:
    root = write_compressed(tmp_path / "remote")
    loader = open_loader(tmp_path / "cache", root, validate_hash="xxh64")
    seen = seen_while_hashing(tmp_path / "cache" / "a")
    assert len(read(loader)) == 8
    assert len(seen[0]) == 1
    assert seen[0][0].endswith(".partial")
    assert not any("shard.00000.mds" in names for names in seen)
    assert sorted(path.name for path in (tmp_path / "cache" / "a").iterdir()) == ["index.json", "shard.00000.mds"]


def test_a_damaged_compressed_shard_in_the_cache_is_fetched_again(tmp_path: Path) -> None:
    root = write_compressed(tmp_path / "remote")
    cache = tmp_path / "cache"
    shutil.copytree(root, cache)
    flip(cache / "a" / "shard.00000.mds.zstd")
    assert len(read(open_loader(cache, root, validate_hash="xxh64"))) == 8
    shutil.rmtree(cache)
    flip(root / "a" / "shard.00000.mds.zstd")
    with pytest.raises(DataError, match=r"shard.00000.mds.zstd is damaged"):
        read(open_loader(cache, root, validate_hash="xxh64"))
    assert [path.name for path in (cache / "a").iterdir()] == ["index.json"]


def test_a_hash_that_the_index_does_not_give(tmp_path: Path) -> None:
    root = write_encoded(tmp_path / "remote", {"a": 8})
    with pytest.raises(DataError, match=r"the index gives no sha256 of .*shard.00000.mds \(xxh64\): set data.valid"):
        read(open_loader(tmp_path / "cache", root, validate_hash="sha256"))


def test_what_killed_processes_were_fetching_is_removed_at_the_next_start(tmp_path: Path) -> None:
    root = write_encoded(tmp_path / "remote", {"a": 8})
    folder = tmp_path / "cache" / "a"
    folder.mkdir(parents=True)
    partial = folder / "shard.00000.mds.0123abcd.partial"
    leftovers = [partial, *(folder / f"{partial.name}.{ending}" for ending in ("tmp", "8C0fe2Aa"))]
    leftovers.append(folder / "index.json.89abcdef.partial")

    def leave() -> None:
        for path in leftovers:
            path.write_bytes(b"half")
            os.utime(path, (0, 0))

    leave()
    kept = [folder / "notes.partial", folder / "shard.00000.mds.01234567.partial"]
    for path in kept:
        path.touch()  # The second one may be on its way to another machine that shares the folder.
    first = open_loader(tmp_path / "cache", root)
    assert sorted(path.name for path in folder.iterdir()) == ["index.json", *(path.name for path in kept)]
    leave()
    second = open_loader(tmp_path / "cache", root)
    assert all(path.exists() for path in leftovers), "the first data set of this process may be fetching them"
    dataset_of(first).close()
    dataset_of(second).close()
    assert len(read(open_loader(tmp_path / "cache", root))) == 8
    assert not any(path.exists() for path in leftovers)


def test_a_shard_that_has_vanished_is_not_read_from_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_encoded(tmp_path, {"a": 40})
    loader = open_loader(root, shuffle=Shuffling.none)
    assert len(read(loader)) == 40
    for shard in (root / "a").glob("*.mds"):
        shard.unlink()
    # The thread that is ahead would find it, too, but perhaps only when the batch has been read.
    monkeypatch.setattr(ShardDataset, "_prepare_thread", lambda dataset, it: it.on_exit())
    with pytest.raises(DataError, match=rf"shard.0000\d.mds could not be fetched .*FileNotFoundError: {GONE}"):
        next(iter(loader))


def test_shards_that_have_vanished_from_a_cache_are_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_encoded(tmp_path / "remote", {"a": 40})
    loader = open_loader(tmp_path / "cache", root)
    assert len(read(loader)) == 40
    cached = sorted((tmp_path / "cache" / "a").glob("*.mds"))
    for shard in cached:
        shard.unlink()
    monkeypatch.setattr(ShardDataset, "_prepare_thread", lambda dataset, it: it.on_exit())
    assert len(list(islice(loader, 5))) == 5
    assert sorted((tmp_path / "cache" / "a").glob("*.mds")) == cached


def test_an_original_that_has_vanished_before_anything_was_read(tmp_path: Path) -> None:
    root = write_encoded(tmp_path, {"a": 8})
    dataset = dataset_of(open_loader(root))
    (root / "a" / "shard.00000.mds").unlink()
    with pytest.raises(DataError, match=f"shard.00000.mds could not be fetched .*FileNotFoundError: {GONE}"):
        dataset.get_item(0)
    with pytest.raises(FileNotFoundError, match=GONE):
        dataset.streams[0].prepare_shard(dataset.shards[0])


def test_a_failure_gives_back_the_lock_that_its_thread_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_encoded(tmp_path / "remote", {"a": 40})
    dataset = dataset_of(open_loader(tmp_path / "cache", root))

    def fail(dataset: StreamingDataset) -> None:
        """Fail with the lock taken, and after another thread has begun to ask for a shard."""
        other = threading.Thread(
            target=setattr, args=(dataset, "_cache_filelock", FileLock(dataset._cache_filelock_path))
        )
        other.start()
        other.join()
        raise ValueError("there is nothing to evict")

    monkeypatch.setattr(ShardDataset, "_evict_coldest_shard", fail)
    dataset.cache_limit = 1
    with pytest.raises(DataError, match="nothing to evict") as caught:
        dataset.prepare_shard(0)
    assert caught.value.__cause__ is not None, "it keeps the lock from being collected"
    taken: list[bool] = []

    def take() -> None:
        with FileLock(dataset._cache_filelock_path, timeout=0):
            taken.append(True)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    assert taken


def test_files_that_vanish_while_their_sizes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_encoded(tmp_path / "remote", {"a": 40})
    assert len(read(open_loader(tmp_path / "cache", root))) == 40

    def scandir(folder: Path) -> Iterator[os.DirEntry]:
        for entry in list(os.scandir(folder)):
            if entry.name == "shard.00001.mds":
                Path(entry).unlink()
            yield entry

    monkeypatch.setattr(shard_fetching, "os", SimpleNamespace(scandir=scandir, access=os.access, F_OK=os.F_OK))
    loader = open_loader(tmp_path / "cache", root)
    assert not (tmp_path / "cache" / "a" / "shard.00001.mds").exists()
    assert len(read(loader)) == 40
