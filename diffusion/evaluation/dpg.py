"""DPG-Bench (Hu et al. 2024): yes-no questions about images of dense prompts, some of which depend on others.

The questions form a graph: "is the cat black?" depends on "is there a cat?". A question is right if its answer is yes
and the questions that it depends on are right.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from statistics import fmean
from typing import Any

from PIL import Image

from diffusion.errors import ConfigurationError
from diffusion.evaluation.protocol import Protocol, content_hash
from diffusion.evaluation.suites import Suite
from diffusion.evaluation.vqa import ASKED, VisionLanguageModel


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question about an image, whose right answer is yes."""

    text: str
    category: str
    """Broad category: global, entity, attribute, relation or other."""

    parents: tuple[int, ...] = ()
    """Positions of the questions of the same prompt that it depends on."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """A prompt and its questions."""

    prompt: str
    questions: tuple[Question, ...]


def read_items(path: Path) -> list[Item]:
    """Read dpg_bench.csv: a row for each question, with its prompt; a ConfigurationError if that is not possible."""
    rows_by_item: dict[str, list[dict[str, Any]]] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for row in csv.DictReader(file):
                rows_by_item.setdefault(row["item_id"], []).append(row)
    except (OSError, UnicodeDecodeError, csv.Error, KeyError) as error:
        raise ConfigurationError(f"protocol.dpg.path={path} cannot be read as dpg_bench.csv: {error!r}") from error
    if not rows_by_item:
        raise ConfigurationError(f"protocol.dpg.path={path} has no questions")
    return [_item(rows, f"{path}, item {name}") for name, rows in rows_by_item.items()]


def _item(rows: Sequence[Mapping[str, str]], where: str) -> Item:
    try:
        positions = {int(row["proposition_id"]): position for position, row in enumerate(rows)}
        questions = []
        for row in rows:
            parents = [int(parent) for parent in row["dependency"].split(",")]
            questions.append(
                Question(
                    text=row["question_natural_language"].strip(),
                    category=row["tuple"].split("(")[0].split("-")[0].strip(),  # "attribute - color (cat, black)"
                    parents=tuple(positions[parent] for parent in parents if parent != 0),
                )
            )
        list(_parents_first(questions))
        return Item(prompt=rows[0]["text"].strip(), questions=tuple(questions))
    except CycleError as error:
        circle = " on ".join(rows[position]["proposition_id"] for position in error.args[1])
        raise ConfigurationError(f"{where}: propositions depend on each other in a circle, {circle}") from error
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{where}, is not in the format of dpg_bench.csv: {error!r}") from error


def right_answers(questions: Sequence[Question], answers: Sequence[bool]) -> list[bool]:
    """Find the questions that are right: answered with yes, as are those on which they depend."""
    right = list(answers)
    for position in _parents_first(questions):
        right[position] = right[position] and all(right[parent] for parent in questions[position].parents)
    return right


def _parents_first(questions: Sequence[Question]) -> Iterable[int]:
    """Order questions, by their positions, so that each comes after those that it depends on; a CycleError if none."""
    return TopologicalSorter({position: one.parents for position, one in enumerate(questions)}).static_order()


@dataclass(frozen=True, kw_only=True)
class Dpg(Suite[Item]):
    """The benchmark, and the model that answers its questions."""

    name = "dpg"
    vqa: VisionLanguageModel

    def record(self) -> Protocol:
        """Questions, and the model that answers them."""
        return {
            "estimator": "100 x mean over images of the share of questions answered with yes, as are those they depend "
            "on; categories: 100 x share of questions answered with yes",
            "questions": content_hash([asdict(item) for item in self.items]),
            "asked": ASKED,
            "yes": "more probable than no",
            "vqa": self.vqa.identity,
        }

    def names(self) -> list[str]:
        """`dpg`, and `dpg/CATEGORY` of the questions."""
        found = dict.fromkeys(question.category for item in self.items for question in item.questions)
        return [self.name, *(f"{self.name}/{category}" for category in found)]

    def judge(self, item: Item, image: Image.Image) -> list[bool]:
        """Return for each question whether the answer is yes."""
        questions = [question.text for question in item.questions]
        return [yes > no for yes, no in self.vqa.probabilities(image, questions, ["yes", "no"])]

    def scores(self, item: Item, judgement: Sequence[bool]) -> Iterable[tuple[str, float]]:
        """The share of right questions, and each answer by category."""
        yield self.name, fmean(right_answers(item.questions, judgement))
        for question, answer in zip(item.questions, judgement, strict=True):
            yield f"{self.name}/{question.category}", answer
