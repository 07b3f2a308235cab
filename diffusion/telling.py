"""Who of a job's processes tells the user an error, and who ends first.

- Before the process group exists, configuration errors are the same on each rank (they follow from the files and the
  command line), and rank 0 speaks. Other errors may concern one machine only, and the first rank of each node speaks.
- Afterwards, an error raised by `distributed.agree` is the same on all ranks, and rank 0 speaks. An error outside it is
  told by rank 0 if it meets it within seconds of the first that does, else by that one.

Both launchers (composer, torchrun) terminate all ranks of a node as soon as one has ended, so who has to speak, or
keeps the store in which others look, ends when the others know of the error, too, or have had the time.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from diffusion.distributed import has_process_group, local_rank, local_world_size, rank, world_size
from diffusion.errors import ConfigurationError, UserError

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


class Termination:
    """The launcher's SIGTERM, kept from changing the exit code of a process that is about to end.

    A `threading.Event` would not do: the handler runs in the thread that waits, maybe while it holds the event's lock.

    Attributes:
        has_come: whether the signal has come.
    """

    def __init__(self) -> None:
        self.has_come = False
        self._previous: Any = None
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._come)

    def _come(self, number: int, frame: FrameType | None) -> None:
        self.has_come = True

    def wait(self, seconds: float) -> bool:
        """Wait for the signal so long; return whether it has come."""
        deadline = time.monotonic() + seconds
        while not self.has_come and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _PAUSE_SECONDS))
        return self.has_come

    def release(self) -> None:
        """Let the signal do what it did before."""
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)


def tell(error: UserError, say: Callable[[str], None], termination: Termination) -> None:
    """Print the message if this is the rank to do it."""
    has_group = has_process_group()
    may_be_alone = has_group and not error.is_agreed
    if may_be_alone:
        speaks = _is_first_to_tell(str(error), termination)
    elif has_group or isinstance(error, ConfigurationError):
        speaks = rank() == 0
    else:
        speaks = local_rank() == 0
    if speaks:
        speaker = f"rank {rank()} on {socket.gethostname()}: " if rank() else ""
        say(f"{type(error).__name__}: {speaker}{error}")
    with contextlib.suppress(KeyboardInterrupt):
        _end_in_order(termination, may_be_alone=may_be_alone, has_spoken=speaks)


def is_known_elsewhere() -> bool:
    """Whether another rank ended with a `UserError`, of which this rank only notices that a collective failed."""
    return has_process_group() and _ask_store(
        lambda store: store.check([USER_ERROR_KEY]), otherwise=False, afterwards=_listen
    )


def await_listeners(termination: Termination | None, seconds: float) -> None:
    """Leave the others the time to learn of an error, as the store ends with the process of rank 0.

    Args:
        termination: ends the wait when it comes, unless None.
        seconds: ends it, too.
    """
    wait_a_moment = time.sleep if termination is None else termination.wait

    def wait(store: Any) -> bool:
        deadline = time.monotonic() + seconds
        while store.add(_LISTENERS_KEY, 0) < world_size() - 1:
            if time.monotonic() > deadline or wait_a_moment(_PAUSE_SECONDS):
                break
        return True

    _ask_store(wait, otherwise=True, patience=seconds + _STORE_SECONDS)


def _end_in_order(termination: Termination, *, may_be_alone: bool, has_spoken: bool) -> None:
    """Let who has to speak, or keeps the store, end when the others have met the error, or have had the time."""
    if may_be_alone and rank() == 0:
        await_listeners(termination, FOLLOWING_SECONDS)
    elif may_be_alone and local_rank() and not has_spoken:
        termination.wait(PATIENCE_SECONDS)
    elif not may_be_alone and local_rank():
        _follow(termination)
    elif not may_be_alone and local_world_size() > 1:
        _await_followers(termination)


def _await_followers(termination: Termination) -> None:
    """Leave the other ranks of this node the time to meet the same error."""
    followers, deadline = set(range(1, local_world_size())), time.monotonic() + FOLLOWING_SECONDS
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as place:
            place.bind(_place_of_followers())
            place.settimeout(_PAUSE_SECONDS)
            while followers and time.monotonic() < deadline and not termination.has_come:
                with contextlib.suppress(TimeoutError, ValueError):
                    followers.discard(int(place.recv(16)))
    except OSError:  # No more files may be open, or another node of the job is in the same network namespace.
        termination.wait(HEARING_SECONDS)


def _follow(termination: Termination) -> None:
    """Tell the first rank of this node that this one ends as well, and let that one end first."""
    deadline, is_told = time.monotonic() + PATIENCE_SECONDS, False
    while time.monotonic() < deadline and not termination.wait(_PAUSE_SECONDS):
        if not is_told:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as place:
                # It does not listen yet, or has gone, or no more files may be open.
                is_told = place.sendto(str(local_rank()).encode(), _place_of_followers()) > 0


def _place_of_followers() -> str:
    """Abstract address of a socket: of a node of this user's job, in the kernel, gone with the process that has it."""
    names = ("MASTER_PORT", "NODE_RANK", "MASTER_ADDR")
    job = (str(os.getuid()), *(os.environ.get(name, "") for name in names))
    return "\0diffusion-" + "-".join(job)[:90]


def _is_first_to_tell(message: str, termination: Termination) -> bool:
    """Whether this rank is to tell an error that it met outside `agree`: rank 0 if it meets it soon, else the first.

    Other ranks may be anywhere, so no collective operation is possible; the store of the process group is.
    """
    key = f"diffusion/told/{message}"

    def is_first(store: Any) -> bool:
        store.set(USER_ERROR_KEY, "")
        deadline = time.monotonic() + HEARING_SECONDS
        if rank():
            while not store.check([key]):
                if time.monotonic() > deadline or termination.wait(_PAUSE_SECONDS):
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
