"""GenEval 2 with Soft-TIFA (Kamath et al. 2025): probabilities of correct answers about objects, counts and relations.

The arithmetic mean (AM) over the questions of an image estimates how many atoms of the prompt it shows; the geometric
mean (GM) estimates whether it shows the whole prompt.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from PIL import Image

from diffusion.evaluation.protocol import Protocol, content_hash
from diffusion.evaluation.suites import Suite, read_json_items
from diffusion.evaluation.vqa import ASKED, VisionLanguageModel

AM, GM = "soft_tifa_am", "soft_tifa_gm"
"""Names of the numbers."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question about an image, and its correct answer."""

    text: str
    answer: str
    """A word."""

    skill: str
    """object, attribute, count, position or verb."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """A prompt and its questions."""

    prompt: str
    num_atoms: int
    questions: tuple[Question, ...]


def read_items(path: Path) -> list[Item]:
    """Read geneval2_data.jsonl: a JSON object a line with `prompt`, `atom_count`, `vqa_list` and `skills`."""
    return read_json_items(path, "protocol.geneval2.path", _item, "GenEval 2")


def _item(row: Mapping[str, Any]) -> Item:
    asked = zip(row["vqa_list"], row["skills"], strict=True)
    questions = tuple(Question(text=text, answer=answer, skill=skill) for (text, answer), skill in asked)
    if not questions:
        raise ValueError("vqa_list is empty")
    return Item(prompt=row["prompt"], num_atoms=int(row["atom_count"]), questions=questions)


@dataclass(frozen=True, kw_only=True)
class GenEval2(Suite[Item]):
    """The benchmark, and the model that answers its questions."""

    name = "geneval2"
    vqa: VisionLanguageModel

    def record(self) -> Protocol:
        """Questions, and the model that answers them."""
        return {
            "estimator": "Soft-TIFA: 100 x mean over images of the arithmetic (am) and geometric mean (gm) of the "
            "probabilities of the correct answers; skills: 100 x mean over questions",
            "questions": content_hash([asdict(item) for item in self.items]),
            "asked": ASKED,
            "vqa": self.vqa.identity,
        }

    def names(self) -> list[str]:
        """`soft_tifa_am` in total and by skill, `soft_tifa_gm` in total and by number of atoms."""
        skills = dict.fromkeys(question.skill for item in self.items for question in item.questions)
        sizes = sorted({item.num_atoms for item in self.items})
        return [AM, GM, *(f"{AM}/{skill}" for skill in skills), *(f"{GM}/{size} atoms" for size in sizes)]

    def judge(self, item: Item, image: Image.Image) -> list[float]:
        """Probability of the correct answer to each question."""
        answers = list(dict.fromkeys(question.answer for question in item.questions))
        rows = self.vqa.probabilities(image, [question.text for question in item.questions], answers)
        return [row[answers.index(question.answer)] for row, question in zip(rows, item.questions, strict=True)]

    def scores(self, item: Item, judgement: Sequence[float]) -> Iterable[tuple[str, float]]:
        """Both means of Soft-TIFA, and the probability of each answer by skill."""
        yield AM, fmean(judgement)
        for name in (GM, f"{GM}/{item.num_atoms} atoms"):
            yield name, math.prod(judgement) ** (1.0 / len(judgement))
        for question, probability in zip(item.questions, judgement, strict=True):
            yield f"{AM}/{question.skill}", probability
