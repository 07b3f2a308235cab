"""The folder that a data set is written to: one writer at a time, and nothing there that is not the data set's."""

import errno
import shutil
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from diffusion import storage
from diffusion.errors import BusyError, DataError, MachineError
from diffusion.files import PARTIAL, lock
from diffusion.formats import data_set
from diffusion.operations.lease import Applicant, await_lease, held
from diffusion.preparation.layout import CAPTIONS, read_scores_record
from diffusion.preparation.records import SettingsError

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)
"""EBADF: NFS locks only what can be opened for writing, which a folder cannot."""

_ALLOWED = (data_set.WRITER, data_set.LISTINGS, data_set.REMOVED, data_set.REREAD, data_set.DEAD_LETTERS,
            data_set.ANSWERS, data_set.SCORES_RECORD, "lost+found")  # fmt: skip
"""Names that may be there before the first scan has begun."""


@contextmanager
def claim(out: str, kind: str | None = None) -> Iterator[None]:
    """Keep other processes from writing to a data set during the block; a local folder is made.

    `kind` is that of the data set that may be there, by its manifest, from which the half-written files of a killed
    process are removed; with None the caller checks what is there.

    Raises:
        DataError: the folder holds another data set, other files, or a link into another data set.
        BusyError: another process is writing there.
        MachineError: the folder cannot be written to.
    """
    with _leased(storage.join(out, data_set.WRITER)) if storage.is_url(out) else _locked(out):
        if not storage.is_url(out):
            _check_links(Path(out))
        if kind is not None:
            if (found := data_set.read_kind(out)) not in (None, kind):
                raise DataError(
                    f"{storage.shown(out)} holds another data set (kind {found!r}, not {kind!r}); choose another folder"
                )
            if found is None and not storage.exists(storage.join(out, data_set.SCAN)):
                check_empty(out, _ALLOWED)
            if not storage.is_url(out):
                for path in Path(out).rglob(f".*{PARTIAL}"):
                    path.unlink(missing_ok=True)
        yield


def _check_links(out: Path) -> None:
    """Reject links into another data set, whose files would be deleted; those to a plain folder may stay."""
    for folder in (out, *(out / name for name in (*data_set.SPLITS, data_set.SCORES))):
        for link in filter(Path.is_symlink, folder.iterdir() if folder.is_dir() else ()):
            target = link.resolve()
            root = next(filter(data_set.is_data_set, (target, *target.parents[:2])), None)
            if root not in (None, out.resolve()):
                raise DataError(f"{link} leads into another data set, {root}, whose files would be deleted: remove the "
                                "link, or put a copy in its place")  # fmt: skip


def clear_result(out: str) -> None:
    """Remove what was selected and written: the manifest first, the marks last. What was taken down stays known."""
    storage.delete([storage.join(out, data_set.MANIFEST)])
    # Positions first: without them no shard is taken for a finished one.
    clear_folders(out, data_set.POSITIONS, *data_set.SPLITS, data_set.SELECTION, data_set.PACKED)
    storage.delete(storage.join(out, name) for name in (data_set.REPORT_PAGE, data_set.REPORT_NUMBERS))
    storage.delete([storage.join(out, data_set.REMOVED_SAMPLES)])


def clear(out: str) -> None:
    """Remove a prepared data set; `scan.json`, by which the rest is known if this is stopped, goes last.

    Answers that were restored stay, and so does `scores.json`, which names their captioner.
    """
    clear_result(out)
    clear_folders(out, data_set.SCORES, data_set.METADATA, data_set.LISTINGS, data_set.REREAD)
    if not storage.list_files(storage.join(out, data_set.ANSWERS)):
        storage.delete([storage.join(out, data_set.SCORES_RECORD)])
    storage.delete([storage.join(out, data_set.SCAN)])


def protect_answers(out: str, difference: str) -> None:
    """Raise a SettingsError instead of removing the captions of a server, which may have cost money."""
    chat = (read_scores_record(out).get(CAPTIONS) or {}).get("chat")
    folders = [storage.join(out, name) for name in (f"{data_set.SCORES}/{CAPTIONS}", data_set.ANSWERS)]
    if chat and any(map(storage.list_files, folders)):
        raise SettingsError(
            f"{storage.shown(out)} has captions of {chat['model']} {difference}, which may have cost money; "
            f"remove {' and '.join(map(storage.shown, folders))} to do without them, or choose another folder"
        )


def clear_folders(out: str, *names: str) -> None:
    """Remove folders of a data set; of one that is a link, the files of the data set."""
    for name in names:
        folder = storage.join(out, name)
        storage.delete(storage.join(folder, file) for file in data_set.list_own_files(folder))
        if not storage.is_url(out):
            shutil.rmtree(folder, ignore_errors=True)


def resolved(uri: str) -> str:
    """Resolve the links of a path; leave a URL as it is."""
    return (uri if storage.is_url(uri) else str(Path(uri).resolve())).rstrip("/")


def check_empty(out: str, allowed: Collection[str]) -> None:
    """Reject a folder that holds anything but hidden files, empty folders and what is allowed."""
    if storage.is_url(out):
        names = {name.partition("/")[0] for name in storage.list_files(out)}
    else:
        names = {path.name for path in Path(out).iterdir()}
    names = {name for name in names if not name.startswith(".") and name not in allowed}
    if not storage.is_url(out):
        names = {name for name in names if not Path(out, name).is_dir() or any(Path(out, name).iterdir())}
    if unexpected := sorted(names):
        shown = ", ".join(map(ascii, unexpected[:3]))
        raise DataError(f"{storage.shown(out)} holds other files ({shown}); choose an empty folder")


@contextmanager
def _locked(out: str) -> Iterator[None]:
    """Hold the lock of a folder, or its lease where the file system has no locks."""
    with ExitStack() as stack:
        try:
            Path(out).mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock(Path(out), timeout=0))
        except TimeoutError as error:
            raise BusyError(f"another process is writing to {out}; wait for it or choose another folder") from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise MachineError(
                    f"cannot write to {out}: {error.strerror or error}; choose a folder that can be written to"
                ) from error
            stack.enter_context(_leased(Path(out) / data_set.WRITER))
        yield


@contextmanager
def _leased(location: Path | str) -> Iterator[None]:
    activity, remedy = "another process is writing there", "Wait for it, or choose another folder"
    with held(await_lease(Applicant(location), activity, remedy)):
        yield
