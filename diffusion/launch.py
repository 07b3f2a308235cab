"""What the commands share: arguments, devices, and how a process ends.

A run that was preempted ends with exit code 75 on every rank, Ctrl-C ends a command with one line and 130. A
`UserError` is printed once per job, without a traceback, and every rank ends with exit code 2: also one that the
launcher terminates because another rank met it, whether this rank noticed its failed collective before, after or while
the signal came.
"""

import argparse
import atexit
import ctypes
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import IO, NoReturn

from diffusion import telling
from diffusion.distributed import has_process_group, rank, world_size
from diffusion.errors import ConfigurationError, MachineError, UserError

USER_ERROR_EXIT_CODE = 2

_PARENT_SECONDS = 1.0
"""Between two looks at whether the parent lives."""

INTERRUPTED_EXIT_CODE = 130
"""Of a command that Ctrl-C ended, as shells have it."""

PREEMPTED_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: a signal ended the run, which has saved a checkpoint and continues when started again."""


def say_to_stderr(message: str) -> None:
    """Write a message and a line break to stderr."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def named_device(given: str | None) -> str:
    """The Torch device that a command is to compute on: the given one, or a GPU where there is one.

    Raises:
        ConfigurationError: it is no device.
    """
    import torch

    name = given or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.device(name)
    except RuntimeError as error:
        raise ConfigurationError(
            f"--device {name} is no device: give cpu, cuda, or one of several as cuda:1"
        ) from error
    return name


def check_device(name: str) -> None:
    """Compute something on a Torch device.

    Raises:
        MachineError: it cannot be used here.
    """
    import torch

    try:
        torch.zeros(1, device=name).cpu()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n")[0]
        raise MachineError(
            f"--device {name} cannot be used on this machine ({reason}): check the driver, or use --device cpu"
        ) from error


def prepare_environment() -> None:
    """Give Composer, before it is imported, the variables that torchrun calls by another name."""
    if "GROUP_RANK" in os.environ:
        os.environ.setdefault("NODE_RANK", os.environ["GROUP_RANK"])


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose complaints are `ConfigurationError`s, so that each job prints them once."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing on every rank."""
        hint = " Values are set without dashes, key.sub=value." if message.startswith("unrecognized") else ""
        raise ConfigurationError(f"{self.prog}: {message}.{hint} {' '.join(self.format_usage().split())}")

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:
        if rank() == 0:
            super()._print_message(message, file)


def positive(text: str) -> int:
    """Read a whole number of at least 1, as the `type` of an argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number of at least 1")
    return int(text)


class PreemptedError(Exception):
    """All ranks were asked to end, have saved a checkpoint, and do; not a failure."""


def run_command(main: Callable[[], None], *, say: Callable[[str], None] = say_to_stderr) -> int:
    """Run a command and turn a `UserError` into one message.

    Args:
        main: the command.
        say: where the message goes.

    Returns:
        The exit code of this process: 0, 2 after a `UserError`, 75 after a `PreemptedError`, 130 after Ctrl-C; with a
        process group the process ends here, with that code. Other exceptions pass.
    """
    prepare_environment()
    _exit_on_termination()
    if "RANK" in os.environ:  # A signal to the composer launcher, or SIGKILL to torchrun, ends it alone.
        end_with_parent(signal.SIGTERM)
    try:
        try:
            main()
        except BaseException:  # Here Python 3.10 handles a signal that the launcher sent while this was raised,
            raise
    except BaseException as reason:
        try:
            termination = telling.Termination()
        except SystemExit:  # and later versions here.
            termination = telling.Termination()
        code = _code_of_ending(_told_by(reason), say, termination)
        if code is None:
            termination.release()
            raise
        return _end(code)
    return 0


def _told_by(reason: BaseException) -> BaseException:
    """What ended a command: what was being raised when SIGTERM came, if that was meant to end it."""
    context = reason.__context__
    is_by_signal = isinstance(reason, SystemExit) and reason.code == 128 + signal.SIGTERM
    return context if is_by_signal and isinstance(context, UserError | PreemptedError | KeyboardInterrupt) else reason


def _code_of_ending(reason: BaseException, say: Callable[[str], None], termination: telling.Termination) -> int | None:
    """Tell why a command ends; return its exit code, None for an exception that is to pass."""
    if isinstance(reason, PreemptedError):
        if rank() == 0:
            say(str(reason))
        return PREEMPTED_EXIT_CODE
    if isinstance(reason, UserError):
        telling.tell(reason, say, termination)
        return USER_ERROR_EXIT_CODE
    if isinstance(reason, KeyboardInterrupt):
        if rank() == 0:
            say("interrupted")
        return INTERRUPTED_EXIT_CODE
    if not telling.is_known_elsewhere():
        return None
    if rank() == 0:  # The launcher terminates all ranks now, so that is no reason to end before they have asked, too.
        telling.await_listeners(None, telling.HEARING_SECONDS)
    return USER_ERROR_EXIT_CODE


def be_forked(main: Callable[[], int | None]) -> NoReturn:
    """Be a forked process: run something and end as a program that does it, and nothing of the process forked from.

    Args:
        main: returns the exit code, None for 0; SystemExit and other exceptions mean what they mean in a program.
    """
    code = 1
    try:
        code = main() or 0
    finally:
        failure = sys.exc_info()[1]
        if isinstance(failure, SystemExit):
            code = failure.code if isinstance(failure.code, int) else int(failure.code is not None)
        elif failure is not None:
            traceback.print_exception(failure)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _exit_on_termination() -> None:
    """Turn SIGTERM to one of several ranks into `SystemExit`, as Composer does when it is imported.

    In a collective the handler waits until that fails, which it does when the rank that failed alone is gone: so the
    rank still learns why it is terminated.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    if world_size() > 1 and is_main_thread and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit_by_signal)


def end_with_parent(number: int, parent: int | None = None) -> None:
    """From now on, send this process a signal within a second or so of the death of its parent process.

    The kernel's own way (PR_SET_PDEATHSIG) goes by the thread that has started the process, which may end long before.

    Args:
        number: the signal.
        parent: process ID of the parent; None is the present one, which may have changed since this one was started.
    """
    expected = os.getppid() if parent is None else parent
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h.
        ctypes.CDLL(None).prctl(set_parent_death_signal, 0)  # torch.multiprocessing sets SIGINT, which saves nothing.

    def watch() -> None:
        pause = threading.Event()
        while os.getppid() == expected:
            pause.wait(_PARENT_SECONDS)
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _exit_by_signal(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _end(code: int) -> int:
    """End a process before its time; return the exit code to give where the interpreter may end by itself.

    With a process group the interpreter's way out is not safe (gloo, torch 2.7): destroying the group can hang, and
    leaving it to the exit of the interpreter can abort the process. So exit handlers run and the process ends.
    """
    if has_process_group():
        logging.shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
