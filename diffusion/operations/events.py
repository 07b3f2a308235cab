"""What happened to a job: JSON lines in the run folder, and posted to an address for whoever is to know at once."""

import datetime
import json
import logging
import queue
import threading
from enum import Enum
from pathlib import Path
from typing import Any

import requests

EVENTS = "events.jsonl"
"""In the run folder: a row for each thing that happened under supervision."""

_POST_SECONDS = 10.0
_LAST_POSTS_SECONDS = 20.0

log = logging.getLogger(__name__)


class EventKind(str, Enum):
    """What happens under supervision; what each means and what to do about it is in docs/operations.md."""

    unfit = "unfit"
    """A check before a start found something wrong with a machine."""

    started = "started"
    told = "told"
    slow_data = "slow_data"
    data_came = "data_came"
    hang = "hang"
    going_back = "going_back"
    ended = "ended"
    """It will be started again."""

    finished = "finished"
    stopped = "stopped"
    """It will not."""


class EventLog:
    """Writes events, and posts them in the background; an address that does not answer delays and harms nothing.

    The body of a post is the row with `run` and `text`, a line for people, which chat services show. The address, a
    secret, is never logged.

    Args:
        run: the run folder.
        webhook: address; None: nothing is posted.
    """

    def __init__(self, run: Path, webhook: str | None = None) -> None:
        self.path, self._run = run / EVENTS, run.name
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._poster: threading.Thread | None = None
        if webhook is not None:
            self._poster = threading.Thread(target=self._post_all, args=(webhook,), daemon=True)
            self._poster.start()

    def add(self, event: EventKind, reason: str = "", **more: Any) -> None:
        """Write and post an event.

        Args:
            event: its kind.
            reason: in words.
            more: numbers and names.
        """
        time = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
        row = {"time": time, "event": event.value, "reason": reason, **more}
        details = ", ".join(f"{key} {value}" for key, value in more.items())
        log.warning("%s%s%s", event.value, f" ({details})" if details else "", f": {reason}" if reason else "")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            log.warning("%s cannot be written: %s", self.path, error.strerror)
        if self._poster is not None:
            self._queue.put({**row, "run": self._run, "text": f"{self._run}: {event.value} {reason}".rstrip()})

    def close(self) -> None:
        """Wait for the last posts, for a short time."""
        if self._poster is not None:
            self._queue.put(None)
            self._poster.join(_LAST_POSTS_SECONDS)

    def _post_all(self, webhook: str) -> None:
        while (row := self._queue.get()) is not None:
            try:
                answer = requests.post(webhook, json=row, timeout=_POST_SECONDS)
            except (requests.RequestException, ValueError) as error:  # Their messages hold the address.
                log.warning("event %s was not posted: %s", row["event"], type(error).__name__)
                continue
            if not answer.ok:
                log.warning("event %s was not posted: status %d", row["event"], answer.status_code)


def read_events(run: Path) -> list[dict[str, Any]]:
    """All events of a run, in order."""
    path = run / EVENTS
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
