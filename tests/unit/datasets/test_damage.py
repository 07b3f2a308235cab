"""Damage that leaves a file its size: found before a sample of the shard is used, mended where there is a remote."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from diffusion.config.data import Representation, Shuffling, ValidationConfig
from diffusion.datasets.batch import BatchKey
from diffusion.datasets.dataset import TextImageDataset
from diffusion.datasets.loader import BatchLoader, train_loader, validation_dataset
from diffusion.datasets.mds import read_shards
from diffusion.errors import DataError
from tests.tools.written_data import data_config, tokenize, write_encoded, write_prepared

LATENTS = Representation.latents


def open_loader(local: Path, representation: Representation, remote: Path | None = None, **options: Any) -> BatchLoader:
    config = data_config(local, "a", remote=remote and str(remote), representation=representation, **options)
    return train_loader(config, seed=3, tokenize=tokenize, rank_batch_size=config.global_batch_size)


def overwrite(shard: Path, data: bytes, at: int) -> None:
    content = bytearray(shard.read_bytes())
    content[at : at + len(data)] = data
    shard.write_bytes(content)


def zero_an_image(root: Path) -> Path:
    """Zero the middle of one image of a shard, and return the shard."""
    shard = root / "a" / "shard.00001.mds"
    offset = shard.read_bytes().index(b"IDAT")
    overwrite(shard, bytes(64), offset + 200)
    return shard


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


def samples_of(loader: BatchLoader) -> list[tuple[int, torch.Tensor]]:
    key = BatchKey.LATENT_MEAN
    return [pair for batch in loader for pair in zip(batch[BatchKey.SAMPLE].tolist(), batch[key], strict=True)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_zeros_within_an_image_of_an_original_end_the_epoch(tmp_path: Path, num_workers: int) -> None:
    root = write_prepared(tmp_path, {"a": 40})
    shard = zero_an_image(root)
    with pytest.raises(DataError, match=str(shard)):
        list(open_loader(root, Representation.images, num_workers=num_workers))


@pytest.mark.parametrize("damage", [flip_bits, move_offset])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_damaged_latents_of_an_original_end_the_epoch(tmp_path: Path, damage: Any, num_workers: int) -> None:
    root = write_encoded(tmp_path, {"a": 40})
    shard = damage(root)
    with pytest.raises(DataError, match=str(shard)):
        list(open_loader(root, LATENTS, num_workers=num_workers))


def test_damage_is_found_in_data_that_is_read_by_index(tmp_path: Path) -> None:
    root = write_encoded(tmp_path, {"a": 40})
    shard = flip_bits(root)
    validation = ValidationConfig(local=str(root))
    dataset = validation_dataset(validation, data_config(root, "a", representation=LATENTS), tokenize=None)
    with pytest.raises(DataError, match=str(shard)):
        [dataset[index] for index in range(len(dataset))]


@pytest.mark.parametrize("validate_hash", [None, "xxh64"])
@pytest.mark.parametrize("damage", [flip_bits, move_offset])
def test_a_damaged_shard_in_the_cache_is_fetched_again(tmp_path: Path, damage: Any, validate_hash: str | None) -> None:
    remote = write_encoded(tmp_path / "remote", {"a": 40})
    for name in ("whole", "damaged"):
        shutil.copytree(remote, tmp_path / name)
    shard = damage(tmp_path / "damaged")
    whole, mended = (
        samples_of(open_loader(tmp_path / name, LATENTS, remote, validate_hash=validate_hash))
        for name in ("whole", "damaged")
    )
    assert len(whole) == 40
    assert [address for address, _ in mended] == [address for address, _ in whole]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(mended, whole, strict=True))
    assert shard.read_bytes() == (remote / "a" / shard.name).read_bytes()


def test_a_damaged_offset_table_without_hashes_is_one_error(tmp_path: Path) -> None:
    root = write_encoded(tmp_path, {"a": 40})
    index = root / "a" / "index.json"
    shards = [entry | {"raw_data": entry["raw_data"] | {"hashes": {}}} for entry in read_shards(root / "a")]
    index.write_text(json.dumps({"version": 2, "shards": shards}))
    assert len(samples_of(open_loader(root, LATENTS))) == 40
    shard = move_offset(root)
    with pytest.raises(DataError, match=str(shard)):
        list(open_loader(root, LATENTS))


def bytes_read() -> int:
    """Bytes that this process has read from files so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_shard_is_hashed_once_in_a_start(tmp_path: Path) -> None:
    root = write_encoded(tmp_path, {"a": 2000})
    num_bytes = sum(shard.stat().st_size for shard in (root / "a").glob("*.mds"))
    loader = open_loader(root, LATENTS)
    epochs = []
    for _ in range(3):
        before = bytes_read()
        assert len(samples_of(loader)) == 2000
        epochs.append(bytes_read() - before)
    assert epochs[0] > 1.9 * num_bytes
    assert max(epochs[1:]) < 1.3 * num_bytes


def test_shards_of_an_earlier_start_make_room(tmp_path: Path) -> None:
    remote = write_encoded(tmp_path / "remote", {"a": 80})
    shutil.copytree(remote, tmp_path / "cache")
    num_shards = len(read_shards(remote / "a"))
    options: dict[str, Any] = {"shuffle": Shuffling.none, "predownload": 8, "num_canonical_nodes": 1}
    for shard in sorted((tmp_path / "cache" / "a").glob("*.mds"))[:4]:
        shard.unlink()
    loader = open_loader(tmp_path / "cache", LATENTS, remote, cache_limit="24kb", **options)
    assert isinstance(loader.dataset, TextImageDataset)
    assert len(samples_of(loader)) == 80
    assert len(list((tmp_path / "cache" / "a").glob("*.mds"))) < num_shards
