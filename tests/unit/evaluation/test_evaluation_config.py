"""The configuration of evaluations."""

from dataclasses import replace

import pytest

from diffusion.config.fields import check_sections
from diffusion.config.loading import load
from diffusion.errors import ConfigurationError
from diffusion.evaluation.config import DpgConfig, EvaluationConfig, Metric, PromptsConfig, ProtocolConfig
from diffusion.evaluation.evaluate import evaluate
from diffusion.evaluation.watch import Watcher, watch


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


def test_a_mistyped_path_is_named_before_networks_are_loaded(tmp_path):
    protocol = ProtocolConfig(metrics=[Metric.clip_score], prompts=PromptsConfig(path=str(tmp_path / "prompts.txt")))
    protocol.networks.clip_score = str(tmp_path / "network")
    config = EvaluationConfig(output_folder=str(tmp_path / "out"), protocol=protocol)
    for name in ("absent", "absent.safetensors"):
        config.model = str(tmp_path / name)
        with pytest.raises(ConfigurationError, match=f"{name} does not exist"):
            evaluate(config)
        assert not (tmp_path / "out").exists()
    (tmp_path / "model_index.json").write_text("{}")
    config.model = str(tmp_path)
    with pytest.raises(ConfigurationError, match=r"protocol\.prompts: .*prompts\.txt"):
        evaluate(config)


def test_what_is_no_run_is_not_watched_and_one_without_checkpoints_is_named(tmp_path, caplog):
    (tmp_path / "config.yaml").touch()
    (tmp_path / "checkpoints" / "ep0-ba10").mkdir(parents=True)
    for name in ("config.yaml", "checkpoints/ep0-ba10"):
        config = EvaluationConfig(runs=[str(tmp_path / name)], watch=True, output_folder=str(tmp_path / "out"))
        with pytest.raises(ConfigurationError, match=name):
            watch(config)
        assert not (tmp_path / "out").exists()
    config = replace(config, runs=["s3://bucket/checkpoints/ep0-ba10"], watch_only=True, idle_seconds=0.0)
    with pytest.raises(ConfigurationError, match="ep0-ba10"):
        watch(config)
    caplog.set_level("INFO")
    watcher = Watcher(replace(config, runs=[str(tmp_path / "absent")]))
    watcher.run()
    watcher.run()
    assert caplog.text.count(str(tmp_path / "absent")) == 1


@pytest.mark.parametrize("path", ["", " "])
@pytest.mark.parametrize(
    "key", ["output_folder", "reference_cache", "model", "runs.0", "protocol.prompts.path", "protocol.reference.path"]
)
def test_no_empty_path_stands_for_the_working_directory(key, path):
    values = {"output_folder": "x", "protocol.prompts.path": "x", "protocol.reference.path": "x", key: path}
    overrides = [f"{name}='{value}'" for name, value in values.items() if name != "runs.0"]
    config = load(EvaluationConfig, "yamls/evaluate.yaml", overrides)
    config.runs = [path] if key == "runs.0" else []
    with pytest.raises(ConfigurationError, match=f"{key} is empty"):
        check_sections(config)


@pytest.mark.parametrize("key", ["output_folder", "reference_cache"])
def test_results_are_written_to_a_local_folder(key):
    config = EvaluationConfig(**{"model": "s3://b/run", "output_folder": "x", key: "s3://b/p"})
    with pytest.raises(ConfigurationError, match=f"{key} is 's3://b/p'"):
        check_sections(config)


@pytest.mark.parametrize(
    ("more", "wrong"),
    [
        (["watch=true", "runs=[runs/a, s3://bucket/b/checkpoints]"], None),
        (["watch=true", "runs=[runs/a, s3://bucket/a/checkpoints]"], "repeated name"),
        (["watch=true", "runs=[runs/a]", "model=runs/b"], "either"),
        (["watch=true", "images=folder"], "not images"),
        (["runs=[runs/a]"], "watch=true"),
        (["model=runs/a", "watch_only=true"], "watch=true"),
        (["model=runs/a", "watch_forever=true"], "watch=true"),
        (["model=runs/a", "idle_seconds=0"], "watch=true"),
        (["model=runs/a", "watch=true", "poll_seconds=1e30"], "poll_seconds"),
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
