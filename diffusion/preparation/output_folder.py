"""The folder that a data set is written into: claimed by one process, never half-written and looking whole."""

import errno
import logging
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from diffusion.datasets.manifest import MANIFEST, WORK, PreparedManifest
from diffusion.datasets.mds import INDEX, read_shards, remove_mds
from diffusion.errors import ConfigurationError, DataError, MachineError
from diffusion.files import lock, read_json

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation")
FACTS = "facts"
"""Folder of a data set: a table of facts per partition."""

REFUSED = "refused"
"""Folder of a data set: some refused images of each partition."""

DONE = "partitions"
"""Folder below the folder of a plan: a folder per finished partition."""

_OURS = ("partitions.json", "report.html", "report.json", "withdrawn.json")
_ALWAYS_ALLOWED = ("lost+found", "withdrawn.txt")


def local_folder(out: str | Path) -> Path:
    """The folder that a data set is to be written to.

    Raises:
        ConfigurationError: it is a URL.
    """
    if "://" in str(out):
        raise ConfigurationError(f"output: {out} is a URL; write to a local folder and copy it there")
    return Path(out)


@contextmanager
def claim(out: Path, kind: str, *, overwrite: bool = False, grow: bool = False) -> Iterator[Path]:
    """Take a folder for writing a data set: empty, left half-written by an earlier run, or finished.

    The block writes the data and, at the end, `manifest.json`. While it runs `work.partial` lies beside them: where
    that is, a run was interrupted, and the next one continues. If the block raises, what was finished is left for the
    next run; if nothing was, all of it is removed.

    Args:
        out: The folder; made if it is not there.
        kind: `kind` in the manifest of a data set that may be replaced or added to.
        overwrite: Replace a finished data set.
        grow: Add to a finished data set.

    Yields:
        `work.partial`, with what an earlier run left there.

    Raises:
        DataError: The folder holds a finished data set, or something else.
        MachineError: Another process is writing there, or the folder cannot be written to.
    """
    with writing(out):
        made = not out.exists()
        out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        work = out / WORK
        with writing(out):
            _enter(out, work, kind, overwrite, grow)
        try:
            yield work
            with writing(out):
                remove_tree(work)
        except BaseException:
            if not any(work.glob(f"*/{DONE}/[0-9]*")):
                start_over(out, work)
                remove_tree(work)
                if made and not any(out.iterdir()):
                    out.rmdir()
            raise


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keep other processes from writing to a data set.

    Raises:
        MachineError: Another process is writing there.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(lock(out, timeout=0))
        except TimeoutError as error:
            raise MachineError(f"another process is writing to {out}; wait for it or choose another folder") from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise _write_error(out, error) from error
            logger.debug("%s cannot be locked: %s", out, error)
        yield


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Turn a failure to write into a message.

    Raises:
        MachineError: The disk is full, or the place cannot be written to.
    """
    try:
        yield
    except OSError as error:
        raise _write_error(out, error) from error


def _write_error(out: Path, error: OSError) -> MachineError:
    remedy = "choose a folder that can be written to"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = f"about twice the size of the images is needed; {_free_space(out)}"
    return MachineError(f"cannot write to {out}: {error.strerror or error}; {remedy}")


def start_over(out: Path, work: Path) -> None:
    """Remove what unfinished runs wrote; of a finished data set everything stays that its manifest knows."""
    manifest = PreparedManifest.read(out) if (out / MANIFEST).is_file() else None
    if manifest is None:
        _remove(out, work)
    else:
        for split in SPLITS:
            for folder in sorted((out / split).glob("*")):
                if folder.name not in manifest.splits.get(split, {}):
                    remove_mds(folder)
                else:
                    _remove_strays(folder)
        remove_tree(work)
    work.mkdir(exist_ok=True)


def remove_tree(folder: Path) -> None:
    """Remove a folder, if it is there, also while a worker that outlived its run writes a last file into it.

    Raises:
        OSError: It cannot be removed.
    """
    for _ in range(3):
        if not folder.exists():
            return
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        shutil.rmtree(folder)


def _enter(out: Path, work: Path, kind: str, overwrite: bool, grow: bool) -> None:
    """Check what the folder holds, and make the folder for the work."""
    manifest = out / MANIFEST
    if manifest.exists():
        values = read_json(manifest)
        found = values.get("kind") if isinstance(values, dict) else None
        if found != kind:
            raise DataError(f"{out} holds another data set (kind {found!r}, not {kind!r}); choose another folder")
        if overwrite:
            logger.info("%s holds a finished data set, which is replaced", out)
            work.mkdir(exist_ok=True)
            manifest.unlink()
            _remove(out, work)
        elif not grow:
            raise DataError(f"{out} holds a finished data set; choose another folder, or replace it with --overwrite")
    elif not work.exists():
        strangers = sorted(
            path.name for path in out.iterdir() if not path.name.startswith(".") and path.name not in _ALWAYS_ALLOWED
        )
        if strangers:
            raise DataError(f"{out} holds other files ({', '.join(map(ascii, strangers[:3]))}); choose an empty folder")
    work.mkdir(exist_ok=True)


def _remove(out: Path, work: Path) -> None:
    """Remove what runs write; the sign that it is unfinished goes last."""
    (out / MANIFEST).unlink(missing_ok=True)
    for name in _OURS:
        (out / name).unlink(missing_ok=True)
    for split in SPLITS:
        remove_mds(out / split)
    for name in (FACTS, REFUSED):
        remove_tree(out / name)
    remove_tree(work)


def _remove_strays(folder: Path) -> None:
    """Remove the shards of an MDS folder that its index does not name."""
    shards = read_shards(folder)
    named = {data["basename"] for shard in shards for data in (shard["raw_data"], shard["zip_data"]) if data}
    for path in folder.iterdir():
        if path.name not in named | {INDEX}:
            path.unlink()


def _free_space(out: Path) -> str:
    """Return the free space of the disk in words."""
    place = next((parent for parent in (out, *out.parents) if parent.exists()), None)
    return f"{shutil.disk_usage(place).free / 2**30:.1f} GiB are free" if place else "free some space"
