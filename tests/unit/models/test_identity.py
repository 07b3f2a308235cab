import pytest
import torch
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from diffusion.config.model import Architecture
from diffusion.models.conditioning import DualTextEncoder
from diffusion.models.pretrained import module_identity, released_state_dict, tokenizer_identity
from diffusion.models.tokenizers import build_tokenizer

PREFIX = "text_model."
SMALL = {
    "vocab_size": 8,
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 4,
    "projection_dim": 4,
}


def name_as_transformers_4(module, state, prefix, metadata):
    for name in [name for name in state if name.startswith(prefix) and not name.startswith(prefix + PREFIX)]:
        state[prefix + PREFIX + name.removeprefix(prefix)] = state.pop(name)


def name_as_transformers_5(module, state, prefix, metadata):
    for name in [name for name in state if name.startswith(prefix + PREFIX)]:
        state[prefix + name.removeprefix(prefix + PREFIX)] = state.pop(name)


def with_known_weights(module: nn.Module) -> nn.Module:
    for tensor in module.state_dict().values():
        tensor.copy_(torch.arange(tensor.numel()).view_as(tensor))
    return module


@pytest.mark.parametrize("naming", [name_as_transformers_4, name_as_transformers_5])
@pytest.mark.parametrize(("is_dual", "identity"), [(False, "6b6d9b6aa875f1ad"), (True, "8ad51b4dede580c6")])
def test_a_text_encoder_s_identity_is_that_of_released_names(is_dual, identity, naming):
    first = CLIPTextModel(CLIPTextConfig(**SMALL))
    first.register_state_dict_post_hook(naming)
    module = DualTextEncoder(first, CLIPTextModelWithProjection(CLIPTextConfig(**SMALL))) if is_dual else first
    assert module_identity(with_known_weights(module)) == identity
    encoders = module.children() if is_dual else [module]
    for encoder in encoders:
        assert {name for name in released_state_dict(encoder) if not name.startswith(PREFIX)} <= {
            "text_projection.weight"
        }


@pytest.mark.parametrize(
    ("architecture", "identity"),
    [(Architecture.stable_diffusion_2, "33d0bcd713681955"), (Architecture.tiny, "059e0164749f967a")],
)
def test_the_identity_of_a_tokenizer_is_that_in_data_sets(architecture, identity):
    assert tokenizer_identity(build_tokenizer(architecture)) == identity
