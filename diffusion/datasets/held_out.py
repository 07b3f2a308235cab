"""Held-out data: samples by index, and batches of one shape each, as many on every rank.

Shape letters: R ranks, B samples of a batch on one rank.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from diffusion.datasets.batch import BatchKey
from diffusion.datasets.streams import Sample, TextImageDataset
from diffusion.randomness import sample_address


class HeldOutData(Dataset):
    """Held-out samples by index: the same at each index for every world size; centre crop and first caption.

    Args:
        samples: the streams.
        num_samples: so many in all: the first of each stream, in proportion to their samples; None is all.
    """

    def __init__(self, samples: TextImageDataset, num_samples: int | None = None) -> None:
        self._samples = samples
        self.stream_names = samples.stream_names
        total = samples.size
        wanted = total if num_samples is None else min(num_samples, total)
        ends = [round(wanted * first / total) for first in [*samples.first_samples, total]]
        self.parts = [range(*pair) for pair in pairwise(ends)]
        """Indices of the samples of each stream."""

    @property
    def stream_names_with_samples(self) -> list[str]:
        """Names of the streams by their number; empty for one of which nothing is taken."""
        return [name if part else "" for name, part in zip(self.stream_names, self.parts, strict=True)]

    def addresses(self) -> NDArray[np.int64]:
        """Addresses of all samples."""
        of_streams = [
            sample_address(stream, np.arange(len(part), dtype=np.int64)) for stream, part in enumerate(self.parts)
        ]
        return np.concatenate(of_streams)

    def __len__(self) -> int:
        return self.parts[-1].stop

    def __getitem__(self, index: int) -> Sample:
        """Read a sample; `~index` is a copy of it that is not counted."""
        is_counted = index >= 0
        place = index if is_counted else ~index
        if place >= len(self):
            raise IndexError(f"{place} of {len(self)} samples")
        stream = bisect_right([part.stop for part in self.parts], place)
        sample = self._samples[self._samples.first_samples[stream] + place - self.parts[stream].start]
        return sample | {BatchKey.IS_COUNTED: np.bool_(is_counted)}


class HeldOutBatches(DistributedSampler):
    """Indices of the batches of one rank.

    A batch holds samples of one stream. All ranks have the same number of batches, of the same sizes, since sharded
    models compute together; where samples do not suffice for that, copies fill up which are not counted. Composer takes
    this for the sampler of a distributed data set, and finds no padding of its own in it.

    Args:
        data: the samples.
        batch_size: B.
        num_ranks: R.
        rank: number of the rank.
    """

    def __init__(self, data: HeldOutData, *, batch_size: int, num_ranks: int, rank: int) -> None:
        super().__init__(data, num_replicas=num_ranks, rank=rank, shuffle=False)
        self.total_size = len(data)
        self._batches = [
            share_of(part[start : start + batch_size * num_ranks], num_ranks, rank)
            for part in data.parts
            for start in range(0, len(part), batch_size * num_ranks)
        ]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return iter(self._batches)


def share_of(indices: Sequence[int], num_ranks: int, rank: int) -> list[int]:
    """Every so manieth index from the rank on, and a copy (`~index`) of the last one where others have one more."""
    share = list(indices[rank::num_ranks])
    num = -(-len(indices) // num_ranks)
    return share if len(share) == num else [*share, ~indices[-1]]
