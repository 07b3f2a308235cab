"""Tiny language models with random weights, as folders in the layout of transformers."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
)

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
WORDS = [
    *("a", "and", "on", "of", "in", "the", "background", "red", "circle", "blue"),
    *("square", "green", "star", "white", "black", "triangle", "yellow", "gray", "navy"),
]
_GEMMA = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
          "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip
WIDTHS = {"t5": 48, "qwen3": 64, "t5gemma": 32}


def write_language_model(folder: Path, kind: str) -> Path:
    """Write model and tokenizer of a kind: `t5` and `t5gemma` have an end token, `qwen3` has no special token."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "t5":
            config = T5Config(vocab_size=64, d_model=48, d_kv=16, d_ff=64, num_layers=2, num_heads=3)
            config.decoder_start_token_id = 0
            model = T5ForConditionalGeneration(config)
        elif kind == "t5gemma":
            model = T5GemmaForConditionalGeneration(T5GemmaConfig(encoder=_GEMMA, decoder=_GEMMA))
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**_GEMMA | {"hidden_size": 64}))
    model.save_pretrained(folder)
    vocabulary = {word: i for i, word in enumerate([PAD, END, UNKNOWN, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if kind != "qwen3":
        tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, 1)])
    special = {"pad_token": PAD, "eos_token": END, "unk_token": UNKNOWN}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder
