"""Remove samples from a finished prepared or encoded data set: mark them, so that training skips them, or erase them.

    python scripts/withdraw.py DATASET FILE [--erase]

FILE holds one key per line, as `key` in the samples, spaces included. A key with a line break or a leading quotation
mark is written as a JSON string. The order of all other samples stays. With --erase, all shards with removed samples,
earlier ones included, are rewritten without their images and captions.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from diffusion.errors import UserError
from diffusion.preparation.withdrawal import read_keys, withdraw
from diffusion.preparation.withdrawal_erase import erase


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    description, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("dataset", type=Path, metavar="DATASET", help="folder with manifest.json")
    parser.add_argument("file", type=Path, metavar="FILE", help="keys, one per line")
    parser.add_argument("--erase", action="store_true", help="rewrite the shards without the removed samples' content")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        withdrawal = withdraw(options.dataset, read_keys(options.file))
        total = sum(map(len, withdrawal.marks.values()))
        print(f"{total} samples are withdrawn from {options.dataset}; {len(withdrawal.absent)} keys are not in it")
        if options.erase:
            print(f"{erase(options.dataset)} shards were written anew")
    except UserError as error:
        print(f"withdraw: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
