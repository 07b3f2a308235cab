"""Which partitions a run works on, and whether those of earlier runs are still what they were."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from diffusion.errors import DataError
from diffusion.files import read_json, write_json
from diffusion.preparation.records import Partition, Source, clean_text, fingerprint_of

PARTITIONS = "partitions.json"
"""File of a data set that names the partitions of all its generations."""

PLAN = "plan.json"


@dataclass(frozen=True, kw_only=True)
class Part:
    """A partition with its number in the data set.

    Attributes:
        number: Counted over all sources and generations; names its files.
        source: Name of its source.
        generation: The run that read it, from 0.
        partition: What the source reads.
        content: `Summary.content`, once it is done.
        seen: Images in it.
        kept: Images that came into the data set.
    """

    number: int
    source: str
    generation: int
    partition: Partition
    content: str = ""
    seen: int = 0
    kept: int = 0

    @property
    def name(self) -> str:
        """Name of its folder and of its files."""
        return f"{self.number:06}"

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Part":
        """Read what `asdict` gave."""
        entry = values["partition"]
        return cls(**{**values, "partition": Partition(**{**entry, "items": tuple(entry["items"])})})


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one run does.

    Attributes:
        generation: Number of generations that there are already.
        settings: Settings that determine the data.
        sources: Name, kind and path of each.
        parts: The partitions to read.
        withdrawn: Hash of the keys that are withdrawn.
    """

    generation: int
    settings: dict[str, Any]
    sources: list[list[str]]
    parts: list[Part]
    withdrawn: str

    @cached_property
    def identity(self) -> str:
        """Equal for equal plans; names the folder of the work, so that no other plan's results are found there."""
        return fingerprint_of(json.dumps(asdict(self), sort_keys=True))[:16]

    def write(self, folder: Path) -> None:
        """Write it into the folder of its work.

        Raises:
            OSError: The disk is full, or the place cannot be written to.
        """
        write_json(folder / PLAN, asdict(self))

    @classmethod
    def read(cls, path: Path) -> "Plan":
        """Read what `write` wrote.

        Raises:
            DataError: It is damaged.
        """
        values = read_json(path)
        try:
            return cls(**{**values, "parts": [Part.from_json(part) for part in values["parts"]]})
        except (KeyError, TypeError) as error:
            raise DataError(f"{path} is damaged ({error!r}); delete the folder that it lies in") from error


def described(sources: Sequence[Source]) -> list[list[str]]:
    """Return name, kind and path of each source."""
    return [[source.name, source.kind, clean_text(source.path)] for source in sources]


def survey(sources: Sequence[Source], size: int, known: Sequence[Part]) -> tuple[list[Part | None], list[Part]]:
    """Look at what the sources hold now.

    Args:
        sources: The sources.
        size: Images of a new partition.
        known: Partitions of earlier runs.

    Returns:
        The known ones in the order given, as they are now, None for those that are gone; and the new ones, which belong
        to no generation yet (-1).
    """
    now: dict[tuple[str, str], Partition] = {}
    new: list[Part] = []
    number = max((part.number for part in known), default=-1) + 1
    known_ids = {(part.source, part.partition.id) for part in known}
    for source in sources:
        for partition in source.partitions(size, [part.partition for part in known if part.source == source.name]):
            place = (source.name, partition.id)
            assert place not in now, f"two partitions of {source.name} are called {partition.id}"
            now[place] = partition
            if place not in known_ids:
                new.append(Part(number=number + len(new), source=source.name, generation=-1, partition=partition))
    found = [now.get((part.source, part.partition.id)) for part in known]
    return [
        None if partition is None else replace(part, partition=partition)
        for part, partition in zip(known, found, strict=True)
    ], new


def in_generation(parts: Sequence[Part], generation: int) -> list[Part]:
    """Return new parts as those of a generation."""
    return [replace(part, generation=generation) for part in parts]


def check_unchanged(
    out: Path, known: Sequence[Part], now: Sequence[Part | None], contents: Callable[[list[Part]], list[str]]
) -> None:
    """Refuse a source in which something that was read before has changed or is gone.

    Args:
        out: The data set, for the message.
        known: Partitions of earlier runs.
        now: The same as they are now, from `survey`.
        contents: Reads partitions again and returns their `Summary.content`; asked for those with other fingerprints.

    Raises:
        DataError: One is gone, or its content is another.
    """
    remedy = f"what {out} holds of it cannot be taken back: prepare all of it anew with --overwrite, or undo that"
    for part, found in zip(known, now, strict=True):
        if found is None:
            raise DataError(f"source {part.source}: '{part.partition.id}' is gone; {remedy}")
    touched = [
        (part, found)
        for part, found in zip(known, now, strict=True)
        if found is not None and found.partition.fingerprint != part.partition.fingerprint
    ]
    for (part, _), content in zip(touched, contents([found for _, found in touched]), strict=True):
        if content != part.content:
            first, last = part.partition.items[0], part.partition.items[-1]
            among = f" (from '{first}' to '{last}')" if len(part.partition.items) > 1 else ""
            raise DataError(
                f"source {part.source}: '{part.partition.id}'{among} has changed; {remedy} (mending an image that was "
                "refused is a change, too; a mended copy under another name is new and is added)"
            )


def read_parts(out: Path, num_generations: int) -> list[Part] | None:
    """Read the partitions of the finished generations of a data set; None if it does not name them.

    Raises:
        DataError: The file is damaged.
    """
    path = out / PARTITIONS
    if not path.is_file():
        return None
    try:
        parts = [Part.from_json(part) for part in read_json(path)["partitions"]]
    except (KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error!r}); prepare the data set anew with --overwrite") from error
    return [part for part in parts if part.generation < num_generations]


def write_parts(out: Path, parts: Sequence[Part]) -> None:
    """Write the partitions of a data set.

    Raises:
        OSError: The disk is full, or the place cannot be written to.
    """
    write_json(out / PARTITIONS, {"partitions": [asdict(part) for part in parts]})
