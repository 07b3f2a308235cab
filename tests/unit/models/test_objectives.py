import pytest
import torch
from diffusers import DDPMScheduler
from torch import Tensor

from diffusion.config.model import ObjectiveConfig, PredictionType
from diffusion.errors import ConfigurationError
from diffusion.models.objectives import (
    EVALUATION,
    TARGETS,
    TRAINING,
    NoiseProcess,
    Quantiles,
    add_noise,
    draw_noise,
    draw_quantiles,
    draw_stratified_quantiles,
    min_snr_weight,
)
from diffusion.models.sampling import build_noise_scheduler, inference_scheduler

SCHEDULE = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}


@pytest.fixture(scope="module")
def example():
    generator = torch.Generator().manual_seed(0)
    latents, noise = torch.randn(2, 5, 4, 8, 8, generator=generator)
    return latents, noise, torch.tensor([0, 1, 500, 998, 999])


def process(zero: bool = False) -> tuple[NoiseProcess, DDPMScheduler]:
    scheduler = DDPMScheduler(**SCHEDULE, rescale_betas_zero_snr=zero, prediction_type="v_prediction")
    return NoiseProcess(scheduler.alphas_cumprod), scheduler


def uniform_timesteps(quantiles: Quantiles) -> Tensor:
    return process()[0].timesteps(quantiles)


def test_noised_latents_and_velocities_are_those_of_diffusers(example):
    latents, noise, timesteps = example
    ours, theirs = process()
    rates = ours.signal_and_noise_rate(timesteps)
    noised = add_noise(latents, noise, rates)
    torch.testing.assert_close(noised, theirs.add_noise(latents, noise, timesteps), rtol=1e-5, atol=1e-6)
    velocity = theirs.get_velocity(latents, noise, timesteps)
    target = TARGETS[PredictionType.v_prediction].compute(latents, noise, rates)
    torch.testing.assert_close(target, velocity, rtol=1e-5, atol=1e-6)


def test_targets_give_back_the_latents(example):
    latents, noise, timesteps = example
    ours, _ = process()
    signal_rate, noise_rate = rates = ours.signal_and_noise_rate(timesteps)
    noised = add_noise(latents, noise, rates)
    velocity = TARGETS[PredictionType.v_prediction].compute(latents, noise, rates)
    torch.testing.assert_close(signal_rate * noised - noise_rate * velocity, latents, rtol=1e-4, atol=1e-5)
    assert TARGETS[PredictionType.epsilon].compute(latents, noise, rates) is noise
    assert TARGETS[PredictionType.sample].compute(latents, noise, rates) is latents
    assert TARGETS.keys() == set(PredictionType)


def test_min_snr_weights_are_equal_in_units_of_the_latents_error():
    ours, _ = process()
    timesteps = torch.tensor([1, 100, 500, 900])
    rates = ours.signal_and_noise_rate(timesteps)
    signal_rate, noise_rate = (rate.flatten() for rate in rates)
    snr = (signal_rate / noise_rate) ** 2
    weights = {kind: min_snr_weight(target, rates, 5.0) for kind, target in TARGETS.items()}
    torch.testing.assert_close(weights[PredictionType.sample], snr.clamp(max=5))
    torch.testing.assert_close(weights[PredictionType.epsilon] * snr, weights[PredictionType.sample])
    torch.testing.assert_close(weights[PredictionType.v_prediction] * (snr + 1), weights[PredictionType.sample])
    assert weights[PredictionType.epsilon][-1] == 1.0


def test_zero_terminal_snr_applies_to_training_and_sampling_alike():
    objective = ObjectiveConfig(prediction_type=PredictionType.v_prediction, zero_terminal_snr=True)
    scheduler = build_noise_scheduler(objective)
    assert NoiseProcess(scheduler.alphas_cumprod).alphas_cumprod[-1] < 1e-7
    sampler = inference_scheduler(scheduler)
    torch.testing.assert_close(sampler.alphas_cumprod, scheduler.alphas_cumprod)
    sampler.set_timesteps(25)
    assert sampler.timesteps[0] == 999
    assert sampler.config["prediction_type"] == "v_prediction"


def test_zero_terminal_snr_is_rejected_with_epsilon():
    with pytest.raises(ConfigurationError, match=r"objective\.zero_terminal_snr"):
        build_noise_scheduler(ObjectiveConfig(zero_terminal_snr=True))


def test_offset_noise_shifts_each_channel_as_a_whole_and_not_in_evaluation():
    step, sample = torch.zeros(3, dtype=torch.int64), torch.arange(3)
    plain = draw_noise(ObjectiveConfig(), TRAINING, 1, step, sample, (4, 8, 8))
    shifted = draw_noise(ObjectiveConfig(offset_noise=0.1), TRAINING, 1, step, sample, (4, 8, 8))
    offset = shifted - plain
    assert offset.std(dim=(2, 3)).max() < 1e-6
    assert 0.01 < offset.mean(dim=(2, 3)).std() < 0.3
    evaluation = draw_noise(ObjectiveConfig(offset_noise=0.1), EVALUATION, 1, step, sample, (4, 8, 8))
    assert torch.equal(evaluation, draw_noise(ObjectiveConfig(), EVALUATION, 1, step, sample, (4, 8, 8)))


def test_timesteps_of_evaluation_are_others_than_those_of_training():
    step, sample = torch.zeros(64, dtype=torch.int64), torch.arange(64)
    training = uniform_timesteps(draw_quantiles(TRAINING, 1, step, sample))
    assert (training != uniform_timesteps(draw_quantiles(EVALUATION, 1, step, sample))).sum() > 55
    assert (training != uniform_timesteps(draw_quantiles(TRAINING, 1, step + 1, sample))).sum() > 55


def test_timesteps_are_uniform():
    num = 40_000
    drawn = uniform_timesteps(draw_quantiles(TRAINING, 5, torch.zeros(num, dtype=torch.int64), torch.arange(num)))
    assert drawn.min() >= 0
    counts = torch.bincount(drawn // 50, minlength=20).double()
    assert ((counts - num / 20) ** 2 / (num / 20)).sum() < 44, "chi-squared with 19 degrees of freedom, p = 0.001"


def stratified(step: int, num: int) -> Tensor:
    steps, samples = torch.full((num,), step), torch.arange(num) * 977 + 5
    return uniform_timesteps(draw_stratified_quantiles(3, steps, samples, torch.arange(num), num))


@pytest.mark.parametrize("num", [1, 7, 250, 1000, 2048])
def test_stratified_timesteps_take_one_of_each_stratum(num):
    drawn = stratified(11, num).sort().values
    lowest = torch.arange(num) * 1000 // num
    highest = ((torch.arange(num) + 1) * 1000 - 1) // num
    assert (drawn >= lowest).all()
    assert (drawn <= highest).all()
    assert not torch.equal(stratified(11, num), stratified(12, num)) or num == 1


def test_each_stratified_timestep_by_itself_is_uniform_and_independent_of_its_neighbour():
    drawn = torch.stack([stratified(step, 16) for step in range(1000)])
    for slot in (0, 5, 15):
        counts = torch.bincount(drawn[:, slot] // 100, minlength=10).double()
        assert ((counts - 100) ** 2 / 100).sum() < 27.9, "chi-squared with 9 degrees of freedom, p = 0.001"
    # Of 16 strata without replacement two slots have correlation -1 / 15.
    pair = torch.corrcoef(drawn[:, :2].double().T)[0, 1]
    assert abs(pair + 1 / 15) < 4 / 1000**0.5
    assert drawn.double().mean(1).std() < 0.1 * 1000 / 12**0.5 / 16**0.5, "the mean over a batch hardly varies"


def test_a_stratified_timestep_does_not_depend_on_the_microbatch():
    whole = stratified(4, 32)
    steps, samples, slots = torch.full((32,), 4), torch.arange(32) * 977 + 5, torch.arange(32)
    parts = [
        uniform_timesteps(draw_stratified_quantiles(3, steps[part], samples[part], slots[part], 32))
        for part in (slice(24, 32), slice(0, 24))
    ]
    assert torch.equal(torch.cat([parts[1], parts[0]]), whole)
