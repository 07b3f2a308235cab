"""Count of images that cannot be decoded in training, and how many are too many; `dataset.py` takes others for them."""

import json
import logging
import multiprocessing
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from diffusion.errors import UnfitDataError, printable
from diffusion.files import read_json_lines

logger = logging.getLogger(__name__)

MAX_BAD_IMAGES = 10
MAX_BAD_FRACTION = 0.001


@dataclass(frozen=True, kw_only=True)
class BadImage:
    """An image that could not be decoded."""

    stream: str
    index: int
    """Its number in the stream."""

    key: str
    epoch: int
    error: str

    def __str__(self) -> str:
        return printable(f"stream '{self.stream}', key '{self.key}': {self.error}")


def read_bad_images(path: Path) -> list[BadImage]:
    """Read the list of a run; nothing where there is none. A line that a killed process left cut off is no entry."""
    return [BadImage(**row) for row in read_json_lines(path) if row is not None]


def max_bad(num_images: int) -> float:
    """Return how many of some images may be bad: ten, or a thousandth."""
    return max(MAX_BAD_IMAGES, MAX_BAD_FRACTION * num_images)


def check_bad_images(num_bad: int, num_read: int, last: str) -> None:
    """Raise an UnfitDataError if more images are bad than may be."""
    if num_bad > max_bad(num_read):
        raise UnfitDataError(
            f"{num_bad} of {num_read} images cannot be decoded (at most {MAX_BAD_IMAGES} or "
            f"{MAX_BAD_FRACTION:.1%} may be), the last: {last}. The data is damaged: check the disk and the "
            "copies, or run scripts/prepare.py again"
        )


class BadImages:
    """Counts over the loader workers of a rank, in memory that they share, and keeps what they met.

    The job's count is made of these by `callbacks.guards`. A worker ends the run by itself only where the
    images of its rank alone are too many for the whole job, whose ranks read equally many samples; never if they are
    not limited.
    """

    def __init__(self, num_ranks: int = 1, *, is_limited: bool = True) -> None:
        self._num_ranks, self._is_limited = num_ranks, is_limited
        self._num_read = multiprocessing.Value("q", 0)
        self._lock = multiprocessing.Lock()
        self._records = tempfile.TemporaryFile("ab+", buffering=0)  # noqa: SIM115 - open as long as this object
        self._taken = self._looked = 0
        self._known: set[tuple[str, int]] = set()

    @property
    def num_bad(self) -> int:
        """Number of distinct images that could not be decoded."""
        records, self._looked = self._read(self._looked)
        self._known.update((image.stream, image.index) for image in records)
        return len(self._known)

    @property
    def num_read(self) -> int:
        """Number of samples read."""
        return self._num_read.value

    def continue_from(self, num_read: int) -> None:
        """Count the samples that the job has read before this start."""
        self._num_read.value = num_read // self._num_ranks

    def count_read(self) -> None:
        """Count a sample."""
        with self._num_read.get_lock():
            self._num_read.value += 1

    def count_bad(self, image: BadImage) -> None:
        """Count, log and keep an image that could not be decoded, unless it was met before."""
        with self._lock:
            num_bad = self.num_bad + 1
            if (image.stream, image.index) in self._known:
                return
            os.write(self._records.fileno(), json.dumps(asdict(image)).encode() + b"\n")
        num_read = self.num_read
        logger.warning("%s; another image takes its place (%d of %d so far)", image, num_bad, num_read)
        if self._is_limited and num_bad > max_bad(num_read * self._num_ranks):
            check_bad_images(num_bad, num_read, str(image))

    def take(self) -> list[BadImage]:
        """The images that were met since the last call; to be called in the process that made this object."""
        images, self._taken = self._read(self._taken)
        return images

    def _read(self, start: int) -> tuple[list[BadImage], int]:
        """The records from a position on, and the position behind them."""
        data = os.pread(self._records.fileno(), os.fstat(self._records.fileno()).st_size - start, start)
        whole = data[: data.rfind(b"\n") + 1]
        return [BadImage(**json.loads(line)) for line in whole.splitlines()], start + len(whole)
