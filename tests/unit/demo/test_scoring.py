import json

import pytest

from demo.report import Step, labelled_grid, write_report
from demo.scoring import DemoScores, Rates, oracle_rates, rates, score_model
from diffusion.evaluation.shapes import COLOURS, SHAPES, draw, prompts
from diffusion.models import tiny


def test_the_oracle_is_right_on_real_images_and_at_chance_on_shuffled_captions():
    own, shuffled = oracle_rates(200, 64)
    assert own.colour >= 0.98
    assert own.shape >= 0.98
    assert abs(shuffled.colour - 1 / len(COLOURS)) < 0.11
    assert abs(shuffled.shape - 1 / len(SHAPES)) < 0.11


def test_rates_count_what_is_right():
    single, pairs = prompts()
    assert rates([draw(scene, 64) for scene in single], single) == Rates(colour=1.0, shape=1.0, relation=None)
    assert rates([draw(scene, 64) for scene in pairs], pairs).relation == pytest.approx(1.0, abs=0.05)
    half = [draw(single[0], 64), draw(single[-1], 64)]
    assert rates(half, [single[0], single[0]]) == Rates(colour=0.5, shape=0.5, relation=None)


def test_an_untrained_model_is_scored_low_and_reported(tmp_path):
    scores, single, pairs = score_model(tiny(), guidance_scale=3.0, num_inference_steps=1, seeds_per_prompt=1)
    assert (scores.num_single, len(single)) == (24, 24)
    assert scores.num_pairs == len(pairs)
    assert scores.single.shape < 0.5
    scores.write(tmp_path / "scores.json")
    assert json.loads((tmp_path / "scores.json").read_text())["num_single"] == 24
    assert labelled_grid(single, 1).width > 6 * 32
    write_report(
        tmp_path / "report.html",
        steps=[Step(name="draw", command="python draw", seconds=1.0)],
        runs={"autoencoder": tmp_path, "phase1": tmp_path},
        scores=scores,
        single=single,
        pairs=pairs,
        seeds_per_prompt=1,
        settings="One step.",
    )
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png") >= 2
    assert f"{scores.single.colour:.1%}" in page
    assert isinstance(scores, DemoScores)
