"""The configuration of evaluations."""

import pytest

from diffusion.config.fields import check_sections
from diffusion.config.loading import load
from diffusion.errors import ConfigurationError
from diffusion.evaluation.config import DpgConfig, EvaluationConfig, Metric
from diffusion.evaluation.evaluate import evaluate


def test_configurations_that_ship_load_and_impossible_ones_are_rejected(tmp_path):
    for yaml in ("yamls/evaluate.yaml", "yamls/tiny/evaluate.yaml"):
        paths = [f"protocol.{part}.path=x" for part in ("prompts", "reference")]
        config = load(EvaluationConfig, yaml, ["output_folder=x", "model=x", *paths])
        check_sections(config)
    config.protocol.metrics.append(Metric.hpsv3)
    config.protocol.dpg = DpgConfig(path="dpg_bench.csv")
    with pytest.raises(ConfigurationError, match=r"(?s)networks\.hpsv3.*networks\.vqa"):
        check_sections(config)
    config.protocol.networks.hpsv3 = config.protocol.networks.vqa = "folder"
    check_sections(config)
    config.protocol.sampling.images_per_prompt = config.protocol.prompts.num = 0
    with pytest.raises(ConfigurationError, match=r"(?s)prompts\.num.*sampling\.images_per_prompt"):
        check_sections(config)
    config.protocol.sampling.images_per_prompt = config.protocol.prompts.num = 1
    config.images, config.guidance_scales = "y", [1.0, 1.0]
    with pytest.raises(ConfigurationError, match=r"(?s)model=.*protocol\.dpg.*guidance_scales"):
        check_sections(config)


@pytest.mark.parametrize("scale", ["-1", ".nan", ".inf"])
def test_a_guidance_scale_is_a_number_from_0_on(scale):
    config = load(EvaluationConfig, "tests/tools/toy_evaluation.yaml", ["model=x", f"guidance_scales=[1, {scale}]"])
    with pytest.raises(ConfigurationError, match=r"guidance_scales\.1"):
        check_sections(config)


def test_scales_that_pipelines_take_for_others_are_rejected_before_networks_are_loaded(tmp_path):
    (tmp_path / "model_index.json").write_text("{}")
    config = EvaluationConfig(model=str(tmp_path), output_folder=str(tmp_path / "out"), guidance_scales=[0.0, 0.5, 1.0])
    with pytest.raises(ConfigurationError, match=r"\[0\.0, 0\.5\]"):
        evaluate(config)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_a_folder_without_images_is_named_before_networks_are_loaded(tmp_path, name):
    (tmp_path / "empty").mkdir()
    config = EvaluationConfig(images=str(tmp_path / name), output_folder=str(tmp_path / "out"))
    with pytest.raises(ConfigurationError, match=f"images: .*{name}"):
        evaluate(config)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "wrong"),
    [
        (["watch=true", "runs=[runs/a, s3://bucket/b/checkpoints]"], None),
        (["watch=true", "runs=[runs/a, s3://bucket/a/checkpoints]"], "repeated name"),
        (["watch=true", "runs=[runs/a]", "model=runs/b"], "either"),
        (["watch=true", "images=folder"], "not images"),
        (["runs=[runs/a]"], "watch=true"),
        (["model=runs/a", "watch_only=true"], "watch=true"),
    ],
)
def test_watchers_follow_one_run_or_several_of_different_names(more, wrong):
    paths = [f"protocol.{part}.path=x" for part in ("prompts", "reference")]
    config = load(EvaluationConfig, "yamls/evaluate.yaml", ["output_folder=x", *paths, *more])
    if wrong is None:
        check_sections(config)
    else:
        with pytest.raises(ConfigurationError, match=wrong):
            check_sections(config)
