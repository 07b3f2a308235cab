"""Where images come from: which reader a place needs, and names that keep the keys of several sources apart.

A place is a path, a pattern, a URL (see `remote_files`) or `hf-dataset:NAME` (see `source_huggingface`). Keys are
unique by construction. The key of an image is the name of its source, a slash, and its place in the source; the name
is the last part of the path, and of sources that share it the second gets `~2`, the third `~3`, in the order given. A
source that is given twice, or that lies inside another, is refused.

Several captions per image come from: several lines of a table or a list in its `captions` (folder), `captions` in the
.json beside the .txt (folder and tar), a column of lists (parquet, Arrow, `datasets`), a JSON list (MDS).
"""

import glob
import logging
import os
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from diffusion.datasets.images import EXTENSIONS
from diffusion.errors import DataError, MachineError
from diffusion.preparation.records import Reason, Record, Refused, Source, clean_text
from diffusion.preparation.sources.arrow import ArrowSource, arrow_files, check_arrow
from diffusion.preparation.sources.folder import FolderSource, is_image_name, read_table, tell_overruled, walk_files
from diffusion.preparation.sources.huggingface import PREFIX, SPELLING, HuggingFaceSource, open_huggingface
from diffusion.preparation.sources.mds import MANIFEST, MDSSource, check_mds, mds_folders, prepared_root
from diffusion.preparation.sources.parquet import ParquetSource, check_parquet
from diffusion.preparation.sources.remote_files import check_url, each, join, list_files
from diffusion.preparation.sources.webdataset import WebDatasetSource
from diffusion.storage import exists, is_url, shown

__all__ = ["Reason", "Record", "Refused", "Source", "open_source", "open_sources"]

logger = logging.getLogger(__name__)

KINDS = (
    "a folder of images, a .tar file, a .parquet file, or a folder or quoted pattern of one of these, an MDS folder, "
    f"a folder that `datasets` saved, a URL of one of these, or {SPELLING}"
)

AnySource = FolderSource | WebDatasetSource | ParquetSource | MDSSource | ArrowSource | HuggingFaceSource

_TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")
_PARQUET_SUFFIXES = (".parquet", ".pq")
_ARROW_SUFFIX = ".arrow"
_HALF_WRITTEN = "work.partial"


def open_source(path: str | Path, *, image_column: str | None = None, caption_column: str | None = None) -> AnySource:
    """Find out what a place holds.

    Args:
        path: A file, a folder, or a pattern with wildcards that stands for tar or parquet files; or the URL of one of
            these, or `hf-dataset:NAME`.
        image_column: Column of the images in parquet, Arrow and MDS; None for the usual names.
        caption_column: Column of the captions in parquet, Arrow and MDS; None for the usual names.

    Returns:
        The source; its name is the last part of the path.

    Raises:
        DataError: There is nothing, nothing known, several kinds, or a table or column that is missing or damaged.
        MachineError: A store does not answer or not to these credentials, or a package is missing.
    """
    text = os.fspath(path)
    columns = (image_column, caption_column)
    if text.startswith(PREFIX):
        return open_huggingface(text, *columns)
    if is_url(text):
        check_url(text)
        try:
            return _open_url(text, *columns)
        except PermissionError as error:
            raise MachineError(
                f"{shown(text)}: access denied; give these credentials the right to list and read"
            ) from error
    absolute = Path(text).absolute()
    if not absolute.exists():
        if not glob.has_magic(text):
            raise DataError(f"{text}: there is no such file or folder; a source is {KINDS}")
        return _open_pattern(text, *columns)
    name = clean_text(absolute.resolve().name) or "root"
    if absolute.is_dir():
        return _open_folder(str(absolute), name, list(walk_files(absolute)), *columns)
    files = (("", str(absolute)),)
    if _is_tar(absolute):
        return WebDatasetSource(name, clean_text(str(absolute)), files)
    if _is_parquet(absolute):
        return _parquet(name, str(absolute), files, *columns)
    if text.endswith(_ARROW_SUFFIX):
        return _arrow(name, str(absolute), files, *columns)
    raise DataError(f"{text} is neither a tar nor a parquet file; a source is {KINDS}")


def open_sources(
    paths: Iterable[str | Path], *, image_column: str | None = None, caption_column: str | None = None
) -> list[AnySource]:
    """Open several sources and give each a name of its own.

    Args:
        paths: As for `open_source`, in the order in which they are read.
        image_column: As for `open_source`.
        caption_column: As for `open_source`.

    Returns:
        The sources in the same order.

    Raises:
        DataError: As for `open_source`; or there is none, or two of them hold the same files.
        MachineError: As for `open_source`.
    """
    sources: list[AnySource] = []
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
    for option, column in (("image-column", image_column), ("caption-column", caption_column)):
        if column and all(isinstance(source, FolderSource | WebDatasetSource) for source in sources):
            logger.warning("--%s %s has no effect: folders of images and tars have no columns", option, column)
    return sources


def _open_url(url: str, image_column: str | None, caption_column: str | None) -> AnySource:
    """Open a remote file, the files that a pattern stands for, or a folder."""
    path = shown(url).rstrip("/")
    scheme, _, below = path.partition("://")
    name = clean_text(path.rpartition("/")[2])
    if scheme not in ("http", "https") and glob.has_magic(below):
        return _open_remote_pattern(url, image_column, caption_column)
    suffix, files = path.lower(), (("", url),)
    if suffix.endswith((*_TAR_SUFFIXES, *_PARQUET_SUFFIXES, _ARROW_SUFFIX)) and exists(url):
        if suffix.endswith(_TAR_SUFFIXES):
            return WebDatasetSource(name, path, files)
        opened = _arrow if suffix.endswith(_ARROW_SUFFIX) else _parquet
        return opened(name, path, files, image_column, caption_column)
    names = list(list_files(url))
    if not names:
        raise DataError(f"{path}: there is nothing; correct the URL, or name a .tar or .parquet file there")
    return _open_folder(url.rstrip("/"), name, names, image_column, caption_column)


def _open_remote_pattern(
    url: str, image_column: str | None, caption_column: str | None
) -> WebDatasetSource | ParquetSource:
    """Open the remote tar or parquet files that a pattern stands for."""
    scheme, _, path = url.partition("://")
    parts = path.split("/")
    fixed = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    if not fixed:
        raise DataError(f"{shown(url)}: the bucket must be named without wildcards")
    root = f"{scheme}://{'/'.join(parts[:fixed])}"
    names = [name for name in list_files(root) if _matches(name.split("/"), parts[fixed:])]
    if not names:
        raise DataError(f"{shown(url)}: no file matches; a source is {KINDS}")
    named = tuple(sorted((name, join(root, name)) for name in names))
    return _of_one_kind(shown(url), parts[fixed - 1], named, image_column, caption_column)


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether the parts of a path match those of a pattern, where `**` stands for any number of folders."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[start:], pattern[1:]) for start in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _open_pattern(
    pattern: str, image_column: str | None, caption_column: str | None
) -> WebDatasetSource | ParquetSource:
    """Open the tar or parquet files that a pattern stands for."""
    found = sorted(Path(path).absolute() for path in glob.glob(pattern, recursive=True))  # noqa: PTH207
    files = [path for path in found if path.is_file()]
    if not files:
        raise DataError(f"{pattern}: no file matches; a source is {KINDS}")
    root = Path(os.path.commonpath([path.parent for path in files]))
    named = tuple(sorted((str(path.relative_to(root)), str(path)) for path in files))
    name = clean_text(root.resolve().name) or "root"
    return _of_one_kind(str(Path(pattern).absolute()), name, named, image_column, caption_column)


def _of_one_kind(
    pattern: str,
    name: str,
    files: tuple[tuple[str, str], ...],
    image_column: str | None,
    caption_column: str | None,
) -> WebDatasetSource | ParquetSource:
    """Open files that are all tars or all parquet."""
    if all(_is_tar(path) for _, path in files):
        return WebDatasetSource(name, clean_text(pattern), files)
    if all(_is_parquet(path) for _, path in files):
        return _parquet(name, pattern, files, image_column, caption_column)
    raise DataError(f"{pattern}: it must match tar files only or parquet files only; it matches {shown(files[0][1])} "
                    "and others")  # fmt: skip


def _open_folder(
    folder: str, name: str, names: list[str], image_column: str | None, caption_column: str | None
) -> AnySource:
    """Open a folder, local or remote, as what the names of the files below it say."""
    columns, path = (image_column, caption_column), clean_text(shown(folder))
    if prepared := _prepared(folder, name, names, *columns):
        return prepared
    tars = _ending(names, folder, _TAR_SUFFIXES)
    logs = _img2dataset_logs(names)
    parquets = _ending([one for one in names if one not in logs], folder, _PARQUET_SUFFIXES)
    arrows, mds = arrow_files(folder, names), mds_folders(names)
    num_images = sum(map(is_image_name, names))
    kinds = {
        "images": num_images,
        "tar files": len(tars),
        "parquet files": len(parquets),
        "Arrow files": len(arrows),
        "MDS folders": len(mds),
    }
    present = [kind for kind, count in kinds.items() if count]
    if len(present) > 1:
        raise DataError(f"{path} holds {' and '.join(present)}; name the ones that are meant, as in '{path}/*.tar'")
    if tars:
        return WebDatasetSource(name, path, tars)
    if parquets:
        return _parquet(name, path, parquets, *columns)
    if arrows:
        return _arrow(name, path, arrows, *columns)
    if mds:
        return _mds(name, folder, mds, prepared_root(folder), *columns)
    table = read_table(folder)  # a damaged table is reported before any work
    if not num_images and not table:
        raise DataError(
            f"{path} holds no image, no tar and no parquet file; a source is {KINDS}; an image is a file that ends "
            f"in {', '.join(sorted(EXTENSIONS))}"
        )
    tell_overruled(folder, names, table)
    return FolderSource(name, folder, num_images)


def _prepared(
    folder: str, name: str, names: list[str], image_column: str | None, caption_column: str | None
) -> MDSSource | None:
    """Open a data set that `prepare` wrote; None if the folder is none."""
    if any(one.startswith(f"{_HALF_WRITTEN}/") for one in names) and MANIFEST not in names:
        raise DataError(f"{shown(folder)} is half-written; run the command that writes it (prepare or encode) again")
    if MANIFEST not in names or prepared_root(folder) != folder:
        return None
    splits = [one for one in names if one.startswith(("train/", "validation/"))]
    return _mds(name, folder, mds_folders(splits), folder, image_column, caption_column)


def _ending(names: Iterable[str], folder: str, suffixes: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return names and places of the files with one of these suffixes, sorted by name."""
    return tuple(sorted((below, join(folder, below)) for below in names if below.lower().endswith(suffixes)))


def _mds(
    name: str,
    folder: str,
    below: Sequence[str],
    prepared: str | None,
    image_column: str | None,
    caption_column: str | None,
) -> MDSSource:
    """Check MDS folders and make a source of them."""
    folders = tuple((one, join(folder, one)) for one in below)
    num = sum(each(lambda place: check_mds(place, image_column, caption_column), [place for _, place in folders]))
    return MDSSource(name, clean_text(shown(folder)), folders, prepared, image_column, caption_column, num)


def _parquet(
    name: str,
    path: str,
    files: tuple[tuple[str, str], ...],
    image_column: str | None,
    caption_column: str | None,
) -> ParquetSource:
    """Check the parquet files and make a source of them."""
    num = sum(each(lambda place: check_parquet(place, image_column, caption_column), [place for _, place in files]))
    return ParquetSource(name, clean_text(path), files, image_column, caption_column, num)


def _arrow(
    name: str,
    path: str,
    files: tuple[tuple[str, str], ...],
    image_column: str | None,
    caption_column: str | None,
) -> ArrowSource:
    """Check the Arrow files and make a source of them."""
    each(lambda place: check_arrow(place, image_column, caption_column), [place for _, place in files])
    return ArrowSource(name, clean_text(path), files, image_column, caption_column)


def _is_tar(path: str | Path) -> bool:
    """Return whether a file is a tar, by its name or, if it is local, its content."""
    if str(path).lower().endswith(_TAR_SUFFIXES):
        return True
    return not is_url(str(path)) and not _is_parquet(path) and tarfile.is_tarfile(path)


def _is_parquet(path: str | Path) -> bool:
    """Return whether a file is parquet, by its name or, if it is local, its content."""
    if str(path).lower().endswith(_PARQUET_SUFFIXES):
        return True
    if is_url(str(path)):
        return False
    with Path(path).open("rb") as file:
        return file.read(4) == b"PAR1"


def _img2dataset_logs(names: Sequence[str]) -> frozenset[str]:
    """Return the parquet files that img2dataset writes beside a tar or folder of the same name."""
    beside = {one for one in names if one.lower().endswith(".tar")}
    for one in names:
        parts = one.split("/")
        beside |= {"/".join(parts[:depth]) for depth in range(1, len(parts))}
    stems = {one: one.removesuffix(".parquet") for one in names if one.endswith(".parquet")}
    return frozenset(one for one, stem in stems.items() if stem in beside or f"{stem}.tar" in beside)


def _places(source: AnySource) -> set[str]:
    """Return the folder or the files that a source reads."""
    if isinstance(source, FolderSource):
        places = [source.path]
    elif isinstance(source, HuggingFaceSource):
        return {source.path}
    else:
        places = [place for _, place in source.files]
    return {place.rstrip("/") if is_url(place) else str(Path(place).resolve()) for place in places}


def _overlap(source: AnySource, other: AnySource) -> bool:
    """Return whether two sources share files."""
    if isinstance(source, FolderSource) and isinstance(other, FolderSource):
        (one,), (two,) = _places(source), _places(other)
        return f"{one}/".startswith(f"{two}/") or f"{two}/".startswith(f"{one}/")
    return type(source) is type(other) and not _places(source).isdisjoint(_places(other))
