"""Withdrawn samples blanked: their shards are written anew, and every other sample keeps its place and its bytes."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from diffusion.datasets.manifest import PreparedManifest
from diffusion.datasets.mds import (
    ShardFormat,
    check_shard,
    encode_sample,
    open_shard,
    read_index,
    read_shards,
    write_index,
    write_shard,
)
from diffusion.files import PARTIAL
from diffusion.preparation.output_folder import locked, writing
from diffusion.preparation.withdrawal import check_data_set, read_marks

logger = logging.getLogger(__name__)


def erase(dataset: Path) -> int:
    """Erase what is withdrawn: images, captions and metadata, or latents and token ids; keys stay.

    A shard is written under a new name, then the index names it, then the old file is removed: stopped at any moment,
    the data set can be read, and the same call continues. (Between the index and the manifest of prepared data, which
    holds the hash of the index, `encode` refuses it until then.)

    Args:
        dataset: Prepared or encoded data with withdrawn samples.

    Returns:
        How many shards were written.

    Raises:
        DataError: It is not a finished data set, or is damaged.
        MachineError: Another process is writing there, or it cannot be written to.
    """
    kind = check_data_set(dataset)
    with locked(dataset), writing(dataset):
        marks = read_marks(dataset)
        count = sum(_erase_in(dataset / place, set(numbers)) for place, numbers in marks.items())
        if kind == "prepared":
            _update_manifest(dataset, list(marks))
    return count


def _erase_in(folder: Path, numbers: set[int]) -> int:
    """Erase samples of one MDS folder; return how many shards were written."""
    entries, written, first = read_shards(folder), 0, 0
    for i, entry in enumerate(entries):
        chosen = {number - first for number in numbers if first <= number < first + entry["samples"]}
        first += entry["samples"]
        if not chosen:
            continue
        shards = ShardFormat(
            columns=dict(zip(entry["column_names"], entry["column_encodings"], strict=True)),
            shard_bytes=entry["size_limit"],
            hashes=tuple(entry["hashes"]),
            compression=entry["compression"],
        )
        check_shard(folder, entry)  # The new shard's hash would be that of the damage.
        with open_shard(folder, entry) as reader:
            samples: list[bytes] = [reader.get_sample_data(j) for j in range(entry["samples"])]
            blank = {j: blanked(reader[j]) for j in sorted(chosen)}
        encoded = {j: encode_sample(sample, shards.columns) for j, sample in blank.items()}
        if all(samples[j] == data for j, data in encoded.items()):
            continue
        for j, data in encoded.items():
            samples[j] = data
        partial = folder / f".erase{PARTIAL}"
        new = write_shard(folder, i, samples, shards, partial=partial, revision=_revision(entry) + 1)
        entries[i] = new
        write_index(folder, entries)
        for data in (entry["raw_data"], entry["zip_data"]):
            if data is not None:
                (folder / data["basename"]).unlink(missing_ok=True)
        written += 1
    return written


def blanked(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a sample of which the key, and the size of the image, are left."""
    blank: dict[str, Any] = {"image": b"", "captions": ["withdrawn"], "metadata": {}}
    return {
        name: np.zeros_like(value) if isinstance(value, np.ndarray) else blank.get(name, value)
        for name, value in sample.items()
    }


def _revision(entry: dict[str, Any]) -> int:
    """Return how often a shard was written anew: `shard.00003.r2.mds` twice."""
    part = entry["raw_data"]["basename"].split(".")[2]
    return int(part[1:]) if part.startswith("r") and part[1:].isdigit() else 0


def _update_manifest(dataset: Path, places: list[str]) -> None:
    """Bring the sizes and hashes of a prepared data set's manifest up to date."""
    manifest = PreparedManifest.read(dataset)
    splits = {split: dict(buckets) for split, buckets in manifest.splits.items()}
    for split, _, bucket in (place.partition("/") for place in places):
        splits[split][bucket] = read_index(dataset / split / bucket)
    if splits != manifest.splits:
        replace(manifest, splits=splits).write(dataset)
