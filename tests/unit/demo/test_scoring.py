import pytest

from demo.scenes import COLOURS, SHAPES, draw, prompts
from demo.score import labelled_grid, oracle_rates, rates, score_model, write_report
from diffusion.models import tiny


def test_the_oracle_is_right_on_real_images_and_at_chance_on_shuffled_captions():
    own, shuffled = oracle_rates(200, 64)
    assert own["colour"] >= 0.98
    assert own["shape"] >= 0.98
    assert abs(shuffled["colour"] - 1 / len(COLOURS)) < 0.11
    assert abs(shuffled["shape"] - 1 / len(SHAPES)) < 0.11


def test_rates_count_what_is_right():
    single, pairs = prompts()
    assert rates([draw(scene, 64) for scene in single], single) == {
        "number": len(single),
        "colour": 1.0,
        "shape": 1.0,
        "count": 1.0,
    }
    assert rates([draw(scene, 64) for scene in pairs], pairs)["relation"] == pytest.approx(1.0, abs=0.05)
    half = [draw(single[0], 64), draw(single[-1], 64)]
    assert rates(half, [single[0], single[0]]) == {"number": 2, "colour": 0.5, "shape": 0.5, "count": 1.0}


def test_an_untrained_model_is_scored_low_and_reported(tmp_path):
    scores, single, pairs = score_model(tiny(), guidance_scale=3.0, num_inference_steps=1, seeds_per_prompt=1)
    assert scores["single"]["number"] == len(single) == 24
    assert scores["pairs"]["number"] == len(pairs)
    assert scores["single"]["shape"] < 0.5
    (tmp_path / "config.yaml").write_text("trainer: {max_duration: 1ba}\n")
    write_report(
        tmp_path / "report.html",
        steps={"draw": {"command": "python draw", "seconds": 1.0}},
        runs=[tmp_path, tmp_path],
        scores=scores,
        grid=labelled_grid(single, 1),
        pairs=pairs,
        settings="One step.",
    )
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png") >= 2
    assert f"{scores['single']['colour']:.1%}" in page
