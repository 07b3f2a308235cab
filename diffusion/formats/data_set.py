"""The data set: names of its files and who writes them, marks, manifest, and the end of writing. No torch.

A writer (`preparation/output.py` keeps others away) writes shards, then indexes, marks, the manifest, and deletes what
none of them names. Killed at any moment it leaves the data set of before, or none, and continues.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from diffusion import storage
from diffusion.errors import DataError
from diffusion.files import PARTIAL
from diffusion.formats.shards import INDEX, BucketEntry, Shard, read_index
from diffusion.storage import MissingFileError

SPLITS = TRAIN, VALIDATION = "train", "validation"
"""Folders of the shards, an MDS folder per bucket: `<split>/<bucket>`."""

_FOLDER = re.compile(rf"({'|'.join(SPLITS)})/\w[\w.-]*")

_OWN_FILE = re.compile(
    r"shard\..+|[0-9a-f-]+(-kept|-rejected)?\.(parquet|jsonl?)|(index|_identities|selections|encoding)\.json"
    rf"|({'|'.join(SPLITS)})\..+\.json|\..+\{PARTIAL}"
)
"""Names of the files that a writer deletes: a folder of a data set may be a link to other files."""

# By prepare and encode, at the end

MANIFEST = "manifest.json"
"""Makes the folder a data set: written last and all at once."""

ENCODED = "encoded"
"""Value of `kind` in the manifest of encoded data."""

# By prepare, encode and takedown

REMOVED_SAMPLES, DAMAGED = "withdrawn.json", "damaged.json"
"""Marks: indices of samples that are removed, or could not be decoded, by `<split>/<bucket>`."""

REMOVED = "removed.json"
"""Hashes of removed images (`preparation/removed.py`)."""

POSITIONS = "positions"
"""Folder of the key of each sample (`preparation/positions.py`)."""

WRITER = "writer.json"
"""Lease of the writer, where the file system has no locks."""

# By prepare: tables, by which a preparation continues and grows

SCAN = "scan.json"
"""Sources and partitions. Without a manifest: the preparation is unfinished."""

LISTINGS, METADATA, SCORES, SELECTION = "listings", "metadata", "scores", "selection"
"""Folders of the stages. The first holds files of partitions that are not scanned."""

ANSWERS = "answers"
"""Folder with the answers of a server that are not beside captions yet, and column beside the captions."""

SCORES_RECORD = "scores.json"
"""Settings that determine each column below `scores`. Columns of other tools are not in it."""

REREAD = "reread"
"""Folder of metadata while files that look changed are compared with what is known of them."""

PACKED = "packed"
"""Folder with what many files hold, in a few; it is made of them anew where it is missing."""

PACKED_SELECTIONS = f"{PACKED}/selections.json"
"""The selections of finished generations of data that has grown; it may lack the last ones."""

IDENTITIES = f"{POSITIONS}/_identities.json"
"""For each generation, what its shards are made from."""

REPORT_PAGE, REPORT_NUMBERS = "report.html", "report.json"

DEAD_LETTERS = "dead_letters.jsonl"
"""Images that an ingestion could not add, an object per line."""

# By encode

SHARDS = "shards.json"
"""For each `<split>/<bucket>` the prepared shards that encoded data was made from: it grows from there."""

WORK = "work.partial"
"""Folder while it is encoded."""

SETTINGS, RECORDS = f"{WORK}/encoding.json", f"{WORK}/shards"
"""The manifest of an unfinished encoding, and the folder with the record of each finished shard."""


@dataclass(frozen=True, kw_only=True)
class SourceEntry:
    """One source of a prepared data set and what became of its images."""

    name: str
    """First part of the keys."""
    kind: str
    """`folder`, `webdataset`, `parquet`, ..."""
    path: str
    """Its location when it was read."""
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
    def find(cls, folder: Path | str) -> "PreparedManifest | None":
        """Read that of a folder, as `read` does; None if there is none."""
        return cls.read(folder) if storage.exists(storage.join(str(folder), MANIFEST)) else None

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
                    split: {
                        name: BucketEntry(**entry) for name, entry in buckets.items() if check_folder(f"{split}/{name}")
                    }
                    for split, buckets in values["splits"].items()
                },
                generations=[Generation(**entry) for entry in values.get("generations", [])],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{where} is damaged ({error!r}); write the data set anew") from error


def read_kind(dataset: str) -> str | None:
    """Read the kind of a finished data set, `prepared` or `encoded`; None without a manifest."""
    manifest = storage.read_json(storage.join(dataset, MANIFEST), None)
    return manifest if manifest is None else str(manifest.get("kind") if isinstance(manifest, dict) else None)


def check_folder(folder: str) -> str:
    """Return `<split>/<bucket>`, as another writer may have stored it; a DataError for another path."""
    if not _FOLDER.fullmatch(folder):
        raise DataError(f"the data set names the folder {folder!a}, which is no <split>/<bucket>: do not use it")
    return folder


def is_data_set(folder: Path) -> bool:
    """Return whether a folder of this machine is that of a data set, finished or not."""
    return any((folder / name).exists() for name in (MANIFEST, SCAN, WORK))


def list_own_files(folder: str) -> dict[str, storage.StoredFile]:
    """List the files below a folder of a data set that a writer may delete: by their names below it."""
    files = storage.list_files(folder).items()
    return {name: file for name, file in files if _OWN_FILE.fullmatch(name.rpartition("/")[2])}


def folder_order(folder: str) -> tuple[str, list[int]]:
    """Sort `train/256-512` before `train/1024-up`: numbers by their value."""
    split, _, bucket = folder.partition("/")
    return split, [int(number) for number in re.findall(r"\d+", bucket)]


def read_splits(dataset: str, folders: Iterable[str]) -> dict[str, dict[str, BucketEntry]]:
    """Sum up the indexes of some `<split>/<bucket>` for the manifest."""
    splits: dict[str, dict[str, BucketEntry]] = {}
    for folder in folders:
        split, bucket = folder.split("/")
        splits.setdefault(split, {})[bucket] = read_index(storage.join(dataset, folder)).summary
    return splits


def read_marks(dataset: str, file: str = REMOVED_SAMPLES) -> dict[str, list[int]]:
    """Read marks: sorted indices by `<split>/<bucket>`."""
    return storage.read_json(storage.join(dataset, file), {})


def add_marks(dataset: str, file: str, marks: Iterable[tuple[str, Iterable[int]]]) -> None:
    """Add indices of some `<split>/<bucket>` to marks."""
    known = read_marks(dataset, file)
    merged = {folder: set(indices) for folder, indices in known.items()}
    for folder, indices in marks:
        merged.setdefault(folder, set()).update(indices)
    listed = {folder: sorted(found) for folder, found in sorted(merged.items()) if found}
    if listed != known:
        storage.write_json(storage.join(dataset, file), listed)


def delete_unnamed(
    dataset: str, shards: Mapping[str, Iterable[Shard]], is_spared: Callable[[str], bool] = lambda _: False
) -> dict[str, dict[str, storage.StoredFile]]:
    """Delete what killed runs left in a data set: unfinished files, shards and indexes that no index names.

    `shards` are those in the index of each `<split>/<bucket>`. Shards whose names `is_spared` chooses stay. Returned
    are the files that were found in each of these folders.
    """
    # Splits and buckets may be links, which a listing follows only where it begins.
    listed = SPLITS if storage.is_url(dataset) else dict.fromkeys((*SPLITS, *shards))
    found: dict[str, dict[str, storage.StoredFile]] = {folder: {} for folder in shards}
    for top in listed:
        for path, file in list_own_files(storage.join(dataset, top)).items():
            folder, _, name = f"{top}/{path}".rpartition("/")
            found.setdefault(folder, {})[name] = file
    left = []
    for folder, files in found.items():
        named = {INDEX, *(shard.stored.name for shard in shards[folder])} if folder in shards else set()
        unnamed = [f"{folder}/{name}" for name in files.keys() - named]
        left += [name for name in unnamed if not (name.startswith(f"{folder}/shard.") and is_spared(name))]
    indexes_first = sorted(left, key=lambda name: (not name.endswith(INDEX), name))  # So that no rest looks whole.
    storage.delete(storage.join(dataset, name) for name in indexes_first)
    if not storage.is_url(dataset):
        storage.delete(map(str, Path(dataset).rglob(f".*{PARTIAL}")))
    return found
