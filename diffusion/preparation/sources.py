"""Where pictures come from: which reader a path needs, and names that keep the keys of several sources apart.

Keys are unique by construction. The key of a picture is the name of its source, a slash, and its place in the source;
the name is the last part of the path, and of sources that share it the second gets `~2`, the third `~3`, in the order
given. A source that is given twice, or that lies inside another, is refused.
"""

import glob
import os
import tarfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from diffusion.errors import DataError
from diffusion.preparation.records import Reason, Record, Refused, Source, clean_text
from diffusion.preparation.source_folder import FolderSource, is_image_name, read_table, walk_files
from diffusion.preparation.source_parquet import ParquetSource, check_parquet
from diffusion.preparation.source_webdataset import WebDatasetSource

__all__ = ["Reason", "Record", "Refused", "Source", "open_source", "open_sources"]

KINDS = "a folder of pictures, a .tar file, a .parquet file, or a folder or quoted pattern of one of these"

_TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")
_PARQUET_SUFFIXES = (".parquet", ".pq")


def open_source(
    path: str | Path, *, image_column: str | None = None, caption_column: str | None = None
) -> FolderSource | WebDatasetSource | ParquetSource:
    """Find out what a path holds.

    Args:
        path: A file, a folder, or a pattern with wildcards that stands for tar or parquet files.
        image_column: Column of the images in parquet files; None for the usual names.
        caption_column: Column of the captions in parquet files; None for the usual names.

    Returns:
        The source; its name is the last part of the path.

    Raises:
        DataError: There is nothing, nothing known, several kinds, or a table or column that is missing or damaged.
    """
    text = os.fspath(path)
    absolute = Path(text).absolute()
    if not absolute.exists():
        if not glob.has_magic(text):
            raise DataError(f"{text}: there is no such file or folder; a source is {KINDS}")
        return _open_pattern(text, image_column, caption_column)
    name = clean_text(absolute.resolve().name) or "root"
    if absolute.is_dir():
        return _open_folder(absolute, name, image_column, caption_column)
    if _is_tar(absolute):
        return WebDatasetSource(name, clean_text(str(absolute)), (("", str(absolute)),))
    if _is_parquet(absolute):
        return _parquet(name, absolute, [("", absolute)], image_column, caption_column)
    raise DataError(f"{text} is neither a tar nor a parquet file; a source is {KINDS}")


def open_sources(
    paths: Iterable[str | Path], *, image_column: str | None = None, caption_column: str | None = None
) -> list[FolderSource | WebDatasetSource | ParquetSource]:
    """Open several sources and give each a name of its own.

    Args:
        paths: As for `open_source`, in the order in which they are read.
        image_column: As for `open_source`.
        caption_column: As for `open_source`.

    Returns:
        The sources in the same order.

    Raises:
        DataError: As for `open_source`; or there is none, or two of them hold the same files.
    """
    sources: list[FolderSource | WebDatasetSource | ParquetSource] = []
    for path in paths:
        source = open_source(path, image_column=image_column, caption_column=caption_column)
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


def _open_pattern(
    pattern: str, image_column: str | None, caption_column: str | None
) -> WebDatasetSource | ParquetSource:
    """Open the tar or parquet files that a pattern stands for."""
    found = sorted(Path(path).absolute() for path in glob.glob(pattern, recursive=True))  # noqa: PTH207
    files = [path for path in found if path.is_file()]
    if not files:
        raise DataError(f"{pattern}: no file matches; a source is {KINDS}")
    root = Path(os.path.commonpath([path.parent for path in files]))
    named = [(str(path.relative_to(root)), path) for path in files]
    name = clean_text(root.resolve().name) or "root"
    if all(_is_tar(path) for path in files):
        return WebDatasetSource(name, clean_text(str(Path(pattern).absolute())), _as_text(named))
    if all(_is_parquet(path) for path in files):
        return _parquet(name, Path(pattern).absolute(), named, image_column, caption_column)
    raise DataError(f"{pattern}: it must match tar files only or parquet files only; it matches {files[0]} and others")


def _open_folder(
    folder: Path, name: str, image_column: str | None, caption_column: str | None
) -> FolderSource | WebDatasetSource | ParquetSource:
    """Open a folder as what the names of the files below it say."""
    tars, parquets, num_images = [], [], 0
    for below in walk_files(folder):
        if below.lower().endswith(_TAR_SUFFIXES):
            tars.append((below, folder / below))
        elif below.lower().endswith(_PARQUET_SUFFIXES):
            parquets.append((below, folder / below))
        elif is_image_name(below):
            num_images += 1
    parquets = [(below, path) for below, path in parquets if not _is_img2dataset_log(path)]
    kinds = {"pictures": num_images, "tar files": len(tars), "parquet files": len(parquets)}
    present = [kind for kind, count in kinds.items() if count]
    if len(present) > 1:
        raise DataError(f"{folder} holds {' and '.join(present)}; name the ones that are meant, as in '{folder}/*.tar'")
    if tars:
        return WebDatasetSource(name, clean_text(str(folder)), _as_text(tars))
    if parquets:
        return _parquet(name, folder, parquets, image_column, caption_column)
    if not num_images and not read_table(folder):
        raise DataError(f"{folder} holds no picture, no tar and no parquet file; a source is {KINDS}")
    read_table(folder)  # a damaged table is reported before any work
    return FolderSource(name, str(folder), num_images)


def _parquet(
    name: str, path: Path, files: list[tuple[str, Path]], image_column: str | None, caption_column: str | None
) -> ParquetSource:
    """Check the parquet files and make a source of them."""
    num_rows = sum(check_parquet(file, image_column, caption_column) for _, file in files)
    return ParquetSource(name, clean_text(str(path)), _as_text(files), image_column, caption_column, num_rows)


def _as_text(files: list[tuple[str, Path]]) -> tuple[tuple[str, str], ...]:
    """Return names and paths of files, sorted by name."""
    return tuple(sorted((below, str(path)) for below, path in files))


def _is_tar(path: Path) -> bool:
    return path.name.lower().endswith(_TAR_SUFFIXES) or (not _is_parquet(path) and tarfile.is_tarfile(path))


def _is_parquet(path: Path) -> bool:
    if path.name.lower().endswith(_PARQUET_SUFFIXES):
        return True
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def _is_img2dataset_log(path: Path) -> bool:
    """Return whether a parquet file is the list that img2dataset writes beside a tar or folder of the same name."""
    return path.with_suffix(".tar").exists() or path.with_suffix("").is_dir()


def _files(source: FolderSource | WebDatasetSource | ParquetSource) -> list[Path]:
    """Return the folder or the files that a source reads."""
    if isinstance(source, FolderSource):
        return [Path(source.path).resolve()]
    listed = source.tars if isinstance(source, WebDatasetSource) else source.files
    return [Path(path).resolve() for _, path in listed]


def _overlap(
    source: FolderSource | WebDatasetSource | ParquetSource, other: FolderSource | WebDatasetSource | ParquetSource
) -> bool:
    """Return whether two sources share files."""
    if isinstance(source, FolderSource) and isinstance(other, FolderSource):
        one, two = _files(source)[0], _files(other)[0]
        return one.is_relative_to(two) or two.is_relative_to(one)
    return type(source) is type(other) and not set(_files(source)).isdisjoint(_files(other))
