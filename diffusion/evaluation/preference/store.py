"""Votes in one SQLite file: a vote that was acknowledged is on the disk, and is there once.

Each vote is a transaction of its own in a write-ahead log that is synchronised with the disk before the transaction
returns. The presentation is the key of its vote, so that a second click, a second tab or a repeated request adds
nothing. The file must be on a local disk: SQLite's write-ahead log does not work on network file systems.
"""

import contextlib
import json
import secrets
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from diffusion.errors import ConfigurationError, DataError
from diffusion.evaluation.preference.images import BLANK, NOISE, checksum
from diffusion.evaluation.preference.pairs import Kind, Material, are_sides_exchanged, drawer, repeated_pairs, schedule
from diffusion.files import atomic_path, unique_partial

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

ANSWERS = ("first", "neither", "second")
QUESTIONS = ("quality", "alignment")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a rater is asked to do."""

    seed: int
    """Of sides, order and checks."""

    num_pairs: int
    """Pairs per rater, at most as many as there are."""

    num_repeats: int
    """Pairs that are shown to the same rater again."""

    num_checks: int
    """Attention checks per rater."""


@dataclass(frozen=True, kw_only=True)
class Presentation:
    """One screen of one rater."""

    id: str
    position: int
    kind: Kind
    item: int
    prompt: str
    first: int
    """Number of the model whose image comes first, or NOISE or BLANK."""

    second: int


@dataclass(frozen=True, kw_only=True)
class Vote:
    """An answered presentation."""

    rater: str
    position: int
    kind: Kind
    pair: int | None
    """Number of the pair; None for a check."""

    prompt: str
    category: str
    first: int
    second: int
    quality: str
    """One of ANSWERS."""

    alignment: str
    shown_at: float
    """Seconds since 1970."""

    voted_at: float

    def preferred(self, question: str) -> int | None:
        """Number of the model that was chosen, None for "no difference"."""
        answer = self.quality if question == "quality" else self.alignment
        return {"first": self.first, "second": self.second, "neither": None}[answer]


class StudyFullError(Exception):
    """There are as many raters as there may be."""


class UnknownPresentationError(Exception):
    """A vote on something that was not shown to this rater."""


class Store:
    """The study and its votes. One object may be used by several threads, one file by several processes."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        connection.execute("CREATE TABLE IF NOT EXISTS secret (only INTEGER PRIMARY KEY CHECK (only = 0), key TEXT)")
        connection.execute("INSERT OR IGNORE INTO secret VALUES (0, ?)", (secrets.token_hex(32),))
        self.secret: str = connection.execute("SELECT key FROM secret").fetchone()[0]
        self._lock = threading.Lock()
        row = connection.execute("SELECT id, models, settings FROM study").fetchone()
        self.study_id: str = row[0]
        self.models: tuple[str, ...] = tuple(json.loads(row[1]))
        self.settings = Settings(**json.loads(row[2]))
        self._num_pairs = connection.execute("SELECT COUNT(*) FROM pairs").fetchone()[0]

    @classmethod
    def open(cls, path: Path) -> "Store":
        """Open a file that is there.

        Raises:
            ConfigurationError: there is none, or it holds no votes of this package.
        """
        if not path.is_file():
            raise ConfigurationError(f"{path}: there is no such file of votes; `serve` makes it")
        try:
            connection = _connect(path)
            row = connection.execute("SELECT format FROM study").fetchone()
        except sqlite3.DatabaseError as error:
            raise ConfigurationError(f"{path}: is no file of votes: {error}") from error
        if row is None or row[0] != _FORMAT:
            raise ConfigurationError(f"{path}: is no file of votes of format {_FORMAT}")
        return cls(connection)

    @classmethod
    def create_or_continue(cls, path: Path, material: Material, settings: Settings) -> "Store":
        """Begin a study, or go on with the one in the file.

        Raises:
            ConfigurationError: the file is of another study: models, prompts, or settings differ.
            DataError: an image is not the one that the study began with.
        """
        checksums = [[checksum(image) for image in item.images] for item in material.items]
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _create(path, material, settings, checksums)
        store = cls.open(path)
        store._compare(path, material, settings, checksums)
        return store

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    @property
    def num_presentations(self) -> int:
        """Screens per rater."""
        return len(self._schedule(""))

    def next_presentation(self, rater: str, *, max_raters: int | None = None) -> Presentation | None:
        """Give the rater's open presentation, or a new one; None when the rater has answered all.

        A new pair is one of those that this rater has seen the prompt of least often, and of these one of those that
        were shown least often to anybody.

        Args:
            rater: who asks.
            max_raters: raters that the study may have; None: any number.

        Raises:
            StudyFullError: this rater would be one too many.
        """
        with self._transaction() as connection:
            opened = connection.execute(
                "SELECT id FROM presentations p WHERE rater = ? AND NOT EXISTS "
                "(SELECT 1 FROM votes v WHERE v.presentation = p.id) ORDER BY position LIMIT 1",
                (rater,),
            ).fetchone()
            if opened:
                return self._presentation(rater, opened[0])
            position = self._count("presentations", rater)
            kinds = self._schedule(rater)
            if position == 0 and max_raters is not None:
                count = connection.execute("SELECT COUNT(DISTINCT rater) FROM presentations").fetchone()[0]
                if count >= max_raters:
                    raise StudyFullError
            if position >= len(kinds):
                return None
            identifier = secrets.token_urlsafe(12)
            kind = kinds[position]
            pair, item, first, second = self._chosen(rater, kind, kinds[:position].count(kind))
            connection.execute(
                "INSERT INTO presentations VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (identifier, rater, position, kind.value, pair, item, first, second, time.time()),
            )
            return self._presentation(rater, identifier)

    def presentation(self, rater: str, identifier: str) -> Presentation:
        """Give a presentation of this rater.

        Raises:
            UnknownPresentationError: it is none of this rater's.
        """
        with self._lock:
            return self._presentation(rater, identifier)

    def vote(self, rater: str, identifier: str, *, quality: str, alignment: str) -> bool:
        """Store a vote; when this returns, it is on the disk.

        Args:
            rater: who votes.
            identifier: of the presentation.
            quality: one of ANSWERS.
            alignment: one of ANSWERS.

        Returns:
            False if there was a vote on the presentation already, which stays as it is.

        Raises:
            UnknownPresentationError: the presentation is none of this rater's.
        """
        with self._transaction() as connection:
            self._presentation(rater, identifier)
            cursor = connection.execute(
                "INSERT INTO votes VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
                (identifier, rater, quality, alignment, time.time()),
            )
            return cursor.rowcount == 1

    def num_votes(self, rater: str) -> int:
        """How many presentations the rater has answered."""
        with self._lock:
            return self._count("votes", rater)

    def votes(self) -> list[Vote]:
        """All votes, rater by rater, in the order in which they were shown."""
        with self._lock:
            rows = self._connection.execute(
                "SELECT rater, position, kind, pair, prompt, category, first, second, quality, alignment, shown_at, "
                "voted_at FROM votes JOIN presentations p USING (rater) JOIN items USING (item) "
                "WHERE p.id = votes.presentation ORDER BY rater, position"
            ).fetchall()
        names = Vote.__dataclass_fields__
        return [Vote(**{**dict(zip(names, row, strict=True)), "kind": Kind(row[2])}) for row in rows]

    def _compare(self, path: Path, material: Material, settings: Settings, checksums: list[list[str]]) -> None:
        rows = self._connection.execute("SELECT prompt, category, checksums FROM items ORDER BY item").fetchall()
        prompts = [(item.prompt.text, item.prompt.category) for item in material.items]
        for what, stored, given in (
            ("models", list(self.models), list(material.models)),
            ("prompts", [row[:2] for row in rows], prompts),
            ("settings", asdict(self.settings), asdict(settings)),
        ):
            if stored != given:
                raise ConfigurationError(
                    f"{path}: its study has other {what}; give those it began with, or another file with --votes"
                )
        for item, row, given in zip(material.items, rows, checksums, strict=True):
            for image, old, new in zip(item.images, json.loads(row[2]), given, strict=True):
                if old != new:
                    raise DataError(f"{image}: is not the image that the study of {path} began with")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    def _schedule(self, rater: str) -> list[Kind]:
        s = self.settings
        return schedule(s.seed, rater, min(s.num_pairs, self._num_pairs), s.num_repeats, s.num_checks)

    def _count(self, table: str, rater: str) -> int:
        return self._connection.execute(f"SELECT COUNT(*) FROM {table} WHERE rater = ?", (rater,)).fetchone()[0]

    def _presentation(self, rater: str, identifier: str) -> Presentation:
        row = self._connection.execute(
            "SELECT id, position, kind, item, prompt, first, second FROM presentations JOIN items USING (item) "
            "WHERE rater = ? AND id = ?",
            (rater, identifier),
        ).fetchone()
        if row is None:
            raise UnknownPresentationError(identifier)
        names = Presentation.__dataclass_fields__
        return Presentation(**{**dict(zip(names, row, strict=True)), "kind": Kind(row[2])})

    def _chosen(self, rater: str, kind: Kind, number: int) -> tuple[int | None, int, int, int]:
        """Pair, item, first and second model of the rater's presentation of that kind with that number."""
        if kind == Kind.check:
            return self._chosen_check(rater, number)
        if kind == Kind.repeat:
            return self._chosen_repeat(rater, number)
        return self._chosen_pair(rater)

    def _chosen_pair(self, rater: str) -> tuple[int, int, int, int]:
        execute = self._connection.execute
        times = dict(execute("SELECT pair, COUNT(*) FROM presentations WHERE kind = 'pair' GROUP BY pair").fetchall())
        shown = execute(
            "SELECT pair, prompt FROM presentations JOIN items USING (item) WHERE rater = ? AND kind = 'pair'", (rater,)
        ).fetchall()
        own = {pair for pair, _ in shown}
        seen = Counter(prompt for _, prompt in shown)
        rows = execute("SELECT pair, item, a, b, prompt FROM pairs JOIN items USING (item) ORDER BY pair").fetchall()
        ranked = [((seen[row[4]], times.get(row[0], 0)), row[:4]) for row in rows if row[0] not in own]
        least = min(rank for rank, _ in ranked)
        candidates = [row for rank, row in ranked if rank == least]
        number = self._count("presentations", rater)
        pair, item, a, b = drawer(self.settings.seed, rater, number, "pair").choice(candidates)
        return (pair, item, b, a) if are_sides_exchanged(self.settings.seed, rater, pair) else (pair, item, a, b)

    def _chosen_repeat(self, rater: str, number: int) -> tuple[int, int, int, int]:
        s = self.settings
        which = repeated_pairs(s.seed, rater, min(s.num_pairs, self._num_pairs), s.num_repeats)[number]
        pair, item, first, second = self._connection.execute(
            "SELECT pair, item, first, second FROM presentations WHERE rater = ? AND kind = 'pair' "
            "ORDER BY position LIMIT 1 OFFSET ?",
            (rater, which),
        ).fetchone()
        return pair, item, second, first

    def _chosen_check(self, rater: str, number: int) -> tuple[None, int, int, int]:
        draw = drawer(self.settings.seed, rater, number, "check")
        item = draw.randrange(self._connection.execute("SELECT COUNT(*) FROM items").fetchone()[0])
        sides = [draw.randrange(len(self.models)), draw.choice([NOISE, BLANK])]
        draw.shuffle(sides)
        return None, item, sides[0], sides[1]


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=60, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def _create(path: Path, material: Material, settings: Settings, checksums: list[list[str]]) -> None:
    """Write the study, atomically."""
    with atomic_path(path, partial=unique_partial(path)) as partial:
        _write_study(partial, material, settings, checksums)


def _write_study(path: Path, material: Material, settings: Settings, checksums: list[list[str]]) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA synchronous = FULL")
    connection.executescript("BEGIN;" + _TABLES)
    connection.execute(
        "INSERT INTO study VALUES (0, ?, ?, ?, ?)",
        (_FORMAT, secrets.token_hex(4), json.dumps(material.models), json.dumps(asdict(settings))),
    )
    items = [
        (i, item.prompt.text, item.prompt.category, json.dumps(checksums[i])) for i, item in enumerate(material.items)
    ]
    connection.executemany("INSERT INTO items VALUES (?, ?, ?, ?)", items)
    pairs = [(i, *pair) for i, pair in enumerate(material.pairs)]
    connection.executemany("INSERT INTO pairs VALUES (?, ?, ?, ?)", pairs)
    connection.execute("COMMIT")
    connection.close()
