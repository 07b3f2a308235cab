"""Sources to prepared data in four stages: scan, score, select, write (docs/architecture.md)."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffusion import storage
from diffusion.config.fields import check_sections
from diffusion.config.loading import to_dict
from diffusion.datasets.manifest import MANIFEST, PreparedManifest
from diffusion.errors import ConfigurationError, DataError
from diffusion.preparation.config import PrepareConfig
from diffusion.preparation.engine import Workers
from diffusion.preparation.output import claim
from diffusion.preparation.scan import Scan, scan_sources
from diffusion.preparation.score import score
from diffusion.preparation.select import select
from diffusion.preparation.takedown import add_removed, read_keys
from diffusion.preparation.write import write

logger = logging.getLogger(__name__)

STAGES = ("scan", "score", "select", "write")

_NOT_OF_THE_DATA = ("sources", "out", "engine", "workers", "ray", "scratch")
"""Keys that do not determine the data; sources are compared by their content."""


def prepare(
    config: PrepareConfig,
    *,
    stages: Sequence[str] = STAGES,
    removed: Path | None = None,
    overwrite: bool = False,
    report: bool = True,
    progress: bool = False,
) -> PreparedManifest | None:
    """Run stages of a preparation; the layout of the result is that of docs/architecture.md.

    The data is a function of the sources, of what they held at each run before, and of the settings; not of workers,
    engine or interruptions. An unfinished preparation is continued. A finished one gets what the sources hold in
    addition, as a generation of its own.

    Args:
        config: the configuration.
        stages: some of `STAGES`, in their order.
        removed: file of keys, one per line, that are never to be in the data set; samples that are there already are
            marked as removed.
        overwrite: replace a finished data set; the metadata and scores that still fit are kept.
        report: write `report.html` and `report.json`.
        progress: show bars on stderr.

    Returns:
        The manifest; None unless `write` is one of the stages.

    Raises:
        ConfigurationError: a setting is wrong.
        DataError: a source is missing, unknown, or has changed in what was read before; no image was kept; `out` holds
            something else, or a data set of other settings.
        MachineError: a file cannot be read or written, or a worker died.
    """
