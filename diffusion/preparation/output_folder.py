"""The folder that a data set is written into: claimed by one process, never half-written and looking whole."""

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diffusion.datasets.manifest import MANIFEST, read_json
from diffusion.datasets.mds import PARTIAL, remove_mds
from diffusion.errors import DataError, MachineError

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation")
_WORK = "work" + PARTIAL
_ALWAYS_ALLOWED = ("lost+found",)


@contextmanager
def claim(out: Path, kind: str, *, overwrite: bool = False) -> Iterator[Path]:
    """Take a folder for writing a data set: empty, left half-written by an earlier run, or finished and to be replaced.

    The block writes `train`, `validation` and, at the end, `manifest.json`. While it runs `work.partial` lies beside
    them: where that is and `manifest.json` is not, a run was interrupted, and the next one starts over. If the block
    raises, what it wrote is removed.

    Args:
        out: The folder; made if it is not there.
        kind: `kind` in the manifest of a data set that may be replaced.
        overwrite: Replace a finished data set.

    Yields:
        `work.partial`, for temporary files.

    Raises:
        DataError: The folder holds a finished data set, or something else.
        MachineError: Another process is writing there, or the folder cannot be written to.
    """
    with writing(out):
        made = not out.exists()
        out.mkdir(parents=True, exist_ok=True)
        lock = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(lock, out)
        work = out / _WORK
        with writing(out):
            _clear(out, work, kind, overwrite)
        try:
            yield work
            with writing(out):
                shutil.rmtree(work)
        except BaseException:
            _remove(out, work)
            if made:
                out.rmdir()
            raise
    finally:
        os.close(lock)


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Turn a failure to write into a message.

    Raises:
        MachineError: The disk is full, or the place cannot be written to.
    """
    try:
        yield
    except OSError as error:
        remedy = "choose a folder that can be written to"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            remedy = f"about twice the size of the pictures is needed; {_free_space(out)}"
        raise MachineError(f"cannot write to {out}: {error.strerror or error}; {remedy}") from error


def _lock(descriptor: int, out: Path) -> None:
    """Lock the folder until the descriptor is closed or the process ends."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise MachineError(f"another process is writing to {out}; wait for it or choose another folder") from error
    except OSError as error:
        logger.debug("%s cannot be locked: %s", out, error)


def _clear(out: Path, work: Path, kind: str, overwrite: bool) -> None:
    """Check what the folder holds, and empty it."""
    manifest = out / MANIFEST
    if manifest.exists():
        values = read_json(manifest)
        found = values.get("kind") if isinstance(values, dict) else None
        if found != kind:
            raise DataError(f"{out} holds another data set (kind {found!r}, not {kind!r}); choose another folder")
        if not overwrite:
            raise DataError(f"{out} holds a finished data set; choose another folder, or replace it with --overwrite")
        logger.info("%s holds a finished data set, which is replaced", out)
        work.mkdir(exist_ok=True)
        manifest.unlink()
    elif work.exists():
        logger.info("%s was left half-written; starting over", out)
    else:
        strangers = sorted(
            path.name for path in out.iterdir() if not path.name.startswith(".") and path.name not in _ALWAYS_ALLOWED
        )
        if strangers:
            raise DataError(f"{out} holds other files ({', '.join(map(ascii, strangers[:3]))}); choose an empty folder")
    _remove(out, work)
    work.mkdir()


def _remove(out: Path, work: Path) -> None:
    """Remove what a run writes; the sign that it is unfinished goes last."""
    (out / MANIFEST).unlink(missing_ok=True)
    for split in SPLITS:
        remove_mds(out / split)
    if work.exists():
        shutil.rmtree(work)


def _free_space(out: Path) -> str:
    """Return the free space of the disk in words."""
    place = next((parent for parent in (out, *out.parents) if parent.exists()), None)
    return f"{shutil.disk_usage(place).free / 2**30:.1f} GiB are free" if place else "free some space"
