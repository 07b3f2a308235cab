"""Images that could not be decoded, of all ranks: listed in a file; too many of them end the run."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from composer import Callback, Logger, State
from composer.utils import dist

from diffusion.datasets.bad_images import FILE, OLD_FILE, BadImage, check_bad_images, read_bad_images
from diffusion.datasets.dataset import TextImageDataset
from diffusion.distributed import agree

log = logging.getLogger(__name__)


class ReportBadImages(Callback):
    """List bad images in `bad_images.jsonl`, and end the run on all ranks when there are too many.

    Each rank collects its own on the host; at an interval the ranks exchange them. An image counts once, also over
    epochs and starts: the file holds those of earlier ones.

    Args:
        folder: of the run; rank 0 writes.
        interval: steps between two exchanges.
    """

    def __init__(self, folder: Path, interval: int) -> None:
        self.path, self.interval = folder / FILE, interval
        self._dataset: TextImageDataset | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        """Find the data."""
        dataset = getattr(state.train_dataloader, "dataset", None)
        self._dataset = dataset if isinstance(dataset, TextImageDataset) else None
        old = self.path.with_name(OLD_FILE)  # until 0.3
        if dist.get_global_rank() == 0 and old.is_file():
            log.info("%s is renamed to %s", old, self.path.name)
            old.rename(self.path)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Exchange at the end of each interval.

        Raises:
            DataError: on all ranks: too many images are bad.
        """
        if state.timestamp.batch.value % self.interval == 0:
            self._exchange(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Exchange the images of the last, incomplete interval."""
        self._exchange(state)

    def close(self, state: State, logger: Logger) -> None:
        """List the images of this rank since the last exchange: after a failure, each rank is alone."""
        if self._dataset is not None:
            self._list(self._dataset.bad_images.take())

    def _exchange(self, state: State) -> None:
        if self._dataset is None:
            return
        images: list[list[BadImage]] = dist.all_gather_object(self._dataset.bad_images.take())
        if new := [image for of_rank in images for image in of_rank]:
            num_read = min(state.timestamp.sample.value, self._dataset.num_samples)
            is_first = dist.get_global_rank() == 0
            agree(lambda: check_bad_images(self._list(new), num_read, str(new[-1])) if is_first else None)

    def _list(self, images: Sequence[BadImage]) -> int:
        """Append the images that are not in the file; return the number in the file."""
        listed = {(image.stream, image.index) for image in read_bad_images(self.path)}
        entries = {(image.stream, image.index): image for image in reversed(images)}
        if new := [entries[key] for key in sorted(entries.keys() - listed)]:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(asdict(image)) + "\n" for image in new))
            log.warning("%d bad images were listed in %s (%d in all)", len(new), self.path, len(listed) + len(new))
        return len(listed) + len(new)
