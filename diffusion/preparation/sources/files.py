"""What the sources that are made of files have in common: each partition is a file, or lies in one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from typing_extensions import Self

from diffusion.preparation.records import Partition, fingerprint_of, key_of
from diffusion.preparation.sources.remote_files import each, state_of


@dataclass(frozen=True)
class FileSource:
    """Files, local or remote.

    Attributes:
        name: First part of the keys.
        path: The file, the folder or the pattern, as it was given.
        files: For each file (of MDS: folder) its name in the keys and where it is, a path or a URL.
    """

    name: str
    path: str
    files: tuple[tuple[str, str], ...]

    def only(self, partition: Partition) -> Self:
        """Return the source with the partition's file alone."""
        return replace(self, files=tuple(file for file in self.files if file[0] == partition.items[0]))

    def prefix(self, below: str) -> str:
        """Return how the keys of a file begin."""
        return f"{self.name}/{key_of(below)}" if below else self.name


def whole_files(source: FileSource, known: Sequence[Partition], unnamed: str) -> list[Partition]:
    """Return one partition per file, as `Source.partitions` does.

    Args:
        source: The source.
        known: Partitions of an earlier run.
        unnamed: Id where the file has no name in the keys.
    """
    files, there = dict(source.files), {partition.items[0] for partition in known}
    kept = [partition for partition in known if partition.items[0] in files]
    new = [Partition(key_of(below) or unnamed, (below,), "") for below in files if below not in there]
    states = each(state_of, [files[partition.items[0]] for partition in (*kept, *new)])
    return [
        replace(partition, fingerprint=fingerprint_of(state))
        for partition, state in zip((*kept, *new), states, strict=True)
    ]
