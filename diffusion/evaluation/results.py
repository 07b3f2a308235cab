"""Numbers with their protocols, in files; and tables, which hold numbers of one protocol only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffusion.errors import ConfigurationError, DataError
from diffusion.evaluation.protocol import Protocol, difference, protocol_hash
from diffusion.files import read_json, write_json

COMPOSITIONAL = "compositional"
"""Name of the mean of the compositional checks; those of a category are called `compositional/CATEGORY`."""

RESULTS = "results"
"""Folder of the files of results, in the output folder."""


@dataclass(frozen=True, kw_only=True)
class Number:
    """A number and how it was computed."""

    value: float
    protocol: Protocol


@dataclass(kw_only=True)
class Result:
    """The numbers of one model at one guidance scale."""

    name: str
    """Of the model: `ep0-ba100-ema`."""

    place: str
    """Where it was found."""

    step: int | None = None
    """Optimizer step of its weights."""

    weights: str = ""
    guidance_scale: float | None = None
    """None for images that were given, and for what does not depend on it."""

    identity: str = ""
    """Hash of the model."""

    numbers: dict[str, Number] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """Of its file."""
        return f"{self.name}{_suffix(self.guidance_scale)}.json"

    def to_json(self) -> dict[str, Any]:
        """Each number with the hash of its protocol; the protocols by their hashes."""
        hashes = {name: protocol_hash(number.protocol) for name, number in self.numbers.items()}
        return {
            "name": self.name,
            "place": self.place,
            "step": self.step,
            "weights": self.weights,
            "guidance_scale": self.guidance_scale,
            "identity": self.identity,
            "numbers": {
                name: {"value": number.value, "protocol": hashes[name]} for name, number in self.numbers.items()
            },
            "protocols": {hashes[name]: number.protocol for name, number in self.numbers.items()},
        }

    def write(self, folder: Path) -> Path:
        """Write atomically below an output folder; return the file."""
        path = folder / RESULTS / self.file_name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, self.to_json())
        return path

    @classmethod
    def read(cls, path: Path) -> "Result":
        """Read what `write` wrote.

        Raises:
            DataError: it is not a result, or was changed.
        """
        content = read_json(path)
        try:
            numbers = {
                name: Number(value=entry["value"], protocol=content["protocols"][entry["protocol"]])
                for name, entry in content["numbers"].items()
            }
            wrong = [
                name
                for name in numbers
                if protocol_hash(numbers[name].protocol) != content["numbers"][name]["protocol"]
            ]
            fields = ("name", "place", "step", "weights", "guidance_scale", "identity")
            result = cls(**{key: content[key] for key in fields}, numbers=numbers)
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path} is not a result of evaluate.py: {error!r}") from error
        if wrong:
            raise DataError(f"{path} was changed: the protocol of {wrong[0]} does not have the hash beside the number")
        return result


def _suffix(guidance_scale: float | None) -> str:
    return "" if guidance_scale is None else f"-cfg{guidance_scale:g}"


def read_results(folders: Sequence[Path]) -> list[Result]:
    """All results below output folders.

    Raises:
        ConfigurationError: a folder holds none.
        DataError: one is damaged.
    """
    results: list[Result] = []
    for folder in folders:
        files = sorted((folder / RESULTS).glob("*.json"))
        if not files:
            raise ConfigurationError(f"{folder} holds no results of evaluate.py")
        results += [Result.read(file) for file in files]
    return sorted(results, key=lambda result: (result.step or 0, result.name, result.guidance_scale or 0.0))


def check_one_protocol(results: Sequence[Result]) -> None:
    """Refuse numbers of one name that were computed by different protocols.

    Raises:
        ConfigurationError: says which, and what differs.
    """
    first: dict[str, tuple[Result, Protocol]] = {}
    for result in results:
        for name, number in result.numbers.items():
            known, protocol = first.setdefault(name, (result, number.protocol))
            if differing := difference(protocol, number.protocol):
                raise ConfigurationError(
                    f"{name} of {known.name} and of {result.name} were computed by different protocols and are not "
                    f"comparable: {'; '.join(differing)}. Evaluate both by one protocol"
                )


def table(results: Sequence[Result]) -> str:
    """A Markdown table of results, one row each; and one of the compositional checks by category, where there are any.

    Raises:
        ConfigurationError: their protocols differ.
    """
    check_one_protocol(results)
    names = list(dict.fromkeys(name for result in results for name in result.numbers))
    whole = _table(results, {name: name for name in names if "/" not in name})
    categories = {
        name: name.removeprefix(f"{COMPOSITIONAL}/") for name in names if name.startswith(f"{COMPOSITIONAL}/")
    }
    return f"{whole}\n{_table(results, categories | {COMPOSITIONAL: 'mean'})}" if categories else whole


def _table(results: Sequence[Result], names: Mapping[str, str]) -> str:
    """A Markdown table of some numbers, by their names and headings."""
    rows = [["model", "guidance", *names.values()], ["---", "---:", *["---:"] * len(names)]]
    for result in results:
        if not any(name in result.numbers for name in names):
            continue
        guidance = "" if result.guidance_scale is None else f"{result.guidance_scale:g}"
        values = [_shown(result.numbers.get(name)) for name in names]
        rows.append([result.name, guidance, *values])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _shown(number: Number | None) -> str:
    return "" if number is None else f"{number.value:.4g}"
