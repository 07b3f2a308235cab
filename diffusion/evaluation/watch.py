"""Follow a run: evaluate each of its complete checkpoints once, while training goes on and never waits.

A checkpoint counts as evaluated when it is in the ledger, which is written after its results. Killed in between, the
watcher finds the results (and the images) and goes on from them.
"""

import dataclasses
import logging
import threading
from pathlib import Path

from diffusion.checkpointing.remote import remove_copy
from diffusion.config.evaluation import EvaluationConfig
from diffusion.config.stores import is_store
from diffusion.distributed import agree
from diffusion.errors import DataError
from diffusion.evaluation.evaluate import Evaluation
from diffusion.evaluation.followed_run import FollowedRun, follow, is_last, step_of
from diffusion.evaluation.ledger import Entry, Ledger
from diffusion.evaluation.models import subjects_of_checkpoint
from diffusion.evaluation.ranks import Ranks
from diffusion.evaluation.results import read_results
from diffusion.evaluation.watch_writers import Writers
from diffusion.loading import load_config_of

log = logging.getLogger(__name__)

HELD = "held"
"""Folder of the checkpoint that is being read, in the output folder."""


def watch(config: EvaluationConfig) -> None:
    """Follow a run until it is finished; to be called by all ranks.

    Args:
        config: with `model` a run folder, its `checkpoints` folder, or `s3://bucket/prefix`.

    Raises:
        UserError: on every rank: the configuration, the data or the machine is at fault.
    """
    Watcher(config, Ranks.start()).run()


class Watcher:
    """Looks, evaluates what is new, and looks again.

    Args:
        config: of the evaluation.
        ranks: this rank among all.
    """

    def __init__(self, config: EvaluationConfig, ranks: Ranks) -> None:
        assert config.model is not None
        self.config, self.ranks, self.place = config, ranks, config.model
        self.folder = Path(config.output_folder).expanduser()
        self.evaluation = Evaluation(config=config, ranks=ranks)
        self.ledger = agree(lambda: Ledger.open(self.folder, self.place))
        self._writers: Writers | None = None
        # A run folder says whether its run is finished; of a store, only what was read from it tells.
        self._is_finished = is_store(self.place) and any(entry.is_last for entry in self.ledger.entries.values())
        self._pause = threading.Event()

    def run(self) -> None:
        """Evaluate until the run is finished; with `watch_forever`, until the process is ended."""
        while True:
            # Whether the run is finished is seen before its checkpoints are listed, so that none comes in between.
            finished, new = self.ranks.broadcast(agree(self._look))
            for name in new:
                self._evaluate(name)
            if (finished or self._is_finished) and not self.config.watch_forever:
                break
            if not new:
                self._pause.wait(self.config.poll_seconds)
        if self._writers is not None:
            self._writers.close()
        log.info("run %s is finished; %d checkpoints were seen", self.place, len(self.ledger.entries))

    def _look(self) -> tuple[bool, list[str]]:
        """Whether the run says that it is finished, and its checkpoints that were not seen; on the first rank."""
        if not self.ranks.is_first:
            return False, []
        run = follow(self.place)
        finished = run.finished_step()
        present = run.present()
        return finished is not None and _has_reached(run, finished), [
            name for name in present if name not in self.ledger.entries
        ]

    def _evaluate(self, name: str) -> None:
        """Evaluate one checkpoint and note it."""
        held = self.folder / HELD / name
        is_there = self.ranks.broadcast(agree(lambda: self._hold(name)))
        entry = Entry(step=step_of(name), skipped="it was removed before it could be read")
        if is_there:
            entry = self._evaluate_held(name, held)
            self._is_finished = self._is_finished or entry.is_last
        self.ranks.barrier()

        def note() -> None:
            if self.ranks.is_first:
                if entry.skipped is None:
                    self._write(held)
                else:
                    log.warning("checkpoint %s of %s is left out: %s", name, self.place, entry.skipped)
                remove_copy(held)
                self.ledger.add(name, entry)

        agree(note)

    def _hold(self, name: str) -> bool:
        return self.ranks.is_first and follow(self.place).hold(name, self.folder / HELD) is not None

    def _evaluate_held(self, name: str, held: Path) -> Entry:
        """Evaluate each of the weights; return what is to be noted."""
        config = agree(lambda: load_config_of(held))
        problems = []
        subjects = subjects_of_checkpoint(held, self.config.weights)
        for subject in subjects:
            try:
                self.evaluation.evaluate(dataclasses.replace(subject, origin=f"{self.place.rstrip('/')}/{name}"))
            except DataError as error:
                # An average that had not started is no reason to leave out the other weights.
                log.warning("%s of %s: %s", subject.weights, name, error)
                problems.append(str(error))
        skipped = "; ".join(problems) if len(problems) == len(subjects) else None
        return Entry(step=step_of(name), skipped=skipped, is_last=is_last(step_of(name), config))

    def _write(self, held: Path) -> None:
        if self._writers is None:
            self._writers = Writers(self.config, load_config_of(held))
        self._writers.write(read_results([self.folder]))


def _has_reached(run: FollowedRun, finished: int) -> bool:
    """Whether the last checkpoint is of the step at which the run said that it was finished; it may be continued."""
    present = run.present()
    return not present or step_of(present[-1]) <= finished
