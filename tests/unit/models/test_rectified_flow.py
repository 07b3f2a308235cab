"""Rectified flow against closed forms: lines, density of the timesteps, samplers, and a model trained with it."""

import math

import pytest
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from diffusion.config.model import FlowConfig, ObjectiveConfig, PredictionType, Sampler
from diffusion.errors import ConfigurationError
from diffusion.models import tiny
from diffusion.models.conditioning import Conditioning
from diffusion.models.objectives import TARGETS, TRAINING, Quantiles, RectifiedFlow, add_noise, draw_quantiles
from diffusion.models.sampling import build_noise_scheduler, inference_scheduler, sample_latents

FLOW = ObjectiveConfig(prediction_type=PredictionType.flow)


def test_noised_latents_lie_on_a_line_along_the_target():
    latents, noise = torch.randn(2, 5, 4, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    timesteps = torch.tensor([1.0, 250.0, 500.0, 730.5, 999.0]).double()
    process = RectifiedFlow(FlowConfig())
    velocity = TARGETS[PredictionType.flow].compute(latents, noise, process.signal_and_noise_rate(timesteps))
    noised, later = (add_noise(latents, noise, process.signal_and_noise_rate(t)) for t in (timesteps, timesteps + 1))
    torch.testing.assert_close(1000 * (later - noised), velocity)
    torch.testing.assert_close(noised - timesteps.view(-1, 1, 1, 1) / 1000 * velocity, latents)
    theirs = FlowMatchEulerDiscreteScheduler(1000)
    at = theirs.timesteps[[900, 300]]
    expected = theirs.scale_noise(latents[:2].float(), at, noise[:2].float())
    torch.testing.assert_close(add_noise(latents[:2], noise[:2], process.signal_and_noise_rate(at)).float(), expected)


@pytest.mark.parametrize("flow", [FlowConfig(), FlowConfig(logit_mean=-0.5, logit_std=1.4, shift=3.0)])
def test_timesteps_have_the_logit_normal_density_of_the_paper(flow):
    num = 100_000
    quantiles = draw_quantiles(TRAINING, 3, torch.zeros(num, dtype=torch.int64), torch.arange(num))
    rate = RectifiedFlow(flow).timesteps(quantiles).double() / 1000
    # Esser et al. 2024: with a shift the ratio of noise to signal is multiplied, so that its log moves (equation 23).
    logit = (rate / (1 - rate)).log() - math.log(flow.shift)
    z = (logit - flow.logit_mean) / flow.logit_std
    assert abs(z.mean()) < 4 / math.sqrt(num)
    assert abs(z.var() - 1) < 4 * math.sqrt(2 / num)
    for value in (-1.0, 0.0, 1.5):
        below = 0.5 * (1 + math.erf(value / math.sqrt(2)))
        assert abs((z < value).double().mean() - below) < 4 * math.sqrt(below * (1 - below) / num)


def test_the_extreme_quantiles_are_inside_of_the_line():
    ends = torch.tensor([0, 2**32 - 1])
    timesteps = RectifiedFlow(FlowConfig()).timesteps(Quantiles(ends, 1))
    assert 0 < timesteps[0] < timesteps[1] < 1000


def test_min_snr_counts_the_error_of_the_latents():
    timesteps = torch.tensor([100.0, 500.0, 900.0])
    signal, noise = (rate.flatten() for rate in RectifiedFlow(FlowConfig()).signal_and_noise_rate(timesteps))
    ratio = TARGETS[PredictionType.flow].error_ratio((signal / noise) ** 2)
    torch.testing.assert_close(ratio, 1 / noise**2)  # x_0 = x_t - noise rate * velocity.


SPREAD = 0.5


def velocity_of_gaussian(noised: Tensor, timestep: Tensor, _: Conditioning) -> Tensor:
    """E[noise - x_0 | x_t] for x_0 of standard deviation SPREAD."""
    rate = timestep.double() / 1000
    signal, variance = 1 - rate, (1 - rate) ** 2 * SPREAD**2 + rate**2
    return noised * (rate - signal * SPREAD**2) / variance


def sampled(sampler: Sampler, num_steps: int, shift: float = 1.0) -> float:
    """Largest error of the sampler: the flow maps noise z to SPREAD * z."""
    objective = ObjectiveConfig(prediction_type=PredictionType.flow, flow=FlowConfig(shift=shift))
    scheduler = inference_scheduler(build_noise_scheduler(objective), sampler)
    noise = torch.linspace(-2, 2, 64, dtype=torch.float64).view(1, 1, 8, 8)
    none = Conditioning(torch.zeros(1, 1, 1))
    options = {"num_inference_steps": num_steps, "guidance_scale": 1.0}
    return float(
        (sample_latents(velocity_of_gaussian, scheduler, noise, none, none, **options) - SPREAD * noise).abs().max()
    )


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_samplers_converge_to_the_flow_with_their_order(shift):
    euler = [sampled(Sampler.euler, num, shift) for num in (20, 80)]
    heun = [sampled(Sampler.heun, num, shift) for num in (20, 80)]
    assert 3 < euler[0] / euler[1] < 6, "first order: a quarter"
    assert 10 < heun[0] / heun[1] < 25, "second order: a sixteenth"
    assert heun[1] < euler[1] / 5


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("sampler", [Sampler.euler, Sampler.heun])
def test_samplers_leave_no_noise_in_images(sampler, shift):
    data, noise = torch.randn(24, 4, 8, 8, generator=torch.Generator().manual_seed(0)).split([16, 8])

    def velocity(noised: Tensor, timestep: Tensor, _: Conditioning) -> Tensor:
        """E[noise - x_0 | x_t] for x_0 of the data."""
        rate = max(float(timestep), 1.0) / 1000
        distances = (noised[:, None] - (1 - rate) * data).square().flatten(2).sum(2)
        mean = torch.einsum("bn,nchw->bchw", torch.softmax(-distances / (2 * rate**2), 1), data)
        return (noised - mean) / rate

    objective = ObjectiveConfig(prediction_type=PredictionType.flow, flow=FlowConfig(shift=shift))
    scheduler, none = inference_scheduler(build_noise_scheduler(objective), sampler), Conditioning(torch.zeros(8, 1, 1))
    images = sample_latents(velocity, scheduler, noise, none, none, num_inference_steps=10, guidance_scale=1.0)
    assert (images[:, None] - data).square().flatten(2).mean(2).amin(1).sqrt().mean() < 0.01


def test_samplers_of_another_process_are_rejected():
    with pytest.raises(ValueError, match="ddim"):
        inference_scheduler(build_noise_scheduler(FLOW), "ddim")
    with pytest.raises(ValueError, match="heun"):
        inference_scheduler(build_noise_scheduler(ObjectiveConfig()), "heun")
    with pytest.raises(ConfigurationError, match=r"objective\.zero_terminal_snr"):
        build_noise_scheduler(ObjectiveConfig(prediction_type=PredictionType.flow, zero_terminal_snr=True))


def test_a_model_generates_with_both_samplers():
    model = tiny(prediction_type="flow")
    options = {"num_inference_steps": 3, "seed": 1, "output": "tensor", "progress": False}
    euler, heun = (model.generate("a circle", sampler=name, **options) for name in (None, "heun"))
    assert isinstance(euler, Tensor)
    assert euler.isfinite().all()
    assert not torch.equal(euler, heun)
