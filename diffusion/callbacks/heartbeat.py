"""The heartbeat of each rank at each phase of each step, and stack traces on a signal."""

import faulthandler
import logging
import os
import socket
import statistics
import threading
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from composer import Callback, Event, Logger, State
from torch._dynamo.callback import callback_handler

from diffusion.distributed import PREEMPTED_EXIT_CODE, USER_ERROR_EXIT_CODE, rank
from diffusion.errors import MachineError, PreemptedError, UserError
from diffusion.operations import timeouts
from diffusion.operations.hang_detection import STACKS_SIGNAL
from diffusion.operations.heartbeats import HeartbeatFile, HeartbeatRecord, Phase, stacks_file
from diffusion.operations.lease import Lease

log = logging.getLogger(__name__)

_PHASES = {
    Event.FIT_START: Phase.starting,
    Event.BEFORE_DATALOADER: Phase.data,
    Event.AFTER_DATALOADER: Phase.step,
    Event.BATCH_END: Phase.between,
    Event.EVAL_START: Phase.evaluation,
    Event.EVAL_BATCH_END: Phase.evaluation,
    Event.EVAL_END: Phase.between,
    Event.FIT_END: Phase.ending,
}
_NUM_STEPS = 50
"""Steps in the median of the step time."""


class Heartbeat(Callback):
    """Write the phase of this rank to a small file; as a context, from the start of a run to its end.

    A heartbeat is one write of 2 KiB that does not wait for the disk. A thread syncs the file, after which other hosts
    of a shared file system see it, renews the lease of the run, and ends the process when another start has taken the
    lease. Within the context, `STACKS_SIGNAL` makes the process write the stack traces of all its threads to a file
    beside it. This callback comes before others, whose work then belongs to its phase.

    Args:
        folder: of the heartbeats of all ranks.
        lease: of the run.
    """

    def __init__(self, folder: Path, lease: Lease) -> None:
        self.folder, self._lease = folder, lease
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sync_and_renew, name="heartbeat", daemon=True)
        self._rank, self._host = rank(), socket.gethostname()
        self._phase = Phase.starting
        self._count, self._step, self._num_done = 0, -1, 0
        self._changed = time.perf_counter()
        self._waited = 0.0
        self._steps: deque[float] = deque(maxlen=_NUM_STEPS)
        self._file: HeartbeatFile | None = None
        self._stacks: IO[str] | None = None

    def __enter__(self) -> "Heartbeat":
        """Open the files.

        Raises:
            MachineError: they cannot be written.
        """
        try:
            self._file = HeartbeatFile(self.folder, self._rank)
            self._stacks = stacks_file(self.folder, self._rank).open("w")
        except OSError as error:
            raise MachineError(
                f"heartbeats cannot be written to {self.folder}: {error.strerror}. Choose another "
                "operations.heartbeat_folder, or null for the run folder"
            ) from error
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True)
        callback_handler.register_start_callback(self._compilation_starts)
        callback_handler.register_end_callback(self._compilation_ends)
        self._write(Phase.starting)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._file is not None
        assert self._stacks is not None
        self._ended.set()
        self._thread.join()
        message = None if error is None else f"{type(error).__name__}: {error}"
        self._write(
            Phase.ended,
            code=_exit_code(error),
            error=message,
            is_lasting=isinstance(error, UserError) and error.is_lasting,
        )
        faulthandler.unregister(STACKS_SIGNAL)
        for callback in (self._compilation_starts, self._compilation_ends):
            for registered in (callback_handler.start_callbacks, callback_handler.end_callbacks):
                if callback in registered:  # torch._dynamo.reset() removes all.
                    registered.remove(callback)
        self._stacks.close()
        self._file.close()
        self._file = None

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Write the phase that begins; before a checkpoint, check that the lease is still this start's.

        Raises:
            MachineError: another start has taken the lease.
        """
        if event is Event.BATCH_CHECKPOINT:
            self._lease.check()
        phase = _PHASES.get(event)
        if phase is None or self._file is None:
            return
        now = time.perf_counter()
        if event is Event.AFTER_DATALOADER:
            self._waited = now - self._changed
        if event is Event.BATCH_END:
            self._steps.append(now - self._changed)
            self._num_done += 1
        self._changed, self._step = now, state.timestamp.batch.value
        self._write(phase)

    def _compilation_starts(self, *_: Any) -> None:
        if self._phase is Phase.step:
            self._write(Phase.compiling)

    def _compilation_ends(self, *_: Any) -> None:
        if self._phase is Phase.compiling:
            self._write(Phase.step)

    def _sync_and_renew(self) -> None:
        """Sync the file and renew the lease, in a thread."""
        assert self._file is not None
        while not self._ended.wait(timeouts.RENEWAL):
            try:
                self._file.sync()
                self._lease.renew()
            except MachineError as error:
                log.critical("%s", error)
                os._exit(USER_ERROR_EXIT_CODE)
            except OSError as error:
                log.warning("the heartbeat in %s does not reach the disk: %s", self.folder, error.strerror)

    def _write(
        self, phase: Phase, *, code: int | None = None, error: str | None = None, is_lasting: bool = False
    ) -> None:
        assert self._file is not None
        self._phase = phase
        self._file.write(
            HeartbeatRecord(
                rank=self._rank,
                pid=os.getpid(),
                host=self._host,
                count=self._count,
                phase=phase,
                step=self._step,
                num_done=self._num_done,
                time=time.time(),
                waited=self._waited,
                median_step=statistics.median(self._steps) if len(self._steps) > 2 else None,
                code=code,
                error=error,
                is_lasting=is_lasting,
            )
        )
        self._count += 1


def _exit_code(error: BaseException | None) -> int:
    """Return the exit code of `launch.run_command` for an error."""
    if error is None:
        return 0
    if isinstance(error, PreemptedError):
        return PREEMPTED_EXIT_CODE
    return USER_ERROR_EXIT_CODE if isinstance(error, UserError) else 1
