"""Protocols and results: how a number was computed, its file, and tables of comparable numbers.

A protocol is the JSON description of everything that a number depends on besides the model and the guidance scale. It
is stored and hashed with the number. Numbers with different protocols are never in one table.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from diffusion.errors import ConfigurationError, DataError, explained_writes
from diffusion.files import read_json, write_json
from diffusion.reports.tables import markdown_table

Protocol = dict[str, Any]
"""JSON description of the computation of a number."""

VERSION = 1
"""Incremented when the computation changes for the same description."""

VALIDATION_LOSS = "validation_loss"
"""Name of the loss on the validation data; those of streams and timesteps are `validation_loss/...`."""

LATER_KEYS = ("data", "category")
"""Keys that protocols of earlier versions lack; these are comparable with any value."""

RESULTS = "results"
"""Folder of result files, in the output folder."""


def is_of_category(name: str) -> bool:
    """Return whether a number is of one category of prompts, `NUMBER/CATEGORY`."""
    return "/" in name and not name.startswith(f"{VALIDATION_LOSS}/")


def text_hash(text: str) -> str:
    """SHA-256 of a text, 16 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def content_hash(content: Any) -> str:
    """Hash of JSON."""
    return text_hash(json.dumps(content))


def protocol_hash(protocol: Mapping[str, Any]) -> str:
    """Hash of a protocol, whatever the order of its keys."""
    return text_hash(json.dumps(protocol, sort_keys=True))


def difference(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Differences of two protocols, as `key: this, that`."""
    found = []
    for key in sorted({*a, *b}):
        one, other = a.get(key), b.get(key)
        if key in LATER_KEYS and None in (one, other):
            continue
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            found += difference(one, other, f"{prefix}{key}.")
        elif one != other:
            found.append(f"{prefix}{key}: {one}, {other}")
    return found


@dataclass(frozen=True, kw_only=True)
class Number:
    """A number with its protocol."""

    value: float
    protocol: Protocol


@dataclass(kw_only=True)
class Result:
    """Numbers of a model at one guidance scale."""

    name: str
    """Name of the model: `ep0-ba100-ema`."""

    path: str
    """Path or URI of the model."""

    step: int | None = None
    """Optimizer step of its weights."""

    weights: str = ""
    guidance_scale: float | None = None
    """None for given images, and for numbers without a guidance scale."""

    identity: str = ""
    """Hash of the model."""

    numbers: dict[str, Number] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """Name of its file."""
        scale = "" if self.guidance_scale is None else f"-cfg{self.guidance_scale:g}"
        return f"{self.name}{scale}.json"

    def write(self, folder: Path) -> Path:
        """Write atomically below an output folder, with each protocol once; return the path.

        Raises:
            MachineError: the file cannot be written.
        """
        content, protocols = asdict(self), {}
        for number in content["numbers"].values():
            key = protocol_hash(number["protocol"])
            protocols[key], number["protocol"] = number["protocol"], key
        path = folder / RESULTS / self.file_name
        with explained_writes(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {**content, "protocols": protocols})
        return path

    @classmethod
    def read(cls, path: Path) -> "Result":
        """Read a file of `write`.

        Raises:
            DataError: the file is not a result, or was modified.
        """
        content = read_json(path)
        try:
            protocols = content.pop("protocols")
            numbers = {
                name: Number(value=entry["value"], protocol=protocols[entry["protocol"]])
                for name, entry in content["numbers"].items()
            }
            result = cls(**{**content, "numbers": numbers})
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path} is not a result of evaluate.py: {error!r}") from error
        if any(protocol_hash(protocol) != key for key, protocol in protocols.items()):
            raise DataError(f"{path} was modified: the hash of a protocol differs")
        return result


def read_results(folders: Sequence[Path]) -> list[Result]:
    """Read all results of output folders.

    Raises:
        ConfigurationError: a folder has no results.
        DataError: a result is damaged.
    """
    results: list[Result] = []
    for folder in folders:
        files = sorted((folder / RESULTS).glob("*.json"))
        if not files:
            raise ConfigurationError(f"{folder} has no results of evaluate.py")
        results += [Result.read(file) for file in files]
    return sorted(results, key=lambda result: (result.step or 0, result.name, result.guidance_scale or 0.0))


def check_one_protocol(results: Sequence[Result]) -> None:
    """Raise a ConfigurationError that names the difference if numbers of one name have different protocols."""
    first: dict[str, tuple[Result, Protocol]] = {}
    for result in results:
        for name, number in result.numbers.items():
            known, protocol = first.setdefault(name, (result, number.protocol))
            if differing := difference(protocol, number.protocol):
                raise ConfigurationError(
                    f"{name} of {known.name} and of {result.name} have different protocols and are not comparable: "
                    f"{'; '.join(differing)}. Evaluate both with one protocol, or choose another output_folder"
                )
            if len(number.protocol) > len(protocol):  # The first one lacks a later key.
                first[name] = (result, number.protocol)


def table(results: Sequence[Result]) -> str:
    """Markdown table of results, one row each; and one table for each number by category of prompts, if there are any.

    Results of different protocols are a ConfigurationError.
    """
    check_one_protocol(results)
    names = list(dict.fromkeys(name for result in results for name in result.numbers))
    tables = [_table(results, {name: name for name in names if "/" not in name})]
    by_number: dict[str, dict[str, str]] = {}
    for name in filter(is_of_category, names):
        number, category = name.split("/", 1)
        by_number.setdefault(number, {})[name] = category
    tables += [_table(results, categories | {number: number}) for number, categories in by_number.items()]
    return "\n".join(tables)


def _table(results: Sequence[Result], names: Mapping[str, str]) -> str:
    """Markdown table of numbers, given as name to heading."""
    rows = []
    for result in results:
        if not any(name in result.numbers for name in names):
            continue
        guidance = "" if result.guidance_scale is None else f"{result.guidance_scale:g}"
        values = [f"{result.numbers[name].value:.4g}" if name in result.numbers else "" for name in names]
        rows.append([result.name, guidance, *values])
    return markdown_table(["model", "guidance", *names.values()], rows) + "\n"
