"""Means over held-out data: of all of it, of each stream, and of parts of the timesteps."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import Tensor
from torchmetrics import MeanMetric, Metric

from diffusion.datasets.batch import BatchKey

NUM_TIMESTEP_BINS = 10


class HeldOutMean(MeanMetric):
    """Mean of a number of each held-out sample, over all ranks; copies that fill up batches are left out.

    Args:
        stream: number of the stream whose samples are taken; None is all.
        timesteps: the timesteps whose samples are taken; None is all.
    """

    def __init__(self, stream: int | None = None, timesteps: range | None = None) -> None:
        super().__init__()
        self.stream, self.timesteps = stream, timesteps

    def add(self, values: Tensor, batch: Mapping[str, Tensor], timesteps: Tensor | None = None) -> None:
        """Add the numbers [B] of a batch; its timesteps [B] are needed where they are chosen from."""
        weight = values.new_ones(len(values))
        if BatchKey.IS_COUNTED in batch:
            weight = weight * batch[BatchKey.IS_COUNTED]
        if self.stream is not None:
            weight = weight * (batch[BatchKey.STREAM] == self.stream)
        if self.timesteps is not None:
            assert timesteps is not None
            weight = weight * ((timesteps >= self.timesteps.start) & (timesteps < self.timesteps.stop))
        self.update(values, weight)


def timestep_bins(num_timesteps: int) -> list[range]:
    """The timesteps 0 .. num_timesteps - 1 in ten parts, as equal as can be."""
    ends = [num_timesteps * i // NUM_TIMESTEP_BINS for i in range(NUM_TIMESTEP_BINS + 1)]
    return [range(*pair) for pair in pairwise(ends)]


def held_out_means(name: str, streams: Sequence[str] = (), bins: Sequence[range] = ()) -> dict[str, Metric]:
    """The mean over all held-out data under a name, and below it those of streams and of timesteps.

    Args:
        name: of the metric.
        streams: names of the streams by their number; an empty one is left out. One stream alone has no metric.
        bins: timesteps that have a mean of their own each.
    """
    metrics: dict[str, Metric] = {name: HeldOutMean()}
    if len(streams) > 1:
        metrics |= {f"{name}/{stream}": HeldOutMean(number) for number, stream in enumerate(streams) if stream}
    metrics |= {f"{name}/timesteps/{part.start}-{part.stop - 1}": HeldOutMean(timesteps=part) for part in bins}
    return metrics
