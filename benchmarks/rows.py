"""Rows of a benchmark: measured one by one, each in a process of its own, and written as soon as each is there.

A file of rows holds one JSON object per line, with a `result` or an `error`. A benchmark that is killed continues with
the rows that it lacks. What a row left in the GPU's memory goes with its process, and so does a CUDA context that no
longer answers.
"""

import ctypes
import datetime
import fnmatch
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement."""

    name: str
    """Identity within a file of rows, such as `trainer/256/64`; the part before the first slash is its kind."""

    measure: Callable[..., dict[str, Any]]
    """Takes the parameters; returns what json can write."""

    parameters: dict[str, Any] = field(default_factory=dict)
    """Equal to itself after json. A row that is there with other parameters is measured again."""


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """Read a file of rows: the last line of each name. A line that a kill cut off is dropped."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return {row["name"]: row for row in rows}


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


def run_rows(rows: Iterable[Row], machine: dict[str, Any], path: Path) -> None:
    """Measure the rows that a file lacks, in processes that are forked from this one, which must not have used CUDA."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for row in rows:
        found = read_rows(path).get(row.name)
        if found is None or found["parameters"] != row.parameters:
            _run_forked(row, machine, path)


def _run_forked(row: Row, machine: dict[str, Any], path: Path) -> None:
    """Measure a row in a process."""
    size = path.stat().st_size if path.exists() else 0
    process = multiprocessing.get_context("fork").Process(target=_attempt_forked, args=(row, machine, path))
    process.start()
    process.join()
    if not path.exists() or path.stat().st_size == size:
        write(path, row, machine, error=f"the process ended with exit code {process.exitcode}")


def _attempt_forked(row: Row, machine: dict[str, Any], path: Path) -> None:
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h: a killed benchmark measures no more.
    ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGKILL))
    if (parent := multiprocessing.parent_process()) is None or os.getppid() != parent.pid:
        return  # The benchmark was killed before.
    attempt(row, machine, path)


def attempt(row: Row, machine: dict[str, Any], path: Path) -> None:
    """Measure a row in this process, and write it or its error."""
    try:
        measured = measure(row)
    except Exception as error:
        write(path, row, machine, error=f"{type(error).__name__}: {str(error).strip()[:500]}")
        raise
    write(path, row, machine, **measured)


def measure(row: Row) -> dict[str, Any]:
    """Measure a row in this process; its `result` and `wall_seconds`."""
    start = time.perf_counter()
    result = row.measure(**row.parameters)
    return {"wall_seconds": round(time.perf_counter() - start, 1), "result": result}


def write(path: Path, row: Row, machine: dict[str, Any], **measured: Any) -> None:
    """Append the line of a row, and print it."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    kind = row.name.split("/")[0]
    line = {"name": row.name, "kind": kind, "date": date, "parameters": row.parameters, "machine": machine, **measured}
    append(path, line)
    print(format_line(line), flush=True)


def format_line(line: dict[str, Any]) -> str:
    """One line for a terminal: the numbers and short texts of a finished row, or its error."""
    if "error" in line:
        return f"{line['name']}: {line['error'].splitlines()[0]}"
    shown = {key: value for key, value in line["result"].items() if isinstance(value, str | int | float)}
    texts = (f"{key} {f'{value:.4g}' if isinstance(value, float) else value}" for key, value in shown.items())
    return f"{line['name']}: {', '.join(texts)}"
