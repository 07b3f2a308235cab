"""What the commands share: ranks, and errors that end a job with one message on all ranks.

A run that was preempted ends with exit code 75 on every rank, Ctrl-C ends a command with one line and 130. A
`UserError` is printed once per job, without a traceback, and every rank ends with exit code 2:

- Before the process group exists, configuration errors are the same on each rank (they follow from the files and the
  command line), and rank 0 speaks. Other errors may concern one machine only, and the first rank of each node speaks.
- Afterwards, steps that may fail on some ranks only run within `agree`: all ranks raise one error that names the
  failing ranks, and rank 0 speaks. An error outside `agree` is told by rank 0 if it meets it within seconds of the
  first that does, else by that one.

Both launchers (composer, torchrun) terminate all ranks of a node as soon as one has ended, so who has to speak, or
keeps the store in which others look, ends when the others know of the error, too, or have had the time. A rank that
the launcher terminates because another rank met a `UserError` ends with exit code 2, too, whether it noticed its failed
collective before, after or while the signal came. Torch is imported by what needs it only: a mistake in a YAML file
ends a command within a second.
"""

import argparse
import atexit
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import IO, Any, NoReturn, TypeVar

from diffusion.errors import ConfigurationError, MachineError, UserError

USER_ERROR_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130
"""Of a command that Ctrl-C ended, as shells have it."""

PREEMPTED_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: a signal ended the run, which has saved a checkpoint and continues when started again."""

PATIENCE_SECONDS = 10.0
"""How long a silent rank waits for the first rank of its node to end."""

FOLLOWING_SECONDS = 10.0
"""How long a rank that has told an error leaves the others, whom the launcher terminates when it ends, to meet it."""

HEARING_SECONDS = 3.0
"""How long a rank waits to hear that rank 0 met the same error."""

_STORE_SECONDS = 3.0
"""What the store of the process group may take to answer, beside what is waited for; if not, it is cut off."""

_PAUSE_SECONDS = 0.05
"""Between two looks at whether something has happened."""

_LISTENERS_KEY = "diffusion/listeners"
"""Entry of the store that counts the ranks other than 0 that know of an error."""

USER_ERROR_KEY = "diffusion/user_error"
"""Entry of the process group's store that says that a rank ended with a `UserError` that the others do not know."""

T = TypeVar("T")


def say_to_stderr(message: str) -> None:
    """Write a message and a line break to stderr."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def rank() -> int:
    """Number of this process in the job, as the launcher set it; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Processes in the job; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Number of this process on its node."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Processes on this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


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


def agree(step: Callable[[], T]) -> T:
    """Run a step on every rank and fail together.

    To be called by all ranks at the same place. Without a process group the step is just run.

    Args:
        step: may raise a `UserError` on some ranks or on all.

    Returns:
        What the step gave on this rank.

    Raises:
        UserError: the step failed somewhere: on all ranks the same error, of the class that the lowest failing rank
            raised; its message names the failing ranks unless all said the same.
        StepFailedElsewhereError: the step raised something else than a `UserError` on other ranks only.
    """
    if not _has_process_group():
        return step()
    import torch.distributed as dist

    report: tuple[type[UserError] | None, str] | None = (None, "")
    reports: list[tuple[type[UserError] | None, str] | None] = [None] * dist.get_world_size()
    result: Any = None
    try:
        result = step()
        report = None
    except UserError as error:
        report = (type(error), str(error))
    finally:
        dist.all_gather_object(reports, report)
    failures = {number: (kind, message) for number, entry in enumerate(reports) if entry for kind, message in [entry]}
    mistakes = {number: (kind, message) for number, (kind, message) in failures.items() if kind is not None}
    if mistakes:
        kind = next(iter(mistakes.values()))[0]
        assert kind is not None
        error = kind(_joined_message({number: text for number, (_, text) in mistakes.items()}, len(reports)))
        error.is_agreed = True
        raise error
    if failures:
        raise StepFailedElsewhereError(f"{_ranks(list(failures), len(reports))} failed; the traceback is in its log.")
    return result


class StepFailedElsewhereError(RuntimeError):
    """A step failed on other ranks for a reason that is not the user's mistake."""


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
    _terminate_with_launcher()
    try:
        main()
    except BaseException as reason:
        try:
            termination = _Termination()
        except SystemExit:  # The launcher's signal came while this was raised, and is handled only now.
            termination = _Termination()
        code = _code_of_ending(reason, say, termination)
        if code is None:
            termination.release()
            raise
        return _end(code)
    return 0


def _code_of_ending(reason: BaseException, say: Callable[[str], None], termination: "_Termination") -> int | None:
    """Tell why a command ends; return its exit code, None for an exception that is to pass."""
    if isinstance(reason, PreemptedError):
        if rank() == 0:
            say(str(reason))
        return PREEMPTED_EXIT_CODE
    if isinstance(reason, UserError):
        _tell(reason, say, termination.has_come)
        return USER_ERROR_EXIT_CODE
    if isinstance(reason, KeyboardInterrupt):
        if rank() == 0:
            say("interrupted")
        return INTERRUPTED_EXIT_CODE
    if not _is_known_elsewhere():
        return None
    if rank() == 0:  # The launcher terminates all ranks now, so that is no reason to end before they have asked, too.
        _await_listeners(threading.Event(), HEARING_SECONDS)
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


def _terminate_with_launcher() -> None:
    """Let the kernel send SIGTERM to this rank when the launcher is gone.

    A signal to the composer launcher (or SIGUSR1 or SIGKILL to torchrun) ends it alone, and its ranks would go on.
    """
    if "RANK" in os.environ and sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h.
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGTERM))


def _exit_by_signal(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _tell(error: UserError, say: Callable[[str], None], terminated: threading.Event) -> None:
    """Print the message if this is the rank to do it."""
    has_group = _has_process_group()
    may_be_alone = has_group and not error.is_agreed
    if may_be_alone:
        speaks = _is_first_to_tell(str(error), terminated)
    elif has_group or isinstance(error, ConfigurationError):
        speaks = rank() == 0
    else:
        speaks = local_rank() == 0
    if speaks:
        speaker = f"rank {rank()} on {socket.gethostname()}: " if rank() else ""
        say(f"{type(error).__name__}: {speaker}{error}")
    with contextlib.suppress(KeyboardInterrupt):
        _end_in_order(terminated, may_be_alone=may_be_alone, has_spoken=speaks)


def _end_in_order(terminated: threading.Event, *, may_be_alone: bool, has_spoken: bool) -> None:
    """Let who has to speak, or keeps the store, end when the others have met the error, or have had the time."""
    if may_be_alone and rank() == 0:
        _await_listeners(terminated, FOLLOWING_SECONDS)
    elif may_be_alone and local_rank() and not has_spoken:
        terminated.wait(PATIENCE_SECONDS)
    elif not may_be_alone and local_rank():
        _follow(terminated)
    elif not may_be_alone and local_world_size() > 1:
        _await_followers(terminated)


def _await_followers(terminated: threading.Event) -> None:
    """Leave the other ranks of this node the time to meet the same error."""
    followers, deadline = set(range(1, local_world_size())), time.monotonic() + FOLLOWING_SECONDS
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as place:
            place.bind(_place_of_followers())
            place.settimeout(_PAUSE_SECONDS)
            while followers and time.monotonic() < deadline and not terminated.is_set():
                with contextlib.suppress(TimeoutError, ValueError):
                    followers.discard(int(place.recv(16)))
    except OSError:  # No more files may be open, or another node of the job is in the same network namespace.
        terminated.wait(HEARING_SECONDS)


def _follow(terminated: threading.Event) -> None:
    """Tell the first rank of this node that this one ends as well, and let that one end first."""
    deadline, is_told = time.monotonic() + PATIENCE_SECONDS, False
    while time.monotonic() < deadline and not terminated.wait(_PAUSE_SECONDS):
        if not is_told:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as place:
                # It does not listen yet, or has gone, or no more files may be open.
                is_told = place.sendto(str(local_rank()).encode(), _place_of_followers()) > 0


def _place_of_followers() -> str:
    """Abstract address of a socket: of a node of this user's job, in the kernel, gone with the process that has it."""
    names = ("MASTER_PORT", "NODE_RANK", "MASTER_ADDR")
    job = (str(os.getuid()), *(os.environ.get(name, "") for name in names))
    return "\0diffusion-" + "-".join(job)[:90]


class _Termination:
    """The launcher's SIGTERM, kept from changing the exit code of a process that is about to end.

    Attributes:
        has_come: set when the signal comes.
    """

    def __init__(self) -> None:
        self.has_come = threading.Event()
        self._previous: Any = None
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, lambda number, frame: self.has_come.set())

    def release(self) -> None:
        """Let the signal do what it did before."""
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)


def _has_process_group() -> bool:
    """Whether torch.distributed is in use, without importing it."""
    dist: Any = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


def _end(code: int) -> int:
    """End a process before its time; return the exit code to give where the interpreter may end by itself.

    With a process group the interpreter's way out is not safe (gloo, torch 2.7): destroying the group can hang, and
    leaving it to the exit of the interpreter can abort the process. So exit handlers run and the process ends.
    """
    if _has_process_group():
        logging.shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _is_first_to_tell(message: str, terminated: threading.Event) -> bool:
    """Whether this rank is to tell an error that it met outside `agree`: rank 0 if it meets it soon, else the first.

    Other ranks may be anywhere, so no collective operation is possible; the store of the process group is.
    """
    key = f"diffusion/told/{message}"

    def is_first(store: Any) -> bool:
        store.set(USER_ERROR_KEY, "")
        deadline = time.monotonic() + HEARING_SECONDS
        if rank():
            while not store.check([key]):
                if time.monotonic() > deadline or terminated.wait(_PAUSE_SECONDS):
                    break
            else:
                return False
        else:
            store.set(key, "")
        return store.add(f"{key}/speakers", 1) == 1

    return _ask_store(is_first, otherwise=True, afterwards=_listen)


def _listen(store: Any) -> None:
    """Count this rank among those that know of an error."""
    if rank():
        store.add(_LISTENERS_KEY, 1)


def _await_listeners(terminated: threading.Event, seconds: float) -> None:
    """Leave the others the time to learn of an error, as the store ends with the process of rank 0."""

    def wait(store: Any) -> bool:
        deadline = time.monotonic() + seconds
        while store.add(_LISTENERS_KEY, 0) < world_size() - 1:
            if time.monotonic() > deadline or terminated.wait(_PAUSE_SECONDS):
                break
        return True

    _ask_store(wait, otherwise=True, patience=seconds + _STORE_SECONDS)


def _is_known_elsewhere() -> bool:
    """Whether another rank ended with a `UserError`, of which this rank only notices that a collective failed."""
    return _has_process_group() and _ask_store(
        lambda store: store.check([USER_ERROR_KEY]), otherwise=False, afterwards=_listen
    )


def _ask_store(
    question: Callable[[Any], bool],
    *,
    otherwise: bool,
    afterwards: Callable[[Any], None] = lambda store: None,
    patience: float = HEARING_SECONDS + _STORE_SECONDS,
) -> bool:
    """Ask the store of the process group; `otherwise` is the answer of one that is gone.

    What is done with it `afterwards` may fail. A store behind a network that was cut off fails after a quarter of an
    hour only, so a thread asks.
    """
    answers: list[bool] = []

    def ask() -> None:
        with contextlib.suppress(*_store_errors()):
            store = _store()
            answers.append(question(store))
            afterwards(store)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(patience)
    return answers[0] if answers else otherwise


def _store() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def _store_errors() -> tuple[type[Exception], ...]:
    import torch.distributed as dist

    return (dist.DistStoreError, dist.DistNetworkError)


def _joined_message(messages: dict[int, str], num_ranks: int) -> str:
    """One text for the messages of several ranks."""
    ranks_by_message: dict[str, list[int]] = {}
    for number, message in messages.items():
        ranks_by_message.setdefault(message, []).append(number)
    if len(messages) == num_ranks and len(ranks_by_message) == 1:
        return next(iter(ranks_by_message))
    return "\n".join(f"{_ranks(numbers, num_ranks)}: {message}" for message, numbers in ranks_by_message.items())


def _ranks(numbers: list[int], num_ranks: int) -> str:
    shown = ", ".join(str(number) for number in numbers[:8])
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {shown}{more} of {num_ranks}"
