"""Torchrun with the exit code of its ranks: `python launchers/torchrun.py ARGUMENTS OF torchrun`.

torchrun itself always ends with 1, so its caller cannot distinguish an error of the user's (2), which a restart does
not fix, from a crash.
"""

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from diffusion.distributed import PREEMPTED_EXIT_CODE, USER_ERROR_EXIT_CODE


def run(arguments: list[str]) -> int:
    """Run torchrun; return 2 or 75 if a rank did, else the first failure's code (128 + number for a signal)."""
    try:
        main(arguments)
    except ChildFailedError as error:
        sys.stderr.write(f"{error}\n")
        codes = [failure.exitcode for failure in error.failures.values()]
        first = error.get_first_failure()[1].exitcode
        code = next((code for code in (USER_ERROR_EXIT_CODE, PREEMPTED_EXIT_CODE) if code in codes), first)
        return code if code >= 0 else 128 - code
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
