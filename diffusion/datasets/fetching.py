"""How the files of a stream come to this machine: attempts and pauses, sizes and hashes.

Like `shards.py`, this file touches private parts of Streaming: those of `Stream`.
"""

import logging
import os
import random
import re
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streaming import Stream
from streaming.base.format import FileInfo, Reader
from streaming.base.world import World

from diffusion.datasets.locations import StreamLocation
from diffusion.datasets.mds import INDEX, find_wrong_hash
from diffusion.datasets.storage_errors import fetch_errors
from diffusion.datasets.stores import shown
from diffusion.datasets.tiers import TierCounts, TierMeter
from diffusion.errors import DataError
from diffusion.files import PARTIAL

logger = logging.getLogger(__name__)

LONGEST_PAUSE = 30.0
"""Seconds between two attempts, at most."""

HOPELESS = (FileNotFoundError, PermissionError, ImportError)
"""Failures that another attempt does not cure."""

GONE = "the file is gone, and there is no remote"

LEFTOVER_SECONDS = 3600.0
"""Age from which a file that was being fetched is one that nobody fetches any more, on other machines either."""

_ON_THE_WAY = re.compile(rf".+\.[0-9a-f]{{8}}{re.escape(PARTIAL)}(\..+)?")
"""Name of a file that is being fetched; some stores' clients give it another ending until it is there."""


@dataclass(frozen=True, kw_only=True)
class Downloads:
    """How files are fetched."""

    attempts: int = 8
    """Attempts for each file; the pauses between them grow from 1 s to `LONGEST_PAUSE`."""

    timeout: float = 30.0
    """Seconds without an answer after which an attempt has failed."""

    validate_hash: str | None = None
    """Hash that shards are checked against; None is one that the index gives, if it gives any."""


class FetchedStream(Stream):
    """A stream whose files are whole once they are here: they have their names when size and hash have been checked.

    A file of another size than the index says counts as a failed attempt. A shard with a wrong hash is fetched once
    more. What is wrong is removed.

    Args:
        location: where the stream lies.
        downloads: how it is fetched.
        meter: counts the shards.
    """

    def __init__(self, location: StreamLocation, downloads: Downloads, meter: TierMeter) -> None:
        super().__init__(
            remote=location.remote,
            local=location.local,
            proportion=location.proportion,
            repeat=location.repeat,
            download_retry=downloads.attempts,
            download_timeout=downloads.timeout,
        )
        self._downloader = location.store.downloader(location.remote)
        self._hash = downloads.validate_hash  # Streaming would look at it when a file has its name.
        self._infos: dict[str, FileInfo] = {}
        self._readers: list[Reader] | None = None
        self._meter = meter

    def fetch_index(self) -> None:
        """Fetch the index, if it is not here.

        Raises:
            DataError: it cannot be fetched.
        """
        target = Path(self.local, self.split, INDEX)
        if self.remote is None or target.exists():
            return
        try:
            self._download_file(INDEX)
        except fetch_errors() as error:
            raise DataError(
                f"{shown(self.remote)}/{INDEX} cannot be fetched: {describe(error)}. Check data.remote, and that this "
                "machine can reach it"
            ) from error

    def get_shards(self, world: World, allow_unsafe_types: bool) -> list[Reader]:
        """Read the index, once: before the ranks wait for each other in Streaming's constructor.

        Raises:
            DataError: it is damaged.
        """
        if self._readers is None:
            try:
                self._readers = super().get_shards(world, allow_unsafe_types)
            except (*fetch_errors(), KeyError, TypeError) as error:
                path = Path(self.local, self.split, INDEX)
                remedy = "copy or write the data set again" if self.remote is None else "delete it, it is fetched again"
                raise DataError(f"{path} cannot be read ({describe(error)}): {remedy}") from error
        return self._readers

    def remove_leftovers(self) -> None:
        """Remove what killed processes were fetching; no other data set of this machine may be fetching now."""
        folder = Path(self.local, self.split)
        if self.remote is None or not folder.is_dir():
            return
        for entry in os.scandir(folder):
            if _ON_THE_WAY.fullmatch(entry.name):
                with suppress(OSError):  # It has gone; a cache that is whole may be another user's, or read-only.
                    if time.time() - entry.stat().st_mtime > LEFTOVER_SECONDS:
                        Path(entry).unlink()

    def release(self) -> None:
        """Close the connection: loader workers that inherited it by fork would share it."""
        self._downloader.clean_up()

    def prepare_shard(self, shard: Reader) -> int:
        """Have a shard here; a file that is here already is hashed.

        Returns:
            By how many bytes the cache has grown.

        Raises:
            ValueError: its hash is wrong, twice.
        """
        for info in (info for pair in shard.file_pairs for info in pair if info is not None):
            self._infos[info.basename] = info
        try:
            self.check(shard)
            return super().prepare_shard(shard)
        except ValueError as error:
            if self.remote is None:
                raise
            logger.warning("%s; fetching it again from %s", error, shown(self.remote))
            self.remove(shard)
        try:
            return super().prepare_shard(shard)
        except ValueError:
            self.remove(shard)
            raise

    def check(self, shard: Reader) -> None:
        """Hash the file of a shard that is here; a compressed one is hashed when it is unpacked.

        Raises:
            ValueError: its hash is wrong.
        """
        for info in (pair[0] for pair in shard.file_pairs):
            path = Path(self.local, self.split, info.basename)
            if path.is_file():
                self._check_hash(info, path, path)

    def remove(self, shard: Reader) -> None:
        """Remove the files of a shard from the cache."""
        assert self.remote is not None
        for info in (info for pair in shard.file_pairs for info in pair if info is not None):
            Path(self.local, self.split, info.basename).unlink(missing_ok=True)

    def _download_file(self, from_basename: str, to_basename: str | None = None) -> str:
        """Fetch a file in several attempts; return its path.

        Raises:
            ValueError: its hash is wrong.
        """
        if self.remote is None:
            raise FileNotFoundError(GONE)
        remote = "/".join(part for part in (self.remote.rstrip("/"), self.split, from_basename) if part)
        local = Path(self.local, self.split, to_basename or from_basename)
        # A name of its own: another data set of this job may fetch the same file at the same time.
        partial = local.with_name(f"{local.name}.{secrets.token_hex(4)}{PARTIAL}")
        info = self._infos.get(from_basename)

        def fetch() -> None:
            self._downloader.download(remote, str(partial), self.download_timeout)
            if info is not None and (size := partial.stat().st_size) != info.bytes:
                partial.unlink()
                raise OSError(f"{size} bytes came instead of {info.bytes}")

        try:
            self._attempt(fetch, shown(remote))
            if info is not None:
                self._meter.add(TierCounts(fetched_shards=1, fetched_bytes=info.bytes))
                self._check_hash(info, partial, local)
            partial.replace(local)
        finally:
            for path in (partial, partial.with_name(f"{partial.name}.tmp")):  # Streaming's clients leave the second.
                path.unlink(missing_ok=True)
        return str(local)

    def _check_hash(self, info: FileInfo, path: Path, target: Path) -> None:
        """Raise `ValueError` if a file, which is or is to become `target`, has not the hash that the index says."""
        if self._hash is not None and self._hash not in info.hashes:
            known = ", ".join(sorted(info.hashes)) or "none"
            raise ValueError(f"the index gives no {self._hash} of {target} ({known}): set data.validate_hash to null")
        if kind := find_wrong_hash(path, info.hashes, self._hash):
            raise ValueError(f"{target} is damaged: its {kind} is not that of the index")

    def _decompress_shard_part(
        self, zip_info: FileInfo, zip_filename: str, raw_filename: str, compression: str | None
    ) -> None:
        self._check_hash(zip_info, Path(zip_filename), Path(zip_filename))  # It may lie here from an earlier run.
        super()._decompress_shard_part(zip_info, zip_filename, raw_filename, compression)

    def _attempt(self, fetch: Callable[[], Any], what: str) -> None:
        """Call until it succeeds, `download_retry` times at most."""
        for number in range(1, self.download_retry + 1):
            try:
                fetch()
            except HOPELESS:
                self.release()
                raise
            except fetch_errors() as error:
                self.release()
                if number == self.download_retry:
                    raise
                pause = min(2.0 ** (number - 1), LONGEST_PAUSE) + random.random() / 2
                logger.warning(
                    "%s: attempt %d of %d failed (%s); trying again in %.1f s",
                    what, number, self.download_retry, describe(error), pause,
                )  # fmt: skip
                threading.Event().wait(pause)
            else:
                return


def describe(error: Exception) -> str:
    """Kind and message of an exception."""
    return f"{type(error).__name__}: {error}"
