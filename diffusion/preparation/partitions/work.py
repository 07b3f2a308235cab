"""The work on one partition: read, examine, decide split and place, write; run by any worker."""

import functools
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from diffusion.datasets.mds import encode_sample
from diffusion.preparation.output_folder import SPLITS, writing
from diffusion.preparation.partitions.examine import Examination, Examined, examine_records
from diffusion.preparation.partitions.output import Summary, read_summary, writing_partition
from diffusion.preparation.partitions.plan import Part
from diffusion.preparation.records import Reason, Record, Refused, Source, file_state, reason_text
from diffusion.preparation.withdrawal import read_keys

COLUMNS = {
    "image": "bytes",
    "captions": "json",
    "width": "int32",
    "height": "int32",
    "key": "str",
    "metadata": "json",
}
"""MDS type of each column of a prepared sample."""

TRAIN, VALIDATION = SPLITS


@dataclass(frozen=True, kw_only=True)
class PartitionTask:
    """A partition, and what is to be done with it.

    Attributes:
        source: The source, with no more than this partition needs.
        part: The partition.
        folder: The folder to write.
        out: The data set, for messages.
        examination: What is done with each image.
        validation_fraction: Share of the keys that is held out.
        seed: Of the order and of the choice of held-out images.
        withdrawn: File of keys that are refused; it need not exist.
    """

    source: Source
    part: Part
    folder: Path
    out: Path
    examination: Examination
    validation_fraction: float
    seed: int
    withdrawn: Path


def is_held_out(key: str, fraction: float, seed: int) -> bool:
    """Return whether a key is held out; what a smaller fraction holds out, a larger one does, too."""
    return _hash(key, "held out", seed) < fraction * 2**64


def order_of(key: str, seed: int) -> int:
    """Return the number, below 2^64, by which the samples of a bucket are sorted."""
    return _hash(key, "order", seed)


def places(bucket_names: list[str]) -> list[tuple[str, str]]:
    """Return split and bucket of each place number: training first, buckets in their order."""
    return [(split, bucket) for split in SPLITS for bucket in bucket_names]


def work_on(task: PartitionTask) -> tuple[int, Summary]:
    """Process a partition, unless that was done before.

    Memory holds one image, those that wait for plug-ins, and the facts of the partition.

    Returns:
        The number of the partition, and its counts.

    Raises:
        ConfigurationError: A plug-in cannot be loaded.
        MachineError: The source cannot be read, or the disk is full.
    """
    if task.folder.is_dir():
        return task.part.number, read_summary(task.folder)
    withdrawn = _withdrawn_keys(task.withdrawn, file_state(task.withdrawn))
    number_of = {place: number for number, place in enumerate(places(task.examination.buckets.names))}
    digest = ContentHash()
    with writing(task.out), writing_partition(task.folder, task.source.name) as writer:
        records = _without(digest.over(task.source.read(task.part.partition)), withdrawn)
        for one in examine_records(records, task.examination):
            if one.refused is not None:
                writer.refuse(one.refused, one.facts, one.record.image if one.record else b"")
                continue
            held_out = is_held_out(one.facts.key, task.validation_fraction, task.seed)
            one.facts.split = VALIDATION if held_out else TRAIN
            writer.keep(
                one.facts,
                encode_sample(_columns(one), COLUMNS),
                order=order_of(one.facts.key, task.seed),
                place=number_of[one.facts.split, one.facts.bucket],
            )
        summary = writer.finish(digest.hexdigest())
    return task.part.number, summary


def content_of(task: tuple[Source, Part]) -> tuple[int, str]:
    """Read a partition without decoding it; return its number and `Summary.content`."""
    source, part = task
    digest = ContentHash()
    for _ in digest.over(source.read(part.partition)):
        pass
    return part.number, digest.hexdigest()


class ContentHash:
    """Hash of all that a source yields for a partition."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def over(self, records: Iterator[Record | Refused]) -> Iterator[Record | Refused]:
        """Pass records and refusals on, and hash them."""
        for record in records:
            bare = record.record if isinstance(record, Refused) else record
            what: list[Any] = [record.key]
            if isinstance(record, Refused):
                what.append(reason_text(record.reason))
            if bare is not None:
                what += [bare.captions, bare.metadata, xxhash.xxh3_128_hexdigest(bare.image)]
            self._hash.update(json.dumps(what).encode() + b"\n")
            yield record

    def hexdigest(self) -> str:
        """Return the hash of what was passed on."""
        return self._hash.hexdigest()


def _columns(one: Examined) -> dict[str, Any]:
    """Return the columns of a sample."""
    assert one.record is not None, "what is kept has a record"
    return {
        "image": one.record.image,
        "captions": one.record.captions,
        "width": one.facts.width,
        "height": one.facts.height,
        "key": one.record.key,
        "metadata": one.record.metadata,
    }


def _without(records: Iterator[Record | Refused], withdrawn: frozenset[str]) -> Iterator[Record | Refused]:
    """Refuse what is withdrawn."""
    for record in records:
        yield Refused(record.key, Reason.WITHDRAWN) if record.key in withdrawn else record


@functools.lru_cache(maxsize=1)
def _withdrawn_keys(path: Path, _state: str) -> frozenset[str]:
    """Read the withdrawn keys, once per process while the file stays as it is."""
    return frozenset(read_keys(path)) if path.is_file() else frozenset()


def _hash(key: str, purpose: str, seed: int) -> int:
    """Return 64 random bits of a key."""
    digest = hashlib.blake2b(key.encode(), digest_size=8, person=purpose.encode(), salt=seed.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little")
