"""Images that could not be decoded, over all ranks: listed in a file, and the end of the run where there are many."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from composer import Callback, Logger, State
from composer.utils import dist

from diffusion.datasets.bad_images import FILE, BadImage, check_bad_images, read_bad_images
from diffusion.datasets.streams import TextImageDataset
from diffusion.distributed import agree

log = logging.getLogger(__name__)


class ReportBadImages(Callback):
    """List bad images in `bad_pictures.jsonl`, and end the run on all ranks when there are too many.

    Ranks collect by themselves, on the host; at an interval all exchange what they have met. Each image counts once,
    however often the run meets it: those of earlier epochs and starts are in the file.

    Args:
        folder: of the run; rank 0 writes.
        interval: steps between two exchanges.
    """

    def __init__(self, folder: str | Path, interval: int = 50) -> None:
        self.path = Path(folder) / FILE
        self.interval = interval
        self._dataset: TextImageDataset | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        """Look for the data."""
        dataset = getattr(state.train_dataloader, "dataset", None)
        self._dataset = dataset if isinstance(dataset, TextImageDataset) else None

    def batch_end(self, state: State, logger: Logger) -> None:
        """Exchange at the end of each interval.

        Raises:
            DataError: on all ranks: too many images are bad.
        """
        if state.timestamp.batch.value % self.interval == 0:
            self._exchange(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Exchange what came after the last interval."""
        self._exchange(state)

    def close(self, state: State, logger: Logger) -> None:
        """List what this rank has met since the last exchange; where the run has failed, each rank is alone."""
        if self._dataset is not None:
            self._list(self._dataset.bad_images.take())

    def _exchange(self, state: State) -> None:
        if self._dataset is None:
            return
        rows: list[list[BadImage]] = dist.all_gather_object(self._dataset.bad_images.take())
        if new := [image for row in rows for image in row]:
            num_read = min(state.timestamp.sample.value, self._dataset.size)
            is_first = dist.get_global_rank() == 0
            agree(lambda: check_bad_images(self._list(new), num_read, str(new[-1])) if is_first else None)

    def _list(self, images: Sequence[BadImage]) -> int:
        """Append images that are not listed yet; return how many are."""
        listed = {(image.stream, image.index) for image in read_bad_images(self.path)}
        entries = {(image.stream, image.index): image for image in reversed(images)}
        if new := [entries[place] for place in sorted(entries.keys() - listed)]:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(asdict(image)) + "\n" for image in new))
            log.warning("%d bad images were listed in %s (%d in all)", len(new), self.path, len(listed) + len(new))
        return len(listed) + len(new)
