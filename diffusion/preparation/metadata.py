"""Metadata of images: a parquet file per partition of the sources, with a row per image.

`scan` writes `metadata/NUMBER.parquet`, rows in the order of the source. `score` writes `scores/COLUMN/NUMBER.parquet`
with as many rows in the same order. These two are the contract for other tools: what reads and writes them can take
the place of a stage (Spark's `mapInPandas`, for example), and any SQL engine can query them.
"""

import pyarrow as pa

from diffusion.datasets.manifest import SCAN

__all__ = ["CAPTIONS", "LISTINGS", "METADATA", "POSITIONS", "SCAN", "SCHEMA", "SCORES", "SELECTION", "part_name"]

METADATA, SCORES, SELECTION, POSITIONS, LISTINGS = "metadata", "scores", "selection", "positions", "listings"
"""Folders of a data set."""

CAPTIONS = "captions"
"""Folder below `scores` with the captions that a captioner wrote."""

SCHEMA = pa.schema(
    {
        "key": pa.string(),  # name of the source, slash, path in the source; unique
        "key_hash": pa.uint64(),  # xxh3_64 of the key: order and validation split are made of it
        "file": pa.string(),  # path below the source
        "version": pa.string(),  # of the file: changes with its content
        "offset": pa.int64(),  # `Location`, as the three below; null where it does not apply
        "length": pa.int64(),
        "row_group": pa.int32(),
        "row": pa.int64(),
        "bytes": pa.int64(),  # of the image file; null, like all below but the last two, where there is none
        "format": pa.string(),  # by the file's signature: jpeg, png, ...
        "width": pa.int32(),  # pixels, upright (EXIF), as height
        "height": pa.int32(),
        "xxh128": pa.string(),  # XXH3 of the file's bytes, 32 hexadecimal digits
        "phash": pa.uint64(),  # perceptual hash
        "sharpness": pa.float64(),  # variance of the Laplacian
        "captions": pa.list_(pa.string()),
        "metadata": pa.string(),  # JSON object: whatever else the source knew
        "reason": pa.string(),  # why it is rejected, empty if it is not
        "detail": pa.string(),  # of the rejection, in a few words
    }
)
"""Columns of `metadata/NUMBER.parquet`. The row's number in the file and the file's number identify an image."""


def part_name(number: int) -> str:
    """Name of the file of a partition."""
    return f"{number:06}.parquet"
