"""Source detection: which kind a path, a pattern or a URL is, by the names of the files."""

import glob
import os
import stat
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from diffusion import storage
from diffusion.datasets.images import EXTENSIONS
from diffusion.errors import DataError, MachineError, printable
from diffusion.formats.data_set import MANIFEST, SCAN, WORK
from diffusion.preparation.config import LimitsConfig, SourceConfig
from diffusion.preparation.records import NoColumnsError, clean_text
from diffusion.preparation.sources.arrow import ArrowSource
from diffusion.preparation.sources.base import LOOKED_AT, Source
from diffusion.preparation.sources.caption_tables import TABLES
from diffusion.preparation.sources.folder import FolderSource, is_image_name
from diffusion.preparation.sources.huggingface import PREFIX, SPELLING, HuggingFaceSource, open_huggingface
from diffusion.preparation.sources.mds import MDSSource, mds_folders, prepared_root
from diffusion.preparation.sources.parquet import ParquetSource
from diffusion.preparation.sources.reading import list_folder, matches
from diffusion.preparation.sources.webdataset import WebDatasetSource
from diffusion.storage import is_url, shown

KINDS = (
    "a folder of images, a .tar file, a .parquet file, or a folder or quoted pattern of one of these, an MDS folder, "
    f"a folder that `datasets` saved, a URL of one of these, or {SPELLING}"
)

_FILES: dict[str, type[Source]] = {
    "tar files": WebDatasetSource,
    "parquet files": ParquetSource,
    "Arrow files": ArrowSource,
}
_CLASSES: dict[str, Any] = {kind.kind: kind for kind in (FolderSource, HuggingFaceSource, MDSSource, *_FILES.values())}


def open_sources(
    entries: Sequence[str | Mapping[str, Any] | SourceConfig],
    image_column: str | None = None,
    caption_column: str | None = None,
    limits: LimitsConfig | None = None,
    partition_size: int | None = None,
    scanned: Sequence[Source] = (),
) -> list[Source]:
    """Find out what some sources are, and give each a name of its own.

    Args:
        entries: each a path, a pattern with wildcards, a URL, `hf-dataset:NAME`, or one with columns of its own; in the
            order in which they are read.
        image_column: column of the images of the sources that name none; None for the usual names.
        caption_column: column of the captions, likewise.
        limits: of an image.
        partition_size: images of a partition; None for a function of their number.
        scanned: sources of an earlier scan, each of the entry of its number. Their kind and columns are known from
            then, whatever they hold now.

    Raises:
        DataError: there is none, nothing, nothing known, several kinds in one, two that hold the same files, or a
            column is missing.
        MachineError: a store does not answer or not to these credentials, or a package is missing.
    """
    sources: list[Any] = []
    without_columns: list[NoColumnsError] = []
    for number, entry in enumerate(entries):
        given = source_config(entry)
        settings: dict[str, Any] = {
            "image_column": given.image_column or image_column,
            "caption_column": given.caption_column or caption_column,
            "limits": limits or LimitsConfig(),
            "partition_size": partition_size,
        }
        if number < len(scanned) and scanned[number].location == _root(given.path):
            sources.append(replace(scanned[number], **settings))
            continue
        try:
            source = _open(given.path, settings)
            source.check()
        except NoColumnsError as error:
            if given.image_column or given.caption_column:
                raise
            without_columns.append(error)
        except PermissionError as error:
            raise MachineError(f"{shown(given.path)}: access denied; give these credentials the right to list and read"
                               ) from error  # fmt: skip
        for other in sources:
            if _overlap(source, other):
                raise DataError(f"{source.path} and {other.path} hold the same files; give them once")
        names, suffix, name = {other.name for other in sources}, 2, source.name
        while name in names:
            name, suffix = f"{source.name}~{suffix}", suffix + 1
        sources.append(replace(source, name=name))
    if without_columns and len(without_columns) == len(sources):
        raise without_columns[0]
    if not sources:
        raise DataError(f"no source was given; a source is {KINDS}")
    return sources


def is_empty(entry: str | Mapping[str, Any] | SourceConfig) -> bool:
    """Return whether an entry is a folder, or could be one of a store, that holds no file yet."""
    path = source_config(entry).path
    if _is_web(path):  # A file.
        return False
    return (is_url(path) or Path(path).is_dir()) and next(list_folder(path), None) is None


def from_description(description: Mapping[str, Any]) -> Source:
    """Make a source of its description; nothing is listed or opened."""
    values = dict(description)
    return _CLASSES[values.pop("kind")](**values | {"limits": LimitsConfig(**values["limits"])})


def source_config(entry: "str | os.PathLike[str] | Mapping[str, Any] | SourceConfig") -> SourceConfig:
    """Return path and columns of an entry."""
    if isinstance(entry, str | os.PathLike):
        return SourceConfig(path=os.fspath(entry))
    if isinstance(entry, SourceConfig):
        return entry
    keys = [one.name for one in fields(SourceConfig)]
    if not isinstance(entry, Mapping):
        raise DataError(f"sources: {entry!r} is no path; put quotes around a name of digits")
    if not isinstance(entry.get("path"), str) or not set(entry) <= set(keys):
        raise DataError(f"sources: a source that is no path has the key path and may have {' and '.join(keys[1:])}; "
                        f"here are {', '.join(map(ascii, entry))}")  # fmt: skip
    return SourceConfig(**entry)


def _open(text: str, settings: dict[str, Any]) -> Source:
    """Open what an entry names: a data set of the hub, a pattern, a file or a folder."""
    if text.startswith(PREFIX):
        return open_huggingface(text, settings)
    if is_url(text):
        _check_url(text)
    path = _root(text)
    if (fixed := _first_wildcard(path)) is not None:
        return _open_pattern(path, fixed, settings)
    if is_url(text):
        is_web = _is_web(path)
        is_file = _kind_of_file(path) is not None and (is_web or storage.exists(path))
        if is_file and is_web:
            storage.stat(path)
    else:
        is_file = _is_file(path, printable(text))
    name = _name_of(path if is_url(path) else os.path.realpath(path))
    if not is_file:
        return _open_folder(path, name, settings)
    kind = _kind_of_file(path)
    if kind is None:  # Then by its content.
        with Path(path).open("rb") as file:
            kind = ParquetSource if file.read(4) == b"PAR1" else WebDatasetSource if tarfile.is_tarfile(path) else None
    if kind is None:
        raise DataError(f"{printable(text)} is neither a tar nor a parquet file; a source is {KINDS}")
    return kind(name=name, root=path, is_file=True, **settings)


def _is_web(path: str) -> bool:
    return path.startswith(("http://", "https://"))


def _root(text: str) -> str:
    return text.rstrip("/") if is_url(text) else os.path.abspath(text)  # noqa: PTH100 - `..` is resolved


def _is_file(path: str, shown_path: str) -> bool:
    """Return whether a path of this machine is that of a file; it may be a folder, too."""
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116
    except (OSError, ValueError) as error:
        raise DataError(f"{shown_path}: there is no such file or folder; a source is {KINDS}") from error
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise DataError(f"{shown_path} is a pipe, a socket or a device; a source is {KINDS}")
    return stat.S_ISREG(mode)


def _name_of(path: str) -> str:
    return clean_text(path.rstrip("/").rpartition("/")[2]) or "root"


def _kind_of_file(path: str) -> Any:
    """Return the class for a file with this name, if it is known by its extension."""
    return next((kind for kind in _FILES.values() if path.lower().endswith(kind.suffixes)), None)


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


def _first_wildcard(path: str) -> int | None:
    """Return the number of the first part of a path that is a pattern: it has wildcards, and does not exist so."""
    parts = [] if _is_web(path) else path.split("/")
    for number, part in enumerate(parts):
        if glob.has_magic(part):
            if is_url(path) and number < 3:
                raise DataError(f"{shown(path)}: the bucket must be named without wildcards")
            place = "/".join(parts[: number + 1])
            if not is_url(path):
                exists = os.path.lexists(place)
            else:  # An object, or a prefix of some.
                exists = next(storage.iterate_files(place), None) is not None or storage.exists(place)
            if not exists:
                return number
    return None


def _open_pattern(text: str, fixed: int, settings: dict[str, Any]) -> Source:
    """Open the tar, parquet or Arrow files that a pattern stands for; its first parts are `fixed`."""
    parts = text.split("/")
    root, pattern = "/".join(parts[:fixed]), parts[fixed:]
    names: list[str] = []
    if is_url(root) or Path(root or "/").is_dir():
        names = [entry.name for entry in list_folder(root or "/") if matches(entry.name.split("/"), pattern)]
    if not names:
        raise DataError(f"{printable(text)}: no file matches; a source is {KINDS}")
    kinds = {_kind_of_file(name) for name in names}
    if len(kinds) > 1 or None in kinds:
        raise DataError(f"{printable(text)}: it must match tar files only or parquet files only; it matches "
                        f"{printable(names[0])} and others")  # fmt: skip
    (kind,) = kinds
    return kind(name=_name_of(root), root=root or "/", pattern="/".join(pattern), **settings)


def _open_folder(folder: str, name: str, settings: dict[str, Any]) -> Any:
    """Open a folder, local or remote, as what the names of the files below it say."""
    path = printable(shown(folder))
    names = sorted(entry.name for entry in islice(list_folder(folder), LOOKED_AT))
    if is_url(folder) and not names:
        raise DataError(f"{path}: there is nothing; correct the URL, or name a .tar or .parquet file there")
    make = {"name": name, "root": folder, **settings}
    if MANIFEST in names and prepared_root(folder) == folder:
        return MDSSource(prepared=folder, **make)
    has_images = any(map(is_image_name, names))
    if MANIFEST not in names and (SCAN in names or any(one.startswith(f"{WORK}/") for one in names)) and not has_images:
        raise DataError(f"{path} is half-written; run the command that writes it (prepare or encode) again")
    files = names
    if has_images:  # Beside them, the archive that they come from and a table of a folder are no sources.
        folders = {part for one in names for part in PurePosixPath(one).parents}
        files = [
            one
            for one in names
            if not one.lower().endswith((".tar.bz2", ".tar.xz"))
            and not (one.lower().endswith(ParquetSource.suffixes) and PurePosixPath(one).with_suffix("") in folders)
        ]
    found: dict[str, Source] = {}
    for what, kind in _FILES.items():
        source = kind(**make)
        # The files that a state.json lists may lie beyond the names that were looked at.
        if Source.takes(source, files) if kind is ArrowSource else source.takes(files):
            found[what] = source
    if mds_folders(names):
        found["MDS folders"] = MDSSource(prepared=prepared_root(folder), **make)
    if has_images or (not found and any(one.rpartition("/")[2] in TABLES for one in names)):
        found["images"] = FolderSource(**make)
    if len(found) > 1:
        raise DataError(f"{path} holds {' and '.join(sorted(found))}; name the ones that are meant, as in "
                        f"'{path}/*.tar'")  # fmt: skip
    if not found:
        raise DataError(f"{path} holds no image, no tar and no parquet file; a source is {KINDS}; an image is a file "
                        f"that ends in {', '.join(sorted(EXTENSIONS))}")  # fmt: skip
    return next(iter(found.values()))


def _overlap(source: Source, other: Source) -> bool:
    """Return whether two sources of a kind share files."""
    if type(source) is not type(other):
        return False
    if isinstance(source, HuggingFaceSource):
        return source.path == other.path
    one, two = (one.root if is_url(one.root) else os.path.realpath(one.root) for one in (source, other))
    if not (f"{one}/".startswith(f"{two}/") or f"{two}/".startswith(f"{one}/")):
        return False
    if isinstance(source, FolderSource) or (one == two and source.pattern == other.pattern):
        return True
    return not _uris(source).isdisjoint(_uris(other))


def _uris(source: Source) -> set[str]:
    uris = map(source.uri, source.files())
    return set(uris) if is_url(source.root) else set(map(os.path.realpath, uris))
