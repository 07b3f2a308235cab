"""What a run does after its last checkpoint: samples, the VAE's statistics, the last metrics; made up after a kill."""

import json
import logging
from pathlib import Path

from composer import Event, Trainer
from composer.utils import dist

from diffusion.errors import MachineError
from diffusion.files import write_json

log = logging.getLogger(__name__)

FINISHED = "finished.json"
"""In the run folder: the run has reached this step and done all that comes after it."""


PREEMPTED = "preempted.json"
"""In the run folder: the run was interrupted by a signal and continues when it is started again."""


def has_ended(trainer: Trainer) -> bool:
    """Whether the checkpoint that was loaded is that of the run's last step."""
    end = trainer.state.max_duration
    return end is not None and trainer.state.timestamp.get(end.unit) >= end


def is_finished(folder: Path, step: int) -> bool:
    """Whether nothing is left to do after a step, as rank 0 sees it. To be called by all ranks."""
    finished: list[bool] = [dist.get_global_rank() == 0 and _finished_step(folder) == step]
    dist.broadcast_object_list(finished)
    return finished[0]


def mark_finished(folder: Path, step: int) -> None:
    """Remember that nothing is left to do after a step, on rank 0.

    Raises:
        MachineError: the run folder cannot be written.
    """
    if dist.get_global_rank() != 0:
        return
    try:
        write_json(folder / FINISHED, {"step": step})
    except OSError as error:
        raise MachineError(f"{folder / FINISHED} cannot be written: {error.strerror}") from error


def make_up(trainer: Trainer) -> None:
    """Do what follows the last step of a run that was killed between its last checkpoint and its end.

    Callbacks see the end of a training without steps. To be called by all ranks.
    """
    trainer.engine.run_event(Event.FIT_START)
    if trainer.state.evaluators:
        trainer.eval()
    trainer.engine.run_event(Event.FIT_END)


def _finished_step(folder: Path) -> int | None:
    try:
        return int(json.loads((folder / FINISHED).read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
