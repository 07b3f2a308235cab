"""Probabilities of answers by a vision-language model."""

import numpy as np
import pytest
import torch
from PIL import Image

from diffusion.errors import ConfigurationError
from diffusion.evaluation.vqa import VisionLanguageModel, forms
from tests.tools.vision_language_models import write_vqa

CPU = torch.device("cpu")
QUESTIONS = ["Is there a star ?", "How many red stars are there ?", "Are there any blue stars ?"]
ANSWERS = ["Yes", "no", "two"]


def noise(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 60, 3), dtype=np.uint8))


def test_forms_of_an_answer():
    assert forms("Yes") == ["yes", "Yes", " yes", " Yes"]
    assert set(forms("seven")) == {"seven", "Seven", "7", " seven", " Seven", " 7"}


def test_the_probability_of_an_answer_is_the_sum_over_its_forms(tmp_path):
    replies = {"yes": 0.3, "Yes": 0.2, "no": 0.1, "No": 0.03, " no": 0.02}
    replies |= {"two": 0.04, "Two": 0.02, "2": 0.01, "1": 0.05}
    model = VisionLanguageModel(str(write_vqa(tmp_path / "vqa", replies)), CPU)
    found = model.probabilities(noise(0), QUESTIONS, [*ANSWERS, "one", "ten"])
    assert np.array(found) == pytest.approx(np.array([[0.5, 0.15, 0.07, 0.05, 0.0]] * 3), abs=1e-6)


def test_questions_asked_together_are_answered_as_one_by_one_and_from_the_image(tmp_path):
    model = VisionLanguageModel(str(write_vqa(tmp_path / "vqa")), CPU)
    together = np.array(model.probabilities(noise(0), QUESTIONS, ANSWERS))
    single = np.array([model.probabilities(noise(0), [question], ANSWERS)[0] for question in QUESTIONS])
    assert together == pytest.approx(single, rel=1e-4)
    assert np.ptp(np.log(together), axis=0).min() > 0.02, "the questions do not matter"
    other = np.array(model.probabilities(noise(1), QUESTIONS, ANSWERS))
    assert np.abs(np.log(other / together)).max() > 0.02, "the image does not matter"


def test_models_are_told_apart_by_their_weights(tmp_path):
    first, second = (VisionLanguageModel(str(write_vqa(tmp_path / f"{i}", seed=i)), CPU) for i in (0, 1))
    assert first.identity.split()[0] == second.identity.split()[0] == "qwen2_vl"
    assert first.identity != second.identity


def test_a_folder_without_a_model_is_an_error(tmp_path):
    with pytest.raises(ConfigurationError, match=r"protocol\.networks\.vqa="):
        VisionLanguageModel(str(tmp_path), CPU)
