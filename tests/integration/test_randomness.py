import math

import pytest
import torch

from diffusion.datasets.sample_order import sample_address
from diffusion.randomness import Purpose, bernoulli, normal, philox, random_words, uniform

NUM = 4096
SAMPLES = torch.arange(NUM)
STEP = torch.zeros(NUM, dtype=torch.int64)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_test_vectors(counter, key, expected):
    words = philox(tuple(torch.tensor([word]) for word in counter), key)
    assert tuple(int(word) for word in words) == expected


def test_a_number_does_not_depend_on_its_place_in_the_batch():
    whole = normal(17, Purpose.NOISE, STEP[:64], SAMPLES[:64], (4, 5, 7))
    for size in (1, 3, 7, 16):
        parts = [
            normal(17, Purpose.NOISE, STEP[i : i + size], SAMPLES[i : min(i + size, 64)], (4, 5, 7))
            if i + size <= 64
            else normal(17, Purpose.NOISE, STEP[i:64], SAMPLES[i:64], (4, 5, 7))
            for i in range(0, 64, size)
        ]
        assert torch.equal(torch.cat(parts), whole)


def test_a_longer_draw_begins_with_the_shorter_one():
    assert torch.equal(
        random_words(1, Purpose.NOISE, STEP, SAMPLES, 10)[:, :3], random_words(1, Purpose.NOISE, STEP, SAMPLES, 3)
    )


def test_every_part_of_the_address_matters():
    draws = {
        "base": random_words(17, Purpose.NOISE, STEP, SAMPLES, 4),
        "seed": random_words(18, Purpose.NOISE, STEP, SAMPLES, 4),
        "purpose": random_words(17, Purpose.TIMESTEP, STEP, SAMPLES, 4),
        "step": random_words(17, Purpose.NOISE, STEP + 1, SAMPLES, 4),
        "stream": random_words(17, Purpose.NOISE, STEP, sample_address(1, SAMPLES), 4),
        "occurrence": random_words(17, Purpose.NOISE, STEP, sample_address(0, SAMPLES, 1), 4),
    }
    names = list(draws)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            equal = (draws[first] == draws[second]).float().mean()
            assert equal < 0.001, (first, second)
            correlation = torch.corrcoef(
                torch.stack([draws[first].flatten().double(), draws[second].flatten().double()])
            )
            assert correlation[0, 1].abs() < 4 / math.sqrt(4 * NUM), (first, second)


def test_neighbouring_samples_and_steps_are_independent():
    noise = normal(17, Purpose.NOISE, STEP, SAMPLES, (16,))
    shifted = normal(17, Purpose.NOISE, STEP + 1, SAMPLES, (16,))
    bound = 4 / math.sqrt(noise.numel())
    assert (noise[1:] * noise[:-1]).mean().abs() < bound
    assert (noise * shifted).mean().abs() < bound
    assert (noise[:, 1:] * noise[:, :-1]).mean().abs() < bound


def test_normals_have_the_moments_of_the_normal_distribution():
    z = normal(3, Purpose.NOISE, STEP, SAMPLES, (64,)).double()
    n = z.numel()
    assert z.mean().abs() < 4 / math.sqrt(n)
    assert (z.var() - 1).abs() < 4 * math.sqrt(2 / n)
    assert (z**3).mean().abs() < 4 * math.sqrt(15 / n)
    assert ((z**4).mean() - 3).abs() < 4 * math.sqrt(96 / n)
    assert 4.0 < z.abs().max() < 6.8


def test_uniforms_are_uniform():
    u = uniform(5, Purpose.CROP, STEP, SAMPLES, 16)
    assert u.min() >= 0
    assert u.max() < 1
    counts = torch.histc(u.float(), bins=32, min=0, max=1)
    chi_squared = ((counts - u.numel() / 32) ** 2 / (u.numel() / 32)).sum()
    assert chi_squared < 62  # 0.1 % of the chi-squared distribution with 31 degrees of freedom


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 1.0])
def test_events_come_with_their_probability(probability):
    rate = bernoulli(9, Purpose.CAPTION_DROP, STEP, SAMPLES, probability).double().mean()
    assert abs(rate - probability) <= 4 * math.sqrt(probability * (1 - probability) / NUM)


def test_addresses_are_distinct_and_not_negative():
    addresses = {sample_address(s, i, o) for s in (0, 1, 1023) for i in (0, 1, 2**40 - 1) for o in (0, 1, 8191)}
    assert len(addresses) == 27
    assert min(addresses) == 0
    assert max(addresses) < 2**63


@pytest.mark.gpu
def test_gpu_gives_the_same_bits_and_nearly_the_same_normals():
    words = random_words(17, Purpose.NOISE, STEP, SAMPLES, 64)
    assert torch.equal(random_words(17, Purpose.NOISE, STEP.cuda(), SAMPLES.cuda(), 64).cpu(), words)
    z = normal(17, Purpose.NOISE, STEP, SAMPLES, (64,))
    on_gpu = normal(17, Purpose.NOISE, STEP.cuda(), SAMPLES.cuda(), (64,)).cpu()
    assert (on_gpu - z).abs().max() < 1e-6 * 7
