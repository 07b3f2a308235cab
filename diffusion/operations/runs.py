"""Status of runs, and how to stop them."""

import json
import socket
from dataclasses import dataclass
from pathlib import Path

from diffusion.config.schema import Config
from diffusion.errors import MachineError
from diffusion.files import lock
from diffusion.formats.run_folder import BUDGET, CHECKPOINTS, COSTS, LEASE, PREEMPTED, SUPERVISED, finished_step
from diffusion.operations.costs import read_costs
from diffusion.operations.heartbeats import heartbeat_folder, read_heartbeats
from diffusion.operations.lease import active_holder
from diffusion.operations.processes import ProcessRecord, is_alive, terminate
from diffusion.storage import is_url


def read_status(run: Path) -> str:
    """Return the status of a run in words."""
    if is_running(run):
        return "running"
    step = finished_step(run)
    if step is not None and all(start.reached <= step for start in read_costs(run)[-1:]):  # Else it was continued.
        return "finished"
    markers = {BUDGET: "budget spent", PREEMPTED: "pre-empted"}
    otherwise = "interrupted" if (run / COSTS).is_file() else "not trained"  # A check has failed.
    return next((text for name, text in markers.items() if (run / name).is_file()), otherwise)


def is_running(run: Path) -> bool:
    """Return whether a run has a supervisor or, on any host, a start that holds its lease."""
    return supervisor_of(run) is not None or active_holder(run / LEASE) is not None


@dataclass(frozen=True, kw_only=True)
class SupervisorRecord(ProcessRecord):
    """Content of a supervisor's lock file."""

    folder: str
    """Working directory."""

    arguments: list[str]
    """Arguments of `scripts/supervise.py`."""


def read_supervisor(run: Path) -> SupervisorRecord | None:
    """Read the record of the last supervisor of a run; None if it had none."""
    try:
        return SupervisorRecord.of(json.loads((run / SUPERVISED).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def supervisor_of(run: Path) -> SupervisorRecord | None:
    """Return the supervisor whose lock is held, by itself or by its job if it was killed; None without one."""
    if not (run / SUPERVISED).exists():
        return None
    try:
        with lock(run / SUPERVISED, shared=True, timeout=0):
            return None
    except TimeoutError:
        return read_supervisor(run)
    except PermissionError:  # Another user's; the lease says whether it runs.
        return None


def stop(run: Path, config: Config) -> list[int]:
    """Stop a run after a save: through its supervisor, or through its ranks on this machine, which notify the others.

    Returns:
        The processes that got the signal.

    Raises:
        MachineError: the run is not running on this machine, or supervised on another one.
    """
    supervisor = supervisor_of(run)
    if supervisor is not None and supervisor.host != socket.gethostname():  # It would restart the job.
        raise MachineError(f"{run} is supervised on {supervisor.host}: give the command there")
    pids = [one.pid for one in read_heartbeats(heartbeat_folder(config, run)) if is_alive(one)]
    if supervisor is not None and is_alive(supervisor):
        pids = [supervisor.pid]
    if not pids:
        holder = active_holder(run / LEASE)
        remedy = f": give the command on {holder.host}" if holder is not None else ""
        raise MachineError(f"{run} is not running on this machine{remedy}")
    terminate(pids)
    return pids


def absolute(run: Path, location: str) -> str:
    """Resolve a location that a run names; a relative path starts where its supervisor was started, if it had one."""
    if is_url(location):
        return location.rstrip("/")
    supervisor = read_supervisor(run)
    return str(Path(supervisor.folder if supervisor is not None else "", Path(location).expanduser()).resolve())


def checkpoints_of(run: Path, config: Config) -> str:
    """The folder or URI of a run's checkpoints."""
    location = config.trainer.checkpoint_folder
    return str(run.resolve() / CHECKPOINTS) if location is None else absolute(run, location)
