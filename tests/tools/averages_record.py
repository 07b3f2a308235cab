"""Callbacks that look at the averages of a training run, named by import path in the tests."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from composer import Callback, Logger, State
from composer.utils import dist
from torch import Tensor

from diffusion.ema.averaging import local_shard, trainable_parameters
from diffusion.ema.callbacks import LateStartEMA


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """Hash of this rank's shards."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(local_shard(tensor.detach()).contiguous().numpy().tobytes())
    return digest.hexdigest()


class RecordAverages(Callback):
    """Write to `folder/rank-R.jsonl` what the averages take, and which weights are in place when."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder) / f"rank-{dist.get_global_rank()}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def _write(self, event: str, state: State, **values: Any) -> None:
        weights = fingerprint(trainable_parameters(state.model).values())
        row = {"event": event, "step": state.timestamp.batch.value, "weights": weights, **values}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def batch_start(self, state: State, logger: Logger) -> None:
        self._write("batch_start", state)

    def eval_start(self, state: State, logger: Logger) -> None:
        self._write("eval_start", state)

    def batch_end(self, state: State, logger: Logger) -> None:
        (ema,) = (callback for callback in state.callbacks if isinstance(callback, LateStartEMA))
        averages = [average.averages for average in ema.averages]
        shards = [local_shard(tensor) for tensors in averages for tensor in tensors.values()]
        storages = {shard.untyped_storage().data_ptr(): shard.untyped_storage().nbytes() for shard in shards}
        self._write(
            "batch_end",
            state,
            num_averages=len(averages),
            num_bytes=sum(storages.values()),
            num_elements=sum(local_shard(p).numel() for p in trainable_parameters(state.model).values()),
            average=fingerprint(averages[0].values()) if averages else None,
        )
