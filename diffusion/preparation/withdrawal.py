"""Images taken back out of a finished data set: marked, so that training passes over them, or erased.

Nothing else changes its place: `withdrawn.json` names the samples by their number, and training puts other samples in
their stead. `withdrawn.txt` holds all keys that were ever withdrawn; a later preparation refuses them.
"""

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from diffusion.datasets.manifest import MANIFEST
from diffusion.datasets.mds import INDEX, open_shard, read_shards
from diffusion.errors import DataError
from diffusion.files import read_json, write_atomically, write_json
from diffusion.preparation.output_folder import FACTS, SPLITS, locked, writing

logger = logging.getLogger(__name__)

KEYS = "withdrawn.txt"
"""File of a data set: every key that was withdrawn, sorted, one per line, as `read_keys` reads them."""

MARKS = "withdrawn.json"
"""File of a data set: for each `<split>/<bucket>` the numbers of the withdrawn samples, ascending."""


@dataclass(frozen=True)
class Withdrawal:
    """What was withdrawn.

    Attributes:
        marks: For each `<split>/<bucket>` the numbers of all withdrawn samples, of this time and before, ascending.
        absent: Keys, of this time, that the data set does not hold, sorted.
    """

    marks: dict[str, list[int]]
    absent: list[str]


def read_keys(path: Path) -> set[str]:
    """Read a file of keys, one per line; blank lines are passed over.

    A line is a key as it is, spaces and all. One that is a JSON string, `"..."`, stands for the text in it: so keys are
    written that hold a line break or begin with a quotation mark.

    Raises:
        DataError: It cannot be read, or is not UTF-8.
    """
    try:
        lines = path.read_bytes().decode().split("\n")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; give a file with one key per line") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error}; give a file with one key per line") from error
    return {_parse_line(line.rstrip("\r")) for line in lines if line.strip()}


def _parse_line(line: str) -> str:
    """Return the key that a line stands for."""
    if line.startswith('"'):
        try:
            return str(json.loads(line))
        except ValueError:
            return line
    return line


def _line_of(key: str) -> str:
    """Return the line that stands for a key."""
    return json.dumps(key) if key.startswith('"') or "\n" in key or key.endswith("\r") else key


def add_keys(out: Path, keys: Iterable[str]) -> None:
    """Add keys to those that a data set refuses from now on.

    Raises:
        OSError: The disk is full, or the place cannot be written to.
    """
    known = read_keys(out / KEYS) if (out / KEYS).is_file() else set()
    if not known.issuperset(keys):
        write_atomically(out / KEYS, "".join(f"{_line_of(key)}\n" for key in sorted(known.union(keys))))


def withdraw(dataset: Path, keys: Iterable[str]) -> Withdrawal:
    """Withdraw samples of a finished data set; what was withdrawn before stays so.

    Args:
        dataset: Prepared or encoded data.
        keys: Keys of the samples.

    Returns:
        What is withdrawn now.

    Raises:
        DataError: It is not a finished data set, or is damaged.
        MachineError: Another process is writing there, or it cannot be written to.
    """
    check_data_set(dataset)
    asked = set(keys)
    with locked(dataset), writing(dataset):
        add_keys(dataset, asked)
        everything = read_keys(dataset / KEYS) if (dataset / KEYS).is_file() else set()
        found = locate(dataset, everything)
        marks: dict[str, set[int]] = {place: set(numbers) for place, numbers in read_marks(dataset).items()}
        for place, number in found.values():
            marks.setdefault(place, set()).add(number)
        withdrawal = Withdrawal(
            {place: sorted(marks[place]) for place in sorted(marks)}, sorted(asked.difference(found))
        )
        if withdrawal.marks != read_marks(dataset):
            write_json(dataset / MARKS, withdrawal.marks)
    if withdrawal.absent:
        logger.warning(
            "%s does not hold %d of the keys (such as %s); they are refused if a later run meets them",
            dataset, len(withdrawal.absent), ascii(withdrawal.absent[0]),
        )  # fmt: skip
    return withdrawal


def check_data_set(dataset: Path) -> str:
    """Return `prepared` or `encoded`.

    Raises:
        DataError: The folder is not a finished data set.
    """
    values = read_json(dataset / MANIFEST) if (dataset / MANIFEST).is_file() else None
    kind = values.get("kind") if isinstance(values, dict) else None
    if kind not in ("prepared", "encoded"):
        raise DataError(f"{dataset} is no finished data set; give the folder that holds its {MANIFEST}")
    return kind


def read_marks(dataset: Path) -> dict[str, list[int]]:
    """Read the numbers of the withdrawn samples; empty if none was withdrawn.

    Raises:
        DataError: The file is damaged.
    """
    return read_json(dataset / MARKS) if (dataset / MARKS).is_file() else {}


def locate(dataset: Path, keys: set[str]) -> dict[str, tuple[str, int]]:
    """Find samples by their keys.

    Returns:
        For each key that is there `<split>/<bucket>` and the sample's number in that folder.

    Raises:
        DataError: A file is missing or damaged.
    """
    if not keys:
        return {}
    facts = sorted((dataset / FACTS).glob("*.parquet"))
    return dict(_from_facts(facts, keys) if facts else _from_shards(dataset, keys))


def bucket_folders(dataset: Path) -> list[Path]:
    """Return the MDS folders of a data set, sorted."""
    return sorted(index.parent for split in SPLITS for index in (dataset / split).glob(f"*/{INDEX}"))


def _from_facts(files: list[Path], keys: set[str]) -> Iterator[tuple[str, tuple[str, int]]]:
    """Look keys up in the facts of a prepared data set."""
    wanted = pa.array(sorted(keys))
    for file in files:
        table = pq.read_table(file, columns=["key", "split", "bucket", "index"])
        table = table.filter(pc.and_(pc.is_in(table["key"], wanted), pc.greater_equal(table["index"], 0)))  # pyright: ignore
        for row in table.to_pylist():
            yield row["key"], (f"{row['split']}/{row['bucket']}", row["index"])


def _from_shards(dataset: Path, keys: set[str]) -> Iterator[tuple[str, tuple[str, int]]]:
    """Look keys up in the samples themselves, all of which are read."""
    for folder in bucket_folders(dataset):
        number = 0
        for entry in read_shards(folder):
            with open_shard(folder, entry) as reader:
                for i in range(entry["samples"]):
                    key = reader[i]["key"]
                    if key in keys:
                        yield key, (f"{folder.parent.name}/{folder.name}", number + i)
            number += entry["samples"]
