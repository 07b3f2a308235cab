import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from diffusion.models.objectives import draw_stratified_quantiles
from diffusion.randomness import NUM_SEEDS, Purpose, bernoulli, normal, random_words
from tests.tools.training_runs import ROOT
from tests.tools.triton_aot import ARCHITECTURES, Launch, launches

PROGRAM = ROOT / "tests/tools/drawn_numbers.py"


def agreement(device: str, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), device],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_the_kernel_agrees_with_torch_in_the_interpreter():
    found = agreement("cpu", TRITON_INTERPRET="1")
    assert found["is_equal"]
    assert found["distance"] < 7e-6


@pytest.mark.gpu
def test_the_kernel_agrees_with_torch_on_a_gpu():
    found = agreement("cuda")
    assert found["is_equal"]
    assert found["distance"] < 7e-6


@pytest.mark.parametrize("num_samples", [1, 5, 16])
def test_a_draw_on_a_gpu_is_a_launch_or_two_more(num_samples):
    address = (torch.zeros(num_samples, dtype=torch.int64), torch.arange(num_samples))
    noise = launches(normal, 17, Purpose.NOISE, *address, (4, 64, 64))
    words = launches(random_words, 17, Purpose.NOISE, *address, 5)
    assert len(noise) == len(words) == 1
    assert all(isinstance(launch, Launch) for launch in noise + words)
    assert len(launches(bernoulli, 17, Purpose.CAPTION_DROP, *address, 0.1)) <= 2
    slots = torch.arange(num_samples)
    assert len(launches(draw_stratified_quantiles, 17, *address, slots, 128)) <= 12


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_few_kernels_without_spills_serve_all_draws(arch):
    found: list[Launch] = []
    for num_samples, seed, purpose in (
        (1, 0, Purpose.NOISE),
        (5, 1, Purpose.POSTERIOR),
        (16, 16, Purpose.TIMESTEP_STRATUM),
        (16, NUM_SEEDS - 1, Purpose.NOISE),
    ):
        address = (torch.zeros(num_samples, dtype=torch.int64), torch.arange(num_samples))
        for shape in ((4, 64, 64), (4, 96, 40), (4, 1, 1)):
            found += launches(normal, seed, purpose, *address, shape)
        found += launches(random_words, seed, purpose, *address, 1)
    kernels = {kernel.ptx: kernel for kernel in (launch.compile(arch) for launch in found)}
    assert len(kernels) == 3, "normal numbers, where 16 divides how many and where not; one word"
    assert all(kernel.num_spilled == 0 and kernel.num_registers <= 64 for kernel in kernels.values())
