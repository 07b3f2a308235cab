"""How the files of a stream come to this machine: attempts and pauses, sizes and hashes.

Like `shards.py`, this file touches private parts of Streaming: those of `Stream`.
"""

import logging
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streaming import Stream
from streaming.base.format import Reader

from diffusion.datasets.locations import StreamLocation
from diffusion.datasets.mds import INDEX
from diffusion.datasets.storage_errors import fetch_errors
from diffusion.datasets.stores import shown
from diffusion.datasets.tiers import TierCounts, TierMeter
from diffusion.errors import DataError

logger = logging.getLogger(__name__)

LONGEST_PAUSE = 30.0
"""Seconds between two attempts, at most."""

HOPELESS = (FileNotFoundError, PermissionError, ImportError)
"""Failures that another attempt does not cure."""


@dataclass(frozen=True, kw_only=True)
class Downloads:
    """How files are fetched."""

    attempts: int = 8
    """Attempts for each file; the pauses between them grow from 1 s to `LONGEST_PAUSE`."""

    timeout: float = 30.0
    """Seconds without an answer after which an attempt has failed."""

    validate_hash: str | None = None
    """Hash that shards are checked against."""


class FetchedStream(Stream):
    """A stream whose files are whole once they are here.

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
            validate_hash=downloads.validate_hash,
        )
        self._downloader = location.store.downloader(location.remote)
        self._sizes: dict[str, int] = {}
        self._meter = meter

    def fetch_index(self) -> None:
        """Fetch the index, if it is not here.

        Raises:
            DataError: it cannot be fetched.
        """
        target = Path(self.local, self.split, INDEX)
        if self.remote is None or target.exists():
            return
        partial = target.with_name(f"{INDEX}.tmp")
        partial.unlink(missing_ok=True)
        try:
            self._download_file(INDEX, partial.name)
        except fetch_errors() as error:
            raise DataError(
                f"{shown(self.remote)}/{INDEX} cannot be fetched: {describe(error)}. Check data.remote, and that this "
                "machine can reach it"
            ) from error
        partial.replace(target)

    def release(self) -> None:
        """Close the connection: loader workers that inherited it by fork would share it."""
        self._downloader.clean_up()

    def prepare_shard(self, shard: Reader) -> int:
        """Have a shard here.

        Returns:
            By how many bytes the cache has grown.

        Raises:
            ValueError: its hash is wrong, twice.
        """
        for info in (info for pair in shard.file_pairs for info in pair if info is not None):
            self._sizes[info.basename] = info.bytes
        try:
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

    def remove(self, shard: Reader) -> None:
        """Remove the files of a shard from the cache."""
        assert self.remote is not None
        for info in (info for pair in shard.file_pairs for info in pair if info is not None):
            Path(self.local, self.split, info.basename).unlink(missing_ok=True)

    def _download_file(self, from_basename: str, to_basename: str | None = None) -> str:
        """Fetch a file in several attempts; return its path."""
        assert self.remote is not None
        remote = "/".join(part for part in (self.remote.rstrip("/"), self.split, from_basename) if part)
        local = Path(self.local, self.split, to_basename or from_basename)

        def fetch() -> None:
            self._downloader.download(remote, str(local), self.download_timeout)
            expected = self._sizes.get(from_basename)
            if expected is not None and (size := local.stat().st_size) != expected:
                local.unlink()
                raise OSError(f"{size} bytes came instead of {expected}")
            if expected is not None:
                self._meter.add(TierCounts(fetched_shards=1, fetched_bytes=expected))

        self._attempt(fetch, shown(remote))
        return str(local)

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
