"""Images of a data set looked up by their keys, for the report."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import xxhash

from diffusion.datasets.mds import open_shard, read_shards


class ImageReader:
    """Reads images that are kept from the shards, and refused ones from the samples that are stored of them.

    Memory: 16 bytes per kept image.
    """

    def __init__(self, out: Path, facts: Sequence[Path], refused: Sequence[Path]) -> None:
        """Look at what there is.

        Args:
            out: The data set; its MDS folders are there.
            facts: Its tables of facts.
            refused: Its tables of refused images.
        """
        self._out = out
        self._facts = list(facts)
        self._refused = {
            key: path for path in refused for key in pq.read_table(path, columns=["key"])["key"].to_pylist()
        }
        hashes, rows = [], []
        for number, path in enumerate(self._facts):
            table = pq.read_table(path, columns=["key", "index"])
            kept = np.flatnonzero(table["index"].to_numpy() >= 0)
            keys = table["key"].take(kept).to_pylist()
            hashes.append(np.array([xxhash.xxh64_intdigest(key) for key in keys], np.uint64))
            rows.append(kept.astype(np.uint64) | np.uint64(number << 32))
        found = np.concatenate(hashes) if hashes else np.empty(0, np.uint64)
        order = np.argsort(found, kind="stable")
        self._hashes = found[order]
        self._rows = (np.concatenate(rows) if rows else found)[order]

    @property
    def readable_refused(self) -> set[str]:
        """Keys of the refused images that are stored."""
        return set(self._refused)

    def __call__(self, key: str) -> bytes | None:
        """Return the file of an image, or None if it is not stored."""
        if key in self._refused:
            table = pq.read_table(self._refused[key], filters=[("key", "=", key)])
            return table["image"][0].as_py()
        place = self._place(key)
        if place is None:
            return None
        folder, number = place
        for entry in read_shards(folder):
            if number < entry["samples"]:
                with open_shard(folder, entry) as reader:
                    return reader[number]["image"]
            number -= entry["samples"]
        return None

    def _place(self, key: str) -> tuple[Path, int] | None:
        """Return MDS folder and number of a kept image."""
        wanted = np.uint64(xxhash.xxh64_intdigest(key))
        start, end = np.searchsorted(self._hashes, wanted, "left"), np.searchsorted(self._hashes, wanted, "right")
        for row in self._rows[start:end].tolist():
            table = pq.read_table(self._facts[row >> 32], columns=["key", "split", "bucket", "index"])
            facts = table.slice(row & 0xFFFFFFFF, 1).to_pylist()[0]
            if facts["key"] == key:
                return self._out / facts["split"] / facts["bucket"], facts["index"]
        return None
