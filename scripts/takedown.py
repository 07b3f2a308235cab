"""Remove samples from a finished prepared or encoded data set: mark them, so that training skips them, or erase them.

    python scripts/takedown.py DATASET KEYS [--erase]

DATASET is a folder or s3://BUCKET/PREFIX. KEYS is a file with one key per line, as `key` in the samples, spaces
included. A key with a line break or a leading quotation mark is written as a JSON string. The order of all other
samples stays. With --erase, no file of the data set holds the images, captions or keys any more, earlier removed ones
included. The same command continues after an interruption. Later scans reject the keys, of which hashes are kept.
"""

from pathlib import Path

from diffusion.launch import CommandParser, run_command


def main() -> None:
    """Mark, and erase."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("dataset", metavar="DATASET", help="folder or URL with manifest.json")
    parser.add_argument("keys", type=Path, metavar="KEYS", help="file of keys, one per line")
    parser.add_argument("--erase", action="store_true", help="erase the removed samples from all files")
    options = parser.parse_args()

    from diffusion.preparation.removed import read_keys
    from diffusion.preparation.takedown import take_down

    done = take_down(options.dataset, read_keys(options.keys), erase=options.erase)
    total = sum(map(len, done.marks.values()))
    print(f"{total} samples are removed from {options.dataset}; {len(done.absent)} keys are not in it")
    if options.erase:
        print(f"{done.num_rewritten} shards were rewritten")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
