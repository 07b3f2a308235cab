"""Samplers at every number of steps: where they begin, how many steps they take, and where they end."""

import pytest
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

from diffusion.config.model import NUM_TIMESTEPS, FlowConfig, ObjectiveConfig, PredictionType, Sampler
from diffusion.models.conditioning import Conditioning
from diffusion.models.sampling import (
    build_noise_scheduler,
    choose_sampler,
    exported_scheduler,
    inference_scheduler,
    sample_latents,
    training_scheduler,
)

PROCESSES = {
    "leading": ObjectiveConfig(),
    "trailing": ObjectiveConfig(prediction_type=PredictionType.v_prediction, zero_terminal_snr=True),
}


def flow(shift: float) -> ObjectiveConfig:
    return ObjectiveConfig(prediction_type=PredictionType.flow, flow=FlowConfig(shift=shift))


def run(scheduler, num_steps: int, prediction=lambda latents, t: torch.zeros_like(latents)):
    """Sample from ones with a prediction; the timesteps at which the network was called, and the result."""
    timesteps = []

    def denoise(latents, timestep, _):
        timesteps.append(float(timestep))
        return prediction(latents, timestep)

    none, start = Conditioning(torch.zeros(1, 1, 1)), torch.ones(1, 1, 1, 1, dtype=torch.float64)
    options = {"num_inference_steps": num_steps, "guidance_scale": 1.0}
    return timesteps, sample_latents(denoise, scheduler, start, none, none, **options)


@pytest.mark.parametrize("name", PROCESSES)
def test_ddim_takes_each_number_of_steps_over_the_whole_schedule(name):
    scheduler = inference_scheduler(build_noise_scheduler(PROCESSES[name]))
    for num_steps in range(1, NUM_TIMESTEPS + 1):
        scheduler.set_timesteps(num_steps)
        timesteps = scheduler.timesteps
        interval = NUM_TIMESTEPS / num_steps
        assert len(timesteps) == num_steps
        gaps = timesteps[:-1] - timesteps[1:]
        assert (gaps >= 1).all(), num_steps
        assert (gaps - interval).abs().max() < 1 if num_steps > 1 else True, num_steps
        starts_at_noise = name == "trailing" or num_steps == 1
        first = NUM_TIMESTEPS - 1 if starts_at_noise else min(NUM_TIMESTEPS - 1, int(NUM_TIMESTEPS - interval) + 1)
        assert timesteps[0] == first, num_steps
        assert 0 <= timesteps[-1] <= interval, num_steps


@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize("num_steps", [1, 3, 30, 61, 600, 999, 1000])
def test_ddim_ends_at_the_first_timestep_without_a_gap(name, num_steps):
    """With the true noise predicted, DDIM is exact at any number of steps."""
    scheduler = inference_scheduler(build_noise_scheduler(PROCESSES[name]))
    clean = torch.full((1, 1, 1, 1), 0.5, dtype=torch.float64)
    alphas = scheduler.alphas_cumprod.double()

    def noise_of(latents, t):
        return (latents - alphas[t].sqrt() * clean) / (1 - alphas[t]).sqrt()

    def prediction(latents, t):
        noise = noise_of(latents, t)
        return noise if name == "leading" else alphas[t].sqrt() * noise - (1 - alphas[t]).sqrt() * clean

    scheduler.set_timesteps(num_steps)
    noise = noise_of(1.0, scheduler.timesteps[0])
    _, found = run(scheduler, num_steps, prediction)
    expected = scheduler.final_alpha_cumprod.sqrt() * clean + (1 - scheduler.final_alpha_cumprod).sqrt() * noise
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("objective", PROCESSES.values(), ids=list(PROCESSES))
@pytest.mark.parametrize("num_steps", [10, 20, 25, 50])
def test_ddim_is_that_of_diffusers_where_steps_divide_the_schedule(objective, num_steps):
    process = build_noise_scheduler(objective)
    ours, theirs = inference_scheduler(process), exported_scheduler(process)
    assert type(theirs) is DDIMScheduler
    found, expected = (run(one, num_steps, lambda latents, t: latents.sin()) for one in (ours, theirs))
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("sampler", ["euler", "heun"])
def test_samplers_of_a_flow_take_each_number_of_steps_from_noise_to_the_image(sampler, shift):
    scheduler = inference_scheduler(build_noise_scheduler(flow(shift)), sampler)
    for num_steps in [*range(1, 20), 50, *range(100, 999, 97), 999, 1000]:
        timesteps, found = run(scheduler, num_steps, lambda latents, _: torch.ones_like(latents))
        levels = scheduler.sigmas
        assert len(levels) == num_steps + 1
        assert levels[0] >= 0.999
        assert levels[-1] == 0
        rest = levels / (shift - (shift - 1) * levels)
        torch.testing.assert_close(rest, torch.linspace(float(rest[0]), 0, num_steps + 1), rtol=0, atol=1e-5)
        assert len(timesteps) == (num_steps if sampler == "euler" else 2 * num_steps - 1)
        torch.testing.assert_close(1 - found.double().item(), float(levels[0]), rtol=0, atol=1e-3)


def test_the_noise_schedule_of_a_published_flow_is_read(tmp_path):
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(tmp_path)
    found = training_scheduler(FlowMatchEulerDiscreteScheduler.from_pretrained(tmp_path).config)
    assert (choose_sampler(found, None), found.config["shift"]) == (Sampler.euler, 3.0)
    without_shift = {"prediction_type": "flow_prediction", "num_train_timesteps": 1000}
    assert training_scheduler(without_shift).config["shift"] == 1.0
