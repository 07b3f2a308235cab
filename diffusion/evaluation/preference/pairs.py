"""What raters are shown: prompts, the images of each model, and the draws that decide order and sides."""

import csv
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from diffusion.errors import ConfigurationError, DataError
from diffusion.evaluation.prompts import read_listing

_IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp"}
_SETTLED = 5
"""A repeat lies at least about so many pairs after the first showing, where there are enough pairs."""


class Kind(str, Enum):
    """Why a presentation is shown."""

    pair = "pair"
    repeat = "repeat"
    """A pair that the same rater has answered, with its sides exchanged."""

    check = "check"
    """An image beside noise or a blank one: whoever looks chooses the image twice."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt, and its category where the prompts have some ("" otherwise)."""

    text: str
    category: str = ""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One image of each model for one prompt."""

    prompt: Prompt
    images: tuple[Path, ...]
    """In the order of the models."""


@dataclass(frozen=True, kw_only=True)
class Material:
    """All that can be shown."""

    models: tuple[str, ...]
    items: tuple[Item, ...]

    @property
    def pairs(self) -> list[tuple[int, int, int]]:
        """Item and two models, as numbers, of each pair that can be asked about."""
        num = len(self.models)
        return [(i, a, b) for i in range(len(self.items)) for a in range(num) for b in range(a + 1, num)]


def read_prompts(path: Path) -> list[Prompt]:
    """Read prompts, each text once.

    Args:
        path: a text file with one prompt a line; or, with the suffix .tsv or .csv, a table with a column `Prompt` and
            perhaps a column `Category` (PartiPrompts, DrawBench).

    Raises:
        ConfigurationError: there is no such file, it has no column `Prompt`, or no prompt is in it.
    """
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--prompts {path}: cannot be read as text: {error}") from error
    if path.suffix in {".tsv", ".csv"}:
        prompts = _table_prompts(path, content)
    else:
        prompts = [Prompt(text=line.strip()) for line in content.splitlines()]
    by_text: dict[str, Prompt] = {}
    for prompt in prompts:
        if prompt.text:
            by_text.setdefault(prompt.text, prompt)
    if not by_text:
        raise ConfigurationError(f"--prompts {path}: no prompt is in it; expected one a line, or a column `Prompt`")
    return list(by_text.values())


def _table_prompts(path: Path, content: str) -> list[Prompt]:
    is_tabbed = path.suffix == ".tsv"
    quoting = csv.QUOTE_NONE if is_tabbed else csv.QUOTE_MINIMAL
    rows = csv.DictReader(content.splitlines(), delimiter="\t" if is_tabbed else ",", quoting=quoting)
    names = {(name or "").strip().lower(): name for name in rows.fieldnames or []}
    text = names.get("prompt") or names.get("prompts")
    if text is None:
        raise ConfigurationError(f"--prompts {path}: the first line has no column `Prompt`, but {sorted(names)}")
    category = names.get("category")
    return [
        Prompt(text=(row[text] or "").strip(), category=(row[category] or "").strip() if category else "")
        for row in rows
    ]


def collect(folders: Mapping[str, Path], prompts: Sequence[Prompt], prompts_file: Path) -> Material:
    """Find each model's images of each prompt.

    A folder has a listing (`metadata.jsonl`, as scripts/generate.py writes it), or only images, whose sorted
    names follow the prompts, the same number for each. The k-th images of a prompt are compared with each other.

    Args:
        folders: name of a model to folder of images; at least two.
        prompts: what was asked of the models.
        prompts_file: where the prompts are from, for messages.

    Raises:
        ConfigurationError: fewer than two models.
        DataError: a folder has no images, lacks a prompt, or has another number for a prompt than the first folder.
    """
    if len(folders) < 2:
        raise ConfigurationError("a comparison takes two models or more: A=FOLDER B=FOLDER")
    found = {name: _images_by_prompt(folder, prompts, prompts_file) for name, folder in folders.items()}
    first = next(iter(folders))
    items = []
    for prompt in prompts:
        of_first = found[first].get(prompt.text, [])
        for name, folder in folders.items():
            images = found[name].get(prompt.text, [])
            if not images:
                raise DataError(f"{folder}: no image of the prompt {prompt.text!r} of {prompts_file}")
            if len(images) != len(of_first):
                raise DataError(
                    f"{folder}: {len(images)} images of the prompt {prompt.text!r}, where {folders[first]} has "
                    f"{len(of_first)}; generate the same number with each model"
                )
        for i in range(len(of_first)):
            items.append(Item(prompt=prompt, images=tuple(found[name][prompt.text][i] for name in folders)))
    return Material(models=tuple(folders), items=tuple(items))


def _images_by_prompt(folder: Path, prompts: Sequence[Prompt], prompts_file: Path) -> dict[str, list[Path]]:
    if (listed := read_listing(folder)) is not None:
        found: dict[str, list[Path]] = {}
        for image in listed:
            found.setdefault(image.prompt, []).append(image.path)
        return found
    names = list(folder.iterdir()) if folder.is_dir() else []
    images = sorted(path for path in names if path.suffix.lower() in _IMAGE_SUFFIXES and path.stem != "grid")
    if not images:
        raise DataError(_how_to_generate(folder, prompts_file))
    per_prompt, rest = divmod(len(images), len(prompts))
    if rest or not per_prompt:
        raise DataError(
            f"{folder}: {len(images)} images without metadata.jsonl cannot be shared among {len(prompts)} prompts; "
            "it takes the same number for each, in the order of the prompts"
        )
    return {prompt.text: images[i * per_prompt : (i + 1) * per_prompt] for i, prompt in enumerate(prompts)}


def _how_to_generate(folder: Path, prompts_file: Path) -> str:
    if not folder.exists():
        return f"{folder}: there is no such folder"
    texts, preparation = prompts_file, ""
    if prompts_file.suffix in {".tsv", ".csv"}:
        texts = prompts_file.with_suffix(".txt")
        preparation = f" (with the prompts of {prompts_file} in {texts}, one a line)"
    return (
        f"{folder}: no images are in it. If it is a run or a checkpoint, generate them first{preparation}: "
        f"python scripts/generate.py {folder} --prompts-file {texts} --seed 17 --out {folder.name}-images"
    )


def schedule(seed: int, rater: str, num_pairs: int, num_repeats: int, num_checks: int) -> list[Kind]:
    """Decide what a rater is shown first, second, and so on.

    Repeats come in the second half; checks are spread evenly, each at a random place of its part.

    Returns:
        `num_pairs` + repeats + `num_checks` kinds; there are at most half as many repeats as pairs.
    """
    draw = drawer(seed, rater, "schedule")
    num_first = num_pairs - num_pairs // 2
    second = [Kind.pair] * (num_pairs // 2) + [Kind.repeat] * min(num_repeats, num_pairs // 2)
    draw.shuffle(second)
    kinds = [Kind.pair] * num_first + second
    length = len(kinds)
    for k in reversed(range(num_checks)):
        kinds.insert(draw.randint(k * length // num_checks, (k + 1) * length // num_checks), Kind.check)
    return kinds


def repeated_pairs(seed: int, rater: str, num_pairs: int, num_repeats: int) -> list[int]:
    """Which of a rater's pairs (0 is the first that was shown) each repeat shows again, all different."""
    num_repeats = min(num_repeats, num_pairs // 2)
    candidates = range(max(num_repeats, num_pairs - num_pairs // 2 - _SETTLED))
    return drawer(seed, rater, "repeats").sample(candidates, num_repeats)


def are_sides_exchanged(seed: int, rater: str, pair: int) -> bool:
    """Whether a rater sees the second model's image of a pair first: a fair coin."""
    return drawer(seed, rater, pair, "sides").random() < 0.5


def drawer(seed: int, *purpose: object) -> random.Random:
    """A generator of random numbers that depend on the seed and the purpose only."""
    return random.Random("/".join(str(word) for word in (seed, *purpose)))
