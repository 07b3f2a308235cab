"""Ingestion: a data set that grows while images are uploaded.

    notifications or polls --size or interval--> look --poll--> append what has stayed the same --> delete messages

What is new is what the sources hold and the data set does not: a message only says that it is time to look. So nothing
depends on which messages come, how often, or whether the process is killed. A growth is that of `prepare`, which
continues after a kill. A message is deleted when its objects are in the finished data set, or in the list of dead
letters.
"""

import functools
import json
import logging
import math
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple, NoReturn

from diffusion import storage
from diffusion.config.loading import to_dict
from diffusion.errors import BusyError, ConfigurationError, DataError, MachineError
from diffusion.formats.data_set import DEAD_LETTERS, METADATA, SCAN
from diffusion.preparation.config import PrepareConfig
from diffusion.preparation.engine import Workers, run
from diffusion.preparation.layout import file_numbers
from diffusion.preparation.notifications import Message, Queue
from diffusion.preparation.prepare import check_settings, discard_unfinished, prepare
from diffusion.preparation.records import NothingKeptError, Partition, SettingsError
from diffusion.preparation.scan import Scan, Scanner, ScanTask, Taken, local_metadata, open_configured
from diffusion.preparation.sources import Source
from diffusion.preparation.sources.detection import is_empty, source_config
from diffusion.preparation.sources.reading import file_of
from diffusion.storage import T, UnavailableError

logger = logging.getLogger(__name__)

_MAX_MESSAGES = 50_000
"""Messages that are held at a time; SQS allows 120,000."""

_BODY_CHARACTERS = 1_000
"""Characters of a message in the list of dead letters."""


class Arrival(NamedTuple):
    """A new file of a source, or a part of a table, with what belongs to it."""

    uri: str
    source: int
    """Number of the source."""
    file: str
    """Name as in a `Location`."""
    version: str
    partition: Partition
    problem: str = ""
    """Why it cannot be used, where the listing says so."""


class Ingestion:
    """Follows the sources of a preparation.

    Args:
        config: the preparation.
        queue: notifications of the sources' buckets; None lists the sources instead, every `poll` seconds.
        interval: seconds from the first arrival to the append.
        size: bytes of arrivals that are appended earlier.
        poll: seconds between two looks; a file is taken when it was the same in both.
        attempts: failures of an object, or deliveries of a message, after which it is a dead letter.
        report: write the report of the preparation after each growth.
    """

    def __init__(
        self,
        config: PrepareConfig,
        queue: Queue | None = None,
        *,
        interval: float,
        size: float,
        poll: float,
        attempts: int,
        report: bool = True,
    ) -> None:
        if queue is not None and not any(source_config(entry).path.startswith("s3://") for entry in config.sources):
            raise ConfigurationError("--queue: no source is in S3; name the bucket (s3://BUCKET/PREFIX), or poll")
        self._config, self._queue, self._report = config, queue, report
        self._interval, self._size, self._poll, self._attempts = interval, size, poll, attempts
        self._sources: Sequence[Source] = ()
        self._failures = Counter[tuple[str, str]]()
        self._changed: set[str] = set()
        self._unfit: set[str] = set()
        self._dead_letters = _read_dead_letters(config.out)
        self._pause = threading.Event()

    def run(self) -> NoReturn:
        """Follow the sources until the process ends.

        Raises:
            UserError: it cannot go on; what fails by itself is a dead letter instead.
        """
        check_settings(self._config)
        self.complete()
        messages: list[Message] = []
        while True:
            self.grow(messages)
            messages = self._gather()

    def grow(self, messages: Iterable[Message] = ()) -> None:
        """Look, append what is new and has stayed the same, and delete the messages that are dealt with."""
        arrivals = self._look()
        if arrivals:
            self._pause.wait(self._poll)
            self._append(arrivals)
        self._resolve(messages)

    def complete(self) -> None:
        """Complete a preparation that was interrupted.

        A growth that fails is rolled back, and listed again; after a failure of the machine, only if it is not scanned;
        with other settings never.
        """
        out = self._config.out
        if not storage.exists(storage.join(out, SCAN)) or not Scan.read(out).partitions:
            return
        try:
            self._prepare({})
        except (UnavailableError, SettingsError):
            raise
        except (DataError, MachineError) as error:
            stays = isinstance(error, MachineError) and _is_scanned(out)  # Captions may have cost money.
            if stays or not self._when_free(discard_unfinished, out):
                raise
            logger.warning("an interrupted growth is begun again: %s", error)

    def _prepare(self, only: Taken) -> None:
        try:
            self._when_free(prepare, self._config, only=only, report=self._report, progress=True)
        except NothingKeptError as error:
            logger.warning("%s; the data set begins with the first image that is kept", error)

    def _when_free(self, change: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Change the data set, after waiting for another writer, such as a takedown."""
        while True:
            try:
                return change(*arguments, **options)
            except BusyError as error:
                logger.warning("%s", error)
                self._pause.wait(self._poll)

    def _gather(self) -> list[Message]:
        """Wait until enough has come, or the first of it has waited long enough."""
        messages: dict[str, Message] = {}
        first = math.inf
        while True:
            if self._queue is not None:
                received = self._queue.receive(self._interval, visibility=2 * self._interval)
                messages |= {one.id: one for one in received}
                sizes = [sum(one.objects.values()) for one in messages.values()]
            else:
                self._pause.wait(self._poll)
                sizes = [one.partition.num_bytes for one in self._look()]
            first = min(first, time.monotonic()) if sizes else math.inf
            is_due = time.monotonic() - first >= self._interval
            if is_due or sum(sizes) >= self._size or len(messages) >= _MAX_MESSAGES:
                return list(messages.values())

    def _look(self) -> list[Arrival]:
        """List what is new, but for dead letters."""
        self._sources = _open_sources(self._config)
        arrivals, changed = list_arrivals(self._config, self._sources)
        if more := sorted(changed - self._changed):
            logger.warning("%d files have changed since they were prepared (such as %s); the data set keeps the former "
                           "ones; upload the new ones under other names", len(more), ascii(more[0]))  # fmt: skip
        self._changed, self._unfit = changed, {one.uri for one in arrivals if one.problem}
        dead = {(one.get("object"), one.get("version", "")) for one in self._dead_letters}
        return [one for one in arrivals if (one.uri, one.version) not in dead]

    def _append(self, arrivals: list[Arrival]) -> None:
        """Let the data set grow by what is as it was; files that fail are tried again the next time."""
        arrivals = self._without(arrivals, {(one.uri, one.version): one.problem for one in arrivals if one.problem})
        suspects = [one for one in arrivals if (one.uri, one.version) in self._failures]
        arrivals = self._without(arrivals, find_failing(self._config, self._sources, suspects))
        is_repeated = False
        while arrivals:
            only: dict[int, dict[str, str]] = {}
            for one in arrivals:
                only.setdefault(one.source, {})[one.file] = one.version
            try:
                self._prepare(only)
                return
            except (UnavailableError, SettingsError):
                raise
            except (DataError, MachineError) as error:
                failing = find_failing(self._config, self._sources, arrivals)
                if not failing and is_repeated:
                    raise
                if failing or isinstance(error, DataError):
                    self._when_free(discard_unfinished, self._config.out)
                is_repeated = not failing  # Files may have changed meanwhile; then they are left out.
                arrivals = self._without(arrivals, failing)

    def _without(self, arrivals: list[Arrival], failing: dict[tuple[str, str], str]) -> list[Arrival]:
        """Count failures; return the other arrivals."""
        self._failures.update(failing.keys())
        for (uri, version), reason in failing.items():
            count = self._failures[uri, version]
            logger.warning("%s fails (%d of %d): %s", ascii(uri), count, self._attempts, reason)
            if count >= self._attempts:
                self._add_dead_letter({"object": uri, "version": version, "reason": reason})
        return [one for one in arrivals if (one.uri, one.version) not in failing]

    def _resolve(self, messages: Iterable[Message]) -> None:
        """Delete the messages whose objects are in the data set, and those that are dead letters."""
        named = {uri for message in messages for uri in message.objects}
        dead = {one["object"] for one in self._dead_letters if "object" in one}
        listed = dead.union(*(one.get("objects", ()) for one in self._dead_letters))
        missing = find_missing(self._config, self._sources, named | listed) | self._unfit
        if not listed <= missing:  # The list must not name an image that can be taken down.
            letters = (_without_objects(one, listed - missing) for one in self._dead_letters)
            self._dead_letters = [one for one in letters if one is not None]
            _write_dead_letters(self._config.out, self._dead_letters)
        done = []
        for message in messages:
            absent = sorted(message.objects.keys() & missing)
            problem = message.problem or (_absence(absent) if absent else "")
            if problem and message.num_deliveries < self._attempts:
                continue  # It is delivered again.
            if problem and not (absent and dead.issuperset(absent)):
                body = message.body[:_BODY_CHARACTERS] if message.problem else None
                self._add_dead_letter({"message": message.id, "objects": absent, "body": body, "reason": problem})
            done.append(message)
        if self._queue is not None:
            self._queue.delete(done)

    def _add_dead_letter(self, letter: dict[str, Any]) -> None:
        """Add an entry to the list of dead letters."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._dead_letters.append({"time": now, **{name: value for name, value in letter.items() if value}})
        _write_dead_letters(self._config.out, self._dead_letters)


def _open_sources(config: PrepareConfig) -> Sequence[Source]:
    """Open the sources; none while one of them holds nothing yet, which leaves its kind open."""
    try:
        return open_configured(config, as_scanned=True)
    except DataError:
        if storage.exists(storage.join(config.out, SCAN)) or not any(map(is_empty, config.sources)):
            raise
        return ()


def list_arrivals(config: PrepareConfig, sources: Sequence[Source]) -> tuple[list[Arrival], set[str]]:
    """List the files that were not scanned yet, and the URIs of those that have changed since they were.

    A source that cannot be listed at all is an arrival with a problem.
    """
    scan = _read_scan(config, sources)
    scanned, arrivals, changed = scan.files(), list[Arrival](), set[str]()
    for index, source in enumerate(sources):
        with local_metadata(config, scan, index) as known:
            try:
                found = source.partitions(known)
            except DataError as error:
                arrivals.append(Arrival(source.root, index, "", "", Partition(), str(error)))
                continue
            for file, version, error in found.problems:
                arrivals.append(Arrival(source.uri(file), index, file, version, Partition(), str(error)))
            changed.update(source.uri(file) for one in found.changed for file, *_ in _split(one))
            for partition in found.new:
                for file, version, single in _split(partition):
                    if version and (index, file, version) not in scanned:
                        arrivals.append(Arrival(source.uri(file), index, file, version, single))
    return arrivals, changed


def _read_scan(config: PrepareConfig, sources: Sequence[Source]) -> Scan:
    return Scan.read(config.out) if storage.exists(storage.join(config.out, SCAN)) else Scan(sources, [])


def _is_scanned(out: str) -> bool:
    return {one.number for one in Scan.read(out).partitions} <= file_numbers(storage.join(out, METADATA))


def _split(partition: Partition) -> Iterator[tuple[str, str, Partition]]:
    """Yield each file of a partition with its version and a partition of its own.

    An image that a caption names and that does not exist yet has no version.
    """
    if not partition.items:
        yield partition.file, partition.version, partition
    for item in partition.items:
        values = json.loads(item)
        yield values["file"], values["version"], replace(partition, items=(item,), num_bytes=values["size"])


def find_missing(config: PrepareConfig, sources: Sequence[Source], uris: Iterable[str]) -> set[str]:
    """Find the objects that the data set should hold and does not: images, or tars and tables, and what is elsewhere.

    Captions are parts of images. What was rejected or taken down is not missing.
    """
    import duckdb

    scan, missing = _read_scan(config, sources), set[str]()
    wanted: dict[int, dict[str, str]] = {}
    for uri in uris:
        places = [(index, one) for index, one in enumerate(sources) if f"{uri}/".startswith(f"{one.root}/")]
        missing |= set() if places else {uri}
        for index, source in places:
            name = uri.removeprefix(f"{source.root}/")
            if source.is_file or source.takes([name]):
                wanted.setdefault(index, {})["" if source.is_file else file_of(name)] = uri
    for index, files in wanted.items():
        recorded = {file for source, file, _ in scan.files() if source == index}
        with local_metadata(config, scan, index) as known, duckdb.connect() as database:
            if known:
                # One row per name of a file: a join by `file IN (...)` would compare each name with each row.
                query = """
                SELECT name FROM (
                    SELECT name, unnest([name, '~' || md5(name)]) AS file FROM (SELECT unnest(?) AS name)
                ) SEMI JOIN read_parquet(?, hive_partitioning = false) USING (file)"""
                recorded.update(name for (name,) in database.execute(query, [list(files), known]).fetchall())
        missing.update(uri for file, uri in files.items() if file not in recorded)
    return missing


def find_failing(
    config: PrepareConfig, sources: Sequence[Source], arrivals: Sequence[Arrival]
) -> dict[tuple[str, str], str]:
    """Find the arrivals that cannot be scanned, by halves, each in processes of its own.

    Returns:
        The reason for each, by URI and version.
    """
    if not arrivals:
        return {}
    with tempfile.TemporaryDirectory(prefix="failing-", dir=config.scratch) as folder:
        tasks = [
            ScanTask(sources[one.source], replace(one.partition, number=number)) for number, one in enumerate(arrivals)
        ]
        try:
            # In processes: a file may end the one that reads it.
            for _ in run(Workers(number=2), functools.partial(Scanner, folder, to_dict(config.limits)), tasks):
                pass
            return {}
        except UnavailableError:
            raise
        except (DataError, MachineError) as error:
            if folder in str(error):  # It cannot be written to.
                raise
            if len(arrivals) == 1:
                return {(arrivals[0].uri, arrivals[0].version): str(error)}
    half = len(arrivals) // 2
    return find_failing(config, sources, arrivals[:half]) | find_failing(config, sources, arrivals[half:])


def _absence(objects: Sequence[str]) -> str:
    return f"{objects[0]} is not in the data set"


def _without_objects(letter: dict[str, Any], known: set[str]) -> dict[str, Any] | None:
    """Take objects out of a dead letter; None if it names no others."""
    objects = letter.get("objects", [letter.get("object")])
    left = [uri for uri in objects if uri not in known]
    if left == objects:
        return letter
    return {**letter, "objects": left, "reason": _absence(left)} if left else None


def _read_dead_letters(out: str) -> list[dict[str, Any]]:
    uri = storage.join(out, DEAD_LETTERS)
    if not storage.exists(uri):
        return []
    try:
        return [json.loads(line) for line in storage.read(uri).splitlines() if line.strip()]
    except ValueError as error:
        raise DataError(f"{storage.shown(uri)} is damaged ({error}); correct the line, or remove the file") from error


def _write_dead_letters(out: str, letters: Sequence[dict[str, Any]]) -> None:
    storage.write(storage.join(out, DEAD_LETTERS), "".join(json.dumps(one) + "\n" for one in letters).encode())
