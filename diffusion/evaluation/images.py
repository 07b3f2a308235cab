"""Sets of images by number: files of a folder, or samples of a prepared data set, and the choice of a subset."""

import hashlib
import heapq
import itertools
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from diffusion.datasets.images import EXTENSIONS, UndecodableImageError, decode_rgb
from diffusion.datasets.streams import StreamLocation, converts_to_srgb, find_marked
from diffusion.errors import ConfigurationError, DataError, error_context
from diffusion.evaluation.config import ReferenceConfig
from diffusion.evaluation.protocol import text_hash
from diffusion.files import hash_file
from diffusion.formats.shards import INDEX, SampleDecoder, Shard, ShardFiles, read_index, read_shard

LISTING = "metadata.jsonl"
"""Lines of `file_name`, `prompt` and further metadata of an image; empty until all images are generated."""

UNFINISHED = "{} is empty: the images are being generated, or were interrupted. Generate them again"
"""Message about a listing."""

GRID = "grid.png"
"""Grid of the images of a folder, which is none of them."""


@dataclass(frozen=True)
class Images:
    """Images by number; `read` returns an RGB image, or raises a DataError if it cannot be decoded."""

    num: int
    read: Callable[[int], Image.Image]

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Image.Image:
        return self.read(index)


def image_files(files: Sequence[Path]) -> Images:
    """Image files by number."""
    return Images(len(files), lambda index: read_image(files[index]))


def read_image(file: Path) -> Image.Image:
    """Read an image file as RGB; a DataError if it cannot be decoded."""
    return _decode(file.read_bytes(), str(file))


def smallest_hashes(names: Iterable[str], num: int | None) -> list[int]:
    """Choose `num` names with the smallest SHA-256, an unbiased choice; return their numbers in order.

    Fewer names are a ConfigurationError.
    """
    if num is None:
        return [i for i, _ in enumerate(names)]
    chosen = by_hash(names, num)
    if len(chosen) < num:
        raise ConfigurationError(f"num={num}, but there are {len(chosen)}: give at most as many, or null for all")
    return sorted(chosen)


def by_hash(names: Iterable[str], num: int) -> list[int]:
    """Numbers of the `num` names with the smallest SHA-256, in the order of these; only as many are in memory."""
    hashes = ((hashlib.sha256(name.encode()).digest(), i) for i, name in enumerate(names))
    return [i for _, i in heapq.nsmallest(num, hashes)]


def list_images(folder: Path) -> list[Path]:
    """Image files below a folder without grids, sorted by path; a DataError if they are not all generated."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        if path.name == LISTING and not path.stat().st_size:
            raise DataError(UNFINISHED.format(path))
    return [path for path in files if path.suffix.lower() in EXTENSIONS and path.name != GRID]


class PreparedSamples:
    """Samples that may be used of a prepared data set, or of a split or bucket of it, by number. Not thread-safe.

    Args:
        root: folder.
        buckets: names of those that count; None: all.

    Raises:
        DataError: an index or the marks of removed samples are damaged.
    """

    def __init__(self, root: Path, buckets: Collection[str] | None = None) -> None:
        self._shards: list[tuple[Path, Shard, str]] = []
        self.convert_to_srgb = False
        removed: list[int] = []
        num = 0
        folders = [index.parent for index in sorted(root.rglob(INDEX))]
        for folder in (one for one in folders if buckets is None or one.name in buckets):
            location = StreamLocation(name=folder.name, remote=None, local=str(folder))
            self.convert_to_srgb |= converts_to_srgb(location)
            removed += sorted(num + index for index in set(find_marked(location)))
            for shard in read_index(folder).shards:
                self._shards.append((folder, shard, str(folder.relative_to(root))))
                num += shard.num_samples
        self._ends = list(itertools.accumulate(shard.num_samples for _, shard, _ in self._shards))
        self._removed = removed
        self._used_before = [index - i for i, index in enumerate(removed)]
        """Number of samples that may be used before each removed one."""

        self._files = ShardFiles()
        self._unpacked: tuple[int, list[bytes]] = (-1, [])
        """Number and samples of the compressed shard that was read last."""

    def __len__(self) -> int:
        return (self._ends[-1] if self._ends else 0) - len(self._removed)

    def sample(self, number: int, columns: Collection[str] | None = None) -> dict[str, Any]:
        """Read some columns of a sample, as far as the data set has them; all by default.

        Raises:
            DataError: the shard is missing or damaged, or a column can hold code.
        """
        at, inside = self._locate(number)
        folder, shard, _ = self._shards[at]
        decode = SampleDecoder(shard.format, columns)
        with _explained(folder / shard.stored.name) as path:
            if shard.packed is None:
                return decode(self._files.read(str(path), inside))
            if self._unpacked[0] != at:
                self._unpacked = (at, read_shard(folder, shard))
            return decode(self._unpacked[1][inside])

    def keyed_image(self, number: int) -> tuple[str, Image.Image]:
        """Read the key and the image, RGB, of a sample; a DataError if the data set has none, or is damaged."""
        sample = self.sample(number, ["image", "key"])
        if "image" not in sample:
            raise DataError("the data set has no images (is it encoded?): give the prepared one")
        key = str(sample.get("key", number))
        return key, _decode(sample["image"], f"sample {key}", self.convert_to_srgb)

    def captions(self, number: int) -> list[str] | None:
        """Captions of a sample, read without its image; None where the data set has none."""
        at, inside = self._locate(number)
        folder, shard, _ = self._shards[at]
        if "captions" not in shard.format.names:
            return None
        if shard.packed is not None:
            return self.sample(number, ["captions"])["captions"]
        with _explained(folder / shard.raw.name) as path:
            return self._files.read_column(str(path), inside, shard.format, "captions")

    def names(self) -> Iterator[str]:
        """Iterate over the names of the samples: folder, shard and number. A takedown does not change the others."""
        removed = {*self._removed}
        for (_, shard, name), end in zip(self._shards, self._ends, strict=True):
            first_written = re.sub(r"\.r\d+(?=\.mds$)", "", shard.raw.name)
            for i in range(shard.num_samples):
                if end - shard.num_samples + i not in removed:
                    yield f"{name}/{first_written}/{i}"

    def identity(self) -> str:
        """Hash of the sizes and hashes of the shards in the indices, and of what was removed."""
        shards: list[Any] = [(name, shard.raw.entry, shard.num_samples) for _, shard, name in self._shards]
        return text_hash(repr(shards + self._removed))

    def _locate(self, number: int) -> tuple[int, int]:
        """Shard of a sample, and its number in the shard."""
        number = range(len(self))[number]
        index = number + bisect_right(self._used_before, number)
        shard = bisect_right(self._ends, index)
        return shard, index - (self._ends[shard - 1] if shard else 0)


@contextmanager
def _explained(path: Path) -> Iterator[Path]:
    try:
        yield path
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); fetch or write the folder anew") from error


def open_reference(config: ReferenceConfig) -> tuple[Images, str]:
    """Open the reference set; return its images and the hash of its content.

    Raises:
        ConfigurationError: the folder is missing, or has too few images.
        DataError: the data set is damaged.
    """
    key = "protocol.reference"
    root = Path(config.path).expanduser()
    if not root.is_dir():
        raise ConfigurationError(f"{key}.path={config.path} is no folder: give one of real images")
    is_prepared = next(root.rglob(INDEX), None) is not None
    samples = PreparedSamples(root) if is_prepared else None
    files = [] if is_prepared else list_images(root)
    names = samples.names() if samples is not None else [str(file.relative_to(root)) for file in files]
    with error_context(key):
        chosen = smallest_hashes(names, config.num)
    if len(chosen) < 2:
        raise ConfigurationError(f"{key}.path={config.path} has {len(chosen)} images: 2 or more are needed")
    if samples is not None:
        content = f"{samples.identity()} {config.num}"
        images = Images(len(chosen), lambda index: samples.keyed_image(chosen[index])[1])
    else:
        files = [files[i] for i in chosen]
        content = text_hash("".join(f"{file.name} {hash_file(file, 'sha256')}\n" for file in files))
        images = image_files(files)
    if (size := config.size) is None:
        return images, text_hash(content)
    scaled = Images(len(images), lambda i: ImageOps.fit(images[i], (size, size), method=Image.Resampling.BICUBIC))
    return scaled, text_hash(content)


def _decode(content: bytes, name: str, convert_to_srgb: bool = False) -> Image.Image:
    try:
        return decode_rgb(content, convert_to_srgb=convert_to_srgb)
    except UndecodableImageError as error:
        raise DataError(f"{name} cannot be decoded ({error}): remove it from the set") from error
