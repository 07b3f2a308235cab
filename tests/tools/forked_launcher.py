"""The composer launcher and torchrun as programs, with ranks that are forked, which makes a start quicker.

The first argument is `composer` or `torchrun`; those of the launcher follow. All else about it is its own: arguments,
monitoring, signals, and being the parent of its ranks.
"""

import os
import signal
import subprocess
import sys
from typing import Any

import torch

from tests.tools.forking import end_as_program, run_as_main


class ForkingPopen(subprocess.Popen):
    """A program for this interpreter is run by a fork; it may get outputs, variables and a session of its own."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        if args[0] != sys.executable:
            super()._execute_child(args, *rest)  # pyright: ignore[reportAttributeAccessIssue]
            return
        variables, output, error, is_session = rest[5], rest[12], rest[14], rest[20]
        self.pid = os.fork()
        if self.pid == 0:
            end_as_program(lambda: _run(args[1:], variables, {1: output, 2: error}, is_session))
        self._child_created = True


def _run(words: list[str], variables: dict[str, str] | None, outputs: dict[int, int], is_session: bool) -> None:
    if is_session:
        os.setsid()
    for number, output in outputs.items():
        if output != -1:
            os.dup2(output, number)
    if variables is not None:
        os.environ.clear()
        os.environ.update(variables)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # The launcher's handlers come along with a fork.
        signal.signal(number, signal.SIG_DFL)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # A fork's first call replaces torch's pool of threads.
    run_as_main([word for word in words if word != "-u"])


def main() -> None:
    """Launch."""
    from composer.cli import launcher
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess.Popen = subprocess_handler.Popen = ForkingPopen
    which = sys.argv.pop(1)
    sys.exit(launcher.main() if which == "composer" else run.main())


if __name__ == "__main__":
    main()
