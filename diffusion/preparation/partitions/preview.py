"""A preparation tried on a few images of each source: what would be kept, and what each filter would refuse."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from diffusion.preparation.partitions.examine import Examination, examine_records
from diffusion.preparation.records import Record, Refused, Source, reason_text

_PARTITIONS = 16
"""Partitions of a source, spread over it, from which the images are taken."""


@dataclass
class Preview:
    """What would become of some images of one source."""

    source: str
    seen: int = 0
    buckets: Counter[str] = field(default_factory=Counter)
    """Kept images by bucket."""
    refused: Counter[str] = field(default_factory=Counter)
    """Refused images by reason."""
    examples: dict[str, str] = field(default_factory=dict)
    """For each reason the first key, with the detail."""


def preview(sources: Sequence[Source], examination: Examination, number: int, partition_size: int) -> list[Preview]:
    """Examine the first images of partitions spread over each source; nothing is written.

    Args:
        sources: The sources.
        examination: What is done with each image.
        number: Images of each source, at most.
        partition_size: As for `prepare`.

    Returns:
        One for each source.

    Raises:
        ConfigurationError: A plug-in or filter cannot be loaded.
        MachineError: A source cannot be read.
    """
    return [_preview(source, examination, number, partition_size) for source in sources]


def _preview(source: Source, examination: Examination, number: int, partition_size: int) -> Preview:
    result = Preview(source.name)
    for one in examine_records(_sampled(source, number, partition_size), examination):
        result.seen += 1
        if one.refused is None:
            result.buckets[one.facts.bucket] += 1
            continue
        reason = reason_text(one.refused.reason)
        result.refused[reason] += 1
        result.examples.setdefault(reason, f"{one.refused.key} ({one.refused.detail or reason})")
    return result


def _sampled(source: Source, number: int, partition_size: int) -> Iterator[Record | Refused]:
    """Yield the first records of partitions spread over a source."""
    partitions = source.partitions(partition_size)
    count = min(len(partitions), _PARTITIONS, number)
    for i in range(count):
        share = number * (i + 1) // count - number * i // count
        yield from itertools.islice(source.read(partitions[i * len(partitions) // count]), share)
