"""Manifests: the file that makes a folder a data set, written last and all at once."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from diffusion.errors import DataError
from diffusion.files import read_json, write_json

MANIFEST = "manifest.json"
WORK = "work.partial"
"""Folder beside the manifest while a data set is being written."""


@dataclass(frozen=True, kw_only=True)
class SourceEntry:
    """One source of a prepared data set and what became of its images."""

    name: str
    """First part of the keys."""
    kind: str
    """`folder`, `webdataset` or `parquet`."""
    path: str
    """Where it was."""
    seen: int
    """Images that it held."""
    kept: int
    """Images that came into the data set."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """One refused image."""

    key: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class RefusedEntry:
    """The images that were refused for one reason."""

    count: int
    examples: list[Example]
    """The first few, in the order of the sources."""


@dataclass(frozen=True, kw_only=True)
class BucketEntry:
    """One MDS folder, `<split>/<bucket>`."""

    num_samples: int
    num_shards: int
    num_bytes: int
    """Bytes of the shards, uncompressed."""
    sha256: str
    """Hash of the folder's index, which holds the hashes of the shards: equal for equal content."""


@dataclass(frozen=True, kw_only=True)
class PrepareSettings:
    """What, beside the sources, determines a prepared data set."""

    edges: list[int]
    """Lowest shorter side of each bucket, in pixels; empty where buckets are by aspect ratio."""
    validation_fraction: float
    seed: int
    shard_bytes: int
    image_column: str | None = None
    caption_column: str | None = None
    sizes: list[str] = field(default_factory=list)
    """Aspect-ratio buckets, HEIGHTxWIDTH."""
    upscale: bool = False
    """Images that are smaller than every aspect-ratio bucket were taken, too."""
    min_samples: int = 0
    """Fewest training images of an aspect-ratio bucket."""
    refuse_small: bool = False
    """Images of buckets with fewer were refused; otherwise they went to others."""
    compression: str | None = None
    """Of the shards."""
    hashes: list[str] = field(default_factory=lambda: ["xxh64"])
    """Of the shards."""
    captioner: dict[str, Any] | None = None
    """As in the configuration of `prepare`, like the ones below."""
    scorers: list[dict[str, Any]] = field(default_factory=list)
    filters: dict[str, Any] = field(default_factory=dict)
    """Empty if nothing was filtered."""
    duplicates: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What one run added; a data set that never grew has one generation."""

    partitions: int
    """Parts of the sources that were read."""
    seen: int
    """Images in them."""
    kept: int
    """Images that came into the data set; they lie behind those of the generations before."""


@dataclass(frozen=True, kw_only=True)
class PreparedManifest:
    """Manifest of a prepared data set."""

    KIND: ClassVar[str] = "prepared"
    VERSION: ClassVar[int] = 1

    sources: list[SourceEntry]
    settings: PrepareSettings
    columns: dict[str, str]
    """MDS type of each column."""
    seen: int
    """Images that the sources held: kept and refused together."""
    kept: int
    refused: dict[str, RefusedEntry] = field(default_factory=dict)
    """By reason, sorted."""
    splits: dict[str, dict[str, BucketEntry]] = field(default_factory=dict)
    """`train` and, with a validation split, `validation`: the buckets that hold samples, ascending."""
    generations: list[Generation] = field(default_factory=list)
    """In order; the numbers above are their sums."""

    def write(self, folder: Path) -> None:
        """Write `manifest.json` into a folder, atomically."""
        write_json(folder / MANIFEST, {"kind": self.KIND, "version": self.VERSION, **asdict(self)})

    @classmethod
    def read(cls, folder: Path) -> "PreparedManifest":
        """Read it; a DataError if there is none, it is damaged, or it is one of another kind or version."""
        values = _read_values(folder, cls.KIND, cls.VERSION)
        try:
            return cls(
                sources=[SourceEntry(**entry) for entry in values["sources"]],
                settings=PrepareSettings(**values["settings"]),
                columns=dict(values["columns"]),
                seen=values["seen"],
                kept=values["kept"],
                refused={
                    reason: RefusedEntry(count=entry["count"], examples=[Example(**one) for one in entry["examples"]])
                    for reason, entry in values["refused"].items()
                },
                splits={
                    split: {name: BucketEntry(**entry) for name, entry in buckets.items()}
                    for split, buckets in values["splits"].items()
                },
                generations=[Generation(**entry) for entry in values.get("generations", [])],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{folder / MANIFEST} is damaged ({error!r}); write the data set anew") from error


def _read_values(folder: Path, kind: str, version: int) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise DataError(
            f"{folder} is not a data set: there is no {MANIFEST}, which is written last; run the command that makes it "
            "(scripts/prepare.py or scripts/encode.py) to its end"
        )
    values = read_json(path)
    if not isinstance(values, dict) or values.get("kind") != kind:
        found = values.get("kind") if isinstance(values, dict) else None
        raise DataError(f"{folder} is not {kind} data: kind in {MANIFEST} is {found!r}, not {kind!r}")
    if values.get("version") != version:
        raise DataError(
            f"{path} has version {values.get('version')!r}, this package reads {version}; make the data set anew"
        )
    return values
