"""The training loss of each stream (resolution bucket)."""

import json
from collections.abc import Sequence
from typing import Any

import torch
from composer import Callback, Logger, State
from composer.utils import dist
from torch import Tensor

from diffusion.datasets.batch import BatchKey
from diffusion.models.latent_diffusion import Batch, LatentDiffusion


class StreamLosses(Callback):
    """Log `loss/train/stream/NAME`: the mean loss of the samples of each stream since it was logged before.

    Sums and counts stay on the device, and are added up over the ranks only when they are logged or saved. Checkpoints
    hold them, so that a resumed run logs the same numbers on any number of ranks.

    Args:
        model: whose losses are observed.
        streams: names of the streams by their number.
        interval: steps between two logs.
    """

    def __init__(self, model: LatentDiffusion, streams: Sequence[str], interval: int) -> None:
        self.streams, self.interval = list(streams), interval
        self._sums = torch.zeros(2, len(streams), dtype=torch.float64)
        model.loss_observer = self._add

    def init(self, state: State, logger: Logger) -> None:
        """Keep the sums where the model is."""
        self._sums = state.device.tensor_to_device(self._sums)

    def _add(self, errors: Tensor, batch: Batch) -> None:
        """Add the errors [B] of a microbatch, and their number, to the sums [2, streams]."""
        of_stream = batch[BatchKey.STREAM] == torch.arange(len(self.streams), device=errors.device)[:, None]
        self._sums[0] += (of_stream * errors.double()).sum(dim=1)
        self._sums[1] += of_stream.sum(dim=1)

    def _of_all_ranks(self) -> dict[str, list[float]]:
        """Sum and count by stream; to be called on all ranks."""
        total = self._sums.clone()
        dist.all_reduce(total)
        return dict(zip(self.streams, total.T.tolist(), strict=True))

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log at the end of each interval."""
        if state.timestamp.batch.value % self.interval:
            return
        totals = self._of_all_ranks()
        self._sums.zero_()
        means = {f"loss/train/stream/{name}": total / count for name, (total, count) in totals.items() if count}
        logger.log_metrics(means)

    def state_dict(self) -> dict[str, Any]:
        """Sums and counts of all ranks, as text: one entry, whatever the streams are."""
        return {"sums": json.dumps(self._of_all_ranks())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the sums; one rank holds them."""
        totals = json.loads(state.get("sums", "{}")) if dist.get_global_rank() == 0 else {}
        sums = [totals.get(name, [0.0, 0.0]) for name in self.streams]
        self._sums = torch.tensor(sums, dtype=torch.float64, device=self._sums.device).T.contiguous()
