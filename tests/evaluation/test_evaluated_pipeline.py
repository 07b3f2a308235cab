"""A pipeline in the diffusers layout makes the images of the model that it was made from."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diffusion.config.evaluation import SamplingConfig
from diffusion.config.model import Architecture, ModelConfig, ObjectiveConfig, PredictionType
from diffusion.errors import ConfigurationError
from diffusion.evaluation.generation import Task, generate_images
from diffusion.evaluation.models import (
    CheckpointGenerator,
    Generator,
    PipelineGenerator,
    Subject,
    find_subjects,
    load_generator,
)
from diffusion.evaluation.pictures import PictureFiles
from diffusion.evaluation.prompts import Prompt
from diffusion.evaluation.ranks import Ranks
from diffusion.models import build_model
from diffusion.models.latent_diffusion import LatentDiffusion

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[True, False], ids=["zero-terminal", "not-zero-terminal"])
def model(request: pytest.FixtureRequest) -> LatentDiffusion:
    config = ModelConfig(architecture=Architecture.tiny, unet={"block_out_channels": [16, 32], "norm_num_groups": 4})
    objective = ObjectiveConfig(prediction_type=PredictionType.v_prediction, zero_terminal_snr=request.param)
    return build_model(config, objective, resolution=32, seed=17)


@pytest.fixture(scope="module")
def folder(model: LatentDiffusion, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import StableDiffusionPipeline

    build: Any = StableDiffusionPipeline
    pipeline = build(
        vae=model.vae,
        text_encoder=model.text_encoder,
        tokenizer=model.tokenizer,
        unet=model.unet,
        scheduler=model.noise_scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    folder = tmp_path_factory.mktemp("exported") / "pipeline"
    pipeline.save_pretrained(folder)
    return folder


def generated(generator: Generator, folder: Path, scale: float) -> np.ndarray:
    prompts = [Prompt(text=text) for text in ("a red circle", "a blue star on a white background", "")]
    sampling = SamplingConfig(num_inference_steps=3, seed=5, images_per_prompt=2)
    task = Task(prompts=prompts, sampling=sampling, guidance_scale=scale, batch_size=4)
    pictures = PictureFiles(generate_images(generator, task, folder / f"cfg{scale:g}", Ranks(), "test"))
    return np.stack([np.asarray(pictures[i]).astype(int) for i in range(len(pictures))])


def test_its_images_are_those_of_the_model(model: LatentDiffusion, folder: Path, tmp_path: Path) -> None:
    (subject,) = find_subjects(str(folder), ["raw", "ema"])
    assert subject == Subject(name="pipeline", place=str(folder), step=None, weights="")
    pipeline, checkpoint = load_generator(subject, CPU), CheckpointGenerator(model, CPU)
    assert isinstance(pipeline, PipelineGenerator)
    assert (pipeline.resolution, pipeline.identity) == (32, checkpoint.identity)
    for scale in (1.0, 3.0):
        images = {
            name: generated(generator, tmp_path / name, scale)
            for name, generator in (("pipeline", pipeline), ("checkpoint", checkpoint))
        }
        assert images["pipeline"].shape == (6, 32, 32, 3)
        assert np.abs(images["pipeline"] - images["checkpoint"]).max() <= 1
        assert np.abs(images["pipeline"][0] - images["pipeline"][1]).max() > 10, "two noises, one image"


def test_a_size_that_the_vae_cannot_make_is_an_error(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="multiples of 4"):
        PipelineGenerator(folder, CPU).latent_shape(34, 32)


def test_a_folder_that_lacks_a_part_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(
        '{"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "UNet2DConditionModel"]}'
    )
    with pytest.raises(ConfigurationError, match="is no pipeline of Stable Diffusion"):
        load_generator(Subject(name="p", place=str(tmp_path), step=None, weights=""), CPU)
