"""Rows of a benchmark: measured one by one in a process of their own, and written as soon as each is there.

A file of rows holds one JSON object per line: a note that a row was started (`started`), its result (`result`) or what
went wrong (`error`). So a benchmark that is killed continues with the rows that it lacks. A process that fails, whether
by an exception, a signal or a hang, is followed by another one for the rest: what it left in the GPU's memory goes
with it, and so does a CUDA context that no longer answers.
"""

import ctypes
import datetime
import fnmatch
import json
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_ATTEMPTS = 2
"""Starts of a row; one whose process ended each time has failed."""

MIN_TIMEOUT = 240
"""Seconds that a row has at least before its process is ended."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement."""

    name: str
    """Identity within a file of rows, such as `trainer/256/64`."""

    kind: str
    """What its result holds; tables are made by kind."""

    measure: Callable[..., dict[str, Any]]
    """Takes the parameters; returns what json can write."""

    parameters: dict[str, Any] = field(default_factory=dict)
    """Equal to itself after json. A row that is there with other parameters is measured again."""

    seconds: float = 30.0
    """Expected duration. A row that would end after the deadline is left for the next call; one that takes three times
    as long (and at least `MIN_TIMEOUT`) is ended."""

    is_alone: bool = False
    """Whether it needs a process of its own, because of settings that only a fresh process takes on."""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a file of rows; a last one that a kill cut off is dropped."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def finished(lines: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The finished rows by name; the last one where a name comes twice."""
    return {line["name"]: line for line in lines if "started" not in line}


def attempts(lines: Iterable[dict[str, Any]]) -> Counter[str]:
    """Starts of each row since it was last finished."""
    starts: Counter[str] = Counter()
    for line in lines:
        starts[line["name"]] = starts[line["name"]] + 1 if "started" in line else 0
    return starts


def append(path: Path, line: dict[str, Any]) -> None:
    """Write a line to the disk, in place of one that a kill cut off."""
    with path.open("a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def chosen(rows: Iterable[Row], patterns: Sequence[str]) -> list[Row]:
    """The rows whose names match one of the patterns of `fnmatch`; all without a pattern."""
    return [row for row in rows if not patterns or any(fnmatch.fnmatch(row.name, pattern) for pattern in patterns)]


def run_rows(build: Callable[[], tuple[list[Row], dict[str, Any]]], path: Path, deadline: float) -> bool:
    """Measure the rows that a file lacks, in processes that are forked from this one.

    Args:
        build: Called in each process; returns the rows and a description of the machine, which each line carries. This
            process must not have used CUDA.
        path: File of rows, created or continued.
        deadline: Of `time.monotonic`; the process that still measures then is killed.

    Returns:
        Whether there is nothing more to do before the deadline; False when a process ended before its first row.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        size = path.stat().st_size if path.exists() else 0
        process = multiprocessing.get_context("fork").Process(target=_work, args=(build, path, deadline))
        process.start()
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
            _show("time is up: the same command continues")
            return True
        if process.exitcode == 0:
            return True
        if not path.exists() or path.stat().st_size == size:
            return False


def run_here(rows: Iterable[Row], machine: dict[str, Any], path: Path | None) -> None:
    """Measure rows in this process, one of several ranks: exceptions pass, and nothing is skipped.

    Args:
        rows: The same on each rank.
        machine: As `run_rows`.
        path: File of rows on the rank that writes it.
    """
    for row in rows:
        line = {**_head(row, machine), **_measure(row)}
        if path is not None:
            append(path, line)
            _show(format_line(line))


def _work(build: Callable[[], tuple[list[Row], dict[str, Any]]], path: Path, deadline: float) -> None:
    """Measure until nothing is left (exit code 0), or until a fresh process has to go on (another one)."""
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h: a killed benchmark measures no more.
    ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGKILL))
    rows, machine = build()
    lines = read_rows(path)
    starts, done = attempts(lines), finished(lines)
    left, is_fresh = [], True
    for row in rows:
        if row.name in done and done[row.name]["parameters"] == row.parameters:
            continue
        if starts[row.name] >= MAX_ATTEMPTS:
            line = {**_head(row, machine), "error": f"the process ended {MAX_ATTEMPTS} times while it was measured"}
            append(path, line)
            _show(format_line(line))
        elif time.monotonic() + row.seconds > deadline:
            left.append(row.name)
        else:
            if row.is_alone and not is_fresh:
                sys.exit(1)
            is_fresh = False
            _attempt(row, machine, path)
            if row.is_alone:
                sys.exit(1)
    if left:
        _show(f"no time for {', '.join(left)}: the same command continues")


def _attempt(row: Row, machine: dict[str, Any], path: Path) -> None:
    """Measure a row and write its result; an exception of the row ends the process afterwards."""
    append(path, {"name": row.name, "started": _now()})
    signal.alarm(max(MIN_TIMEOUT, int(3 * row.seconds)))
    try:
        line = {**_head(row, machine), **_measure(row)}
    except Exception as error:
        line = {**_head(row, machine), "error": f"{type(error).__name__}: {str(error).strip()[:500]}"}
        append(path, line)
        _show(format_line(line))
        raise
    finally:
        signal.alarm(0)
    append(path, line)
    _show(format_line(line))


def _measure(row: Row) -> dict[str, Any]:
    start = time.perf_counter()
    result = row.measure(**row.parameters)
    return {"wall_seconds": round(time.perf_counter() - start, 1), "result": result}


def _head(row: Row, machine: dict[str, Any]) -> dict[str, Any]:
    return {"name": row.name, "kind": row.kind, "date": _now(), "parameters": row.parameters, "machine": machine}


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _show(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def format_line(line: dict[str, Any]) -> str:
    """One line for a terminal: the numbers and short texts of a finished row, or its error."""
    if "error" in line:
        return f"{line['name']}: {line['error'].splitlines()[0]}"
    shown = {key: value for key, value in line["result"].items() if isinstance(value, str | int | float)}
    texts = (f"{key} {f'{value:.4g}' if isinstance(value, float) else value}" for key, value in shown.items())
    return f"{line['name']}: {', '.join(texts)}"
