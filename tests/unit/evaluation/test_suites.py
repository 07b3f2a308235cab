"""Suites of questions: DPG-Bench and GenEval 2, with a table in place of the model that answers."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from PIL import Image

from diffusion.errors import ConfigurationError
from diffusion.evaluation import dpg, geneval2
from diffusion.evaluation.dpg import Dpg
from diffusion.evaluation.geneval2 import GenEval2
from diffusion.evaluation.vqa import VisionLanguageModel

DPG_COLUMNS = ["item_id", "text", "keywords", "proposition_id", "dependency", "category_broad", "category_detailed",
               "tuple", "question_natural_language"]  # fmt: skip
CAT = [
    (1, "0", "entity - whole (cat)", "Is there a cat?"),
    (2, "1", "attribute - color (cat, black)", "Is the cat black?"),
    (3, "0", "entity - whole (sofa)", "Is there a sofa?"),
    (4, "1,3", "relation - spatial (cat, sofa, on)", "Is the cat on the sofa?"),
    (5, "4", "attribute - state (cat, asleep)", "Is the cat on the sofa asleep?"),
]
BICYCLES = {
    "prompt": "four white bicycles behind a cow",
    "atom_count": 5,
    "vqa_list": [["How many bicycles?", "four"], ["Are they white?", "Yes"], ["Behind the cow?", "Yes"]],
    "skills": ["count", "attribute", "position"],
}
PIGS = {"prompt": "two pigs", "atom_count": 2, "vqa_list": [["How many pigs?", "two"]], "skills": ["count"]}


@dataclass
class Table(VisionLanguageModel):
    """Probability of an answer by the red value of the image and the question; 0 by default."""

    probability: Mapping[tuple[int, str, str], float]
    identity: str = "table"
    asked: list[tuple[int, int]] = field(default_factory=list)
    """Image and number of its questions, of each call."""

    def probabilities(self, image: Image.Image, questions: Sequence[str], answers: Sequence[str]) -> list[list[float]]:
        red = image.getpixel((0, 0))[0]  # pyright: ignore[reportIndexIssue, reportOptionalSubscript]
        assert isinstance(red, int)
        self.asked.append((red, len(questions)))
        return [[self.probability.get((red, question, answer), 0.0) for answer in answers] for question in questions]


def write_dpg(path: Path, items: Mapping[str, list[tuple[int, str, str, str]]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(DPG_COLUMNS)
        for name, questions in items.items():
            for number, parents, scene, text in questions:
                writer.writerow([name, f"{name}, in many words", "", number, parents, "", "", scene, text])
    return path


def write_geneval2(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def images(folder: Path, num: int) -> list[Path]:
    """Image i is of the colour (i, 0, 0)."""
    folder.mkdir(parents=True)
    files = [folder / f"{i:06d}.png" for i in range(num)]
    for i, file in enumerate(files):
        Image.new("RGB", (4, 4), (i, 0, 0)).save(file)
    return files


def test_dpg_bench_is_read_with_its_graph(tmp_path):
    path = write_dpg(tmp_path / "dpg_bench.csv", {"cat": CAT, "dog": [(1, "0", "global - (dog)", "Is it a dog?")]})
    cat, dog = dpg.read_items(path)
    assert (cat.prompt, dog.prompt) == ("cat, in many words", "dog, in many words")
    assert [question.parents for question in cat.questions] == [(), (0,), (), (0, 2), (3,)]
    categories = ["entity", "attribute", "entity", "relation", "attribute"]
    assert [question.category for question in cat.questions] == categories
    assert [question.category for question in dog.questions] == ["global"]
    assert cat.questions[3].text == "Is the cat on the sofa?"


@pytest.mark.parametrize("parents", ["9", "", "one"])
def test_a_wrong_dependency_is_named(tmp_path, parents):
    path = write_dpg(tmp_path / "dpg_bench.csv", {"fox": [(1, parents, "entity - whole (fox)", "Is there a fox?")]})
    with pytest.raises(ConfigurationError, match=r"dpg_bench\.csv, item fox"):
        dpg.read_items(path)


def test_dependencies_in_a_circle_are_named(tmp_path):
    rows = [(1, "2", "entity - whole (fox)", "A fox?"), (2, "3", "entity - whole (den)", "A den?")]
    path = write_dpg(tmp_path / "dpg_bench.csv", {"fox": [*rows, (3, "2", "entity - whole (cub)", "A cub?")]})
    with pytest.raises(ConfigurationError, match=r"item fox.* circle, (2 on 3 on 2|3 on 2 on 3)"):
        dpg.read_items(path)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([True, True, True, True, True], [True, True, True, True, True]),
        ([False, True, True, True, True], [False, False, True, False, False]),
        ([True, False, True, True, True], [True, False, True, True, True]),
        ([True, True, False, True, True], [True, True, False, False, False]),
        ([True, True, True, False, True], [True, True, True, False, False]),
    ],
)
def test_a_question_is_right_only_if_those_it_depends_on_are(tmp_path, answers, expected):
    for step in (1, -1):  # A file may name children before their parents.
        (item,) = dpg.read_items(write_dpg(tmp_path / "dpg_bench.csv", {"cat": CAT[::step]}))
        assert dpg.right_answers(item.questions, answers[::step]) == expected[::step]


def test_dpg_is_the_mean_over_questions_images_and_prompts(tmp_path):
    dog = [(1, "0", "entity - whole (dog)", "Is there a dog?")]
    items = dpg.read_items(write_dpg(tmp_path / "dpg_bench.csv", {"cat": CAT, "dog": dog}))
    texts = [question.text for question in items[0].questions]
    probability = {
        **{(0, text, "yes"): 0.6 for text in texts},  # All right: 1.
        **{(1, text, "yes"): 0.6 for text in texts},  # No cat, so that only the sofa is right: 1/5.
        (1, texts[0], "no"): 0.7,
        (2, "Is there a dog?", "yes"): 0.2,
        (3, "Is there a dog?", "no"): 0.2,
    }
    suite = Dpg(items=items, images_per_prompt=2, vqa=Table(probability))
    assert [prompt.text for prompt in suite.prompts()] == ["cat, in many words", "dog, in many words"]
    found = suite.evaluate(images(tmp_path / "images", 4), {"seed": 1}, tmp_path / "judgements")
    values = {name: number.value for name, number in found.items()}
    assert values == pytest.approx(
        {
            "dpg": 100 * ((1 + 1 / 5) / 2 + (1 + 0) / 2) / 2,
            "dpg/entity": 100 * (2 + 1 + 1 + 0) / 6,  # Of the answers, whatever they depend on.
            "dpg/attribute": 100.0,
            "dpg/relation": 100.0,
        }
    )
    assert found["dpg"].protocol == suite.protocols({"seed": 1})["dpg"]
    assert found["dpg"].protocol["images"] == {"seed": 1}


def test_soft_tifa_of_a_worked_example(tmp_path):
    items = geneval2.read_items(write_geneval2(tmp_path / "geneval2_data.jsonl", [BICYCLES, PIGS]))
    probability = {
        (0, "How many bicycles?", "four"): 0.2,
        (0, "Are they white?", "Yes"): 0.9,
        (0, "Behind the cow?", "Yes"): 0.4,
        (0, "Are they white?", "four"): 0.05,
        (1, "How many pigs?", "two"): 0.7,
        (1, "How many pigs?", "four"): 0.3,
    }
    suite = GenEval2(items=items, images_per_prompt=1, vqa=Table(probability))
    found = suite.evaluate(images(tmp_path / "images", 2), {}, tmp_path / "judgements")
    assert {name: number.value for name, number in found.items()} == pytest.approx(
        {
            "soft_tifa_am": 100 * (0.5 + 0.7) / 2,
            "soft_tifa_gm": 100 * (0.072 ** (1 / 3) + 0.7) / 2,
            "soft_tifa_am/count": 100 * (0.2 + 0.7) / 2,
            "soft_tifa_am/attribute": 90.0,
            "soft_tifa_am/position": 40.0,
            "soft_tifa_gm/2 atoms": 70.0,
            "soft_tifa_gm/5 atoms": 100 * 0.072 ** (1 / 3),
        }
    )
    assert list(found) == suite.names()


def test_a_wrong_line_of_geneval2_is_named(tmp_path):
    for row in ({"prompt": "a"}, {**PIGS, "skills": []}, {**PIGS, "skills": [], "vqa_list": []}):
        path = write_geneval2(tmp_path / "geneval2_data.jsonl", [PIGS, row])
        with pytest.raises(ConfigurationError, match=r"geneval2_data\.jsonl, line 2"):
            geneval2.read_items(path)


def test_an_interrupted_evaluation_judges_the_missing_images_only(tmp_path):
    items = geneval2.read_items(write_geneval2(tmp_path / "geneval2_data.jsonl", [BICYCLES, PIGS]))
    table = Table({(1, "How many bicycles?", "four"): 0.5})
    suite = GenEval2(items=items, images_per_prompt=2, vqa=table)
    files = images(tmp_path / "images", 4)
    first = suite.evaluate(files, {}, tmp_path / "judgements")
    assert table.asked == [(0, 3), (1, 3), (2, 1), (3, 1)]
    assert first["soft_tifa_gm"].value == 0.0, "one probability of 0 makes the geometric mean so"
    (lost,) = (tmp_path / "judgements").glob("*/000001.json")
    lost.unlink()
    assert suite.evaluate(files, {}, tmp_path / "judgements") == first
    assert table.asked[4:] == [(1, 3)]
    table.identity = "another model"
    suite.evaluate(files, {}, tmp_path / "judgements")
    assert len(table.asked) == 9
