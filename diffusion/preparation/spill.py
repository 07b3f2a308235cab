"""A temporary file that samples are put into as they come and taken from in another order."""

import json
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

_LENGTHS = struct.Struct("<QQ")
_BUFFER_BYTES = 2**20


class Spill:
    """Samples on disk, 16 bytes of memory for each, read back in ascending order of a number given with each.

    Samples with the same number keep the order in which they came.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = path.open("wb", buffering=_BUFFER_BYTES)
        self._ranks = array("Q")
        self._offsets = array("Q")
        self._end = 0

    def __len__(self) -> int:
        return len(self._ranks)

    def add(self, rank: int, image: bytes, fields: dict[str, Any]) -> None:
        """Append a sample.

        Args:
            rank: Place in the order, 0 <= rank < 2^64.
            image: The entry `image` of the sample.
            fields: The other entries, fit for JSON.

        Raises:
            OSError: The disk is full.
        """
        assert self._file is not None, "samples are added before any is read"
        header = json.dumps(fields).encode()
        self._file.write(_LENGTHS.pack(len(header), len(image)))
        self._file.write(header)
        self._file.write(image)
        self._ranks.append(rank)
        self._offsets.append(self._end)
        self._end += _LENGTHS.size + len(header) + len(image)

    def samples(self) -> Iterator[dict[str, Any]]:
        """Yield the samples in ascending order of rank; nothing can be added afterwards."""
        self.close()
        order = np.argsort(np.frombuffer(self._ranks, dtype=np.uint64), kind="stable") if self._ranks else []
        with self._path.open("rb") as file:
            for index in order:
                file.seek(self._offsets[index])
                num_header, num_image = _LENGTHS.unpack(file.read(_LENGTHS.size))
                fields = json.loads(file.read(num_header))
                yield {"image": file.read(num_image), **fields}

    def close(self) -> None:
        """Write out what is buffered."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def remove(self) -> None:
        """Delete the file."""
        self.close()
        self._path.unlink()

    def abandon(self) -> None:
        """Close the file after a failure, when what is buffered may not fit on the disk."""
        try:
            self.close()
        except OSError:
            self._file = None
