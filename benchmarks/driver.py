"""The driver of a scan, of partitions without images.

A module beside `preparation`, as Ray pickles the classes of `__main__` by value, which takes 2 GB.
"""

import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from unittest.mock import patch

from diffusion.preparation import scan
from diffusion.preparation.config import Engine, PrepareConfig
from diffusion.preparation.engine import Workers
from diffusion.preparation.records import Location, Partition, Partitions, Reason, Rejected
from diffusion.preparation.sources import Source


@dataclass(frozen=True, kw_only=True)
class _EmptySource(Source):
    """Tars whose reading is replaced: each is one rejection."""

    kind: ClassVar[str] = "empty"
    num_partitions: int

    def partitions(self, known: Sequence[str] = (), only: object = None) -> Partitions:
        """List partitions like those of tars of 10,000 images."""
        return Partitions(
            new=(
                Partition(file=f"{n:05}.tar", version=f"{n} etag", num_bytes=10**9) for n in range(self.num_partitions)
            )
        )

    def scan(self, partition: Partition) -> Iterator[Rejected]:
        """Reject one image."""
        location = Location(file=partition.file, version=partition.version)
        yield Rejected(f"empty/{partition.file}", Reason.DAMAGED_FILE, location)


def measure_driver(num_partitions: int, engine: Engine = Engine.processes) -> dict[str, float]:
    """Scan partitions without images; return CPU seconds and peak memory (MB) of this process, which is the driver."""
    began, cpu = time.monotonic(), time.process_time()
    source = _EmptySource(name="empty", root="/empty", num_partitions=num_partitions)
    with tempfile.TemporaryDirectory() as out, patch.object(scan, "open_sources", lambda *_: [source]):
        config = PrepareConfig(sources=["/empty"], out=out)
        found = scan.scan_sources(config, workers=Workers(engine=engine, number=2))
        assert len(list(Path(out, "metadata").iterdir())) == len(found.partitions) == num_partitions
    return {
        "partitions": num_partitions,
        "driver CPU s": time.process_time() - cpu,
        "driver ms/partition": (time.process_time() - cpu) / num_partitions * 1e3,
        "wall s": time.monotonic() - began,
        "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }
