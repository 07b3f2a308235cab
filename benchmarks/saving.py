"""How fast checkpoints are written, beside raw files of the same size on the same disk."""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffusion.checkpointing.save import write_file, write_sharded


def measure_saving(*, num_megabytes: int = 1024, rounds: int = 5, folder: Path | None = None) -> dict[str, Any]:
    """Write a checkpoint and a raw file in turn, both to the disk (fsync).

    Raw: the bytes of all tensors, one `write` each. A checkpoint is everything: `sharded` with its checksums and index,
    `single` as one file that gets its name when it is whole.

    Args:
        num_megabytes: of fp32 tensors of 8 MiB.
        rounds: of each, after one that is not counted; the median of the ratios of neighbours counts.
        folder: on the disk to be measured; None is the temporary folder.

    Returns:
        `ratio_sharded` and `ratio_single` (rate over the raw one), `raw_bytes_per_second` (the median), and the
        settings.
    """
    tensors = {f"tensor-{i}": torch.rand(2**21) for i in range(max(1, num_megabytes // 8))}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    seconds: dict[str, list[float]] = {"raw": [], "sharded": [], "single": []}
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory(dir=folder) as place:
            root = Path(place)
            ways: dict[str, Callable[[], None]] = {
                "raw": lambda root=root: _write_raw(root / "raw", tensors),
                "sharded": lambda root=root: write_sharded(root / "sharded", {"state": tensors}, None),
                "single": lambda root=root: write_file(root / "single.pt", {"state": tensors}),
            }
            for name, write in ways.items():
                start = time.perf_counter()
                write()
                if number:
                    seconds[name].append(time.perf_counter() - start)
    raw = seconds["raw"]
    ratios = {
        f"ratio_{name}": statistics.median(bare / ours for bare, ours in zip(raw, seconds[name], strict=True))
        for name in ("sharded", "single")
    }
    return {**ratios, "raw_bytes_per_second": num_bytes / statistics.median(raw), "num_bytes": num_bytes}


def _write_raw(path: Path, tensors: dict[str, Tensor]) -> None:
    with path.open("wb") as file:
        for tensor in tensors.values():
            file.write(tensor.numpy().data)
        file.flush()
        os.fsync(file.fileno())
