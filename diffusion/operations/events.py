"""Events of a supervised job: JSON lines in the run folder, and posts to a webhook."""

import datetime
import logging
import queue
import threading
from enum import Enum
from pathlib import Path
from typing import Any

import requests

from diffusion.config.secrets import redact
from diffusion.files import append_json_lines, read_json_lines
from diffusion.formats.run_folder import EVENTS
from diffusion.operations import timeouts

log = logging.getLogger(__name__)


class EventKind(str, Enum):
    """Kind of an event; docs/operations.md explains each."""

    unfit = "unfit"
    """A check before a start found a problem of a machine."""

    started = "started"
    growing = "growing"
    """The job is ended, and started again on more hosts."""

    signal = "signal"
    """The supervisor passed on a signal."""

    slow_data = "slow_data"
    data_came = "data_came"
    """The wait for data is over."""

    hang = "hang"
    rolling_back = "rolling_back"
    """The next start rolls back to an earlier checkpoint."""

    ended = "ended"
    """A restart follows."""

    finished = "finished"
    stopped = "stopped"
    """No restart follows."""


class EventLog:
    """Writes events, and posts them in the background; failures of the webhook have no effect on the job.

    The body of a post is the row with `run` and `text`, a line that chat services show. The address of the webhook,
    None without one, is a secret and never logged.
    """

    def __init__(self, run: Path, webhook: str | None = None) -> None:
        self.path, self._run = run / EVENTS, run.name
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._poster: threading.Thread | None = None
        if webhook is not None:
            self._poster = threading.Thread(target=self._post_all, args=(webhook,), daemon=True)
            self._poster.start()

    def add(self, event: EventKind, reason: str = "", **more: Any) -> None:
        """Write and post an event with its reason in words and further fields."""
        reason, more = redact(reason), redact(more)
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        row = {"time": time, "event": event.value, "reason": reason, **more}
        details = ", ".join(f"{key} {value}" for key, value in more.items())
        log.warning("%s%s%s", event.value, f" ({details})" if details else "", f": {reason}" if reason else "")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_json_lines(self.path, [row])
        except OSError as error:
            log.warning("%s cannot be written: %s", self.path, error.strerror)
        if self._poster is not None:
            self._queue.put({**row, "run": self._run, "text": f"{self._run}: {event.value} {reason}".rstrip()})

    def close(self) -> None:
        """Wait for the last posts, up to a time-out."""
        if self._poster is not None:
            self._queue.put(None)
            self._poster.join(timeouts.LAST_POSTS)

    def _post_all(self, webhook: str) -> None:
        while (row := self._queue.get()) is not None:
            try:
                answer = requests.post(webhook, json=row, timeout=timeouts.POST)
            except (requests.RequestException, ValueError) as error:  # The messages contain the address.
                log.warning("event %s was not posted: %s", row["event"], type(error).__name__)
                continue
            if not answer.ok:
                log.warning("event %s was not posted: status %d", row["event"], answer.status_code)


def read_events(run: Path) -> list[dict[str, Any]]:
    """Read the events of a run, in order; damaged lines are skipped."""
    return [row for row in read_json_lines(run / EVENTS) if row is not None]
