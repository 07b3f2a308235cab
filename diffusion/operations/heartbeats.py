"""Heartbeats: what each rank does at present, in a small file that it overwrites, and that the supervisor reads."""

import hashlib
import json
import os
import time
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from diffusion.config.schema import Config
from diffusion.formats.run_folder import HEARTBEATS
from diffusion.operations.processes import ProcessRecord

RECORD_BYTES = 2048
"""Constant size of a rank's file: a heartbeat needs no space on a full disk."""

_MAX_MESSAGE = 700
_NUM_READS = 5


class Phase(str, Enum):
    """Activity of a rank."""

    starting = "starting"
    """Opening data and model, or loading a checkpoint."""

    data = "data"
    """Waiting for a batch."""

    compiling = "compiling"
    """Compiling, within a step."""

    step = "step"
    evaluation = "evaluation"
    between = "between"
    """Between two steps: checkpoints, samples."""

    ending = "ending"
    """After the last step."""

    ended = "ended"
    """Ended by itself."""


@dataclass(frozen=True, kw_only=True)
class HeartbeatRecord(ProcessRecord):
    """Content of a heartbeat."""

    rank: int
    count: int
    """Number of heartbeats before this one."""

    phase: Phase
    step: int
    """Completed steps of the run; -1 during the start."""

    num_done: int
    """Completed steps of this start."""

    median_step: float | None = None
    """Median duration of a step in seconds; None before three steps."""

    code: int | None = None
    """Exit code of a rank that has ended by itself."""

    error: str | None = None
    """Class and message of its error."""

    is_lasting: bool = False
    """True if a restart meets the same error again."""


class HeartbeatFile:
    """File of one rank among those of all ranks; each write is one system call on a file that stays open."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(folder / f"rank-{rank}.json", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, record: HeartbeatRecord) -> None:
        """Overwrite the heartbeat."""
        fields = asdict(record)
        if record.error is not None:
            fields["error"] = record.error[:_MAX_MESSAGE].encode("ascii", "replace").decode()
        os.pwrite(self._descriptor, json.dumps(fields).encode().ljust(RECORD_BYTES - 1) + b"\n", 0)

    def sync(self) -> None:
        """Wait for the disk; other hosts of a shared file system see the file then."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file, which stays."""
        os.close(self._descriptor)


def heartbeat_folder(config: Config, run: Path) -> Path:
    """Return the folder of a run's heartbeats; the run folder is given as it is reached from here."""
    folder = config.operations.heartbeat_folder
    if not folder:
        return run / HEARTBEATS
    name = hashlib.sha256(os.fsencode(os.path.abspath(run))).hexdigest()[:10]  # noqa: PTH100 -- without "..", links stay
    return Path(folder).expanduser() / name


def stacks_file(folder: Path, rank: int) -> Path:
    """Return the file to which a rank writes its stack traces on request."""
    return folder / f"stacks-{rank}.txt"


def read_heartbeats(folder: Path) -> list[HeartbeatRecord]:
    """Read the last heartbeat of each rank, sorted by rank; unreadable files are skipped."""
    records = [_read(path) for path in folder.glob("rank-*.json")]
    return sorted((record for record in records if record is not None), key=lambda record: record.rank)


def _read(path: Path) -> HeartbeatRecord | None:
    """Read a heartbeat; several times if it is being overwritten, or a network disk fails."""
    for attempt in range(_NUM_READS):
        time.sleep(0.01 if attempt else 0)
        try:
            fields = json.loads(path.read_bytes())
            return HeartbeatRecord.of({**fields, "phase": Phase(fields["phase"])})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError):
            continue
    return None


def clear_heartbeats(folder: Path) -> None:
    """Remove the files of an earlier start."""
    for pattern in ("rank-*.json", "stacks-*.txt"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
