"""Dry run: a preparation tried on a few images of each source, in a temporary folder."""

import math
from collections.abc import Iterable
from dataclasses import replace
from tempfile import TemporaryDirectory

from diffusion.config.fields import check_sections
from diffusion.config.loading import to_dict
from diffusion.errors import DataError
from diffusion.preparation.config import PrepareConfig
from diffusion.preparation.engine import Workers
from diffusion.preparation.plugins import check_plugins
from diffusion.preparation.records import Partition
from diffusion.preparation.scan import Scan, Scanner, ScanTask, open_configured
from diffusion.preparation.score import score
from diffusion.preparation.select import Selection, select
from diffusion.preparation.select import check as check_selection

_PARTITIONS = 16
"""Partitions of a source, spread over it, from which the images are taken."""


def preview(config: PrepareConfig, number: int) -> Selection:
    """Scan, score and select some images of each source; nothing is written but a temporary folder.

    `out` is ignored, and so is `buckets.min_samples`, which a few images do not reach.

    Raises:
        ConfigurationError: a setting is wrong.
        DataError: a source is missing or unknown, or has no images.
        MachineError: a source cannot be read.
    """
    check_sections(config)
    check_plugins(config)
    check_selection(config)
    sources = open_configured(config)
    with TemporaryDirectory(prefix="preview-", dir=config.scratch) as out:
        config = replace(config, out=out, buckets=replace(config.buckets, min_samples=None, reject_small=False))
        scanner = Scanner(out, to_dict(config.limits))
        scanned: list[Partition] = []
        for index, source in enumerate(sources):
            partitions, left = _spread(source.partitions().checked().new)[:number], number
            for i, partition in enumerate(partitions):
                partition = replace(partition, number=len(scanned), source=index)
                few = math.ceil(left / (len(partitions) - i))
                left -= scanner(ScanTask(source, partition, limit=few)).num_images
                scanned.append(partition)
        if not scanned:
            raise DataError(f"the sources hold no images: {', '.join(source.path for source in sources)}")
        scan = Scan(sources, scanned)
        score(config, scan, workers=Workers())
        return select(out, config, scan)


def _spread(partitions: Iterable[Partition]) -> list[Partition]:
    """Choose partitions at equal distances from a stream of unknown length."""
    chosen: list[Partition] = []
    step = 1
    for i, partition in enumerate(partitions):
        if i % step == 0:
            chosen.append(partition)
        if len(chosen) == 2 * _PARTITIONS:
            chosen, step = chosen[::2], 2 * step
    return [chosen[i * len(chosen) // _PARTITIONS] for i in range(_PARTITIONS)] if len(chosen) > _PARTITIONS else chosen
