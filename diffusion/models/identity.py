"""Hashes that say whether two models or tokenizers are the same."""

import hashlib
import json
from typing import Any

import torch
from torch import nn


def module_identity(module: nn.Module) -> str:
    """Hash of a module's weights: SHA-256 over names, shapes, dtypes and bytes, 16 hexadecimal digits.

    Weights that were stored in another precision are another identity.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
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
