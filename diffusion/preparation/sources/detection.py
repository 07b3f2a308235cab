"""Source detection: which kind a path, a pattern or a URL is, by the names of the files."""

import glob
import os
import stat
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

from diffusion import storage
from diffusion.datasets.images import EXTENSIONS
from diffusion.errors import DataError, MachineError
from diffusion.preparation.config import LimitsConfig, SourceConfig
from diffusion.preparation.records import Source, clean_text
from diffusion.preparation.sources.arrow import ArrowSource
from diffusion.preparation.sources.base import FileSource
from diffusion.preparation.sources.caption_tables import TABLES
from diffusion.preparation.sources.folder import FolderSource, is_image_name
from diffusion.preparation.sources.huggingface import PREFIX, SPELLING, HuggingFaceSource, open_huggingface
from diffusion.preparation.sources.mds import MANIFEST, MDSSource, mds_folders, prepared_root
from diffusion.preparation.sources.parquet import ParquetSource
from diffusion.preparation.sources.reading import list_folder, matches, printable
from diffusion.preparation.sources.webdataset import WebDatasetSource
from diffusion.storage import is_url, shown

KINDS = (
    "a folder of images, a .tar file, a .parquet file, or a folder or quoted pattern of one of these, an MDS folder, "
    f"a folder that `datasets` saved, a URL of one of these, or {SPELLING}"
)

_LOOKED_AT = 200_000
"""Names by which the kind of a folder is found: a folder of 100 million images is listed once, later."""

_SCAN, _WORK = "scan.json", "work.partial/"
"""What a half-written data set has, of this version and of the one before."""

_CLASSES: dict[str, Any] = {
    kind.kind: kind
    for kind in (FolderSource, WebDatasetSource, ParquetSource, ArrowSource, HuggingFaceSource, MDSSource)
}


def open_sources(
    entries: Sequence[str | Mapping[str, Any] | SourceConfig],
    image_column: str | None = None,
    caption_column: str | None = None,
    limits: LimitsConfig | None = None,
    partition_size: int | None = None,
) -> list[Source]:
    """Find out what some sources are, and give each a name of its own.

    Args:
        entries: each a path, a pattern with wildcards, a URL, `hf-dataset:NAME`, or one with columns of its own; in the
            order in which they are read.
        image_column: column of the images of all sources that name none; None for the usual names.
        caption_column: column of the captions, likewise.
        limits: limits of an image; None for the default ones.
        partition_size: images of a partition; None for a function of their number.

    Raises:
        DataError: there is none, nothing, nothing known, several kinds in one, two that hold the same files, or a
            column is missing.
        MachineError: a store does not answer or not to these credentials, or a package is missing.
    """
    sources: list[Any] = []
    for entry in entries:
        path, own = _entry(entry)
        settings = {
            "image_column": own.get("image_column") or image_column,
            "caption_column": own.get("caption_column") or caption_column,
            "limits": limits or LimitsConfig(),
            "partition_size": partition_size,
        }
        source = _open(path, settings)
        for other in sources:
            if _overlap(source, other):
                raise DataError(f"{source.path} and {other.path} hold the same files; give them once")
        names, number, name = {other.name for other in sources}, 2, source.name
        while name in names:
            name, number = f"{source.name}~{number}", number + 1
        sources.append(replace(source, name=name))
    if not sources:
        raise DataError(f"no source was given; a source is {KINDS}")
    return sources


def from_description(description: Mapping[str, Any]) -> Source:
    """Make a source of its description; nothing is listed or opened."""
    values = dict(description)
    return _CLASSES[values.pop("kind")](**values | {"limits": LimitsConfig(**values["limits"])})


def _entry(entry: "str | os.PathLike[str] | Mapping[str, Any] | SourceConfig") -> tuple[str, Mapping[str, Any]]:
    """Return the path of an entry, and its columns."""
    if isinstance(entry, str | os.PathLike):
        return os.fspath(entry), {}
    values = vars(entry) if isinstance(entry, SourceConfig) else dict(entry)
    known = [one.name for one in fields(SourceConfig)]
    if unknown := [key for key in values if key not in known]:
        raise DataError(f"sources: a source has no key {', '.join(map(ascii, unknown))}; it has {', '.join(known)}")
    if not isinstance(values.get("path"), str):
        raise DataError("sources: a source that is a mapping needs the key path")
    return values["path"], values


def _open(text: str, settings: dict[str, Any]) -> Any:
    if text.startswith(PREFIX):
        return open_huggingface(text, settings)
    if is_url(text):
        try:
            return _open_url(text, settings)
        except PermissionError as error:
            raise MachineError(f"{shown(text)}: access denied; give these credentials the right to list and read"
                               ) from error  # fmt: skip
    if "\0" in text:
        raise DataError(f"{printable(text)}: there is no such file or folder")
    path = os.path.abspath(text)  # noqa: PTH100 - `..` is resolved
    if glob.has_magic(path) and not os.path.lexists(path):
        return _open_pattern(path, settings)
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116
    except OSError as error:
        raise DataError(f"{printable(text)}: there is no such file or folder; a source is {KINDS}") from error
    name = _name_of(os.path.realpath(path))
    if stat.S_ISDIR(mode):
        return _open_folder(path, name, settings)
    if not stat.S_ISREG(mode):
        raise DataError(f"{printable(text)} is a pipe, a socket or a device; a source is {KINDS}")
    kind = _kind_of_file(path) or _kind_by_content(path)
    if kind is None:
        raise DataError(f"{printable(text)} is neither a tar nor a parquet file; a source is {KINDS}")
    return _checked(kind(name=name, root=path, is_file=True, **settings))


def _name_of(path: str) -> str:
    return clean_text(path.rstrip("/").rpartition("/")[2]) or "root"


def _kind_of_file(path: str) -> Any:
    """Return the class for a file with this name, if it is known by its extension."""
    kinds = (WebDatasetSource, ParquetSource, ArrowSource)
    return next((kind for kind in kinds if path.lower().endswith(kind.suffixes)), None)


def _kind_by_content(path: str) -> Any:
    with Path(path).open("rb") as file:
        if file.read(4) == b"PAR1":
            return ParquetSource
    return WebDatasetSource if tarfile.is_tarfile(path) else None


def _check_url(url: str) -> None:
    """Check that a URL is known and holds nothing secret: it is written to files of the data set."""
    remedy = "give credentials in the environment (AWS_ACCESS_KEY_ID and so on, or ~/.netrc for web servers)"
    if "@" in url.partition("://")[2].partition("/")[0]:
        raise DataError(f"{shown(url)}: the URL holds a user or password, which would reach logs; leave it out and "
                        f"{remedy}")  # fmt: skip
    if shown(url) != url:
        raise DataError(f"{shown(url)}: the URL holds a query, which may be a password and would reach files; leave it "
                        f"out and {remedy}, or download the file")  # fmt: skip
    storage.check_uri(url)


def _open_url(url: str, settings: dict[str, Any]) -> Any:
    _check_url(url)
    root = url.rstrip("/")
    scheme, _, below = root.partition("://")
    if scheme not in ("http", "https") and glob.has_magic(below):
        return _open_pattern(root, settings)
    kind = _kind_of_file(root)
    if kind is not None and (scheme in ("http", "https") or storage.exists(root)):
        storage.stat(root)
        return _checked(kind(name=_name_of(root), root=root, is_file=True, **settings))
    return _open_folder(root, _name_of(root), settings)


def _open_pattern(pattern: str, settings: dict[str, Any]) -> Any:
    """Open the tar, parquet or Arrow files that a pattern stands for."""
    parts = pattern.split("/")
    fixed = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    root = "/".join(parts[:fixed])
    if is_url(pattern) and fixed < 3:
        raise DataError(f"{shown(pattern)}: the bucket must be named without wildcards")
    if not is_url(root) and not Path(root or "/").is_dir():
        raise DataError(f"{printable(pattern)}: no file matches; a source is {KINDS}")
    names = [entry.name for entry in list_folder(root or "/") if matches(entry.name.split("/"), parts[fixed:])]
    if not names:
        raise DataError(f"{printable(pattern)}: no file matches; a source is {KINDS}")
    kinds = {_kind_of_file(name) for name in names}
    if len(kinds) > 1 or None in kinds:
        raise DataError(f"{printable(pattern)}: it must match tar files only or parquet files only; it matches "
                        f"{printable(names[0])} and others")  # fmt: skip
    (kind,) = kinds
    return _checked(kind(name=_name_of(root), root=root or "/", pattern="/".join(parts[fixed:]), **settings))


def _open_folder(folder: str, name: str, settings: dict[str, Any]) -> Any:
    """Open a folder, local or remote, as what the names of the files below it say."""
    path = printable(shown(folder))
    names = sorted(entry.name for entry in islice(list_folder(folder), _LOOKED_AT))
    if is_url(folder) and not names:
        raise DataError(f"{path}: there is nothing; correct the URL, or name a .tar or .parquet file there")
    make = {"name": name, "root": folder, **settings}
    if MANIFEST in names and prepared_root(folder) == folder:
        return _checked(MDSSource(prepared=folder, **make))
    has_images = any(map(is_image_name, names))
    if MANIFEST not in names and (_SCAN in names or any(one.startswith(_WORK) for one in names)) and not has_images:
        raise DataError(f"{path} is half-written; run the command that writes it (prepare or encode) again")
    sources = {
        "tar files": WebDatasetSource(**make),
        "parquet files": ParquetSource(**make),
        "Arrow files": ArrowSource(**make),
    }
    found: dict[str, Any] = {what: source for what, source in sources.items() if source.takes(names)}
    if has_images:
        found["images"] = FolderSource(**make)
    if mds_folders(names):
        found["MDS folders"] = MDSSource(prepared=prepared_root(folder), **make)
    if len(found) > 1:
        raise DataError(f"{path} holds {' and '.join(sorted(found))}; name the ones that are meant, as in "
                        f"'{path}/*.tar'")  # fmt: skip
    if not found and any(one.rpartition("/")[2] in TABLES for one in names):
        found["images"] = FolderSource(**make)
    if not found:
        raise DataError(f"{path} holds no image, no tar and no parquet file; a source is {KINDS}; an image is a file "
                        f"that ends in {', '.join(sorted(EXTENSIONS))}")  # fmt: skip
    (source,) = found.values()
    return _checked(source)


def _checked(source: Any) -> Any:
    """Check the columns of a source that has some."""
    if not isinstance(source, FolderSource | WebDatasetSource):
        source.check()
    return source


def _overlap(source: Any, other: Any) -> bool:
    """Whether two sources of a kind share files."""
    if type(source) is not type(other):
        return False
    if not isinstance(source, FileSource):
        return source.path == other.path
    one, two = (one.root if is_url(one.root) else os.path.realpath(one.root) for one in (source, other))
    if not (f"{one}/".startswith(f"{two}/") or f"{two}/".startswith(f"{one}/")):
        return False
    if isinstance(source, FolderSource) or (one == two and source.pattern == other.pattern):
        return True
    return not _uris(source).isdisjoint(_uris(other))


def _uris(source: FileSource) -> set[str]:
    uris = map(source.uri, source.files())
    return set(uris) if is_url(source.root) else set(map(os.path.realpath, uris))
