"""Sampling: noise schedule, samplers with classifier-free guidance, initial noise, and checks of arguments.

Shape letters: B images, C channels, H W height and width of the latent.
"""

import math
import operator
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_flow_match_heun_discrete import FlowMatchHeunDiscreteScheduler
from diffusers.schedulers.scheduling_utils import SchedulerOutput
from PIL import Image
from torch import Tensor
from tqdm.auto import tqdm

from diffusion.config.model import NUM_TIMESTEPS, ObjectiveConfig, PredictionType, Sampler
from diffusion.errors import ConfigurationError, raise_all
from diffusion.models.architectures import FLOW_PREDICTION, NOISE_SCHEDULE
from diffusion.models.conditioning import Conditioning
from diffusion.randomness import NUM_SEEDS, Purpose, normal

Denoiser = Callable[[Tensor, Tensor, Conditioning], Tensor]
"""(latents [B, C, H, W], timestep [], conditioning of B images) -> prediction [B, C, H, W]."""

NoiseScheduler = DDPMScheduler | FlowMatchEulerDiscreteScheduler
"""Noise schedule of training, as diffusers describes it."""


class DDIM(DDIMScheduler):
    """DDIM whose n timesteps are spread over the whole schedule, also where n does not divide its length T.

    A single step begins at the last timestep.
    """

    def set_timesteps(self, num_inference_steps: int, device: Any = None) -> None:
        """Space the timesteps by T / n; diffusers rounds this down, or takes one more step."""
        super().set_timesteps(num_inference_steps, device)
        length, indices = self.config["num_train_timesteps"], np.arange(num_inference_steps)
        if self.config["timestep_spacing"] == "trailing":
            timesteps = np.round(length - indices * (length / num_inference_steps)) - 1
        else:
            timesteps = indices[::-1] * length // num_inference_steps + self.config["steps_offset"]
            timesteps -= max(0, timesteps[0] - (length - 1))  # With an offset, T steps would exceed the schedule.
        if num_inference_steps == 1:  # The leading one is the first timestep, whose images have little noise.
            timesteps = np.array([length - 1])
        self.timesteps = torch.from_numpy(timesteps.astype(np.int64)).to(device)
        self._following = dict(zip(timesteps[:-1].tolist(), timesteps[1:].tolist(), strict=True))

    def step(self, model_output: Tensor, timestep: Any, sample: Tensor, *_: Any, **__: Any) -> SchedulerOutput:
        """Move to the next timestep, without noise (Song et al. 2021, equation 12 with sigma = 0)."""
        following = self._following.get(int(timestep))
        alpha = self.alphas_cumprod[int(timestep)]
        alpha_next = self.final_alpha_cumprod if following is None else self.alphas_cumprod[int(following)]
        beta = 1 - alpha
        if self.config["prediction_type"] == PredictionType.epsilon.value:
            clean, noise = (sample - beta**0.5 * model_output) / alpha**0.5, model_output
        elif self.config["prediction_type"] == PredictionType.sample.value:
            clean, noise = model_output, (sample - alpha**0.5 * model_output) / beta**0.5
        else:
            clean = alpha**0.5 * sample - beta**0.5 * model_output
            noise = alpha**0.5 * model_output + beta**0.5 * sample
        return SchedulerOutput(prev_sample=alpha_next**0.5 * clean + (1 - alpha_next) ** 0.5 * noise)


class EulerScheduler(DPMSolverMultistepScheduler):
    """Euler's method, as DPM-Solver++ of order 1."""

    def set_timesteps(self, *args: Any, **kwargs: Any) -> None:
        """Begin at the first step: it cannot be found by its timestep where several steps round to the same one."""
        super().set_timesteps(*args, **kwargs)
        self.set_begin_index(0)


class HeunScheduler(FlowMatchHeunDiscreteScheduler):
    """Heun's method, with what the pipelines of Stable Diffusion ask of a scheduler."""

    init_noise_sigma = 1.0

    def set_timesteps(self, num_inference_steps: int, device: Any = None) -> None:
        """Space n steps evenly from 1 to 0 before the shift; those of diffusers are n - 1 and a tiny one.

        The network's timesteps are whole, as in training. The last step is Euler's (Karras et al. 2022, algorithm 1): a
        correction at noise level 0, where nothing is trained, would leave noise in the image.
        """
        super().set_timesteps(num_inference_steps, device)
        line, shift = torch.linspace(1, 0, num_inference_steps + 1, dtype=torch.float64), self.config["shift"]
        self.sigmas = (shift * line / (1 + (shift - 1) * line)).float()
        timesteps = (self.sigmas * self.config["num_train_timesteps"]).clamp(min=1)
        self.timesteps = timesteps.round().repeat_interleave(2)[1:-2].to(device)
        self._step_index = 0

    def step(self, model_output: Tensor, timestep: Any, sample: Tensor, *_: Any, **__: Any) -> SchedulerOutput:
        """Take Euler's step to the next noise level, then repeat it with the mean of both velocities."""
        if self.state_in_first_order:
            self.sample, self.prev_derivative = sample.float(), model_output
            self.dt = float(self.sigmas[self._step_index + 1] - self.sigmas[self._step_index])
            return SchedulerOutput(prev_sample=(self.sample + self.dt * model_output).to(model_output.dtype))
        assert self.dt is not None
        corrected = self.sample + self.dt * (self.prev_derivative + model_output) / 2
        self.dt, self._step_index = None, self._step_index + 1
        return SchedulerOutput(prev_sample=corrected.to(model_output.dtype))

    def scale_model_input(self, sample: Tensor, timestep: Tensor) -> Tensor:
        """Return the input of the network as it is."""
        return sample


InferenceScheduler = DDIM | EulerScheduler | HeunScheduler


def build_noise_scheduler(objective: ObjectiveConfig) -> NoiseScheduler:
    """Build the noise scheduler that training and sampling share.

    Raises:
        ConfigurationError: the objective contradicts itself.
    """
    raise_all(ConfigurationError, list(objective.problems("objective")))
    if objective.prediction_type is PredictionType.flow:
        return FlowMatchEulerDiscreteScheduler(NUM_TIMESTEPS, shift=objective.flow.shift)
    return DDPMScheduler(
        **NOISE_SCHEDULE,
        prediction_type=objective.prediction_type.value,
        rescale_betas_zero_snr=objective.zero_terminal_snr,
    )


def flow_shift(config: Mapping[str, Any]) -> float | None:
    """Shift of rectified flow in a sampler's configuration; None for other processes."""
    if config.get("prediction_type") == FLOW_PREDICTION:
        return config.get("flow_shift", 1.0)
    return config.get("shift", 1.0) if config.get("_class_name", "").startswith("FlowMatch") else None


def training_scheduler(config: Mapping[str, Any]) -> NoiseScheduler:
    """Noise schedule of training from a sampler's configuration in a pipeline's folder."""
    if (shift := flow_shift(config)) is not None:
        return FlowMatchEulerDiscreteScheduler(config["num_train_timesteps"], shift=shift)
    return DDPMScheduler.from_config(config)  # pyright: ignore[reportReturnType, reportArgumentType]


def schedule_differences(stored: Mapping[str, Any], **requested: Any) -> list[str]:
    """List where a stored noise schedule, in diffusers' names, is not `NOISE_SCHEDULE` and the requested values."""
    return [
        f"{key} is {stored[key]} there and {value} here"
        for key, value in {"trained_betas": None, **NOISE_SCHEDULE, **requested}.items()
        if stored.get(key, value) != value
    ]


def choose_sampler(noise_scheduler: NoiseScheduler, sampler: Sampler | str | None) -> Sampler:
    """Check a sampler's name; None is the first one that fits the noise schedule.

    Raises:
        ValueError: it does not fit, or is unknown.
    """
    is_flow = isinstance(noise_scheduler, FlowMatchEulerDiscreteScheduler)
    fitting = {one.value: one for one in ([Sampler.euler, Sampler.heun] if is_flow else [Sampler.ddim])}
    name = next(iter(fitting)) if sampler is None else getattr(sampler, "value", sampler)
    if name not in fitting:
        raise ValueError(f"sampler {name!r}: this model takes {' or '.join(fitting)}")
    return fitting[name]


def inference_scheduler(noise_scheduler: Any, sampler: Sampler | str | None = None) -> InferenceScheduler:
    """Sampler over the noise schedule of training.

    DDIM (Song et al. 2021): with zero-terminal SNR the first sampling step is the last timestep of training (Lin et al.
    2023, section 3.3): "trailing" steps. Otherwise "leading" steps with an offset of 1, as published with Stable
    Diffusion 2.

    Rectified flow: Euler's method (as DPM-Solver++ of order 1, which all pipelines of diffusers take), or Heun's with
    two evaluations a step, but one in the last.

    Raises:
        ValueError: the sampler does not fit the noise schedule.
    """
    config, sampler = noise_scheduler.config, choose_sampler(noise_scheduler, sampler)
    if sampler is Sampler.heun:
        return HeunScheduler(config.num_train_timesteps, shift=config.shift)
    kind = EulerScheduler if sampler is Sampler.euler else DDIM
    return kind.from_config(exported_scheduler(noise_scheduler).config)  # pyright: ignore[reportReturnType]


def exported_scheduler(noise_scheduler: Any) -> DDIMScheduler | DPMSolverMultistepScheduler:
    """Build the first sampler of a noise schedule as diffusers has it, for folders that its pipelines read."""
    config = noise_scheduler.config
    if choose_sampler(noise_scheduler, None) is Sampler.euler:
        return DPMSolverMultistepScheduler(
            config.num_train_timesteps,
            prediction_type=FLOW_PREDICTION,
            use_flow_sigmas=True,
            flow_shift=config.shift,
            solver_order=1,
        )
    zero_terminal = bool(config.rescale_betas_zero_snr)
    return DDIMScheduler.from_config(  # pyright: ignore[reportReturnType]
        config,
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=0 if zero_terminal else 1,
        timestep_spacing="trailing" if zero_terminal else "leading",
    )


@torch.no_grad()
def sample_latents(
    denoiser: Denoiser,
    scheduler: InferenceScheduler,
    latents: Tensor,
    conditioning: Conditioning,
    unconditional: Conditioning,
    *,
    num_inference_steps: int,
    guidance_scale: float,
    progress: bool = False,
) -> Tensor:
    """Sample with classifier-free guidance (Ho and Salimans 2022, equation 6, where w + 1 is the guidance scale).

    Args:
        denoiser: the network.
        scheduler: the sampler; its steps are set here.
        latents: float32 [B, C, H, W], pure noise.
        conditioning: conditioning by the prompts.
        unconditional: conditioning by the empty caption or by negative prompts.
        num_inference_steps: number of steps, at most the timesteps of the noise schedule.
        guidance_scale: 1 is no guidance.
        progress: show a bar.

    Returns:
        float32 [B, C, H, W].
    """
    scheduler.set_timesteps(num_inference_steps, device=latents.device)
    guided = guidance_scale != 1.0
    context = unconditional.concatenate(conditioning) if guided else conditioning
    for timestep in tqdm(scheduler.timesteps, desc="sampling", disable=not progress, leave=False):
        model_input = torch.cat([latents, latents]) if guided else latents
        prediction = denoiser(model_input, timestep, context).float()
        if guided:
            without, with_prompt = prediction.chunk(2)
            prediction = without + guidance_scale * (with_prompt - without)
        latents = scheduler.step(prediction, timestep, latents, return_dict=False)[0]  # pyright: ignore
    return latents


def initial_latents(seeds: Sequence[int], shape: tuple[int, int, int], device: torch.device) -> Tensor:
    """Initial noise of sampling; an image's noise depends on its seed alone.

    It is drawn on the CPU, because random numbers on a GPU need a C compiler.

    Returns:
        float32 [B, C, H, W], on the device.
    """
    zero = torch.zeros(1, dtype=torch.int64, device="cpu")
    noise = (normal(seed, Purpose.INITIAL_LATENTS, zero, zero, shape) for seed in seeds)
    return torch.cat([torch.empty(0, *shape, device="cpu"), *noise]).to(device)


# Arguments of `LatentDiffusion.generate`


def expand_prompts(
    prompts: str | Sequence[str], negative_prompts: str | Sequence[str] | None, num_images_per_prompt: int
) -> tuple[list[str], list[str]]:
    """Prompt and negative prompt of each image; those of a prompt are adjacent.

    Raises:
        ValueError: one is no text, or the number of negative prompts is neither 1 nor P.
    """
    prompts = _texts("prompts", prompts)
    negatives = _texts("negative_prompts", negative_prompts, absent="")
    if len(negatives) not in (1, len(prompts)):
        raise ValueError(f"{len(negatives)} negative prompts for {len(prompts)} prompts: give one, or one each")
    negatives = negatives * len(prompts) if len(negatives) == 1 else negatives
    repeat = range(num_images_per_prompt)
    return [prompt for prompt in prompts for _ in repeat], [negative for negative in negatives for _ in repeat]


def _texts(name: str, given: Any, absent: str | None = None) -> list[str]:
    """List one text or several, with `absent` in place of None; a ValueError if one is no text."""
    several: Any = [given] if isinstance(given, str) or not isinstance(given, Iterable) else given
    texts: list[Any] = [absent if text is None else text for text in several]
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise ValueError(f"{name} {wrong[0]!r}: give texts")
    return texts


def image_seeds(seed: int | Sequence[int] | None, num_images: int) -> list[int]:
    """One seed per image: consecutive from a number, as given, or random.

    Raises:
        ValueError: the number of seeds differs from that of images, or a seed is not a whole number in 0 .. 2^32 - 1.
    """
    if seed is None:
        return [secrets.randbelow(NUM_SEEDS) for _ in range(num_images)]
    if np.ndim(seed) == 0:
        first = whole_number("seed", seed, minimum=0, maximum=NUM_SEEDS - 1)
        return [(first + i) % NUM_SEEDS for i in range(num_images)]
    seeds = [whole_number("seed", one, minimum=0, maximum=NUM_SEEDS - 1) for one in np.asarray(seed).tolist()]
    if len(seeds) != num_images:
        raise ValueError(f"{len(seeds)} seeds for {num_images} images: give one per image, one number, or none")
    return seeds


def image_size(height: int | None, width: int | None, *, default: int, factor: int) -> tuple[int, int]:
    """Height and width of images in pixels, which are multiples of `factor`.

    Raises:
        ValueError: a side is not a multiple of the factor.
    """
    height = default if height is None else whole_number("height", height, minimum=1)
    width = default if width is None else whole_number("width", width, minimum=1)
    if height % factor or width % factor:
        raise ValueError(f"size {height} x {width}: both must be multiples of {factor}")
    return height, width


def whole_number(name: str, value: Any, *, minimum: int, maximum: float = math.inf) -> int:
    """Check a whole number of any library against a range.

    Raises:
        ValueError: the value is not a whole number in the range.
    """
    wanted = (
        f"a whole number of {minimum} or more" if maximum == math.inf else f"a whole number in {minimum} .. {maximum}"
    )
    try:
        number = operator.index(value)
    except TypeError as error:
        raise ValueError(f"{name} {value!r}: give {wanted}") from error
    if not minimum <= number <= maximum:
        raise ValueError(f"{name} {number}: give {wanted}")
    return number


# Images


def to_pil(images: Tensor) -> list[Image.Image]:
    """Convert images [B, 3, height, width] in [0, 1] to PIL."""
    arrays = (images * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(array) for array in arrays]


def image_grid(images: Sequence[Image.Image], num_columns: int) -> Image.Image:
    """Arrange images of one size in rows on white, 2 pixels apart."""
    pad = 2
    width, height = images[0].size
    num_rows = -(-len(images) // num_columns)
    size = (num_columns * (width + pad) + pad, num_rows * (height + pad) + pad)
    grid = Image.new("RGB", size, "white")
    for i, image in enumerate(images):
        grid.paste(image, (pad + i % num_columns * (width + pad), pad + i // num_columns * (height + pad)))
    return grid
