"""Tiny vision-language models, as folders in the layout of transformers: for questions, and a reward model."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from torch import nn
from transformers import (
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
)
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

WIDTH = 32
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
WORDS = [
    *("yes", "Yes", "no", "No", " no", "two", "Two", "2", "three", "Three", "3", "user", "assistant"),
    *("Is", "Are", "there", "a", "any", "How", "many", "the", "red", "blue", "star", "stars", "circle", "?", ".", ":"),
]
"""Tokens, beside the bytes and their beginnings: byte-level BPE, with a token of its own for a word after a space."""

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }} {% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
INSTRUCTION = "the star : {text_prompt} . <|Reward|> ."


def _tokenizer() -> Qwen2Tokenizer:
    words = Tokenizer(BPE())
    words.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    words.train_from_iterator(WORDS, BpeTrainer(initial_alphabet=ByteLevel.alphabet(), show_progress=False))
    model = json.loads(words.to_str())["model"]
    merges: Any = [tuple(merge) for merge in model["merges"]]
    return Qwen2Tokenizer(model["vocab"], merges, eos_token=END, extra_special_tokens=[START, END, *VISION])


def _processor() -> Any:
    # Images of 28 pixels and more: at least one merged patch.
    sizes: dict[str, Any] = {"min_pixels": 28 * 28, "max_pixels": 56 * 56}
    images = Qwen2VLImageProcessor(**sizes)
    return Qwen2VLProcessor(images, _tokenizer(), Qwen2VLVideoProcessor(**sizes), chat_template=CHAT)


def _model(processor: Any, seed: int) -> Any:
    ids = processor.tokenizer.get_vocab()
    text = {"vocab_size": len(ids), "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "tie_word_embeddings": False}  # fmt: skip
    vision = {"depth": 1, "embed_dim": 16, "num_heads": 2, "mlp_ratio": 2, "hidden_size": WIDTH}
    special = {"pad_token_id": ids[PAD], "eos_token_id": ids[END], "bos_token_id": ids[START]}
    names = {"vision_start": "vision_start", "vision_end": "vision_end", "image": "image_pad", "video": "video_pad"}
    images = {f"{key}_token_id": ids[f"<|{name}|>"] for key, name in names.items()}
    config = Qwen2VLConfig(
        text_config=text | special, vision_config=vision, tie_word_embeddings=False, **special, **images
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2VLForConditionalGeneration(config)
        with torch.no_grad():
            for weight in model.parameters():  # Larger than an untrained model's, so that images and words matter.
                weight.add_(0.2 * torch.randn_like(weight))
    return model


def write_vqa(folder: Path, replies: Mapping[str, float] | None = None, seed: int = 0) -> Path:
    """Write a model that answers questions.

    Args:
        folder: folder to write.
        replies: probabilities of words as the reply to anything; padding has the rest. None: random weights.
        seed: seed of the weights.
    """
    processor = _processor()
    model = _model(processor, seed)
    if replies is not None:
        _without_layers(model)
        ids = processor.tokenizer.get_vocab()
        last = model.get_input_embeddings().weight[ids["assistant"]]
        logits = torch.full([len(ids)], -100.0)
        for word, probability in {**replies, PAD: 1.0 - sum(replies.values())}.items():
            (token,) = processor.tokenizer.encode(word)
            logits[token] = math.log(probability)
        with torch.no_grad():
            hidden = model.model.language_model.norm(last)
            model.lm_head.weight.copy_(logits[:, None] * hidden / hidden.square().sum())
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def write_reward(folder: Path, mean: float | None = None, seed: int = 0, *, names_of_old: bool = False) -> Path:
    """Write a reward model in the form of HPSv3's.

    Args:
        folder: folder to write.
        mean: score of any image; None: random weights.
        seed: seed of the weights.
        names_of_old: name the weights as transformers before 4.52 does.
    """
    processor = _processor()
    processor.save_pretrained(folder)
    processor.tokenizer.add_tokens(["<|Reward|>"], special_tokens=True)
    model = _model(processor, seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head: Any = nn.Sequential(
            nn.Linear(WIDTH, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)
        )
    if mean is not None:
        with torch.no_grad():
            head[5].weight.zero_()
            head[5].bias.copy_(torch.tensor([mean, -7.0]))
    weights = {**model.state_dict(), **{f"rm_head.{name}": tensor for name, tensor in head.state_dict().items()}}
    if names_of_old:
        new = {"model.visual.": "visual.", "model.language_model.": "model."}
        for name in list(weights):
            for prefix, old in new.items():
                if name.startswith(prefix):
                    weights[old + name.removeprefix(prefix)] = weights.pop(name)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "HPSv3.safetensors")
    model.config.text_config.vocab_size += 5  # As Qwen2-VL's, whose table is longer than its tokenizer's.
    model.config.save_pretrained(folder)
    (folder / "instruction.txt").write_text(INSTRUCTION)
    return folder


def _without_layers(model: Any) -> None:
    """Make each layer add nothing, so that the logits depend on the last token only."""
    with torch.no_grad():
        for layer in model.model.language_model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
