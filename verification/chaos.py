"""Faults at random, seeded times over a supervised run, and what each of them cost."""

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from diffusion.callbacks.metrics_file import STARTS
from diffusion.operations.events import read_events
from diffusion.operations.heartbeats import HeartbeatRecord
from verification.faults import FAULTS, Scene
from verification.runner import VerificationError

log = logging.getLogger(__name__)

PATIENCE = 900.0
"""Seconds within which a run must have overcome a fault."""

_POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A fault that is going to happen."""

    kind: str
    """One of `faults.FAULTS`."""

    step: int
    """The earliest step."""

    delay: float
    """Seconds after that step was seen."""

    rank: int
    """Which rank is hit, if one is."""


@dataclass(frozen=True, kw_only=True)
class Overcome:
    """A fault, and what it cost."""

    kind: str
    step: int
    """Steps that the run had done."""

    redone: int
    """Steps that were done again."""

    seconds: float
    """From the fault until the run was as far as before."""

    ended: str
    """How the start that it hit ended, as the supervisor says."""


def plan(kinds: Sequence[str], num_faults: int, *, num_ranks: int, seed: int, gap: int) -> list[Planned]:
    """Draw faults: each kind about equally often, in random order, at random times.

    Args:
        kinds: that may happen.
        num_faults: how many do.
        num_ranks: of the run.
        seed: determines all of it.
        gap: steps between two faults, at most; at least half of it.
    """
    chance = random.Random(f"chaos {seed}")
    drawn: list[str] = []
    while len(drawn) < num_faults:
        drawn += chance.sample(list(kinds), min(len(kinds), num_faults - len(drawn)))
    chance.shuffle(drawn)
    result, step = [], 0
    for kind in drawn:
        step += chance.randint(gap - gap // 2, gap)
        result.append(Planned(kind=kind, step=step, delay=chance.random() / 2, rank=chance.randrange(num_ranks)))
    return result


class Chaos:
    """Lets faults happen to a run while it is supervised, one after the other.

    Args:
        scene: the run.
        is_over: whether the supervisor has ended.
    """

    def __init__(self, scene: Scene, is_over: Callable[[], bool]) -> None:
        self.scene, self._is_over = scene, is_over
        self._furthest = 0

    def run(self, faults: Sequence[Planned]) -> list[Overcome]:
        """Let all of them happen, each when the run has overcome the one before.

        Raises:
            VerificationError: the run has ended before the last one, or does not overcome one.
        """
        return [self._let_happen(fault) for fault in faults]

    def _let_happen(self, fault: Planned) -> Overcome:
        self._wait(lambda: self._step() >= max(fault.step, self._furthest), f"step {fault.step}, for {fault.kind}")
        threading.Event().wait(fault.delay)
        num_starts, num_ends, began = len(self._starts()), len(self._ends()), time.monotonic()
        log.info("%s at step %d", fault.kind, self._step())
        FAULTS[fault.kind](self.scene, fault.rank)
        self._wait(lambda: len(self._starts()) > num_starts, f"another start after {fault.kind}")
        hit = self._ends()[num_ends]
        self._furthest = max(self._furthest, hit["step"])
        self._wait(lambda: self._step() >= self._furthest, f"step {self._furthest} after {fault.kind}")
        overcome = Overcome(
            kind=fault.kind,
            step=hit["step"],
            redone=max(0, hit["step"] - self._starts()[num_starts]),
            seconds=time.monotonic() - began,
            ended=hit["reason"],
        )
        log.info("overcome: %s", overcome)
        return overcome

    def _starts(self) -> list[int]:
        """The step that each start of the run's training began with."""
        path = self.scene.run / STARTS
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return [row["step"] for row in rows if row["event"] == "start"]

    def _ends(self) -> list[dict[str, Any]]:
        """How each start of the job ended, as the supervisor says."""
        return [event for event in read_events(self.scene.run) if event["event"] == "ended"]

    def _step(self) -> int:
        """Steps that the run has done, as its last start sees it; -1 before its first one."""
        heartbeats: Sequence[HeartbeatRecord] = self.scene.heartbeats()
        return min((one.step if one.num_done else -1 for one in heartbeats), default=-1)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline, pause = time.monotonic() + PATIENCE, threading.Event()
        while not condition():
            if self._is_over():
                raise VerificationError(f"{self.scene.run}: the job has ended before {what}")
            if time.monotonic() > deadline:
                raise VerificationError(f"{self.scene.run}: {what} has not come within {PATIENCE:g} s")
            pause.wait(_POLL_SECONDS)


def format_overcome(faults: Sequence[Overcome]) -> str:
    """A table in Markdown, with the time lost in all."""
    lines = ["| fault | at step | steps done again | seconds lost | how the job ended |", "|---|---|---|---|---|"]
    for fault in faults:
        reason = fault.ended.partition(". ")[0].replace("|", "/")
        reason = reason if len(reason) <= 90 else f"{reason[:87]}..."
        lines.append(f"| {fault.kind} | {fault.step} | {fault.redone} | {fault.seconds:.0f} | {reason} |")
    lines.append(
        f"| {len(faults)} faults | | {sum(f.redone for f in faults)} | {sum(f.seconds for f in faults):.0f} | |"
    )
    return "\n".join(lines)
