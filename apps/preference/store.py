"""A study in one SQLite file: what each rater is shown, and the votes.

An acknowledged vote is on the disk, and counted once: each vote is a transaction of its own in a write-ahead log that
is synchronised with the disk before the transaction returns, and the presentation is the key of its vote. The file must
be on a local disk: SQLite's write-ahead log does not work on network file systems.
"""

import contextlib
import json
import random
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

import pandas as pd

from apps.preference.images import BLANK, NOISE, ImageSet
from diffusion.errors import ConfigurationError, DataError, explained_writes
from diffusion.files import atomic_path, hash_file, unique_partial

_FORMAT = 1
_TABLES = """
CREATE TABLE study (only INTEGER PRIMARY KEY CHECK (only = 0), format INTEGER NOT NULL, id TEXT NOT NULL,
    models TEXT NOT NULL, settings TEXT NOT NULL);
CREATE TABLE items (item INTEGER PRIMARY KEY, prompt TEXT NOT NULL, category TEXT NOT NULL, checksums TEXT NOT NULL);
CREATE TABLE pairs (pair INTEGER PRIMARY KEY, item INTEGER NOT NULL REFERENCES items, a INTEGER NOT NULL,
    b INTEGER NOT NULL);
CREATE TABLE presentations (id TEXT PRIMARY KEY, rater TEXT NOT NULL, position INTEGER NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('pair', 'repeat', 'check')), pair INTEGER REFERENCES pairs,
    item INTEGER NOT NULL REFERENCES items, first INTEGER NOT NULL, second INTEGER NOT NULL, shown_at REAL NOT NULL,
    UNIQUE (rater, position), UNIQUE (rater, id));
CREATE INDEX presentations_of_pair ON presentations (kind, pair);
CREATE TABLE votes (presentation TEXT PRIMARY KEY, rater TEXT NOT NULL,
    quality TEXT NOT NULL CHECK (quality IN ('first', 'second', 'neither')),
    alignment TEXT NOT NULL CHECK (alignment IN ('first', 'second', 'neither')), voted_at REAL NOT NULL,
    UNIQUE (rater, presentation), FOREIGN KEY (rater, presentation) REFERENCES presentations (rater, id));
"""

_NEW_PAIRS = """
WITH seen AS (SELECT prompt, COUNT(*) AS times FROM presentations JOIN items USING (item)
        WHERE rater = :rater AND kind = 'pair' GROUP BY prompt),
    shown AS (SELECT pair, COUNT(*) AS times FROM presentations WHERE kind = 'pair' GROUP BY pair)
SELECT pairs.pair, pairs.item, a, b, IFNULL(seen.times, 0) AS by_rater, IFNULL(shown.times, 0) AS by_all
    FROM pairs JOIN items USING (item) LEFT JOIN seen USING (prompt) LEFT JOIN shown USING (pair)
    WHERE pairs.pair NOT IN (SELECT pair FROM presentations WHERE rater = :rater AND kind = 'pair')
    ORDER BY by_rater, by_all, pairs.pair
"""
"""Pairs that are new to a rater; those that come first are the least seen ones."""

ANSWERS = ("first", "neither", "second")
QUESTIONS = ("quality", "alignment")

_REPEAT_DISTANCE = 5
"""Least distance of a repeat from the first showing, in pairs, where there are enough pairs."""


class ScreenKind(str, Enum):
    """Purpose of a presentation."""

    pair = "pair"
    repeat = "repeat"
    """A pair that the same rater has answered, with its sides exchanged."""

    check = "check"
    """Attention check: an image beside noise or a blank one."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Screens of each rater."""

    seed: int
    """Seed of sides, order and checks."""

    num_pairs: int
    """Pairs per rater, at most all of them."""

    num_repeats: int
    """Pairs shown to the same rater again, at most half of the pairs."""

    num_checks: int
    """Attention checks per rater."""


@dataclass(frozen=True, kw_only=True)
class Presentation:
    """One screen of one rater."""

    id: str
    kind: ScreenKind
    item: int
    prompt: str
    first: int
    """Number of the model of the first image, or NOISE or BLANK."""

    second: int


class Store:
    """The study and its votes in an existing file. Several threads may use one object, several processes one file.

    Raises:
        ConfigurationError: there is no such file, or it is no study.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ConfigurationError(f"{path}: no such file of votes; `serve` makes it")
        self.path, self._lock = path, threading.RLock()
        self._connection = sqlite3.connect(path, timeout=60, isolation_level=None, check_same_thread=False)
        execute = self._connection.execute
        try:
            study = execute("SELECT id, models, settings FROM study WHERE format = ?", (_FORMAT,)).fetchone()
            self.study_id: str = study[0]
            execute("PRAGMA journal_mode = WAL")  # It changes the file, which is a study by now.
            execute("PRAGMA synchronous = FULL")
            execute("PRAGMA foreign_keys = ON")
        except (sqlite3.DatabaseError, TypeError) as error:
            raise ConfigurationError(f"{path}: not a file of votes of format {_FORMAT}: {error}") from error
        self.models: tuple[str, ...] = tuple(json.loads(study[1]))
        self.settings = Settings(**json.loads(study[2]))
        self._num_pairs = min(self.settings.num_pairs, execute("SELECT COUNT(*) FROM pairs").fetchone()[0])

    @classmethod
    def create_or_continue(cls, path: Path, images: ImageSet, settings: Settings) -> "Store":
        """Begin a study, or continue the one in the file.

        Raises:
            ConfigurationError: the file has another study: models, prompts, or settings differ; or it was deleted.
            DataError: an image has changed since the study began.
            MachineError: the file cannot be written.
        """
        checksums = [[hash_file(image, "xxh3_128") for image in item.images] for item in images.items]
        if not path.exists():
            log = path.with_name(f"{path.name}-wal")
            if log.exists():  # SQLite would put its votes into the new study.
                raise ConfigurationError(
                    f"{log} has votes of a deleted study: remove it and {path.name}-shm, or restore {path.name}"
                )
            with explained_writes(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_path(path, partial=unique_partial(path)) as partial:
                    partial.touch()  # SQLite's error has no reason.
                    _create(partial, images, settings, checksums)
        store = cls(path)
        store._check_same_study(images, settings, checksums)
        return store

    def _check_same_study(self, images: ImageSet, settings: Settings, checksums: list[list[str]]) -> None:
        rows = self._connection.execute("SELECT prompt, category, checksums FROM items ORDER BY item").fetchall()
        stored = {"models": self.models, "prompts": [row[:2] for row in rows], "settings": self.settings}
        prompts = [(item.prompt, item.category) for item in images.items]
        given = {"models": images.models, "prompts": prompts, "settings": settings}
        if different := [name for name in stored if stored[name] != given[name]]:
            raise ConfigurationError(
                f"{self.path}: its study has other {' and '.join(different)}; give those it began with, or another "
                "file with --votes"
            )
        began = [json.loads(row[2]) for row in rows]
        if began != checksums and sorted(began) == sorted(checksums):
            raise ConfigurationError(
                f"{self.path} was begun by an earlier version, which matched unpadded names with wrong prompts: begin "
                "another study with --votes"
            )
        for item, old, new in zip(images.items, began, checksums, strict=True):
            changed = [image for image, a, b in zip(item.images, old, new, strict=True) if a != b]
            if changed:
                raise DataError(f"{changed[0]}: changed since the study of {self.path} began")

    def read_secret(self) -> str:
        """Read the secret that signs links and cookies, or create it; without its file, earlier links are invalid.

        It has a file of its own beside the votes, because these may be passed on.

        Raises:
            ConfigurationError: the file is empty, or other users may read it.
        """
        path = self.path.with_name(f"{self.path.name}.secret")
        if not path.exists():
            with atomic_path(path, partial=unique_partial(path), exist_ok=False) as partial:
                partial.touch(mode=0o600)
                partial.write_text(secrets.token_hex(32))
        secret = path.read_text(encoding="utf-8").strip()
        if not secret or path.stat().st_mode & 0o077:
            raise ConfigurationError(f"{path} must hold a secret that only you can read: chmod 600, or remove it")
        return secret

    def close(self) -> None:
        """Close the file; the last process that does so moves the votes from the write-ahead log into it."""
        with self._lock:
            self._connection.close()

    @property
    def num_presentations(self) -> int:
        """Screens per rater."""
        return len(self._schedule(""))

    def next_presentation(self, rater: str) -> Presentation | None:
        """Open presentation of a rater, or a new one; None when the rater has answered all.

        A new pair is one whose prompt this rater has seen least often, and of these, one that was shown least often to
        anybody.
        """
        with self._transaction():
            opened = self._connection.execute(
                "SELECT id FROM presentations WHERE rater = ? AND id NOT IN (SELECT presentation FROM votes)", (rater,)
            ).fetchone()
            if opened:
                return self.presentation(rater, opened[0])
            position, kinds = self._count("presentations", rater), self._schedule(rater)
            if position >= len(kinds):
                return None
            identifier, kind = secrets.token_urlsafe(12), kinds[position]
            pair, item, first, second = self._choose(rater, position, kind, kinds[:position].count(kind))
            self._connection.execute(
                "INSERT INTO presentations VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (identifier, rater, position, kind.value, pair, item, first, second, time.time()),
            )
            return self.presentation(rater, identifier)

    def presentation(self, rater: str, identifier: str) -> Presentation:
        """A presentation of this rater; a KeyError if it was not shown to this rater."""
        with self._lock:
            row = self._connection.execute(
                "SELECT kind, item, prompt, first, second FROM presentations JOIN items USING (item) "
                "WHERE rater = ? AND id = ?",
                (rater, identifier),
            ).fetchone()
        if row is None:
            raise KeyError(identifier)
        kind, item, prompt, first, second = row
        return Presentation(id=identifier, kind=ScreenKind(kind), item=item, prompt=prompt, first=first, second=second)

    def vote(self, rater: str, identifier: str, *, quality: str, alignment: str) -> bool:
        """Store a vote, with one of ANSWERS to each question; when this returns, it is on the disk.

        Returns:
            False if the presentation has a vote already, which stays.

        Raises:
            KeyError: the presentation was not shown to this rater.
        """
        with self._transaction():
            self.presentation(rater, identifier)
            cursor = self._connection.execute(
                "INSERT INTO votes VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
                (identifier, rater, quality, alignment, time.time()),
            )
            return cursor.rowcount == 1

    def num_votes(self, rater: str) -> int:
        """Number of presentations that the rater has answered."""
        with self._lock:
            return self._count("votes", rater)

    def votes(self) -> pd.DataFrame:
        """All votes, rater by rater, in the order of presentation.

        Returns:
            Columns `rater`, `position`, `kind`, `pair` (missing for a check), `prompt`, `category`, `first`, `second`
            (numbers of models, or NOISE or BLANK), an answer for each question, `shown_at` and `voted_at` (Unix time).
        """
        with self._lock:
            votes = pd.read_sql_query(
                "SELECT rater, position, kind, pair, prompt, category, first, second, quality, alignment, shown_at, "
                "voted_at FROM votes JOIN presentations p USING (rater) JOIN items USING (item) "
                "WHERE p.id = votes.presentation ORDER BY rater, position",
                self._connection,
            )
        return votes.astype({"pair": "Int64"})

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock, self._connection:  # Commits, or rolls back after an exception.
            self._connection.execute("BEGIN IMMEDIATE")
            yield

    def _schedule(self, rater: str) -> list[ScreenKind]:
        settings = self.settings
        return schedule(settings.seed, rater, self._num_pairs, settings.num_repeats, settings.num_checks)

    def _count(self, table: str, rater: str) -> int:
        return self._connection.execute(f"SELECT COUNT(*) FROM {table} WHERE rater = ?", (rater,)).fetchone()[0]

    def _choose(self, rater: str, position: int, kind: ScreenKind, number: int) -> tuple[int | None, int, int, int]:
        """Pair, item, first and second model of a presentation at a position, with a number among those of its kind.

        A pair is new to the rater. A check has no pair, and NOISE or BLANK in place of a model.
        """
        seed, execute = self.settings.seed, self._connection.execute
        if kind is ScreenKind.pair:
            rows = execute(_NEW_PAIRS, {"rater": rater}).fetchall()
            candidates = [row[:4] for row in rows if row[4:] == rows[0][4:]]
            pair, item, a, b = generator(seed, rater, position, "pair").choice(candidates)
            is_exchanged = generator(seed, rater, pair, "sides").random() < 0.5
            return (pair, item, b, a) if is_exchanged else (pair, item, a, b)
        if kind is ScreenKind.repeat:
            return execute(
                "SELECT pair, item, second, first FROM presentations WHERE rater = ? AND kind = 'pair' "
                "ORDER BY position LIMIT 1 OFFSET ?",
                (rater, repeated_pairs(seed, rater, self._num_pairs, self.settings.num_repeats)[number]),
            ).fetchone()
        draw = generator(seed, rater, number, "check")
        item = draw.randrange(execute("SELECT COUNT(*) FROM items").fetchone()[0])
        sides = [draw.randrange(len(self.models)), draw.choice([NOISE, BLANK])]
        draw.shuffle(sides)
        return None, item, sides[0], sides[1]


def schedule(seed: int, rater: str, num_pairs: int, num_repeats: int, num_checks: int) -> list[ScreenKind]:
    """Order of the kinds that a rater is shown.

    Repeats, at most half as many as pairs, come in the second half; checks are spread evenly, each at a random position
    of its part.
    """
    draw = generator(seed, rater, "schedule")
    num_first = num_pairs - num_pairs // 2
    second = [ScreenKind.pair] * (num_pairs // 2) + [ScreenKind.repeat] * min(num_repeats, num_pairs // 2)
    draw.shuffle(second)
    kinds = [ScreenKind.pair] * num_first + second
    length = len(kinds)
    for k in reversed(range(num_checks)):
        kinds.insert(draw.randint(k * length // num_checks, (k + 1) * length // num_checks), ScreenKind.check)
    return kinds


def repeated_pairs(seed: int, rater: str, num_pairs: int, num_repeats: int) -> list[int]:
    """Numbers of the rater's pairs, in the order of presentation, that the repeats show again, all different."""
    num_repeats = min(num_repeats, num_pairs // 2)
    candidates = range(max(num_repeats, num_pairs - num_pairs // 2 - _REPEAT_DISTANCE))
    return generator(seed, rater, "repeats").sample(candidates, num_repeats)


def generator(seed: int, *purpose: object) -> random.Random:
    """Generator of random numbers that depend on the seed and the purpose only."""
    return random.Random("/".join(str(word) for word in (seed, *purpose)))


def _create(path: Path, images: ImageSet, settings: Settings, checksums: list[list[str]]) -> None:
    """Write a study without votes; the file is synchronised before it gets its name."""
    study = (_FORMAT, secrets.token_hex(4), json.dumps(images.models), json.dumps(asdict(settings)))
    items = [(i, item.prompt, item.category, json.dumps(checksums[i])) for i, item in enumerate(images.items)]
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(_TABLES)
        connection.execute("INSERT INTO study VALUES (0, ?, ?, ?, ?)", study)
        connection.executemany("INSERT INTO items VALUES (?, ?, ?, ?)", items)
        connection.executemany("INSERT INTO pairs VALUES (?, ?, ?, ?)", [(i, *p) for i, p in enumerate(images.pairs)])
        connection.commit()
