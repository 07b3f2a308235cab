"""List the images that a run has seen up to a checkpoint, with counts, sources and licences.

    python scripts/provenance.py CHECKPOINT --data PREPARED/train --out seen.csv

Training logs nothing for this: the order of samples is a function of configuration, data and seed, and is computed
again. CHECKPOINT is a checkpoint or a run. --data is the folder of the prepared data's buckets, with licences in their
metadata. The default is the run's own streams, which hold only keys in the case of latents. --summary writes, too, the
public summary of training content that the EU's AI Act asks for (article 53(1)(d)), by the Commission's template. The
provider completes it.
"""

import csv
import json
from pathlib import Path

from diffusion.errors import DataError, printable
from diffusion.files import atomic_path, csv_text
from diffusion.launch import CommandParser, output_file, run_command


def main() -> None:
    """Count, look up, write."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("checkpoint", type="checkpoint", help="checkpoint, or run folder (newest checkpoint)")
    parser.add_argument("--data", type=Path, help="folder of the buckets of the prepared data, such as PREPARED/train")
    parser.add_argument("--out", type=output_file, default="seen.csv", help="table to write (default: seen.csv)")
    parser.add_argument(
        "--summary", type=output_file, metavar="FILE.md", help="summary of the training content to write"
    )
    options = parser.parse_args()

    from diffusion.checkpointing.find import resolve_checkpoint
    from diffusion.checkpointing.read import read_config_values, read_position
    from diffusion.config.loading import from_dict
    from diffusion.config.schema import Config
    from diffusion.datasets.bad_images import read_bad_images
    from diffusion.datasets.provenance import (
        apply_substitutes,
        build_order,
        exposures,
        find_folders,
        licence_of,
        times_seen,
    )
    from diffusion.datasets.sample_order import describe_changes
    from diffusion.formats.run_folder import BAD_IMAGES
    from diffusion.operations.training_content import Content, read_manifests, write_summary

    checkpoint = resolve_checkpoint(options.checkpoint)
    config = from_dict(Config, read_config_values(checkpoint), str(checkpoint))
    folders = find_folders(config, options.data)
    if options.summary is not None:  # Mistakes show before all is counted.
        read_manifests(folders)
    num_steps, fingerprint = read_position(checkpoint)
    order = build_order(config, folders, fingerprint)
    if changes := describe_changes(fingerprint, order.fingerprint()):
        raise DataError(f"this is not the data that the run has seen: {'; '.join(changes)}. Name that with --data")
    counts = times_seen(order, num_steps)
    runs = (checkpoint.parent.parent, Path(config.output_folder).expanduser())  # Of a run in a store: the second.
    bad = next((found for run in runs if (found := read_bad_images(run / BAD_IMAGES))), [])
    apply_substitutes(config, folders, counts, bad)
    content = Content()
    with atomic_path(options.out) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["key", "source", "licence", "stream", "index", "times", "metadata"])
        for one in exposures(config, folders, counts):
            licence, source = licence_of(one.metadata), one.key.partition("/")[0]
            metadata = json.dumps(one.metadata)
            texts = map(csv_text, (one.key, source, licence, one.stream))
            table.writerow([*texts, one.index, one.times, metadata])
            content.add(one)
    print(f"{checkpoint}: {num_steps} steps of {config.data.global_batch_size} samples")
    num_seen, num_draws = (counts["source"].total() for counts in (content.images, content.draws))
    print(f"{num_seen} images were seen, {num_draws} times together; each is listed in {options.out}")
    for title, counter in content.draws.items():
        print(f"\n{title:<40} samples")
        for name, count in counter.most_common():
            print(f"{printable(name):<40} {count}")
    if options.summary is not None:
        write_summary(
            options.summary,
            content,
            config=config,
            checkpoint=checkpoint,
            num_steps=num_steps,
            folders=folders,
            runs=runs,
        )
    if config.init_from is not None:
        print(f"\nThe run began with the weights of {config.init_from.checkpoint}: list what that has seen, too")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
