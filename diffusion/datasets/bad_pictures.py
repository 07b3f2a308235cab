"""Pictures that cannot be decoded while training: counted on each rank, and how many are too many for the job."""

import json
import logging
import multiprocessing
import os
import tempfile
from dataclasses import asdict, dataclass

from diffusion.errors import UnfitDataError

logger = logging.getLogger(__name__)

MAX_BAD_PICTURES = 10
MAX_BAD_FRACTION = 0.001


@dataclass(frozen=True, kw_only=True)
class BadPicture:
    """A picture that could not be decoded."""

    stream: str
    index: int
    """Its number in the stream."""

    key: str
    epoch: int
    error: str

    def __str__(self) -> str:
        return f"stream '{self.stream}', key '{self.key}': {self.error}"


def check_bad_pictures(num_bad: int, num_read: int, last: str) -> None:
    """Refuse to go on with too many bad pictures.

    Args:
        num_bad: pictures that could not be decoded.
        num_read: samples read.
        last: the last of the bad ones.

    Raises:
        UnfitDataError: more than `MAX_BAD_PICTURES` and more than `MAX_BAD_FRACTION` of the samples are bad.
    """
    if num_bad > max(MAX_BAD_PICTURES, MAX_BAD_FRACTION * num_read):
        raise UnfitDataError(
            f"{num_bad} of {num_read} pictures cannot be decoded (at most {MAX_BAD_PICTURES} or "
            f"{MAX_BAD_FRACTION:.1%} may be), the last: {last}. The data is damaged: check the disk and the "
            "copies, or run scripts/prepare.py again"
        )


class BadPictures:
    """Counts over the loader workers of a rank, in memory that they share, and keeps what they met.

    The job's count is made of these by `callbacks.bad_pictures`. A worker ends the run by itself only where the
    pictures of its rank alone are too many for the whole job, whose ranks read equally many samples.

    Args:
        num_ranks: of the job.
    """

    def __init__(self, num_ranks: int = 1) -> None:
        self._num_ranks = num_ranks
        self._num_read = multiprocessing.Value("q", 0)
        self._num_bad = multiprocessing.Value("q", 0)
        self._records = tempfile.TemporaryFile("ab+", buffering=0)  # noqa: SIM115 - open as long as this object
        self._taken = 0

    @property
    def num_bad(self) -> int:
        """How many were met; one that is met in each epoch counts each time."""
        return self._num_bad.value

    @property
    def num_read(self) -> int:
        """How many samples were asked for."""
        return self._num_read.value

    def count_read(self) -> None:
        """Count a sample."""
        with self._num_read.get_lock():
            self._num_read.value += 1

    def count_bad(self, picture: BadPicture) -> None:
        """Count, log and keep a picture that could not be decoded.

        Raises:
            UnfitDataError: there are too many.
        """
        with self._num_bad.get_lock():
            self._num_bad.value += 1
            num_bad = self._num_bad.value
            os.write(self._records.fileno(), json.dumps(asdict(picture)).encode() + b"\n")
        num_read = self.num_read
        logger.warning("%s; another picture takes its place (%d of %d so far)", picture, num_bad, num_read)
        if num_bad > max(MAX_BAD_PICTURES, MAX_BAD_FRACTION * num_read * self._num_ranks):
            check_bad_pictures(num_bad, num_read, str(picture))

    def take(self) -> list[BadPicture]:
        """The pictures that were met since the last call; to be called in the process that made this object."""
        data = os.pread(self._records.fileno(), os.fstat(self._records.fileno()).st_size - self._taken, self._taken)
        whole = data[: data.rfind(b"\n") + 1]
        self._taken += len(whole)
        return [BadPicture(**json.loads(line)) for line in whole.splitlines()]
