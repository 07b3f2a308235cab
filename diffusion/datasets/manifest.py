"""Manifests: the file that makes a folder a data set, written last and all at once."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from diffusion import storage
from diffusion.errors import DataError
from diffusion.storage import MissingFileError

SPLITS = ("train", "validation")
"""Folders of the shards."""

MANIFEST = "manifest.json"
ENCODED = "encoded"
"""Value of `kind` in the manifest of encoded data."""

WORK = "work.partial"
"""Folder of a data set while it is being encoded."""

SCAN = "scan.json"
"""File of a prepared data set: its sources and partitions. Without a manifest: the preparation is unfinished."""

REMOVED_SAMPLES, DAMAGED = "withdrawn.json", "damaged.json"
"""Files of unusable samples, removed ones and those that could not be decoded: `{"<split>/<bucket>": [indices]}`."""


@dataclass(frozen=True, kw_only=True)
class SourceEntry:
    """One source of a prepared data set and what became of its images."""

    name: str
    """First part of the keys."""
    kind: str
    """`folder`, `webdataset`, `parquet`, ..."""
    path: str
    """Where it was."""
    seen: int
    """Images that it held."""
    kept: int
    """Images that came into the data set."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """One rejected image."""

    key: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class RejectedEntry:
    """The images that were rejected for one reason."""

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
class Generation:
    """Samples that one preparation added; a data set that never grew has one generation."""

    partitions: int
    """Parts of the sources that were read."""
    seen: int
    """Images in them."""
    kept: int
    """Images that came into the data set; they lie behind those of the generations before."""


def has_srgb_conversion(settings: Mapping[str, Any]) -> bool:
    """Return whether settings of a manifest convert images to sRGB; those of earlier versions do not."""
    return bool(settings.get("convert_to_srgb"))


@dataclass(frozen=True, kw_only=True)
class PreparedManifest:
    """Manifest of a prepared data set."""

    KIND: ClassVar[str] = "prepared"
    VERSION: ClassVar[int] = 2

    sources: list[SourceEntry]
    settings: dict[str, Any]
    """Settings of `prepare` that determine the data."""
    columns: dict[str, str]
    """MDS type of each column."""
    seen: int
    """Images that the sources held: kept and rejected together."""
    kept: int
    rejected: dict[str, RejectedEntry] = field(default_factory=dict)
    """By reason, sorted."""
    splits: dict[str, dict[str, BucketEntry]] = field(default_factory=dict)
    """`train` and, with a validation split, `validation`: the buckets that hold samples, ascending."""
    generations: list[Generation] = field(default_factory=list)
    """In order; the numbers above are their sums."""
    version: int = VERSION

    def write(self, folder: Path | str) -> None:
        """Write `manifest.json` into a folder (path or s3://), atomically."""
        storage.write_json(storage.join(str(folder), MANIFEST), {"kind": self.KIND, **asdict(self)})

    @property
    def convert_to_srgb(self) -> bool:
        """Return whether images are converted to sRGB when they are decoded."""
        return has_srgb_conversion(self.settings)

    @property
    def folders(self) -> list[str]:
        """Folders that hold samples, `<split>/<bucket>`."""
        return [f"{split}/{bucket}" for split, buckets in self.splits.items() for bucket in buckets]

    @classmethod
    def read(cls, folder: Path | str) -> "PreparedManifest":
        """Read that of a folder, a path or an s3:// URI.

        Raises:
            DataError: there is none, it is damaged, or it is one of another kind or version.
            MachineError: it cannot be read.
        """
        uri = storage.join(str(folder), MANIFEST)
        root, where = storage.shown(str(folder)), storage.shown(uri)
        try:
            values = storage.read_json(uri)
        except MissingFileError as error:
            raise DataError(
                f"{root} is not a data set: there is no {MANIFEST}, which is written last; run the command that makes "
                "it (scripts/prepare.py or scripts/encode.py) to its end"
            ) from error
        kind = values.get("kind") if isinstance(values, dict) else None
        if kind != cls.KIND:
            raise DataError(f"{root} is not {cls.KIND} data: kind in {MANIFEST} is {kind!r}, not {cls.KIND!r}")
        if (version := values.get("version")) != cls.VERSION:
            raise DataError(f"{where} has version {version!r}, this package reads {cls.VERSION}; make it anew")
        try:
            return cls(
                sources=[SourceEntry(**entry) for entry in values["sources"]],
                settings=dict(values["settings"]),
                columns=dict(values["columns"]),
                seen=values["seen"],
                kept=values["kept"],
                rejected={
                    reason: RejectedEntry(count=entry["count"], examples=[Example(**one) for one in entry["examples"]])
                    for reason, entry in values["rejected"].items()
                },
                splits={
                    split: {name: BucketEntry(**entry) for name, entry in buckets.items()}
                    for split, buckets in values["splits"].items()
                },
                generations=[Generation(**entry) for entry in values.get("generations", [])],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{where} is damaged ({error!r}); write the data set anew") from error
