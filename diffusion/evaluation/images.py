"""Sets of images by number: files of a folder, or samples of a prepared data set; and which of them are taken."""

import hashlib
import itertools
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from PIL import Image, ImageOps

from diffusion.datasets.images import UndecodableImageError, decode_rgb
from diffusion.datasets.mds import INDEX, open_shard, read_shards
from diffusion.errors import ConfigurationError, DataError
from diffusion.evaluation.config import ReferenceConfig

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp"})

_OPEN_SHARDS = 8


class Images(Protocol):
    """Images by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Image.Image:
        """An RGB image.

        Raises:
            DataError: it cannot be decoded.
        """
        ...


def smallest_hashes(names: Sequence[str], num: int | None) -> list[int]:
    """Which of some names are taken, in their order: so many whose SHA-256 is smallest, so that a choice is not biased.

    Raises:
        ConfigurationError: there are not as many.
    """
    if num is None:
        return list(range(len(names)))
    if num > len(names):
        raise ConfigurationError(f"{num} are asked for, but there are {len(names)}")
    return sorted(by_hash(names)[:num])


def by_hash(names: Sequence[str]) -> list[int]:
    """The numbers of some names in the order of their SHA-256."""
    return sorted(range(len(names)), key=lambda i: hashlib.sha256(names[i].encode()).digest())


class ImageFiles:
    """Files by number.

    Args:
        files: their paths.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = list(files)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Image.Image:
        return _decode(self.files[index].read_bytes(), str(self.files[index]))

    def identity(self) -> str:
        """Hash of names and contents."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
        return digest.hexdigest()[:16]


def list_images(folder: Path) -> list[Path]:
    """Image files below a folder, sorted by their paths."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())


class PreparedSamples:
    """Samples of the MDS folders of a prepared data set, by number. Not for several threads at once.

    Args:
        root: the data set, a split or a bucket of it.

    Raises:
        DataError: an index is damaged.
    """

    def __init__(self, root: Path) -> None:
        self.entries = [
            (index.parent, entry, str(index.parent.relative_to(root)))
            for index in sorted(root.rglob(INDEX))
            for entry in read_shards(index.parent)
        ]
        self._ends = list(itertools.accumulate(entry["samples"] for _, entry, _ in self.entries))
        self._readers: OrderedDict[int, tuple[ExitStack, Any]] = OrderedDict()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def sample(self, index: int) -> dict[str, Any]:
        """The columns of a sample."""
        shard = bisect_right(self._ends, index)
        first = self._ends[shard - 1] if shard else 0
        return self._reader(shard)[index - first]

    def names(self) -> list[str]:
        """Place of each sample: folder, shard and number."""
        return [
            f"{name}/{entry['raw_data']['basename']}/{i}"
            for _, entry, name in self.entries
            for i in range(entry["samples"])
        ]

    def identity(self) -> str:
        """Hash of what the indices say of the shards: their sizes and hashes."""
        shards = [(name, entry["raw_data"], entry["samples"]) for _, entry, name in self.entries]
        return hashlib.sha256(repr(shards).encode()).hexdigest()[:16]

    def _reader(self, shard: int) -> Any:
        if shard in self._readers:
            self._readers.move_to_end(shard)
            return self._readers[shard][1]
        if len(self._readers) == _OPEN_SHARDS:
            self._readers.popitem(last=False)[1][0].close()
        folder, entry, _ = self.entries[shard]
        stack = ExitStack()
        self._readers[shard] = (stack, stack.enter_context(open_shard(folder, entry)))
        return self._readers[shard][1]


class PreparedImages:
    """Images of a prepared data set.

    Args:
        samples: the data set.
        indices: which of its samples.
    """

    def __init__(self, samples: PreparedSamples, indices: Sequence[int]) -> None:
        self.samples, self.indices = samples, list(indices)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Image.Image:
        sample = self.samples.sample(self.indices[index])
        if "image" not in sample:
            raise DataError("the data set holds no images (is it encoded?): give the prepared one")
        return _decode(sample["image"], f"sample {sample.get('key', index)}")


class ScaledSquares:
    """The middle squares of images, scaled to one size.

    Args:
        images: the images.
        size: side in pixels.
    """

    def __init__(self, pictures: Images, size: int) -> None:
        self.pictures, self.size = pictures, size

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Image.Image:
        return ImageOps.fit(self.pictures[index], (self.size, self.size), method=Image.Resampling.BICUBIC)


def open_reference(config: ReferenceConfig) -> tuple[Images, str]:
    """The reference set, and the hash of what it holds.

    Raises:
        ConfigurationError: there is no such folder, or it holds too few images.
        DataError: it is damaged.
    """
    root = Path(config.path).expanduser()
    if not root.is_dir():
        raise ConfigurationError(f"protocol.reference.path={config.path} is no folder: give one of real images")
    if next(iter(_indices(root)), None) is not None:
        samples = PreparedSamples(root)
        chosen = _chosen(samples.names(), config)
        pictures: Images = PreparedImages(samples, chosen)
        content = f"{samples.identity()} {config.num}"
    else:
        files = list_images(root)
        names = [str(file.relative_to(root)) for file in files]
        taken = ImageFiles([files[i] for i in _chosen(names, config)])
        pictures, content = taken, taken.identity()
    if len(pictures) < 2:
        raise ConfigurationError(f"protocol.reference.path={config.path} holds {len(pictures)} images: 2 or more")
    identity = hashlib.sha256(content.encode()).hexdigest()[:16]
    return (ScaledSquares(pictures, config.size) if config.size else pictures), identity


def _indices(root: Path) -> Iterator[Path]:
    return root.rglob(INDEX)


def _chosen(names: Sequence[str], config: ReferenceConfig) -> list[int]:
    try:
        return smallest_hashes(names, config.num)
    except ConfigurationError as error:
        raise ConfigurationError(f"protocol.reference.num: of the images in {config.path}, {error}") from error


def _decode(content: bytes, name: str) -> Image.Image:
    try:
        return decode_rgb(content)
    except UndecodableImageError as error:
        raise DataError(f"{name} cannot be decoded ({error}): remove it from the set") from error
