"""Where streams lie, and what is checked about them before anything is opened."""

import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from diffusion.config.data import StreamConfig
from diffusion.datasets.manifest import MANIFEST
from diffusion.datasets.mds import INDEX
from diffusion.datasets.storage_errors import fetch_errors
from diffusion.datasets.stores import Store, shown
from diffusion.errors import DataError
from diffusion.files import PARTIAL, read_json

logger = logging.getLogger(__name__)

MANIFEST_TIMEOUT = 20.0
"""Seconds without an answer after which a manifest cannot be fetched: in one attempt, to tell a wrong address soon."""


@dataclass(frozen=True, kw_only=True)
class StreamLocation:
    """One stream with its paths joined."""

    name: str
    remote: str | None
    local: str
    section: str = "data"
    """Of the configuration, whose `streams` name it."""

    proportion: float | None = None
    repeat: float | None = None
    store: Store = field(default_factory=Store)

    @property
    def source(self) -> str:
        """Folder or URL that holds the original."""
        return self.remote or self.local


def is_url(path: str) -> bool:
    """Whether a remote is reached by something else than the file system."""
    return "://" in path or path.startswith("dbfs:")


def join(root: str, *names: str) -> str:
    """Join a path or a URL and names."""
    return "/".join([root.rstrip("/") or "/", *names]) if is_url(root) else str(Path(root, *names))


def locate_streams(
    remote: str | None, local: str, streams: Sequence[StreamConfig], section: str = "data"
) -> list[StreamLocation]:
    """Join the roots of a data set with its streams.

    Args:
        remote: root of the data set; None where `local` holds it.
        local: root on this machine.
        streams: the streams of the configuration, which `diffusion.config.checks` has checked.
        section: of the configuration: `data` or `validation`.
    """
    return [_locate(remote, local, stream, section) for stream in streams]


def _locate(root_remote: str | None, root_local: str, stream: StreamConfig, section: str) -> StreamLocation:
    local = stream.local or str(Path(root_local, stream.name))
    remote = stream.remote or (join(root_remote, stream.name) if root_remote else None)
    if remote is not None and not is_url(remote) and Path(remote).resolve() == Path(local).resolve():
        remote = None  # An original is never treated as a cached copy.
    return StreamLocation(
        name=stream.name,
        remote=remote,
        local=local,
        section=section,
        proportion=stream.proportion,
        repeat=stream.repeat,
        store=Store(endpoint_url=stream.endpoint_url, profile=stream.profile),
    )


def check_location(location: StreamLocation) -> None:
    """Refuse a stream that is not there or not whole. A URL is left to Streaming, which downloads its index.

    Raises:
        DataError: what is missing, where, and the command that makes it.
    """
    folder = Path(location.source)
    if folder.name.endswith(PARTIAL) or location.name.endswith(PARTIAL):
        raise DataError(f"{folder} is half-written: run the command that writes it (prepare or encode) again")
    if is_url(location.source):
        return
    if not folder.is_dir():
        raise DataError(f"{folder} (stream '{location.name}') does not exist{_what_is_there(folder, location.section)}")
    if not (folder / INDEX).is_file():
        raise DataError(
            f"{folder} (stream '{location.name}') has no {INDEX}: it is not an MDS folder or was not copied whole. "
            "Copy it again, or write it with scripts/prepare.py or scripts/encode.py"
        )
    if not any((parent / MANIFEST).is_file() for parent in folder.absolute().parents[:2]):
        halves = sorted(path.name for path in folder.parent.glob(f"*{PARTIAL}"))
        if halves:
            raise DataError(
                f"{folder.parent} is unfinished ({halves[0]}, and no {MANIFEST}): run the command that writes it "
                "(prepare or encode) again; it continues where it was stopped"
            )
        _tell_of_another_tool(folder)


@cache
def _tell_of_another_tool(folder: Path) -> None:
    """Say it once: a run looks at its streams before networks are built, and again when it opens them."""
    logger.warning("%s has no %s beside or above it: taken for an MDS folder of another tool", folder, MANIFEST)


def _what_is_there(folder: Path, section: str) -> str:
    """The second half of the message about a missing folder: the half-written one, or its neighbours."""
    partial = folder.with_name(folder.name + PARTIAL)
    if partial.is_dir():
        return f", only the half-written {partial.name}: run the command that writes it (prepare or encode) again"
    neighbours = sorted(path.parent.name for path in folder.parent.glob(f"*/{INDEX}"))
    if neighbours:
        streams = ", ".join(f"{{name: {name}}}" for name in neighbours)
        return (
            f". Streams there: {', '.join(neighbours)}. To read these, set {section}.streams='[{streams}]' (a bucket "
            "without images has no folder)"
        )
    return (
        f": run scripts/prepare.py (and scripts/encode.py for latents), or correct {section}.local, {section}.remote "
        f"and {section}.streams"
    )


def find_manifest(source: str, store: Store | None = None) -> dict[str, Any] | None:
    """Read the `manifest.json` beside or above a stream.

    Args:
        source: folder or URL of the stream, such as `ROOT/train/256-512` or `s3://bucket/ROOT/train/256-512`.
        store: of the URL.

    Returns:
        Its content; None where there is none.

    Raises:
        DataError: it cannot be read.
    """
    return next((content for _, content in _find(source, MANIFEST, store or Store())), None)


def find_beside(location: StreamLocation, name: str) -> Iterator[tuple[str, Any]]:
    """Read a JSON file one and two folders above a stream, where it is there.

    Yields:
        The stream's path below that folder, such as `train/256-512`, and the file's content.

    Raises:
        DataError: it cannot be read.
    """
    yield from _find(location.source, name, location.store)


def _find(source: str, name: str, store: Store) -> Iterator[tuple[str, Any]]:
    if not is_url(source):
        folder = Path(source).absolute()
        for parent in folder.parents[:2]:
            if (parent / name).is_file():
                yield folder.relative_to(parent).as_posix(), read_json(parent / name)
        return
    for up in (1, 2):
        root, *below = source.rstrip("/").rsplit("/", up)
        content = None if root.endswith((":", "/")) else _download_json(join(root, name), store)
        if content is not None:
            yield "/".join(below), content


def _download_json(url: str, store: Store) -> Any:
    """Content of a remote JSON file; None where there is none."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "content.json")
        try:
            store.fetch(url, str(path), MANIFEST_TIMEOUT)
        except FileNotFoundError as error:
            logger.debug("%s: %s", shown(url), error)
            return None
        except PermissionError as error:
            raise DataError(
                f"access to {shown(url)} is denied ({error}), so whether it names images to leave out is unknown. "
                "Allow s3:GetObject on it, and s3:ListBucket on its bucket: without that, access to a file that does "
                "not exist is denied, too"
            ) from error
        except fetch_errors() as error:
            raise DataError(
                f"{shown(url)} cannot be fetched: {type(error).__name__}: {error}. Check data.remote, and that this "
                "machine can reach it"
            ) from error
        return read_json(path)
