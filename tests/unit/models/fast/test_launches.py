"""Launches and copies of a microbatch on a GPU beside the networks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer import Event
from composer.core import Precision
from torch import Tensor, nn

from diffusion import randomness
from diffusion.callbacks.batch import StepAddress
from diffusion.config.model import (
    Architecture,
    Compilation,
    ModelConfig,
    ObjectiveConfig,
    PerformanceConfig,
    PredictionType,
)
from diffusion.config.training import Device
from diffusion.datasets.batch import BatchKey, num_samples, split_batch
from diffusion.models import fast, latent_diffusion, objectives
from diffusion.models.build import build_model
from diffusion.models.fast.compilation import find_blocks
from diffusion.trainer import HostTrainer
from tests.tools.launches import LaunchCounter, pinned_memory

MAX_LAUNCHES = {False: 40, True: 44}
"""Launches of a microbatch beside the networks, with captions and with stored text embeddings; a random draw is one."""

OURS, TEXT, UNET, UNET_BACKWARD = "ours", "text encoder", "U-Net", "U-Net, backward"


class Block(torch.autograd.Function):
    """A compiled block: one launch forward, and one backward."""

    @staticmethod
    def forward(ctx: Any, shape: torch.Size, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return inputs[0].new_empty(shape).zero_()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradient.zero_()
        return None, *(torch.empty_like(value) if value.requires_grad else None for value in ctx.saved_tensors)


def stand_in(block: nn.Module) -> None:
    plain = block.forward

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
            result = plain(x, *args, **kwargs)
        is_tuple = isinstance(result, tuple)
        others = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        output = Block.apply((result[0] if is_tuple else result).shape, x, *others, *block.parameters())
        return (output,) if is_tuple else output

    block.forward = forward


def draw_with_one_launch(monkeypatch):
    def normal(seed, purpose, step, sample, shape):
        return torch.zeros(len(sample), *shape, device=sample.device)

    def random_words(seed, purpose, step, sample, num_words):
        return torch.zeros(len(sample), num_words, dtype=torch.int64, device=sample.device)

    for module in (latent_diffusion, objectives):
        monkeypatch.setattr(module, "normal", normal)
    for module in (randomness, objectives):
        monkeypatch.setattr(module, "random_words", random_words)


def count_second_microbatch(monkeypatch, architecture=Architecture.tiny, **options) -> LaunchCounter:
    """Count what Composer's Trainer and our model do in a microbatch, when all that is made once is there."""
    draw_with_one_launch(monkeypatch)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    objective = ObjectiveConfig(prediction_type=PredictionType.v_prediction)
    model: Any = build_model(ModelConfig(architecture=architecture), objective, resolution=256, seed=17)
    fast.apply(model.unet, PerformanceConfig(compilation=Compilation.none), Device.gpu)
    model.to("meta")
    for network in (model.unet, model.text_encoder):  # As FSDP2 and `lower_precision` have their weights.
        network.to(torch.bfloat16)
    for block in find_blocks(model.unet):
        stand_in(block)
    batch = make_batch(model, 4, **options)
    state: Any = SimpleNamespace(model=model, auto_microbatching=False, train_metrics=None, precision_config=None)
    state.device = SimpleNamespace(tensor_to_device=lambda tensor: tensor.to("meta"), dist_backend="")
    state.scaler, state.precision = object(), Precision.FP32
    state.timestamp = SimpleNamespace(batch=SimpleNamespace(value=3))
    counter = LaunchCounter(OURS)

    def run_event(event: Event) -> None:
        if event is Event.AFTER_FORWARD:
            state.outputs.prediction.register_hook(lambda _: setattr(counter, "part", UNET_BACKWARD))
        elif event is Event.AFTER_BACKWARD:
            counter.part = OURS

    trainer: Any = object.__new__(HostTrainer)
    trainer.state, trainer._original_model, trainer._backwards_create_graph = state, model, False
    trainer.accumulate_train_batch_on_tokens = False
    trainer._train_data_spec = SimpleNamespace(get_num_samples_in_batch=num_samples)
    trainer.engine = SimpleNamespace(run_event=run_event)
    counter.watch(UNET, model.unet)
    counter.watch(TEXT, model.text_encoder)
    with pinned_memory(monkeypatch), counter:
        state.batch = {key: value.pin_memory() for key, value in batch.items()}
        StepAddress().after_dataloader(state, None)  # pyright: ignore[reportArgumentType]
        for microbatch in split_batch(state.batch, 2):
            model.zero_grad()
            counter.part = OURS
            counter.clear()
            state.batch = {key: value.to("meta", non_blocking=True) for key, value in microbatch.items()}
            trainer._train_microbatch(False, 4, True)
    return counter


def make_batch(model: Any, size: int, *, text_embeddings: bool = False) -> dict[str, Tensor]:
    num_tokens = model.tokenizer.model_max_length
    batch = {
        BatchKey.LATENT_MEAN: torch.zeros(size, 4, 32, 32).half(),
        BatchKey.LATENT_LOGVAR: torch.zeros(size, 4, 32, 32).half(),
        BatchKey.TOKEN_IDS: torch.zeros(size, num_tokens, dtype=torch.int64),
        BatchKey.SAMPLE: torch.arange(size),
    }
    if text_embeddings:
        width = model.text_encoder.config.hidden_size
        batch[BatchKey.TEXT_EMBEDDING] = torch.zeros(size, num_tokens, width).half()
        batch[BatchKey.POOLED_TEXT_EMBEDDING] = torch.zeros(size, width).half()
    return batch


@pytest.mark.parametrize("text_embeddings", [False, True])
def test_launches_and_copies_of_a_microbatch(monkeypatch, text_embeddings):
    counter = count_second_microbatch(monkeypatch, text_embeddings=text_embeddings)
    assert counter.total(OURS) <= MAX_LAUNCHES[text_embeddings], counter.launches
    assert counter.total(TEXT) == 0 or not text_embeddings, "the empty caption is encoded once"
    assert sum(counter.copies.values()) == counter.copies[OURS] == 1, "Composer's zero, to which it adds the loss"
