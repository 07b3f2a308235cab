"""Pictures that could not be decoded, over all ranks: listed in a file, and the end of the run where there are many."""

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from composer import Callback, Logger, State
from composer.utils import dist

from diffusion.datasets.bad_pictures import BadPicture, check_bad_pictures
from diffusion.datasets.streams import TextImageDataset
from diffusion.ranks import agree

log = logging.getLogger(__name__)

FILE = "bad_pictures.jsonl"


class ReportBadPictures(Callback):
    """List bad pictures in `bad_pictures.jsonl`, and end the run on all ranks when there are too many.

    Ranks count by themselves, on the host; at an interval the counts of all are added up. The counts go into
    checkpoints, so that a run that is often interrupted does not begin to count anew each time. Samples that were read
    ahead of an interruption count twice.

    Args:
        folder: of the run; rank 0 writes.
        interval: steps between two exchanges.
    """

    def __init__(self, folder: str | Path, interval: int = 50) -> None:
        self.path = Path(folder) / FILE
        self.interval = interval
        self.num_read = self.num_bad = 0
        """Of the whole job, earlier starts included, as of the last exchange; the same on all ranks."""

        self._before = (0, 0)
        self._last = ""
        self._dataset: TextImageDataset | None = None
        self._listed: set[tuple[str, int]] = set()

    def fit_start(self, state: State, logger: Logger) -> None:
        """Look for the data, and for what is listed already."""
        dataset = getattr(state.train_dataloader, "dataset", None)
        self._dataset = dataset if isinstance(dataset, TextImageDataset) else None
        if dist.get_global_rank() == 0 and self.path.is_file():
            lines = self.path.read_text(encoding="utf-8").splitlines()
            entries = [json.loads(line) for line in lines if line.endswith("}")]
            self._listed = {(entry["stream"], entry["index"]) for entry in entries}

    def batch_end(self, state: State, logger: Logger) -> None:
        """Exchange at the end of each interval.

        Raises:
            DataError: on all ranks: too many pictures are bad.
        """
        if state.timestamp.batch.value % self.interval == 0:
            self._exchange()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Exchange what came after the last interval."""
        self._exchange()

    def state_dict(self) -> dict[str, Any]:
        """The counts of all ranks as text; to be called on all ranks."""
        self._add_up()
        return {"counts": json.dumps([self.num_read, self.num_bad])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting."""
        if "counts" in state:
            num_read, num_bad = json.loads(state["counts"])
            self._before = self.num_read, self.num_bad = num_read, num_bad

    def _exchange(self) -> None:
        self._add_up()
        if self._last:
            last, self._last = self._last, ""
            agree(lambda: check_bad_pictures(self.num_bad, self.num_read, last))

    def _add_up(self) -> None:
        """Add the counts of all ranks up, and list what is new."""
        if self._dataset is None:
            return
        counter = self._dataset.bad_pictures
        rows: list[tuple[int, int, list[BadPicture]]] = dist.all_gather_object(
            (counter.num_read, counter.num_bad, counter.take())
        )
        self.num_read = self._before[0] + sum(row[0] for row in rows)
        self.num_bad = self._before[1] + sum(row[1] for row in rows)
        new = [picture for row in rows for picture in row[2]]
        if new:
            self._last = str(new[-1])
            if dist.get_global_rank() == 0:
                self._list(new)

    def _list(self, pictures: list[BadPicture]) -> None:
        """Append pictures that are not listed yet."""
        entries = {(picture.stream, picture.index): picture for picture in reversed(pictures)}
        new = [entries[place] for place in sorted(entries.keys() - self._listed)]
        self._listed.update(entries)
        if new:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(asdict(picture)) + "\n" for picture in new))
            log.warning("%d bad pictures were listed in %s (%d in all)", len(new), self.path, len(self._listed))
