"""Hashes that say whether two models or tokenizers are the same, equal with each version of the libraries."""

import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CLIPTextModel


def released_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """State dict with the names of released weights: transformers 5 drops `text_model.` in `CLIPTextModel`."""
    paths = [path for path, part in module.named_modules() if isinstance(part, CLIPTextModel)]
    # That of a larger model is called text_model itself.
    shortened = [f"{path}." if path else "" for path in paths if path.split(".")[-1] != "text_model"]
    state = module.state_dict()
    for start in shortened:
        names = [name for name in state if name.startswith(start) and not name.startswith(f"{start}text_model.")]
        state |= {f"{start}text_model.{name.removeprefix(start)}": state.pop(name) for name in names}
    return state


def module_identity(module: nn.Module) -> str:
    """Hash of a module's weights: SHA-256 over released names, shapes, dtypes and bytes, 16 hexadecimal digits.

    Weights that were stored in another precision are another identity.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(released_state_dict(module).items()):
        data = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {tuple(data.shape)} {data.dtype}".encode())
        digest.update(data.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def tokenizer_identity(tokenizer: Any) -> str:
    """Hash of a tokenizer's vocabulary, special tokens and length, 16 hexadecimal digits."""
    content = {
        "vocabulary": sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1]),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "length": tokenizer.model_max_length,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
