"""Write pictures and captions from folders, WebDataset tars and parquet files as one prepared data set.

    python scripts/prepare.py SOURCE [SOURCE ...] OUT --edges 256 512 768 1024 --validation-fraction 0.01 --seed 17

A SOURCE is a folder of pictures (captions in .txt files beside them, or metadata.jsonl or captions.csv in the folder),
a tar or parquet file, or a folder or quoted pattern of such files. OUT gets one MDS folder per split and bucket, and
manifest.json, written last. Run again, it starts over if it was interrupted and does nothing if it is finished.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from diffusion.datasets.buckets import DEFAULT_EDGES
from diffusion.datasets.manifest import PreparedManifest
from diffusion.datasets.mds import DEFAULT_SHARD_BYTES
from diffusion.errors import UserError
from diffusion.preparation.prepare import prepare


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    description, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="folder, tar or parquet file, or quoted pattern")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    edges_help = "lowest shorter side of each bucket (default: 256 512 768 1024); give it after OUT"
    parser.add_argument("--edges", nargs="+", default=DEFAULT_EDGES, metavar="PIXELS", help=edges_help)
    parser.add_argument("--validation-fraction", type=float, default=0.0, help="share that is held out (default: 0)")
    parser.add_argument("--seed", type=int, default=17, help="of the order and the held-out pictures (default: 17)")
    parser.add_argument("--shard-mb", type=int, default=DEFAULT_SHARD_BYTES // 2**20, metavar="MIB",
                        help="size of a shard in MiB (default: 256)")  # fmt: skip
    parser.add_argument("--workers", type=int, default=None, help="processes that decode (default: one per core)")
    parser.add_argument("--image-column", default=None, help="column of the images in parquet files")
    parser.add_argument("--caption-column", default=None, help="column of the captions in parquet files")
    parser.add_argument("--overwrite", action="store_true", help="replace a finished data set in OUT")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    return parser.parse_args(arguments)


def summary(manifest: PreparedManifest) -> str:
    """Return the counts of a manifest as a table."""
    rows = [("source", "seen", "kept", "refused")]
    rows += [(one.name, str(one.seen), str(one.kept), str(one.seen - one.kept)) for one in manifest.sources]
    rows.append(("all", str(manifest.seen), str(manifest.kept), str(manifest.seen - manifest.kept)))
    lines = _table(rows)
    rows = [("split / bucket", "pictures", "shards", "MiB")]
    for split, buckets in manifest.splits.items():
        for bucket, entry in buckets.items():
            megabytes = f"{entry.num_bytes / 2**20:.1f}"
            rows.append((f"{split}/{bucket}", str(entry.num_samples), str(entry.num_shards), megabytes))
    lines += ["", *_table(rows)]
    if manifest.refused:
        lines += ["", *_table([("refused as", "pictures"), *((k, str(v.count)) for k, v in manifest.refused.items())])]
        lines += [
            f"  {reason}: {example.key}" + (f" ({example.detail})" if example.detail else "")
            for reason, entry in manifest.refused.items()
            for example in entry.examples
        ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    options = parse_arguments(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("diffusion").setLevel(logging.INFO)
    logging.getLogger("PIL").setLevel(logging.CRITICAL)  # what it says about damaged files is in the table of refusals
    try:
        manifest = prepare(
            options.sources,
            options.out,
            edges=options.edges,
            validation_fraction=options.validation_fraction,
            seed=options.seed,
            shard_bytes=options.shard_mb * 2**20,
            num_workers=options.workers,
            image_column=options.image_column,
            caption_column=options.caption_column,
            overwrite=options.overwrite,
            progress=not options.quiet,
        )
    except UserError as error:
        print(f"prepare: {error}", file=sys.stderr)
        return 2
    print(summary(manifest))
    return 0


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return lines with aligned columns, the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.rjust(width) if column else cell.ljust(width)
                  for column, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
