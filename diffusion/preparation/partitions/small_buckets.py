"""Aspect-ratio buckets that would hold too few images: theirs go to other buckets, or are refused.

Decided when all images are counted, so that it depends on workers and partitions as little as the order does. A
bucket that the data set holds already stays one, however few images it has.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diffusion.config.data import named_size
from diffusion.datasets.buckets import SizeBuckets
from diffusion.errors import DataError
from diffusion.preparation.partitions.merge import KeptIndex, LeftOut, read_kept_rows
from diffusion.preparation.partitions.output import FACTS
from diffusion.preparation.records import Reason


def leave_small_buckets(
    kept: KeptIndex,
    is_left_out: NDArray[np.bool_],
    folders: Sequence[Path],
    buckets: SizeBuckets,
    existing: Collection[str],
) -> list[list[LeftOut]]:
    """Take the images out of the buckets that are too small.

    Args:
        kept: The samples; the places of those that move are changed.
        is_left_out: bool [N], those that are not written anyway.
        folders: Their partitions.
        buckets: The division.
        existing: Names of the buckets that the data set holds already.

    Returns:
        For each partition its samples that no bucket takes, ascending.

    Raises:
        DataError: All buckets are too small.
    """
    names = buckets.names
    bucket_of = kept.rows["place"] % len(names)  # Places are those of training, then those held out.
    is_training = kept.rows["place"] < len(names)
    counts = np.bincount(bucket_of[~is_left_out & is_training], minlength=len(names)).tolist()
    is_large = np.array(
        [count >= buckets.min_samples or name in existing for name, count in zip(names, counts, strict=True)]
    )
    left: list[list[LeftOut]] = [[] for _ in folders]
    moving = np.flatnonzero(~is_left_out & ~is_large[bucket_of])
    if not len(moving):
        return left
    if not is_large.any():
        raise DataError(
            f"no bucket has {buckets.min_samples} images (buckets.min_samples), the largest has {max(counts)}: lower "
            "it, or divide the images into fewer buckets"
        )
    large = [name for name, stays in zip(names, is_large, strict=True) if stays]
    others = replace(buckets, sizes=tuple(size for name in large if (size := named_size(name))))
    partitions = kept.partition_of(moving)
    for number in np.unique(partitions).tolist():
        facts = read_kept_rows(folders[number] / FACTS, ["width", "height"])
        widths, heights = facts["width"].to_pylist(), facts["height"].to_pylist()
        for sample in moving[partitions == number].tolist():
            row, bucket = sample - int(kept.starts[number]), int(bucket_of[sample])
            name = None if buckets.refuse_small else others.of(widths[row], heights[row])
            if name is None:
                why = f"{names[bucket]} would hold {counts[bucket]} images, fewer than {buckets.min_samples}"
                left[number].append(LeftOut(row, Reason.SMALL_BUCKET, why))
            else:
                kept.rows["place"][sample] = int(kept.rows["place"][sample]) - bucket + names.index(name)
    return left
