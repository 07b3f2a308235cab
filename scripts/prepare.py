"""Prepare one data set of images and captions from several kinds of sources.

    python scripts/prepare.py SOURCE [SOURCE ...] OUT --edges 256 512 768 1024 --validation-fraction 0.01 --seed 17
    python scripts/prepare.py --config yamls/prepare.yaml [key=value ...] [--dry-run]
    python scripts/prepare.py scan|score|select|write --config yamls/prepare.yaml [key=value ...]
    python scripts/prepare.py select --explain --config yamls/prepare.yaml where="aesthetic >= 5"

A SOURCE is a folder of images (captions in .txt files beside them, or metadata.jsonl or captions.csv in the folder),
a tar or parquet file, a folder or quoted pattern of such files, or one of the other kinds of
docs/your_own_data.md. OUT (a folder or s3://BUCKET/PREFIX) gets one MDS folder per split and bucket, and manifest.json,
written last. Each stage can also be run by itself: `scan` decodes the images, `score` runs models, `select` decides by
SQL, `write` copies the selected images. The same command continues after an interruption and adds new images of the
sources. Ctrl-C ends it with exit code 130.
"""

import argparse
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diffusion.errors import ConfigurationError, printable
from diffusion.launch import CommandParser, run_command
from diffusion.preparation.config import STAGES, Engine, PrepareConfig
from diffusion.reports.tables import text_table

if TYPE_CHECKING:
    from diffusion.formats.data_set import PreparedManifest
    from diffusion.preparation.select import Selection

NUM_DRY_RUN = 100
"""Default number of images of each source in a dry run."""

_SETTINGS = ("validation_fraction", "seed", "shard_mb", "window_mb", "compression", "workers", "partition_size",
             "image_column", "caption_column", "where")  # fmt: skip


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("words", nargs="*", metavar="SOURCE ... OUT", help="a stage, if only one is to run; folders, "
                        "tar or parquet files, quoted patterns, and the output folder; with --config: "
                        "key=value")  # fmt: skip
    parser.add_argument("--config", type=Path, metavar="YAML", help="read the settings from a file; the settings "
                        "below are then given as key=value")  # fmt: skip
    parser.add_argument("--dry-run", nargs="?", type=int, const=NUM_DRY_RUN, metavar="IMAGES",
                        help="read this number of images of each source (default: 100), print what would be "
                        "kept and rejected, and write nothing")  # fmt: skip
    parser.add_argument("--explain", action="store_true", help="with the stage select: print how many images each "
                        "condition rejects, and write nothing")  # fmt: skip
    settings = parser.add_argument_group("settings, without --config")
    settings.add_argument("--edges", nargs="+", metavar="PIXELS", help="lowest shorter side of each bucket (default: "
                          "256 512 768 1024); give it after OUT")  # fmt: skip
    settings.add_argument("--validation-fraction", type=float, help="share for validation (default: 0)")
    settings.add_argument("--seed", type=int, help="of the order and the validation split (default: 17)")
    settings.add_argument("--where", metavar="SQL", help='condition on the metadata, such as "sharpness > 5"')
    settings.add_argument("--shard-mb", type=float, metavar="MIB", help="size of a shard in MiB (default: 256)")
    settings.add_argument("--window-mb", type=float, metavar="MIB", help="images that are shuffled together, in memory "
                          "(default: 1024)")  # fmt: skip
    settings.add_argument("--compression", help="of the shards, such as zstd:3 (default: none)")
    settings.add_argument("--workers", type=int, help="workers (default: one per core)")
    settings.add_argument("--engine", choices=[one.value for one in Engine], help="default: processes")
    settings.add_argument("--partition-size", type=int, help="images per partition, unless the source defines it "
                          "(default: 1024, fewer in small sources)")  # fmt: skip
    settings.add_argument("--image-column", help="column of the images in tables")
    settings.add_argument("--caption-column", help="column of the captions in tables")
    parser.add_argument("--removed", type=Path, metavar="FILE", help="keys, one per line, to keep out of the data set; "
                        "samples that are in it already are marked as removed")  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace a finished data set in OUT")
    parser.add_argument("--no-report", action="store_true", help="do not write report.html and report.json")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    options = parser.parse_intermixed_args(arguments)
    options.stages = STAGES
    if options.words and options.words[0] in STAGES:
        options.stages = (options.words.pop(0),)
    if options.explain and (options.stages != ("select",) or options.dry_run is not None):
        raise ConfigurationError("--explain is for the stage select without --dry-run: prepare.py select --explain ...")
    return options


def configuration(options: argparse.Namespace) -> PrepareConfig:
    """Return the configuration that the command line gives."""
    from diffusion.config.loading import load_complete
    from diffusion.datasets.buckets import parse_edges

    if options.dry_run is not None and options.dry_run < 1:
        raise ConfigurationError(f"--dry-run {options.dry_run}: it must look at 1 image or more")
    given = {name: getattr(options, name) for name in _SETTINGS if getattr(options, name) is not None}
    if options.config is not None:
        wrong = [name for name in (*_SETTINGS, "edges", "engine") if getattr(options, name) is not None]
        if wrong:
            key = "buckets.edges" if wrong[0] == "edges" else wrong[0]
            raise ConfigurationError(f"--{wrong[0].replace('_', '-')} and --config: write {key}=... instead")
        is_dry = options.dry_run is not None
        return load_complete(PrepareConfig, options.config, options.words, may_lack=lambda key: is_dry and key == "out")
    words = [*options.words, *(options.edges or ())]  # --edges takes all words after it.
    if keys := [word for word in words if re.match(r"[a-z_.]+=", word) and not Path(word).exists()]:
        raise ConfigurationError(f"{keys[0]}: key=value needs --config FILE; without it give options, such as --seed")
    if len(options.words) < (1 if options.dry_run is not None else 2):
        raise ConfigurationError("give SOURCE ... and OUT, and --edges after them, or --config FILE (see --help)")
    config = PrepareConfig(sources=options.words[:-1] or options.words, out=options.words[-1], **given)
    config.buckets.edges = list(parse_edges(options.edges)) if options.edges is not None else None
    config.engine = Engine(options.engine or config.engine)
    return config


def summary(manifest: "PreparedManifest") -> str:
    """Table of the counts of a manifest."""
    rows = [("source", "seen", "kept", "rejected")]
    rows += [(one.name, str(one.seen), str(one.kept), str(one.seen - one.kept)) for one in manifest.sources]
    rows.append(("all", str(manifest.seen), str(manifest.kept), str(manifest.seen - manifest.kept)))
    lines = text_table(rows)
    rows = [("split / bucket", "images", "shards", "MiB")]
    for split, buckets in manifest.splits.items():
        for bucket, entry in buckets.items():
            megabytes = f"{entry.num_bytes / 2**20:.1f}"
            rows.append((f"{split}/{bucket}", str(entry.num_samples), str(entry.num_shards), megabytes))
    lines += ["", *text_table(rows)]
    if manifest.rejected:
        rejected = [(reason, str(counted.count)) for reason, counted in manifest.rejected.items()]
        lines += ["", *text_table([("rejected as", "images"), *rejected])]
        lines += [
            f"  {reason}: {example.key}" + (f" ({example.detail})" if example.detail else "")
            for reason, entry in manifest.rejected.items()
            for example in entry.examples
        ]
    return "\n".join(map(printable, lines))


def preview_text(selection: "Selection") -> str:
    """Tables of what a dry run found, with an example of each reason."""
    rows: list[tuple[str, ...]] = [("source", "images", "kept", "rejected as", "of them")]
    for name, counts in selection.sources.items():
        rows.append((name, str(sum(counts.values())), str(counts.get("", 0)), "", ""))
        rows += [("", "", "", reason, str(count)) for reason, count in sorted(counts.items()) if reason]
    folders = [("split / bucket", "images"), *((k, str(v["images"])) for k, v in selection.places.items())]
    lines = [*text_table(rows), "", *text_table(folders)]
    lines += [f"  {reason}: {one.key} ({one.detail or reason})" for reason, (one, *_) in selection.examples.items()]
    return "\n".join(map(printable, lines))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepare, or show what would be kept."""
    options = parse_arguments(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("diffusion").setLevel(logging.INFO)
    logging.getLogger("PIL").setLevel(logging.CRITICAL)  # Damaged files are in the table of rejections.
    config = configuration(options)

    from diffusion import storage
    from diffusion.formats.data_set import REMOVED_SAMPLES
    from diffusion.preparation.prepare import explain_selection, prepare, preview

    if options.dry_run is not None:
        print(preview_text(preview(config, options.dry_run)))
        if options.config is None and len(options.words) > 1:
            print(f"\n{options.words[-1]} is taken for OUT, which a dry run does not look at")
        return
    if options.explain:
        print(explain_selection(config))
        return
    manifest = prepare(
        config,
        stages=options.stages,
        removed=options.removed,
        overwrite=options.overwrite,
        report=not options.no_report,
        progress=not options.quiet,
    )
    if manifest is not None:
        print(summary(manifest))
        marks = storage.read_json(storage.join(config.out, REMOVED_SAMPLES), {})
        if num_removed := sum(map(len, marks.values())):
            print(f"\nimages that takedowns removed since they were kept: {num_removed}")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
