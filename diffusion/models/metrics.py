"""Validation metrics: means over all validation data, by stream and by timestep."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

from diffusion.datasets.batch import BatchKey


class ValidationMean(Metric):
    """Mean of a value per validation sample over all ranks, in float64, without the copies that fill up batches.

    A value that is not finite makes the mean so, too; MeanMetric would drop it, or ignore the weights (`nan_strategy`).

    Args:
        stream: number of the only stream that counts; None is all.
        timesteps: the only timesteps that count; None is all.
    """

    total: Tensor
    weight: Tensor

    def __init__(self, stream: int | None = None, timesteps: range | None = None) -> None:
        super().__init__()
        self.stream, self.timesteps = stream, timesteps
        for state in ("total", "weight"):
            self.add_state(state, torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Tensor, batch: Mapping[str, Tensor], timesteps: Tensor | None = None) -> None:
        """Add the values [B] of a batch; `timesteps` [B] are needed to select by timestep."""
        weight = values.new_ones(len(values))
        if BatchKey.IS_COUNTED in batch:
            weight = weight * batch[BatchKey.IS_COUNTED]
        if self.stream is not None:
            weight = weight * (batch[BatchKey.STREAM] == self.stream)
        if self.timesteps is not None:
            assert timesteps is not None
            weight = weight * ((timesteps >= self.timesteps.start) & (timesteps < self.timesteps.stop))
        self.total += torch.where(weight > 0, values * weight, 0.0).sum(dtype=torch.float64)
        self.weight += weight.sum()

    def compute(self) -> Tensor:
        """Return the mean."""
        return self.total / self.weight


def validation_means(name: str, streams: Sequence[str] = (), bins: Sequence[range] = ()) -> dict[str, Metric]:
    """Metrics of a value: over all validation data (`name`), by stream and by timestep (`name/...`).

    Streams without a name and a single one have no metric of their own.
    """
    metrics: dict[str, Metric] = {name: ValidationMean()}
    if len(streams) > 1:
        metrics |= {f"{name}/{stream}": ValidationMean(number) for number, stream in enumerate(streams) if stream}
    metrics |= {f"{name}/timesteps/{part.start}-{part.stop - 1}": ValidationMean(timesteps=part) for part in bins}
    return metrics
