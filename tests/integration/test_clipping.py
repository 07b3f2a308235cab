"""Gradient clipping against its closed form; on several ranks: test_replicas.py."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from diffusion.callbacks.clipping import GRADIENT_NORM, ClipGradients


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
