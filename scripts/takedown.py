"""Remove samples from finished data sets: mark them, so that training skips them, or erase them.

    python scripts/takedown.py DATASET [ENCODED ...] KEYS [--erase] [--copies] [--near]

DATASET is prepared or encoded data, a folder or s3://BUCKET/PREFIX; ENCODED is encoded data that was made from it. KEYS
is a file with one key per line, as `key` in the samples, spaces included. A key with a line break or a leading
quotation mark is written as a JSON string. The order of all other samples stays. With --erase, no file of the data sets
holds the images, captions or keys any more, earlier removed ones included. The same command continues after an
interruption. Hashes of keys and images are kept: later scans and selections reject the keys, and copies of the images.
Copies that prepared data holds are listed.
"""

import json
from pathlib import Path

from diffusion.launch import CommandParser, run_command


def main() -> None:
    """Mark, and erase."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("datasets", nargs="+", metavar="DATASET", help="folder or URL with manifest.json; first "
                        "prepared data, then what was encoded from it")  # fmt: skip
    parser.add_argument("keys", type=Path, metavar="KEYS", help="file of keys, one per line")
    parser.add_argument("--erase", action="store_true", help="erase the removed samples from all files")
    parser.add_argument(
        "--copies", action="store_true", help="remove the copies of removed images in prepared data, too"
    )
    parser.add_argument("--near", action="store_true", help="images that look nearly the same are copies")
    options = parser.parse_args()

    from diffusion.preparation.removed import read_keys
    from diffusion.preparation.takedown import take_down

    dataset, *derived = options.datasets
    kinds = {"erase": options.erase, "copies": options.copies, "near": options.near}
    keys = read_keys(options.keys)
    done = take_down(dataset, keys, derived=derived, **kinds)
    total = sum(map(len, done.marks.values()))
    print(f"{len(keys) - len(done.absent)} of {len(keys)} keys are removed; {total} samples of {dataset} in all")
    for key in done.absent:
        print(f"no data set holds it: {json.dumps(key)}")
    for key in done.copies:
        print(f"a copy is left: {json.dumps(key)}")
    if options.erase:
        print(f"{done.num_rewritten} shards were rewritten")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
