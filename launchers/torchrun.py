"""torchrun that ends with the exit code of its ranks: `python launchers/torchrun.py ARGUMENTS OF torchrun`.

torchrun itself ends with 1 whatever they ended with, so that who started it cannot tell a mistake (2), which another
start does not mend, from a crash.
"""

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from diffusion.distributed import PREEMPTED_EXIT_CODE, USER_ERROR_EXIT_CODE


def run(arguments: list[str]) -> int:
    """Be an agent of torchrun; return the exit code: of several a mistake's first, for a signal 128 and its number."""
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
