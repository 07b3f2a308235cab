import copy
from typing import Any

import pytest
import torch
from torch import nn

from diffusion.config.model import Architecture, ModelConfig, TextEncoderConfig
from diffusion.models.architectures import build_frozen_text_encoder, with_seed
from diffusion.models.conditioning import Conditioner
from diffusion.models.fast.compilation import compile_text_encoder
from tests.tools.language_models import write_language_model


@pytest.mark.parametrize(("kind", "num_graphs"), [("clip", 2), ("t5", 2), ("qwen3", 1), ("t5gemma", 1)])
def test_layers_are_compiled_in_training_and_share_graphs(traced, tmp_path, kind, num_graphs):
    config = ModelConfig(architecture=Architecture.tiny_xl)  # With two encoders.
    if kind != "clip":
        config.text_encoder = TextEncoderConfig(path=str(write_language_model(tmp_path, kind)))
    plain: Any = with_seed(3, lambda: build_frozen_text_encoder(config)).eval()
    compiled, network = copy.deepcopy(plain), nn.Identity()
    names = [(name, type(module).__name__) for name, module in plain.named_modules()]
    compile_text_encoder(compiled, network)
    assert [(name, type(module).__name__) for name, module in compiled.named_modules()] == names
    options = {"num_chunks": 1, "is_extended": False, "is_masked": False, "is_adapted": False}
    conditioners = [Conditioner(encoder, torch.tensor([1]), **options) for encoder in (plain, compiled)]
    for is_training in (False, True):
        network.train(is_training)
        for seed in range(2):
            ids = torch.randint(1, 20, (2, 16), generator=torch.Generator().manual_seed(seed))
            ids[0, 9:] = 0
            expected, found = (conditioner.encode_text(ids) for conditioner in conditioners)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (num_graphs if is_training else 0)
    assert not torch._dynamo.utils.counters["graph_break"]
