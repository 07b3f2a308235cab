"""Tokenizers, built without a hub.

The merges of CLIP's byte-pair encoding come from the PyPI package open_clip_torch: 49,408 entries, pad token "!" (id
0), as in stable-diffusion-2-base. The tiny families have a small vocabulary in a file of this package. SDXL has two
tokenizers with different pad tokens: ids are those of the second, and the model replaces the padding for the first
(`models.conditioning.DualTextEncoder`).
"""

import gzip
import importlib.util
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ftfy
import numpy as np
from numpy.typing import NDArray
from transformers import CLIPTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from diffusion.config.model import Architecture, ModelConfig
from diffusion.datasets.dataset import Tokenize
from diffusion.errors import MachineError
from diffusion.models.architectures import ARCHITECTURES, CLIP_VOCABULARY
from diffusion.models.text_encoders import load_language_tokenizer

END_OF_WORD = "</w>"
START, END, PAD = "<|startoftext|>", "<|endoftext|>", "!"
_SPECIAL = re.compile(r"<\|(startoftext|endoftext)\|>")
NUM_CLIP_MERGES = 48_894
TINY_MERGES = Path(__file__).parent / "data" / "tiny_merges.txt"


def clip_merges() -> list[str]:
    """Merges of CLIP's byte-pair encoding in order, from the installed package open_clip_torch.

    Raises:
        MachineError: the package or its file is missing.
    """
    package = importlib.util.find_spec("open_clip")
    folder = Path(package.origin).parent if package and package.origin else Path()
    path = folder / "bpe_simple_vocab_16e6.txt.gz"
    if not path.is_file():
        raise MachineError(f"CLIP's merges are missing ({path}): install the package open_clip_torch")
    lines = gzip.decompress(path.read_bytes()).decode("utf-8").split("\n")
    return lines[1 : NUM_CLIP_MERGES + 1]


def build_clip_tokenizer(merges: Sequence[str], max_tokens: int) -> CLIPTokenizer:
    """Build a tokenizer like CLIP's: 256 bytes, 256 bytes at the end of a word, one entry per merge, start and end.

    Merges are pairs of symbols separated by a space, in order of priority. The pad token is "!", id 0.
    """
    symbols = list(bytes_to_unicode().values())  # One per byte (GPT-2, Radford et al. 2019, section 2.2).
    pairs: list[Any] = [tuple(merge.split()) for merge in merges]
    entries = [*symbols, *(symbol + END_OF_WORD for symbol in symbols), *map("".join, pairs), START, END]
    special = {"unk_token": END, "bos_token": START, "eos_token": END, "pad_token": PAD}
    vocabulary = {entry: i for i, entry in enumerate(entries)}
    return CLIPTokenizer(vocabulary, pairs, **special, model_max_length=max_tokens)


def build_tokenizer(architecture: Architecture) -> CLIPTokenizer:
    """Build the tokenizer of an architecture."""
    spec = ARCHITECTURES[architecture]
    is_clip = spec.text_encoder["vocab_size"] == CLIP_VOCABULARY
    merges = clip_merges() if is_clip else TINY_MERGES.read_text(encoding="utf-8").splitlines()
    return build_clip_tokenizer(merges, spec.max_tokens)


def repair(caption: str) -> str:
    """Repair and lower-case a caption like CLIP, which transformers 5 omits; parts between `PAD` are separate.

    The names of the start and the end become words: as tokens they would end the caption for the text encoder.
    """
    repaired = PAD.join(ftfy.fix_text(part) for part in caption.split(PAD)).lower()
    return _SPECIAL.sub(r"<| \1 |>", repaired)


def tokenize(tokenizer: Any, captions: str | Sequence[str], num_chunks: int = 1) -> NDArray[np.int32]:
    """Encode K captions (or one), padded and truncated to chunks of the tokenizer's length: int32 [K, L].

    Each chunk has a start and an end of its own. A short caption leaves the last ones empty. A language model's
    tokenizer has one chunk, with the special tokens that the model was trained with.
    """
    captions = [captions] if isinstance(captions, str) else captions
    length = tokenizer.model_max_length
    if not isinstance(tokenizer, CLIPTokenizer):
        options = {"padding": "max_length", "truncation": True, "max_length": length, "return_tensors": "np"}
        return tokenizer(list(captions), split_special_tokens=True, **options)["input_ids"].astype(np.int32)
    content = length - 2
    encoded: Any = tokenizer(
        [repair(caption) for caption in captions],
        add_special_tokens=False,
        truncation=True,
        max_length=num_chunks * content,
    )
    ids = np.full((len(captions), num_chunks, length), tokenizer.pad_token_id, np.int32)
    for chunks, caption in zip(ids, encoded["input_ids"], strict=True):
        for i, chunk in enumerate(chunks):
            part = caption[i * content : (i + 1) * content]
            chunk[: len(part) + 2] = [tokenizer.bos_token_id, *part, tokenizer.eos_token_id]
    return ids.reshape(len(captions), -1)


def num_full(token_ids: Any, empty_ids: Sequence[int]) -> int:
    """Count the captions that take all tokens of the text encoder, and are cut if they are longer.

    Args:
        token_ids: [K, L], an array or a tensor.
        empty_ids: [L] of the empty caption.
    """
    return int((token_ids[:, -1] != empty_ids[-1]).sum())


def load_tokenizer(config: ModelConfig) -> Any:
    """CLIP's tokenizer, or that of a language model.

    Raises:
        ConfigurationError: the language model has none.
    """
    text = config.text_encoder
    if text.path is not None:
        return load_language_tokenizer(text.path, text.max_tokens)
    return build_tokenizer(config.architecture)


def caption_tokenizer(config: ModelConfig) -> Tokenize:
    """Build what encodes the captions of a model; errors as in `load_tokenizer`."""
    return partial(tokenize, load_tokenizer(config), num_chunks=config.text_encoder.chunks)
