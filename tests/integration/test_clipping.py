"""Gradient clipping: against its closed form, and on several ranks against one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from diffusion.callbacks.metrics_file import read_metrics, series
from diffusion.callbacks.step import GRADIENT_NORM, ClipGradients

RUNS = {"one": (1, "ddp"), "sharded": (2, "fsdp"), "replicated": (2, "ddp")}
MAX_NORM = 0.05


def clip(gradients: list[torch.Tensor | None], max_norm: float) -> tuple[list[torch.Tensor | None], list[float]]:
    """Clip the gradients of parameters that are groups of their own, as an autoencoder and its discriminator are."""
    weights = [nn.Parameter(torch.zeros(3)) for _ in gradients]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = None if gradient is None else gradient.clone()
    state: Any = SimpleNamespace(optimizers=[torch.optim.SGD([{"params": [weight]} for weight in weights], lr=1.0)])
    logged: list[float] = []
    logger: Any = SimpleNamespace(log_metrics=lambda metrics: logged.append(metrics[GRADIENT_NORM]))
    callback = ClipGradients(max_norm)
    callback.after_train_batch(state, logger)
    callback.batch_end(state, logger)
    return [weight.grad for weight in weights], logged


def test_the_norm_is_over_all_groups():
    gradients = [torch.tensor([3.0, 0.0, 0.0]), None, torch.tensor([0.0, 4.0, 12.0])]
    clipped, logged = clip(gradients, 1.0)
    assert logged == [13.0]
    assert clipped[1] is None
    torch.testing.assert_close(clipped[0], torch.tensor([3.0, 0.0, 0.0]) / 13)
    torch.testing.assert_close(clipped[2], torch.tensor([0.0, 4.0, 12.0]) / 13)


def test_smaller_gradients_stay_as_they_are():
    gradient = torch.tensor([0.1, 0.2, 0.3])
    (clipped,), (logged,) = clip([gradient], 1.0)
    assert torch.equal(clipped, gradient)  # pyright: ignore[reportArgumentType]
    assert logged == pytest.approx(0.14**0.5)


def test_a_skipped_step_has_no_norm():
    assert clip([None, None], 1.0) == ([None, None], [])


@pytest.fixture(scope="module")
def runs(server, tmp_path_factory):
    root = tmp_path_factory.mktemp("clipping")

    def options(name: str) -> tuple[str, list[str]]:
        recorders = [
            f"{{path: tests.tools.toys.RecordGradients, arguments: {{path: {root / name}.pt}}}}",
            f"{{path: tests.tools.toys.RecordWeights, arguments: {{folder: {root / name}-weights}}}}",
        ]
        return "tests/tools/toy.yaml", [
            f"output_folder={root / name}",
            f"trainer.parallelism={RUNS[name][1]}",
            "trainer.max_duration=4ba",
            "trainer.device_train_microbatch_size=2",
            f"optimizer.max_grad_norm={MAX_NORM}",
            "samples.prompts=[]",
            f"plugins.callbacks=[{','.join(recorders)}]",
        ]

    for num_ranks in (1, 2):
        server.train(num_ranks, [options(name) for name, (number, _) in RUNS.items() if number == num_ranks])
    return root


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["sharded", "replicated"])
def test_equal_over_ranks(runs, name):
    steps, norms = series(read_metrics(runs / name / "metrics.jsonl"), GRADIENT_NORM)
    expected_steps, expected = series(read_metrics(runs / "one" / "metrics.jsonl"), GRADIENT_NORM)
    assert steps == expected_steps == [1, 2, 3, 4], "logged at the end of each step"
    assert min(expected) > MAX_NORM, "every step is clipped"
    assert norms == pytest.approx(expected, rel=1e-6)
    gradients, of_one = torch.load(runs / f"{name}.pt"), torch.load(runs / "one.pt")
    for one in (gradients, of_one):
        assert torch.cat([part.flatten() for part in one.values()]).norm().item() == pytest.approx(MAX_NORM, rel=1e-4)
    for number in range(1, 5):
        weights, others = (torch.load(runs / f"{which}-weights/step-{number:03d}.pt") for which in (name, "one"))
        for key, weight in others.items():
            torch.testing.assert_close(weights[key], weight, rtol=1e-6, atol=1e-6)
