"""Which sample takes the place of one that is not to be used.

A sample that was withdrawn, or whose image could not be encoded, keeps its number, so that the order of the others
does not change; when its turn comes, the next usable sample of its stream is read. That is a function of the marks
beside the data set alone: the same for images and for their latents, and for any number of machines.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable

from diffusion.datasets.locations import StreamLocation, find_beside
from diffusion.errors import DataError

MARKS = ("withdrawn.json", "damaged.json")
"""Files beside `manifest.json` that name unusable samples: `{"<split>/<bucket>": [numbers]}`."""


class Substitutes:
    """The unusable samples of a stream, and what is read instead.

    Args:
        num_samples: of the stream.
        absent: numbers of the unusable ones.
        name: of the stream, for messages.

    Raises:
        DataError: numbers that are not those of samples, or no sample is usable.
    """

    def __init__(self, num_samples: int, absent: Iterable[int] = (), name: str = "") -> None:
        self.num_samples = num_samples
        self._absent = array("q", sorted(set(absent)))
        if self._absent and not 0 <= self._absent[0] <= self._absent[-1] < num_samples:
            raise DataError(
                f"stream '{name}' has {num_samples} samples, but sample {self._absent[-1]} is marked in "
                f"{' or '.join(MARKS)}: the marks are of another data set"
            )
        if num_samples and len(self._absent) == num_samples:
            raise DataError(f"all {num_samples} samples of stream '{name}' are withdrawn: take it out of data.streams")

    def __len__(self) -> int:
        """Number of unusable samples."""
        return len(self._absent)

    @property
    def absent(self) -> list[int]:
        """Numbers of the unusable samples, ascending."""
        return self._absent.tolist()

    def is_absent(self, index: int) -> bool:
        """Whether a sample is not to be used."""
        place = bisect_left(self._absent, index)
        return place < len(self._absent) and self._absent[place] == index

    def substitute_of(self, index: int) -> int:
        """Number of the sample that is read for a number: itself where it is usable."""
        place = bisect_left(self._absent, index)
        while place < len(self._absent) and self._absent[place] == index:
            place, index = place + 1, index + 1
            if index == self.num_samples:
                place = index = 0
        return index


def find_substitutes(location: StreamLocation, num_samples: int) -> Substitutes:
    """Read the marks beside a data set.

    Args:
        location: the stream; `withdrawn.json` lies one or two folders above it, as its manifest does.
        num_samples: of the stream.

    Raises:
        DataError: the marks cannot be read, or are not those of this stream.
    """
    absent: list[int] = []
    for name in MARKS:
        for place, marks in find_beside(location, name):
            numbers = marks.get(place, []) if isinstance(marks, dict) else None
            if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
                raise DataError(f"{name} beside {location.source} is damaged: for '{place}' it has no list of numbers")
            absent += numbers
    return Substitutes(num_samples, absent, location.name)
