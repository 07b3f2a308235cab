"""Prompts from files: PartiPrompts, DrawBench, any table or list, and the captions of a prepared data set."""

import csv
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diffusion.errors import ConfigurationError
from diffusion.evaluation.config import PromptsConfig
from diffusion.evaluation.images import PreparedSamples, by_hash, smallest_hashes

COLUMNS = ("Prompt", "Prompts", "prompt", "caption", "text")
"""Names that a column of prompts has, tried in this order."""

CATEGORIES = ("Category", "category")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What an image is generated for."""

    text: str
    category: str = ""


def read_prompts(config: PromptsConfig) -> list[Prompt]:
    """Read prompts in the order of their file; empty ones are left out.

    Raises:
        ConfigurationError: there is no such file or column, or it holds too few.
        DataError: a data set is damaged.
    """
    path = Path(config.path).expanduser()
    if path.is_dir():
        return _of_data_set(path, config)
    if not path.is_file():
        raise ConfigurationError(f"protocol.prompts.path={config.path} does not exist: give a file or a data set")
    if path.suffix in (".tsv", ".csv"):
        prompts = _of_table(path, config)
    elif path.suffix == ".txt":
        prompts = [Prompt(text=line) for line in path.read_text(encoding="utf-8").splitlines()]
    else:
        raise ConfigurationError(f"protocol.prompts.path={config.path}: give a .tsv, .csv or .txt, or a data set")
    prompts = [prompt for prompt in prompts if prompt.text.strip()]
    try:
        chosen = smallest_hashes([f"{i} {prompt.text}" for i, prompt in enumerate(prompts)], config.num)
    except ConfigurationError as error:
        raise ConfigurationError(f"protocol.prompts.num: of the prompts in {config.path}, {error}") from error
    if not chosen:
        raise ConfigurationError(f"protocol.prompts.path={config.path} holds no prompts")
    return [prompts[i] for i in chosen]


def prompts_identity(prompts: Sequence[Prompt]) -> str:
    """Hash of prompts in their order, 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps([prompt.text for prompt in prompts]).encode()).hexdigest()[:16]


def _of_table(path: Path, config: PromptsConfig) -> list[Prompt]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        # PartiPrompts has unbalanced quotation marks in its prompts, so a .tsv has no quoting.
        dialect = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if path.suffix == ".tsv" else {}
        rows = list(csv.DictReader(file, **dialect))
    names = list(rows[0]) if rows else []
    column = _column(config.column, COLUMNS, names)
    if column is None:
        wanted = f"protocol.prompts.column={config.column}" if config.column else "a column of prompts"
        raise ConfigurationError(f"{path} has no {wanted}: its columns are {', '.join(names) or 'none'}")
    category = _column(config.category_column, CATEGORIES, names)
    if config.category_column is not None and category is None:
        raise ConfigurationError(f"{path} has no column {config.category_column}: it has {', '.join(names)}")
    return [
        Prompt(text=(row[column] or "").strip(), category=(row[category] or "").strip() if category else "")
        for row in rows
    ]


def _column(asked: str | None, usual: Sequence[str], names: Sequence[str]) -> str | None:
    wanted = (asked,) if asked is not None else usual
    return next((name for name in wanted if name in names), None)


def _of_data_set(root: Path, config: PromptsConfig) -> list[Prompt]:
    """First captions of a prepared data set; with `num`, of the samples whose names have the smallest hashes."""
    samples = PreparedSamples(root)
    order = range(len(samples)) if config.num is None else by_hash(samples.names())
    found: dict[int, Prompt] = {}
    for i in order:
        if len(found) == config.num:
            break
        sample = samples.sample(i)
        if "captions" not in sample:
            raise ConfigurationError(f"protocol.prompts.path={root} holds no captions: give a prepared data set")
        if caption := sample["captions"][0].strip():
            found[i] = Prompt(text=caption)
    if len(found) < (config.num or 1):
        raise ConfigurationError(f"protocol.prompts.path={root} holds {len(found)} captions: {config.num or 1} or more")
    return [prompt for _, prompt in sorted(found.items())]
