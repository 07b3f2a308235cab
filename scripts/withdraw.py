"""Remove samples from a finished prepared or encoded data set: mark them, so that training skips them, or erase them.

    python scripts/withdraw.py DATASET FILE [--erase]

FILE holds one key per line, as `key` in the samples, spaces included. A key with a line break or a leading quotation
mark is written as a JSON string. The order of all other samples stays. With --erase, all shards with removed samples,
earlier ones included, are rewritten without their images and captions.
"""

from pathlib import Path

from diffusion.launch import CommandParser, run_command
from diffusion.preparation.withdrawal import read_keys, withdraw
from diffusion.preparation.withdrawal_erase import erase


def main() -> None:
    """Mark, and erase."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("dataset", type=Path, metavar="DATASET", help="folder with manifest.json")
    parser.add_argument("file", type=Path, metavar="FILE", help="keys, one per line")
    parser.add_argument("--erase", action="store_true", help="rewrite the shards without the removed samples' content")
    options = parser.parse_args()
    withdrawal = withdraw(options.dataset, read_keys(options.file))
    total = sum(map(len, withdrawal.marks.values()))
    print(f"{total} samples are removed from {options.dataset}; {len(withdrawal.absent)} keys are not in it")
    if options.erase:
        print(f"{erase(options.dataset)} shards were rewritten")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
