"""Generation of images for prompts by all ranks, from a checkpoint or a pipeline in the diffusers layout.

Image i is a function of model, prompt, guidance scale and protocol. The address of its initial latents is (seed,
prompt, image of the prompt), and batches are divided by image number. So an image is the same on any number of ranks,
to the bit on one kind of machine. Another batch size changes rounding errors. An interrupted generation continues.
"""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import CLIPTokenizer

from diffusion.checkpointing.find import resolve_checkpoint
from diffusion.checkpointing.layout import batch_of
from diffusion.config.frozen import FrozenPaths
from diffusion.config.model import Sampler
from diffusion.distributed import map_on_ranks, on_first_rank
from diffusion.ema.posthoc import AVERAGE_SUFFIX
from diffusion.errors import ConfigurationError, DataError, UserError, explained_writes, first_line
from diffusion.evaluation.config import SamplingConfig
from diffusion.evaluation.prompts import Prompt, write_listing
from diffusion.evaluation.protocol import content_hash, difference
from diffusion.files import atomic_path, read_json, write_json
from diffusion.formats.marks import Mark, save_marked
from diffusion.loading import load_model
from diffusion.models.conditioning import DualTextEncoder
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.model_folders import PIPELINE_INDEX, load_pretrained
from diffusion.models.networks import patch_size_of
from diffusion.models.pretrained import SCHEDULE_KEYS, is_pipeline, module_identity, weights_identity
from diffusion.models.sampling import choose_sampler, inference_scheduler, to_pil, training_scheduler
from diffusion.models.tokenizers import repair
from diffusion.randomness import Purpose, normal

PIPELINES = ("StableDiffusionPipeline", "StableDiffusionXLPipeline", "PRXPipeline", "PRXPixelPipeline")
"""Classes of diffusers whose folders can be evaluated."""

GENERATION = "generation.json"
"""Record of everything that the images of a folder depend on; written first."""


class Generator(ABC):
    """Generates images from prompts and initial latents."""

    mark: Mark
    """Origin of its images: name, and hash of the weights."""

    resolution: int
    """Default side of images in pixels."""

    vae_factor: int
    """Pixels per latent position along one side."""

    side_factor: int
    """Both sides of an image in pixels are multiples of it."""

    num_channels: int
    """Channels of the latents."""

    noise_scheduler: Any
    """Noise schedule of training, as a scheduler of diffusers."""

    device: torch.device

    def sampler(self, sampling: SamplingConfig) -> Sampler:
        """Sampler of a configuration; a ConfigurationError if it does not fit the noise schedule."""
        try:
            return choose_sampler(self.noise_scheduler, sampling.sampler)
        except ValueError as error:
            raise ConfigurationError(f"sampling: {error}") from error

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Channels, height and width of the latents of an image, whose size is in pixels.

        Sides that are not multiples of `side_factor` are a ConfigurationError.
        """
        if height % self.side_factor or width % self.side_factor:
            raise ConfigurationError(
                f"protocol.sampling.height={height} and width={width} must be multiples of {self.side_factor}"
            )
        return self.num_channels, height // self.vae_factor, width // self.vae_factor

    @abstractmethod
    def generate(
        self, prompts: Sequence[str], latents: Tensor, sampling: SamplingConfig, guidance_scale: float
    ) -> list[Image.Image]:
        """Generate one image for each prompt, from latents [B, C, H, W]."""


@dataclass(frozen=True, kw_only=True)
class EvaluatedModel:
    """A model to evaluate."""

    name: str
    """Name in file names: `ep0-ba100-ema`."""

    path: str
    """Checkpoint, file of averaged weights, or folder of a pipeline."""

    step: int | None
    """Optimizer step of the weights, if known."""

    weights: str
    """Weights of a checkpoint: `raw`, `ema` ...; empty otherwise."""

    origin: str | None = None
    """Path or URI of the original, if `path` is a copy."""


class CheckpointGenerator(Generator):
    """Generator from a model of this package."""

    def __init__(self, model: LatentDiffusion, device: torch.device) -> None:
        self.vae_identity = module_identity(model.vae)
        self.noise_scheduler, self.mark = model.noise_scheduler, model.mark
        self.model, self.device, self.resolution = model.to(device).eval(), device, model.resolution
        self.vae_factor, self.num_channels = model.vae_factor, model.network.config["in_channels"]
        self.side_factor = model.side_factor

    def generate(
        self, prompts: Sequence[str], latents: Tensor, sampling: SamplingConfig, guidance_scale: float
    ) -> list[Image.Image]:
        """Generate one image for each prompt."""
        try:
            self.model.requested_scores(sampling.scores)
        except ValueError as error:
            raise ConfigurationError(f"protocol.sampling.scores: {error}") from error
        images = self.model.generate(
            prompts,
            sampling.negative_prompt,
            scores=sampling.scores,
            height=latents.shape[2] * self.vae_factor,
            width=latents.shape[3] * self.vae_factor,
            num_inference_steps=sampling.num_inference_steps,
            sampler=sampling.sampler,
            guidance_scale=guidance_scale,
            latents=latents,
            batch_size=len(prompts),
            output="tensor",
            progress=False,
        )
        assert isinstance(images, Tensor)
        if not images.isfinite().all():
            raise WeightsError("generated images are not finite: the weights are of no use")
        return to_pil(images)


class PipelineGenerator(Generator):
    """Generator from a text-to-image pipeline of diffusers, with the samplers of this package.

    The folder holds Stable Diffusion, SDXL, PRX or PRXPixel in the diffusers layout.

    Raises:
        ConfigurationError: the pipeline cannot be loaded.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        if (folder / "text_adapter").is_dir():
            raise ConfigurationError(
                f"model={folder}: its prompts are encoded by text_adapter/, which a pipeline does not read. Evaluate "
                "the run that it was exported from"
            )
        pipeline = _load_pipeline(folder)
        self.noise_scheduler = training_scheduler(pipeline.scheduler.config)
        pipeline.set_progress_bar_config(disable=True)
        text_encoder = pipeline.text_encoder
        if hasattr(pipeline, "text_encoder_2"):
            text_encoder = DualTextEncoder(text_encoder, pipeline.text_encoder_2)
            pipeline.watermark = None
        self.is_prx, self.is_pixel = hasattr(pipeline, "transformer"), not hasattr(pipeline, "vae")
        network = pipeline.transformer if self.is_prx else pipeline.unet
        vae = nn.Identity() if self.is_pixel else pipeline.vae
        version = weights_identity(network, vae, text_encoder)
        self.mark = Mark(model=folder.resolve().name, version=version)
        self.pipeline, self.device = pipeline.to(device), device
        self.vae_factor, self.num_channels = pipeline.vae_scale_factor, network.config.in_channels
        self.side_factor = self.vae_factor * patch_size_of(network)
        if self.is_prx:
            self.resolution = pipeline.config.default_sample_size or (1024 if self.is_pixel else 512)
        else:
            self.resolution = network.config.sample_size * self.vae_factor

    def generate(
        self, prompts: Sequence[str], latents: Tensor, sampling: SamplingConfig, guidance_scale: float
    ) -> list[Image.Image]:
        """Generate one image for each prompt."""
        if sampling.scores:
            raise ConfigurationError(
                "protocol.sampling.scores is for checkpoints: a pipeline was exported with its own (--score)"
            )
        self.pipeline.scheduler = inference_scheduler(self.noise_scheduler, sampling.sampler)
        options: dict[str, Any] = {
            "height": latents.shape[2] * self.vae_factor,
            "width": latents.shape[3] * self.vae_factor,
            "num_inference_steps": sampling.num_inference_steps,
            "guidance_scale": guidance_scale,
        }
        latents, negative = latents.to(self.pipeline.text_encoder.dtype), sampling.negative_prompt
        if isinstance(self.pipeline.tokenizer, CLIPTokenizer):
            prompts, negative = [repair(prompt) for prompt in prompts], repair(negative)
        if self.is_prx:  # With guidance it takes one prompt at a time.
            options |= {"use_resolution_binning": False}
            if self.is_pixel:
                latents = latents * self.pipeline.config.noise_scale
            else:
                options |= {"skip_text_cleaning": True}
            images = [
                self.pipeline(prompt, negative, latents=latents[i : i + 1], **options).images
                for i, prompt in enumerate(prompts)
            ]
            return [image for [image] in images]
        negatives = [negative] * len(prompts)
        return self.pipeline(list(prompts), negative_prompt=negatives, latents=latents, **options).images


def _load_pipeline(folder: Path) -> Any:
    import diffusers

    options: dict[str, Any] = {"use_safetensors": True, "dtype": torch.float32, "remedy": "Export it again"}
    try:
        name = read_json(folder / PIPELINE_INDEX)["_class_name"]
        if name not in PIPELINES:
            raise ValueError(f"its class is {name}")
        return load_pretrained(getattr(diffusers, name), folder, local_files_only=True, **options)
    except (UserError, LookupError, ValueError, TypeError) as error:
        reason = first_line(error)
        raise ConfigurationError(f"model={folder} is no {' or '.join(PIPELINES)}: {reason}") from error


def find_models(source: str, weights: Sequence[str]) -> list[EvaluatedModel]:
    """Find the models to evaluate, by `EvaluationConfig.model` and `EvaluationConfig.weights`.

    A pipeline, or a file of averaged weights, has one kind of weights.

    Raises:
        ConfigurationError: there is no model.
    """
    path = Path(source).expanduser()
    if is_pipeline(source):
        return [EvaluatedModel(name=path.resolve().name, path=str(path), step=None, weights="")]
    if path.suffix == AVERAGE_SUFFIX and path.is_file():
        return [EvaluatedModel(name=path.stem, path=str(path), step=None, weights="")]
    return checkpoint_models(resolve_checkpoint(source), weights)


def checkpoint_models(checkpoint: Path, weights: Sequence[str]) -> list[EvaluatedModel]:
    """One model for each of the weights of a checkpoint."""
    stem, step = checkpoint.name.removesuffix(".pt"), batch_of(checkpoint)
    return [
        EvaluatedModel(name=f"{stem}-{one}", path=str(checkpoint), step=step if step >= 0 else None, weights=one)
        for one in weights
    ]


class WeightsError(DataError):
    """The weights to evaluate are damaged, missing in the checkpoint, or not finite."""


def load_generator(model: EvaluatedModel, device: torch.device, paths: FrozenPaths | None = None) -> Generator:
    """Load the generator of a model, with its frozen parts from other paths than those of the training if given.

    Raises:
        ConfigurationError: weights are missing, or do not fit.
        WeightsError: the checkpoint is damaged, lacks the average, or holds NaN.
    """
    if is_pipeline(model.path):
        return PipelineGenerator(Path(model.path), device)
    try:
        return CheckpointGenerator(load_model(model.path, weights=model.weights or "raw", paths=paths), device)
    except DataError as error:
        raise WeightsError(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class GenerationTask:
    """Images to generate."""

    prompts: Sequence[Prompt]
    sampling: SamplingConfig
    guidance_scale: float
    batch_size: int

    @property
    def num_images(self) -> int:
        """Number of images; those of one prompt are adjacent."""
        return len(self.prompts) * self.sampling.images_per_prompt

    def prompt_of(self, image: int) -> int:
        """Number of the prompt of an image."""
        return image // self.sampling.images_per_prompt

    def size(self, generator: Generator) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.sampling.height or generator.resolution, self.sampling.width or generator.resolution

    def record(self, generator: Generator) -> dict[str, Any]:
        """Everything that the images depend on."""
        height, width = self.size(generator)
        schedule, sampler = generator.noise_scheduler.config, generator.sampler(self.sampling)
        # Earlier versions took other steps, or do not say: for Heun, and for DDIM with a remainder or one step.
        num_steps = self.sampling.num_inference_steps
        is_even = num_steps > 1 and schedule["num_train_timesteps"] % num_steps == 0
        has_other_steps = sampler is Sampler.heun or (sampler is Sampler.ddim and not is_even)
        return {
            "model": generator.mark.version,
            "prompts": content_hash([prompt.text for prompt in self.prompts]),
            "images_per_prompt": self.sampling.images_per_prompt,
            "guidance_scale": self.guidance_scale,
            "noise_schedule": {key: schedule[key] for key in (*SCHEDULE_KEYS, "shift") if key in schedule},
            "sampler": sampler.value,
            **({"sampler_version": 2} if has_other_steps else {}),
            "num_inference_steps": num_steps,
            "seed": self.sampling.seed,
            "height": height,
            "width": width,
            "negative_prompt": self.sampling.negative_prompt,
            "batch_size": self.batch_size,
            **({"scores": self.sampling.scores} if self.sampling.scores else {}),
        }


def addressed_latents(
    task: GenerationTask, images: Sequence[int], shape: tuple[int, int, int], device: torch.device
) -> Tensor:
    """Initial latents of images by number, drawn on the CPU like `initial_latents`: float32 [B, C, H, W]."""
    addresses = [divmod(image, task.sampling.images_per_prompt) for image in images]
    prompt, copy = (torch.tensor(part) for part in zip(*addresses, strict=True))
    return normal(task.sampling.seed, Purpose.INITIAL_LATENTS, copy, prompt, shape).to(device)


def generate_images(
    generator: Generator, task: GenerationTask, folder: Path, label: str, *, replaces: bool = False
) -> list[Path]:
    """Generate the missing images of a folder that is for this task only; collective. All ranks must see the folder.

    With `replaces` the images of another model are removed.

    Returns:
        The files in the order of the images.

    Raises:
        ConfigurationError: the folder has images of another task; names the difference.
        MachineError: the folder cannot be written.
    """
    files = [folder / f"{image:06d}.png" for image in range(task.num_images)]
    shape = generator.latent_shape(*task.size(generator))
    on_first_rank(lambda: _open_folder(folder, task.record(generator), replaces))

    def find_missing() -> list[int]:
        starts = range(0, task.num_images, task.batch_size)
        return [start for start in starts if not all(file.is_file() for file in files[start : start + task.batch_size])]

    missing = on_first_rank(find_missing)

    def generate(batch: int) -> None:
        numbers = range(missing[batch], min(missing[batch] + task.batch_size, task.num_images))
        texts = [task.prompts[task.prompt_of(number)].text for number in numbers]
        latents = addressed_latents(task, numbers, shape, generator.device)
        images = generator.generate(texts, latents, task.sampling, task.guidance_scale)
        for number, image in zip(numbers, images, strict=True):
            with explained_writes(files[number]), atomic_path(files[number], durable=False) as partial:
                save_marked(image, partial, generator.mark, compress_level=1)

    with torch.no_grad():
        map_on_ranks(len(missing), generate, label)

    def list_images() -> None:
        rows = []
        for image, file in enumerate(files):
            number, copy = divmod(image, task.sampling.images_per_prompt)
            prompt = {"prompt": task.prompts[number].text, "category": task.prompts[number].category}
            rows.append({"file_name": file.name, **prompt, "prompt_index": number, "image_of_prompt": copy})
        with explained_writes(folder):
            write_listing(folder, rows)

    on_first_rank(list_images)
    return files


def _open_folder(folder: Path, record: dict[str, Any], replaces: bool) -> None:
    """Create the folder, or check that it is of this task."""
    found = read_json(folder / GENERATION) if (folder / GENERATION).is_file() else None
    if found is not None and not (replaces and found["model"] != record["model"]):
        # Earlier records have no noise schedule.
        if differing := difference({"noise_schedule": record["noise_schedule"], **found}, record):
            is_other = found["model"] != record["model"]
            remark = ". Earlier versions left ingredients out of the hash of a model" if is_other else ""
            raise ConfigurationError(
                f"{folder} has images of another task ({'; '.join(differing)}): choose another output_folder{remark}"
            )
        return
    with explained_writes(folder):
        if folder.is_dir():  # Without a record its images are what a killed removal left.
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        write_listing(folder, [])
        write_json(folder / GENERATION, record)
