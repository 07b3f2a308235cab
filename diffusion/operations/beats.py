"""Signs of life: what each rank does at present, in a small file that it overwrites, and that a supervisor reads."""

import json
import os
import threading
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from diffusion.config.schema import Config

RECORD_BYTES = 2048
"""Size of a rank's file. It never changes, so that a sign of life needs no room on a disk that is full."""

_MAX_MESSAGE = 700

_NUM_READS = 5
"""How often a sign of life is read that is being overwritten: who reads may act on a single look."""

_PAUSE_SECONDS = 0.01
"""Between two of these."""


class Phase(str, Enum):
    """What a rank does."""

    starting = "starting"
    """It opens data and model, or loads a checkpoint."""

    data = "data"
    """It waits for a batch."""

    compiling = "compiling"
    """It compiles, within a step."""

    step = "step"
    """It computes a step."""

    evaluation = "evaluation"
    """It evaluates on held-out data."""

    between = "between"
    """It is between two steps, where checkpoints are saved and images sampled."""

    ending = "ending"
    """It does what follows the last step."""

    ended = "ended"
    """It has ended by itself."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """A sign of life."""

    rank: int
    pid: int
    host: str
    count: int
    """Signs given before this one."""

    phase: Phase
    step: int
    """Steps that the run has done; -1 while it starts."""

    num_done: int
    """Of these, in this start."""

    time: float
    """Seconds since 1970, by the clock of the host."""

    waited: float = 0.0
    """Seconds for which the step waited for its batch."""

    median_step: float | None = None
    """Seconds; None before three steps."""

    code: int | None = None
    """Exit code of a rank that has ended by itself."""

    error: str | None = None
    """Its error: class and message."""

    is_lasting: bool = False
    """Whether starting again is of no use."""


class BeatFile:
    """The file of one rank; each write is one system call on a file that stays open.

    Args:
        folder: where the files of all ranks are.
        rank: number of the rank.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(folder / f"rank-{rank}.json", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, beat: Beat) -> None:
        """Overwrite the sign of life."""
        fields = asdict(beat)
        if beat.error is not None:
            fields["error"] = beat.error[:_MAX_MESSAGE].encode("ascii", "replace").decode()
        os.pwrite(self._descriptor, json.dumps(fields).encode().ljust(RECORD_BYTES - 1) + b"\n", 0)

    def sync(self) -> None:
        """Wait for the disk: a file system of several hosts shows them the file then."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; it stays."""
        os.close(self._descriptor)


def beats_folder(config: Config, run: Path) -> Path:
    """Where the ranks of a run give signs of life.

    Args:
        config: its configuration.
        run: the run folder, as it is reached from here.
    """
    place = config.operations.heartbeat_folder
    return Path(place).expanduser() if place else run / "heartbeats"


def stacks_file(folder: Path, rank: int) -> Path:
    """Where a rank writes its stack traces when it is asked to."""
    return folder / f"stacks-{rank}.txt"


def read_beats(folder: Path) -> list[Beat]:
    """The last sign of life of each rank, by rank.

    One that is being overwritten is read again; one that stays unreadable is left out.
    """
    beats, left, pause = [], list(folder.glob("rank-*.json")), threading.Event()
    for number in range(_NUM_READS):
        if number and left:
            pause.wait(_PAUSE_SECONDS)
        paths, left = left, []
        for path in paths:
            try:
                fields = json.loads(path.read_bytes())
                beats.append(Beat(**{**fields, "phase": Phase(fields["phase"])}))
            except (ValueError, TypeError):
                left.append(path)
            except FileNotFoundError:
                continue
    return sorted(beats, key=lambda beat: beat.rank)


def clear_beats(folder: Path) -> None:
    """Remove what the ranks of an earlier start have left."""
    for pattern in ("rank-*.json", "stacks-*.txt"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
