"""The frozen text encoder in lower precision, and the empty caption, which is encoded once."""

from typing import Any

import pytest
import torch
from torch import nn

from diffusion.config.model import Architecture, ModelConfig, ObjectiveConfig
from diffusion.datasets.batch import BatchKey
from diffusion.models.build import build_model

TOKEN_IDS = torch.randint(1, 2000, (4, 24), generator=torch.Generator().manual_seed(0))


def build(architecture: Architecture = Architecture.tiny) -> Any:
    return build_model(ModelConfig(architecture=architecture), ObjectiveConfig(), resolution=32, seed=17)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_that_are_cast_once_encode_as_those_that_autocast_casts(dtype):
    model = build(Architecture.tiny_xl)
    with torch.autocast("cpu", dtype):
        expected = model.conditioner.encode_text(TOKEN_IDS)
    model.conditioner.lower_precision(dtype)
    with torch.autocast("cpu", dtype):
        found = model.conditioner.encode_text(TOKEN_IDS)
    sampled = model.conditioner.encode_text(TOKEN_IDS)
    for part, other, same in zip(expected, found, sampled, strict=True):
        assert torch.equal(part, other)
        assert torch.equal(part, same), "also outside of an autocast, as samples are drawn"
    modules = list(model.text_encoder.modules())
    assert {module.weight.dtype for module in modules if isinstance(module, nn.Linear)} == {dtype}
    kept = [module.weight.dtype for module in modules if isinstance(module, nn.LayerNorm | nn.Embedding)]
    assert set(kept) == {torch.float32}


def test_the_empty_caption_is_encoded_once_for_each_precision():
    model = build()
    calls = []
    model.text_encoder.register_forward_hook(lambda *_: calls.append(1))
    text = model.conditioner.encode_text(TOKEN_IDS)
    batch = {BatchKey.TEXT_EMBEDDING: text.hidden.half(), BatchKey.POOLED_TEXT_EMBEDDING: text.pooled.half()}
    dropped = model.conditioner.drop(TOKEN_IDS, torch.tensor([True, False, True, False]))
    calls.clear()
    for _ in range(3):
        conditioning = model.conditioner.encode_batch(batch, dropped)
    assert len(calls) == 1
    empty = model.conditioner.encode_text(dropped[:1]).hidden.half()
    expected = torch.cat([empty, text.hidden[1:2].half(), empty, text.hidden[3:].half()])
    assert torch.equal(conditioning.text.half(), expected)
    calls.clear()
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            model.conditioner.encode_batch(batch, dropped)
    assert len(calls) == 1


def test_images_are_generated_with_a_text_encoder_in_lower_precision():
    model = build(Architecture.tiny_xl)
    options = {"seed": 0, "num_inference_steps": 2, "height": 32, "width": 32, "output": "tensor", "progress": False}
    expected = model.generate("a red circle", **options)
    model.conditioner.lower_precision(torch.bfloat16)
    found = model.generate("a red circle", **options)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02)
