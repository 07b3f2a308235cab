"""Arguments, devices, and how a process ends, shared by the commands.

| exit code | |
|---|---|
| 0 | done |
| 2 | a `UserError`: the configuration, the data or the machine |
| 75 | a signal (a checkpoint was saved) or a wrong loss (the next start rolls back): the same command continues |
| 130 | Ctrl-C |

Each node's first rank prints a `UserError`, without a traceback and with its rank in front where there are several.
Another rank prints its own error only if the first does not end within seconds: then the first has not met it. Ranks
that have not met it end by their launcher, or by a collective that fails. Other exceptions keep their traceback.
"""

import argparse
import atexit
import ctypes
import logging
import math
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path, PosixPath
from typing import IO, Any, NoReturn, TypeVar

from diffusion.config.secrets import redact, redact_arguments
from diffusion.distributed import (
    INTERRUPTED_EXIT_CODE,
    PREEMPTED_EXIT_CODE,
    USER_ERROR_EXIT_CODE,
    has_process_group,
    is_first_rank,
    local_rank,
    local_world_size,
    num_cores,
    rank,
    world_size,
)
from diffusion.errors import (
    ConfigurationError,
    MachineError,
    PreemptedError,
    UserError,
    explained_writes,
    first_line,
    printable,
)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Addresses that other machines cannot reach."""

MAX_COMPILE_THREADS = 32
"""Torch's limit for one process."""

_PACKAGES = (
    "torch",
    "mosaicml",
    "mosaicml-streaming",
    "streaming-community",
    "diffusers",
    "transformers",
    "numpy",
    "diffusion",
)
_PARENT_SECONDS = 1.0
"""Between two checks whether the parent lives."""

_OTHERS_SECONDS = 1.0
"""Time for a node's other ranks to meet the error of the first, whose end makes the launcher end them."""

_FIRST_SECONDS = 5.0
"""Time in which a node's first rank has to end, if it has met the same error."""

_PAUSE_SECONDS = 0.05

T = TypeVar("T")


def say_to_stderr(message: str) -> None:
    """Write a message and a line break to stderr."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def choose_device(given: str | None) -> str:
    """Choose the Torch device of a command: the given one, or a GPU if there is one.

    Raises:
        MachineError: it is not a device, or does not compute here.
    """
    import torch

    name = given or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=name).cpu()
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error)
        raise MachineError(
            f"--device {name} cannot be used ({reason}): give cpu, cuda, or one of several as cuda:1"
        ) from error
    return name


def python_command(code: str) -> list[str]:
    """Return the command of a Python that imports from where this process does, not from the working directory first.

    That may hold files of strangers.
    """
    return [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {sys.path}; {code}"]


class CommandParser(argparse.ArgumentParser):
    """An argument parser that raises `ConfigurationError`, so that each node prints a mistake once.

    The description is printed as it is written. Arguments of type `float` are finite and not negative, those of type
    `Path` are neither empty, which would be the working directory, nor URLs, and those of type "checkpoint" are URLs or
    exist.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})
        self.register("type", float, number)
        self.register("type", Path, local_path)
        self.register("type", "checkpoint", checkpoint_location)

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing on every rank."""
        hint = " Values are set without dashes, key.sub=value." if message.startswith("unrecognized") else ""
        message = " ".join(redact_arguments(message.split(" ")))
        raise ConfigurationError(f"{self.prog}: {message}.{hint} {' '.join(self.format_usage().split())}")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Reject an `OutputFile` that is another argument too."""
        found, rest = super().parse_known_args(args, namespace)
        values = [value if isinstance(value, list) else [value] for value in vars(found).values()]
        named = [one for value in values for one in value if isinstance(one, str | Path)]
        for one in named:
            if isinstance(one, OutputFile) and sum(Path(other).resolve() == one.resolve() for other in named) > 1:
                self.error(f"{one} is given twice, and would be overwritten: choose another file to write")
        return found, rest

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:
        if is_first_rank():
            super()._print_message(message, file)


def _argument(read: Callable[[str], T], words: str, holds: Callable[[T], bool]) -> Callable[[str], T]:
    """Make the `type` of an argument from a reader of its text, and a condition that its value meets."""

    def parse(text: str) -> T:
        try:
            if holds(value := read(text)):
                return value
        except (ValueError, KeyError):
            pass
        raise argparse.ArgumentTypeError(f"{text or 'an empty text'} is no {words}")

    return parse


def _seconds(text: str) -> float:
    return float(text[:-1]) * {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}[text[-1:]]


def _name_and_score(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    return name, float(value)


def _is_present(location: str) -> bool:
    from diffusion.storage import is_url

    return is_url(location) or Path(location).expanduser().exists()


def _local_path(text: str) -> Path:
    if not text.strip() or "://" in text:
        raise ValueError(text)
    return Path(text).expanduser()


number = _argument(float, "number of at least 0", lambda value: 0 <= value < math.inf)
positive_number = _argument(float, "number above 0", lambda value: 0 < value < math.inf)
share = _argument(float, "share from 0 to 1", lambda value: 0 <= value <= 1)
whole_number = _argument(int, "whole number of at least 0", lambda value: value >= 0)
positive = _argument(int, "whole number of at least 1", lambda value: value >= 1)
port = _argument(int, "port from 0 to 65535", lambda value: 0 <= value < 2**16)
duration = _argument(_seconds, "time: give 90s, 30m, 2h or 1d", lambda value: 0 < value <= threading.TIMEOUT_MAX)
named_score = _argument(_name_and_score, "score such as aesthetic=7", lambda score: math.isfinite(score[1]))
local_path = _argument(_local_path, "path of this machine", lambda path: True)
existing_folder = _argument(_local_path, "folder", Path.is_dir)
existing_file = _argument(_local_path, "file", lambda path: path.exists() and not path.is_dir())
checkpoint_location = _argument(str, "checkpoint, run folder, or URL of a store", _is_present)
"""Types of arguments; `duration` is in seconds."""


def unicode_text(text: str) -> str:
    """Read a text that UTF-8 can hold, as the `type` of an argument."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"{text!a} is no UTF-8") from error
    return text


class OutputFile(PosixPath):
    """A file to write."""


def output_file(text: str) -> Path:
    """Read a file to write, as the `type` of an argument; a MachineError, before any work, if that is not possible."""
    path = OutputFile(local_path(text))
    if is_first_rank():
        with explained_writes(text):
            path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not path.exists()
            path.open("ab").close()
            if is_new:
                path.unlink()
    return path


def run_command(main: Callable[[], None], *, say: Callable[[str], None] = say_to_stderr) -> int:
    """Run a command, turn a `UserError` into one message, and return the exit code of this process.

    With a process group the process ends here, with that code. Exceptions that are no `UserError`, `PreemptedError` or
    Ctrl-C pass, but for a path of an unknown user.
    """
    if "GROUP_RANK" in os.environ:  # As torchrun names what Composer reads when it is imported.
        os.environ.setdefault("NODE_RANK", os.environ["GROUP_RANK"])
    if "RANK" in os.environ:  # A signal to the composer launcher, or SIGKILL to torchrun, ends it alone.
        end_with_parent(signal.SIGTERM)
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(compile_threads()))
    try:
        main()
    except BaseException as error:
        # SIGTERM of the launcher, in answer to another rank, may come while an error of this rank is raised.
        cause = error.__context__ if isinstance(error, SystemExit) and error.__context__ is not None else error
        cause = _explained(cause)
        code = exit_code(cause)
        if code == 1:
            raise
        _report(cause, say)
        return end_process(code)
    return 0


def compile_threads() -> int:
    """Number of processes in which a rank compiles kernels: its share of the node's cores, where torch takes all."""
    return max(1, min(MAX_COMPILE_THREADS, num_cores() // local_world_size()))


def _explained(error: BaseException) -> BaseException:
    """Return the error of `Path.expanduser` as one that names the path, and any other as it is."""
    if not isinstance(error, RuntimeError) or str(error) != "Could not determine home directory.":
        return error
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    path = frame.f_locals.get("self", "~")
    return ConfigurationError(f"{path}: there is no such user, or, for ~ alone, no HOME. Write the path in full")


def exit_code(error: BaseException | None) -> int:
    """Return the exit code of a command that this error ends; 1 for one with a traceback."""
    if isinstance(error, PreemptedError):
        return PREEMPTED_EXIT_CODE
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED_EXIT_CODE
    if isinstance(error, UserError):
        return USER_ERROR_EXIT_CODE
    return 0 if error is None else 1


def _report(error: BaseException, say: Callable[[str], None]) -> None:
    """Print why a command ends. From here on, SIGTERM of the launcher does not change the exit code."""
    terminated: list[int] = []
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: terminated.append(number))

    def wait(seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not terminated and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)

    if not isinstance(error, UserError):
        if is_first_rank():
            say(str(error) if isinstance(error, PreemptedError) else "interrupted")
        return
    # What libraries, servers and names of files say may hold passwords and control characters.
    message = printable(redact(f"{type(error).__name__}: {error}"), keep="\n\t")
    if world_size() > 1:
        message = f"rank {rank()}: {message}"
    if local_rank() == 0:
        say(message)
        if local_world_size() > 1:
            wait(_OTHERS_SECONDS)
    else:
        wait(_FIRST_SECONDS)
        if not terminated and not error.is_agreed:
            say(message)


def end_with_parent(number: int, parent: int | None = None) -> None:
    """Send this process a signal within about a second of its parent's death; by default of the present parent's.

    The kernel's own signal (PR_SET_PDEATHSIG) comes when the thread that started the process ends, which may be early.
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


def end_process(code: int) -> int:
    """End a process with a process group; return the exit code of any other, which ends by itself.

    With a process group the interpreter's way out is not safe (gloo): destroying the group can hang, and
    leaving it to the exit of the interpreter can abort the process. So exit handlers run and the process ends.
    """
    if has_process_group():
        logging.shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that determine a run, as far as they are installed."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions
