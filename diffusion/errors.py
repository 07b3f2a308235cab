"""Exceptions that say who is at fault: the configuration, the data or the machine.

A `UserError` is what a command prints, without a traceback, before it ends with exit code 2. Everything else that is
raised is a defect of this package (or of a library below it) and keeps its traceback.
"""

import contextlib
import difflib
import errno
from collections.abc import Iterable, Iterator

from safetensors import SafetensorError


class UserError(Exception):
    """A mistake that the person who started the command can correct.

    The message says what is wrong, where (the key or the file), and what to do.
    """

    is_lasting = False
    """True if the same command fails again for certain."""

    is_agreed = False
    """True if all ranks raise it together (`diffusion.distributed.agree`)."""


class ConfigurationError(UserError):
    """The configuration is wrong: an unknown key, a value of the wrong type, an impossible combination."""

    is_lasting = True


class DataError(UserError):
    """The data is missing, damaged, or does not match the configuration."""


class UnfitDataError(DataError):
    """More data is damaged than is tolerated."""

    is_lasting = True


class MachineError(UserError):
    """The machine lacks something that the configuration asks for: a device, a precision, disk space."""


class UnavailableError(MachineError):
    """A store or server does not answer, or answers with a failure that may pass."""


class BusyError(MachineError):
    """Another process holds the lock or the lease."""


class PreemptedError(Exception):
    """The run ends, and its next start continues: after a signal (a checkpoint was saved) or a wrong loss."""


@contextlib.contextmanager
def error_context(key: str) -> Iterator[None]:
    """Put the configuration key, or what is being done, in front of the message of an error that the block raises."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{key}: {error}") from error


@contextlib.contextmanager
def explained_writes(what: object, remedy: str = "") -> Iterator[None]:
    """Report that a file or folder cannot be written, by the system or safetensors, as a MachineError.

    Without a remedy it is to free space on a full disk, or to choose another folder.
    """
    try:
        yield
    except UserError:  # Some are an OSError, too.
        raise
    except (OSError, SafetensorError) as error:
        is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        remedy = remedy or ("Free space on the disk" if is_full else "Choose a folder that can be written to")
        reason = getattr(error, "strerror", None) or error
        raise MachineError(f"{what} cannot be written: {reason}. {remedy}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def printable(text: str, keep: str = "") -> str:
    """Escape control characters and bytes that are not UTF-8, which must not reach a terminal, except those to keep."""
    return "".join(letter if letter.isprintable() or letter in keep else ascii(letter)[1:-1] for letter in text)


def raise_all(kind: type[UserError], problems: list[str]) -> None:
    """Raise one error with all problems, if there are any."""
    if len(problems) == 1:
        raise kind(problems[0])
    if problems:
        raise kind(f"{len(problems)} problems:\n" + "\n".join(f"  - {problem}" for problem in problems))


def similar_names(name: str, known: Iterable[str]) -> list[str]:
    """Find the known names that a misspelt one resembles, best first; case is ignored."""
    by_lower_case = {one.lower(): one for one in known}
    exact = [name.lower()] if name.lower() in by_lower_case else []
    close = exact or difflib.get_close_matches(name.lower(), by_lower_case, n=3, cutoff=0.66)
    return [by_lower_case[one] for one in close]
