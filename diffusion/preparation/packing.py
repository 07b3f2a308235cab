"""Packed files: what many small files of a data set hold, in a few, so that a growth does not read all before it.

Items (partitions, or generations) are numbered from 0. `packed/KIND/FIRST-STOP-HASH.parquet` holds some columns of the
items from FIRST to before STOP; HASH is that of what identifies them. A new file holds the items that are in none, and
takes over those of the last file as long as that has no more than it: there are at most as many files as the number of
items has binary digits. Whoever changes or removes the metadata of an item removes the folder, which is made anew.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from diffusion import storage
from diffusion.formats.data_set import PACKED, list_own_files


class Pack(NamedTuple):
    """A packed file."""

    first: int
    stop: int
    name: str
    """Name below the folder of the data set."""


class Packs:
    """The packed files of a kind (a folder below `packed`) that fit, and the items that are in none."""

    def __init__(self, out: str, kind: str, identities: Sequence[str]) -> None:
        self._folder, self._identities = storage.join(PACKED, kind), identities
        self._out, self._there = out, list_own_files(storage.join(out, self._folder))
        bounds = {tuple(map(int, name.split("-")[:2])) for name in self._there if re.match(r"\d+-\d+-\w+\.", name)}
        self.packs: list[Pack] = []
        for first, stop in sorted(bounds, key=lambda one: (one[0], -one[1])):
            pack = self._pack(first, stop)
            if first == self.stop and stop <= len(identities) and pack.name.rpartition("/")[2] in self._there:
                self.packs.append(pack)

    @property
    def stop(self) -> int:
        """First item that is in no packed file."""
        return self.packs[-1].stop if self.packs else 0

    def next(self) -> tuple[Pack, list[Pack]]:
        """Return the file that is to be written of the items that are in none, and the files that it takes in."""
        end, taken = len(self._identities), list[Pack]()
        while self.packs and self.packs[-1].stop - self.packs[-1].first <= end - self.stop:
            taken.insert(0, self.packs.pop())
        return self._pack(self.stop, end), taken

    def add(self, pack: Pack) -> None:
        """Take a file into use that has been written; remove those that are not used any more."""
        self.packs.append(pack)
        used = {one.name.rpartition("/")[2] for one in self.packs}
        storage.delete(storage.join(self._out, self._folder, name) for name in self._there if name not in used)

    def _pack(self, first: int, stop: int) -> Pack:
        digest = xxhash.xxh3_64_hexdigest("\n".join(self._identities[first:stop]).encode())
        return Pack(first, stop, storage.join(self._folder, f"{first}-{stop}-{digest}.parquet"))
