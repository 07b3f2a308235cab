"""Images of an evaluation: a pipeline makes those of its model, from noise drawn on the CPU."""

import dataclasses
import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

from demo.shape_checks import shape_checks
from diffusion.config.model import Architecture, FlowConfig, ObjectiveConfig, PredictionType, Sampler
from diffusion.config.training import Device, Plugin
from diffusion.errors import ConfigurationError, MachineError
from diffusion.evaluation.config import (
    CompositionalConfig,
    EvaluationConfig,
    Metric,
    NetworksConfig,
    ProtocolConfig,
    ReferenceConfig,
    ResizeFilter,
    SamplingConfig,
)
from diffusion.evaluation.evaluate import IMAGES, Evaluation
from diffusion.evaluation.generate import (
    GENERATION,
    CheckpointGenerator,
    EvaluatedModel,
    GenerationTask,
    Generator,
    PipelineGenerator,
    WeightsError,
    addressed_latents,
    find_models,
    generate_images,
    load_generator,
)
from diffusion.evaluation.images import image_files
from diffusion.evaluation.metrics import Metrics
from diffusion.evaluation.prompts import Prompt, open_images
from diffusion.evaluation.protocol import read_results
from diffusion.files import read_json, write_json
from diffusion.formats.marks import Mark
from diffusion.models import build_model
from diffusion.models.latent_diffusion import LatentDiffusion
from tests.integration.test_distributed import on_ranks
from tests.tools.evaluation_toys import write_images
from tests.tools.image_marks import read_mark
from tests.tools.pipelines import write_model
from tests.unit.models import test_latents
from tests.unit.models.test_pretrained import build

CPU = torch.device("cpu")


CASES = {
    "zero-terminal": lambda: build(Architecture.tiny, zero_terminal_snr=True),
    "not-zero-terminal": lambda: build(Architecture.tiny),
    "flow": lambda: build(Architecture.tiny, prediction_type=PredictionType.flow, flow=FlowConfig(shift=2.0)),
    "xl": lambda: build(Architecture.tiny_xl),
    "transformer": lambda: test_latents.build(test_latents.configured(Architecture.tiny_transformer)),
    "transformer-v": lambda: build_model(
        test_latents.configured(Architecture.tiny_transformer),
        ObjectiveConfig(prediction_type=PredictionType.v_prediction),
        resolution=32,
        seed=17,
    ).eval(),
    "pixels": lambda: test_latents.build(test_latents.configured(Architecture.tiny_pixel_transformer)),
}


@pytest.fixture(scope="module", params=CASES.values(), ids=list(CASES))
def model(request: pytest.FixtureRequest) -> LatentDiffusion:
    return request.param()


@pytest.fixture(scope="module")
def folder(model: LatentDiffusion, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(model, tmp_path_factory.mktemp("exported") / "pipeline", resolution=32)


def generated(generator: Generator, folder: Path, scale: float, sampler: Sampler | None) -> np.ndarray:
    prompts = [Prompt(text=text) for text in ("a red circle", "A \u201cblue\u201d star &amp; a \ufb01sh", "")]
    sampling = SamplingConfig(num_inference_steps=3, seed=5, images_per_prompt=2, sampler=sampler)
    task = GenerationTask(prompts=prompts, sampling=sampling, guidance_scale=scale, batch_size=4)
    images = image_files(generate_images(generator, task, folder / f"cfg{scale:g}", "test"))
    return np.stack([np.asarray(images[i]).astype(int) for i in range(len(images))])


def test_its_images_are_those_of_the_model(model: LatentDiffusion, folder: Path, tmp_path: Path) -> None:
    (subject,) = find_models(str(folder), ["raw", "ema"])
    assert subject == EvaluatedModel(name="pipeline", path=str(folder), step=None, weights="")
    pipeline, checkpoint = load_generator(subject, CPU), CheckpointGenerator(model, CPU)
    assert isinstance(pipeline, PipelineGenerator)
    assert (pipeline.resolution, pipeline.mark.version) == (32, checkpoint.mark.version)
    heun = Sampler.heun if model.objective.prediction_type is PredictionType.flow else None
    for scale, sampler in ((1.0, None), (3.0, heun)):
        images = {
            name: generated(generator, tmp_path / name, scale, sampler)
            for name, generator in (("pipeline", pipeline), ("checkpoint", checkpoint))
        }
        assert images["pipeline"].shape == (6, 32, 32, 3)
        assert np.abs(images["pipeline"] - images["checkpoint"]).max() <= 1
        mark = read_mark(tmp_path / "pipeline" / f"cfg{scale:g}" / "000000.png")
        assert (mark["AISystemUsed"], mark["AISystemVersionUsed"]) == ("pipeline", checkpoint.mark.version)
        assert np.abs(images["pipeline"][0] - images["pipeline"][1]).max() > 10, "two noises, one image"


@pytest.mark.parametrize("num_steps", [7, 15])
def test_heun_gives_a_pipeline_the_timesteps_of_the_model(tmp_path, num_steps):
    model = CASES["pixels"]()
    sampling = SamplingConfig(num_inference_steps=num_steps, sampler=Sampler.heun)
    images = []
    for generator in (CheckpointGenerator(model, CPU), PipelineGenerator(write_model(model, tmp_path / "one"), CPU)):
        task = GenerationTask(prompts=[Prompt(text="a")], sampling=sampling, guidance_scale=3.0, batch_size=1)
        latents = addressed_latents(task, [0], generator.latent_shape(32, 32), CPU)
        images.append(np.asarray(generator.generate(["a"], latents, sampling, 3.0)[0]).astype(int))
    assert np.abs(images[0] - images[1]).max() <= 1


@pytest.fixture
def subject(tmp_path: Path) -> EvaluatedModel:
    """A pipeline of a tiny model."""
    (subject,) = find_models(str(write_model(build(Architecture.tiny), tmp_path / "pipeline")), [])
    return subject


def shapes_evaluation(monkeypatch, out: Path, **options) -> Evaluation:
    """An evaluation of one check of the demo."""
    checks = shape_checks()[:1]
    monkeypatch.setattr("demo.shape_checks.shape_checks", lambda: checks)
    suite = CompositionalConfig(suite="demo.shape_checks.shapes", images_per_prompt=1)
    sampling = SamplingConfig(num_inference_steps=options.pop("steps", 1))
    protocol = ProtocolConfig(metrics=[], compositional=suite, sampling=sampling)
    config = EvaluationConfig(output_folder=str(out), protocol=protocol, guidance_scales=[1.0], device=Device.cpu)
    return Evaluation(config=dataclasses.replace(config, **options))


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_run_may_write_a_checkpoint_again(tmp_path, monkeypatch, is_interrupted):
    out = tmp_path / "out"
    evaluation, model = shapes_evaluation(monkeypatch, out), build(Architecture.tiny)
    (subject,) = find_models(str(write_model(model, tmp_path / "pipeline")), [])
    evaluation.evaluate(subject)
    with torch.no_grad():
        next(model.network.parameters()).add_(1.0)
    write_model(model, tmp_path / "pipeline")
    if is_interrupted:
        shutil.rmtree(out / "results")
    with pytest.raises(ConfigurationError, match="another task" if is_interrupted else "other weights"):
        evaluation.evaluate(subject)
    evaluation.of_run(out).evaluate(subject)
    (result,) = read_results([out])
    assert result.identity == load_generator(subject, CPU).mark.version
    (record,) = (out / IMAGES).rglob(GENERATION)
    assert read_json(record)["model"] == result.identity


def test_images_that_a_killed_removal_has_left_are_not_those_of_new_weights(tmp_path, monkeypatch):
    generator = CheckpointGenerator(build(Architecture.tiny), CPU)
    generated(generator, tmp_path, 1.0, None)
    (tmp_path / "cfg1" / GENERATION).unlink()
    generator.mark = Mark(model="new", version="of other weights")
    generated(generator, tmp_path, 1.0, None)
    assert read_mark(tmp_path / "cfg1" / "000000.png")["AISystemVersionUsed"] == "of other weights"


@pytest.mark.parametrize("name", ["metadata.jsonl", "000000.json", "pipeline-cfg1.json"])
def test_a_full_disk_is_reported(tmp_path, monkeypatch, subject, name):
    def sync(path: Path) -> None:
        if path.name == f".{name}.partial" and path.stat().st_size:
            raise OSError(28, "No space left on device")

    evaluation = shapes_evaluation(monkeypatch, tmp_path / "out")
    monkeypatch.setattr("diffusion.files.sync", sync)
    with pytest.raises(MachineError, match="No space left on device"):
        evaluation.evaluate(subject)


def test_images_that_are_not_kept_are_removed_after_a_kill_too(tmp_path, monkeypatch, subject):
    out = tmp_path / "out"
    shapes_evaluation(monkeypatch, out).evaluate(subject)
    assert any((out / IMAGES).rglob("*.png"))
    shapes_evaluation(monkeypatch, out, keep_images=False).evaluate(subject)
    assert not any((out / IMAGES).rglob("*.png"))


def test_another_protocol_in_the_output_folder_is_an_error_before_images_are_generated(tmp_path, monkeypatch):
    out, model = tmp_path / "out", build(Architecture.tiny)
    for name, steps in (("one", 1), ("two", 2)):
        (subject,) = find_models(str(write_model(model, tmp_path / name)), [])
        evaluation = shapes_evaluation(monkeypatch, out, steps=steps)
        if name == "one":
            evaluation.evaluate(subject)
    with pytest.raises(ConfigurationError, match="num_inference_steps: 1, 2"):
        evaluation.evaluate(subject)
    assert [path.name for path in (out / IMAGES).iterdir()] == ["one-cfg1"]


def test_numbers_of_a_folder_are_kept_until_its_images_change(tmp_path, monkeypatch):
    folder, real = write_images(tmp_path / "images", 3), write_images(tmp_path / "real", 3, seed=1)
    networks = NetworksConfig(inception_replacement=Plugin(path="diffusion.evaluation.features.RandomFeatures"))

    def evaluate(metric: Metric, folder: Path = folder, **options) -> set[str]:
        reference = ReferenceConfig(path=str(real))
        protocol = ProtocolConfig(metrics=[metric], reference=reference, networks=networks, **options)
        config = EvaluationConfig(
            output_folder=str(tmp_path / "out"), images=str(folder), protocol=protocol, device=Device.cpu
        )
        Evaluation(config=config).evaluate_folder(folder, open_images(folder))
        (result,) = read_results([tmp_path / "out"])
        return {*result.numbers}

    assert evaluate(Metric.fid) == {"frechet_random-16"}
    assert evaluate(Metric.kid) == {"frechet_random-16", "kernel_random-16"}
    with pytest.raises(ConfigurationError, match="another folder of that name"):
        evaluate(Metric.kid, write_images(tmp_path / "others" / "images", 3))
    with monkeypatch.context() as patched:
        patched.setattr(Metrics, "compute", lambda *arguments: pytest.fail("computed before the error"))
        with pytest.raises(ConfigurationError, match="resize: "):
            evaluate(Metric.kid, resize_filter=ResizeFilter.lanczos)
    (folder / "000.png").write_bytes((folder / "001.png").read_bytes())
    assert evaluate(Metric.kid) == {"kernel_random-16"}


def test_a_size_that_the_vae_cannot_make_is_an_error(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="multiples of "):
        PipelineGenerator(folder, CPU).latent_shape(34, 32)


def test_an_export_with_a_text_adapter_of_its_own_is_an_error(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "exported")
    (tmp_path / "exported" / "text_adapter").mkdir()
    with pytest.raises(ConfigurationError, match="Evaluate the run"):
        PipelineGenerator(tmp_path / "exported", CPU)


@pytest.mark.parametrize(
    "index",
    [
        '{"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "UNet2DConditionModel"]}',
        '{"_class_name": "FluxPipeline"}',
        '{"_class_name": ["pipeline", "Mine"]}',
        "{}",
        "no json",
    ],
)
def test_a_folder_that_is_no_such_pipeline_or_lacks_a_part_is_an_error(tmp_path: Path, index: str) -> None:
    (tmp_path / "model_index.json").write_text(index)
    with pytest.raises(ConfigurationError, match="is no StableDiffusionPipeline or "):
        load_generator(EvaluatedModel(name="p", path=str(tmp_path), step=None, weights=""), CPU)


def test_initial_noise_is_drawn_on_the_cpu_for_any_device(monkeypatch):
    drawn_on = []

    def normal(seed, purpose, step, sample, shape):
        drawn_on.append((step.device.type, sample.device.type))
        return torch.zeros(len(sample), *shape)

    monkeypatch.setattr("diffusion.evaluation.generate.normal", normal)
    task = GenerationTask(prompts=[Prompt(text="a")], sampling=SamplingConfig(), guidance_scale=3.0, batch_size=2)
    assert addressed_latents(task, [0], (4, 8, 8), torch.device("meta")).device.type == "meta"
    assert drawn_on == [("cpu", "cpu")]


@pytest.mark.parametrize(
    ("case", "sampler", "num_steps", "changed"),
    [
        ("zero-terminal", Sampler.ddim, 50, False),
        ("zero-terminal", Sampler.ddim, 30, True),
        ("not-zero-terminal", Sampler.ddim, 1, True),
        ("flow", Sampler.euler, 30, False),
        ("flow", Sampler.heun, 50, True),
    ],
)
def test_images_of_an_earlier_version_of_a_sampler_are_another_task(tmp_path, case, sampler, num_steps, changed):
    generator = CheckpointGenerator(CASES[case](), CPU)
    sampling = SamplingConfig(num_inference_steps=num_steps, sampler=sampler)
    task = GenerationTask(prompts=[], sampling=sampling, guidance_scale=1.0, batch_size=1)
    earlier = task.record(generator)
    earlier.pop("sampler_version", None)
    (tmp_path / "images").mkdir()
    write_json(tmp_path / "images" / GENERATION, earlier)
    with pytest.raises(ConfigurationError, match="sampler_version: None, 2") if changed else nullcontext():
        generate_images(generator, task, tmp_path / "images", "test")


def test_images_of_another_noise_schedule_are_another_task(tmp_path):
    generator = CheckpointGenerator(CASES["flow"](), CPU)
    sampling = SamplingConfig(num_inference_steps=1, images_per_prompt=1)
    task = GenerationTask(prompts=[Prompt(text="a")], sampling=sampling, guidance_scale=1.0, batch_size=1)
    generate_images(generator, task, tmp_path / "images", "test")
    generator.noise_scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    with pytest.raises(ConfigurationError, match=r"noise_schedule\.shift: 2\.0, 3\.0"):
        generate_images(generator, task, tmp_path / "images", "test")
    record = read_json(tmp_path / "images" / GENERATION)
    del record["noise_schedule"]
    write_json(tmp_path / "images" / GENERATION, record)
    generate_images(generator, task, tmp_path / "images", "test")


def test_an_image_that_fails_on_a_rank_ends_all_ranks(tmp_path):
    """Rank 1 generates the second of two images."""
    generator = CheckpointGenerator(CASES["flow"](), CPU)
    sampling = SamplingConfig(num_inference_steps=1, images_per_prompt=1)
    prompts = [Prompt(text="a"), Prompt(text="b")]
    task = GenerationTask(prompts=prompts, sampling=sampling, guidance_scale=1.0, batch_size=1)

    def step(rank: int) -> None:
        with torch.no_grad():
            next(generator.model.network.parameters()).fill_(torch.nan if rank else 0)
        generate_images(generator, task, tmp_path / "images", "test")

    [(first, message), second] = on_ranks(tmp_path, step)
    assert first is WeightsError and "rank 1 of 2" in message and second == (first, message)
