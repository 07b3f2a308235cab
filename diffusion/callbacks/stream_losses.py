"""Mean losses of streams while training."""

import json
from collections.abc import Sequence
from typing import Any

import torch
from composer import Callback, Logger, State
from composer.utils import dist as composer_dist

from diffusion.composer_models import LatentDiffusionTraining
from diffusion.datasets.batch import BatchKey


class StreamLosses(Callback):
    """Log `loss/train/stream/NAME`: the mean loss of the samples of each stream over an interval in steps.

    Sums and counts stay on the device, where those of all ranks are added at the end of each step. They are part of
    checkpoints, so that a resumed run logs the same numbers on any number of ranks.
    """

    def __init__(self, model: LatentDiffusionTraining, streams: Sequence[str], interval: int) -> None:
        self.streams, self.interval = list(streams), interval
        self._sums = torch.zeros(2, len(streams), dtype=torch.float64)
        """Sums of this rank in this step."""

        self._totals = torch.zeros_like(self._sums)
        """Sums of all ranks in the steps before."""

        self._model = model

    def init(self, state: State, logger: Logger) -> None:
        """Move the sums to the device."""
        self._sums, self._totals = map(state.device.tensor_to_device, (self._sums, self._totals))

    def after_loss(self, state: State, logger: Logger) -> None:
        """Add the errors [B] of a microbatch, and their number, to the sums [2, streams]."""
        errors = self._model.errors
        of_stream = state.batch[BatchKey.STREAM] == torch.arange(len(self.streams), device=errors.device)[:, None]
        self._sums[0] += (of_stream * errors.double()).sum(dim=1)
        self._sums[1] += of_stream.sum(dim=1)

    def _by_stream(self) -> dict[str, list[float]]:
        return dict(zip(self.streams, self._totals.T.tolist(), strict=True))

    def batch_end(self, state: State, logger: Logger) -> None:
        """Add up, and log at the end of each interval."""
        composer_dist.all_reduce(self._sums)
        self._totals += self._sums
        self._sums.zero_()
        if state.timestamp.batch.value % self.interval:
            return
        means = {f"loss/train/stream/{name}": total / num for name, (total, num) in self._by_stream().items() if num}
        self._totals.zero_()
        logger.log_metrics(means)

    def state_dict(self) -> dict[str, Any]:
        """Return sums and counts as text: one entry for any streams, without a collective operation."""
        return {"sums": json.dumps(self._by_stream())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the sums of a checkpoint."""
        totals = json.loads(state.get("sums", "{}"))
        sums = [totals.get(name, [0.0, 0.0]) for name in self.streams]
        self._totals = torch.tensor(sums, dtype=torch.float64, device=self._sums.device).T.contiguous()
