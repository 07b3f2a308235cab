"""Preparations of tests: small shards, one worker, no report; and the samples of the result."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from streaming import LocalDataset

from diffusion.formats.data_set import PreparedManifest
from diffusion.preparation.config import PrepareConfig
from diffusion.preparation.prepare import STAGES
from diffusion.preparation.prepare import prepare as prepare_from_config


def prepare(
    sources: Sequence[Any],
    out: str | Path,
    *,
    edges: Iterable[int] | None = None,
    num_workers: int = 1,
    shard_bytes: int | None = None,
    window_bytes: int | None = None,
    stages: Sequence[str] = STAGES,
    removed: Path | None = None,
    overwrite: bool = False,
    report: bool = False,
    **keys: Any,
) -> PreparedManifest:
    """Prepare data with some keys of the configuration; sizes in bytes."""
    listed = [source if isinstance(source, dict) else str(source) for source in sources]
    config = PrepareConfig(sources=listed, out=str(out), workers=num_workers, **keys)
    if edges is not None:
        config.buckets.edges = list(edges)
    config.shard_mb = config.shard_mb if shard_bytes is None else shard_bytes / 2**20
    config.window_mb = config.window_mb if window_bytes is None else window_bytes / 2**20
    manifest = prepare_from_config(config, stages=stages, removed=removed, overwrite=overwrite, report=report)
    assert manifest is not None
    return manifest


def read_samples(out: str | Path) -> dict[str, list[dict[str, Any]]]:
    """Return all samples in their order, by `<split>/<bucket>`."""
    datasets = {
        "/".join(index.parts[-3:-1]): LocalDataset(str(index.parent)) for index in Path(out).glob("*/*/index.json")
    }
    return {folder: [dataset[i] for i in range(len(dataset))] for folder, dataset in sorted(datasets.items())}
