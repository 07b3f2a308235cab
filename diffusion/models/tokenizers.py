"""Tokenizers, built without a hub.

CLIP's byte-pair encoding is made from the merges that the PyPI package open_clip_torch ships: 49,408 entries, pad token
"!" (id 0), as in stable-diffusion-2-base. The tiny families have a small one of the same kind, from files in this
package. SDXL has two tokenizers, which differ in the pad token only: ids are those of the second, and the model
replaces the padding for the first (`models.conditioning.DualTextEncoder`).
"""

import gzip
import importlib.util
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import ftfy
import numpy as np
from numpy.typing import NDArray
from transformers import CLIPTokenizer

from diffusion.config.model import Architecture
from diffusion.errors import MachineError
from diffusion.models.architectures import ARCHITECTURES, Vocabulary

END_OF_WORD = "</w>"
START, END, PAD = "<|startoftext|>", "<|endoftext|>", "!"
NUM_CLIP_MERGES = 48_894
TINY_MERGES = Path(__file__).parent / "data" / "tiny_merges.txt"


def byte_symbols() -> list[str]:
    """One printable symbol per byte, in the order of CLIP's vocabulary (GPT-2, Radford et al. 2019, section 2.2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(code) for code in [*printable, *range(0x100, 0x200 - len(printable))]]


def clip_merges() -> list[str]:
    """The merges of CLIP's byte-pair encoding, in order, from the installed package open_clip_torch.

    Raises:
        MachineError: the package, or its file, is not there.
    """
    package = importlib.util.find_spec("open_clip")
    folder = Path(package.origin).parent if package and package.origin else Path()
    path = folder / "bpe_simple_vocab_16e6.txt.gz"
    if not path.is_file():
        raise MachineError(f"CLIP's merges are missing ({path}): install the package open_clip_torch")
    lines = gzip.decompress(path.read_bytes()).decode("utf-8").split("\n")
    return lines[1 : NUM_CLIP_MERGES + 1]


def tiny_merges() -> list[str]:
    """The merges of the tiny family's tokenizer, in order."""
    return TINY_MERGES.read_text(encoding="utf-8").splitlines()


def build_clip_tokenizer(merges: Sequence[str], max_tokens: int) -> CLIPTokenizer:
    """Build a tokenizer of CLIP's kind: 256 bytes, the same ending a word, one entry per merge, start and end.

    Args:
        merges: pairs of symbols separated by a space, in the order of their priority.
        max_tokens: length that captions are padded and cut to.

    Returns:
        A tokenizer whose pad token is "!", id 0.
    """
    symbols = byte_symbols()
    entries = [*symbols, *(symbol + END_OF_WORD for symbol in symbols)]
    entries += ["".join(merge.split()) for merge in merges]
    entries += [START, END]
    with tempfile.TemporaryDirectory() as folder:
        vocabulary_file, merges_file = Path(folder, "vocab.json"), Path(folder, "merges.txt")
        vocabulary = {entry: i for i, entry in enumerate(entries)}
        vocabulary_file.write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
        merges_file.write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
        return CLIPTokenizer(
            str(vocabulary_file),
            str(merges_file),
            unk_token=END,
            bos_token=START,
            eos_token=END,
            pad_token=PAD,
            model_max_length=max_tokens,
        )


def build_tokenizer(architecture: Architecture) -> CLIPTokenizer:
    """Build the tokenizer of an architecture."""
    spec = ARCHITECTURES[architecture]
    merges = tiny_merges() if spec.vocabulary is Vocabulary.tiny else clip_merges()
    return build_clip_tokenizer(merges, spec.max_tokens)


def repair(caption: str) -> str:
    """Repair and lower a caption as CLIP does and transformers 5 does not; `PAD` ends what is repaired at once."""
    return PAD.join(ftfy.fix_text(part) for part in caption.split(PAD)).lower()


def tokenize(tokenizer: Any, captions: Sequence[str]) -> NDArray[np.int32]:
    """Encode captions, padded and cut to the tokenizer's length.

    Returns:
        int32 [K, L] for K captions.
    """
    encoded = tokenizer(
        [repair(caption) for caption in captions],
        padding="max_length",
        truncation=True,
        max_length=tokenizer.model_max_length,
        return_tensors="np",
    )
    return encoded["input_ids"].astype(np.int32)


def train_merges(captions: Iterable[str], num_merges: int) -> list[str]:
    """Learn the merges of a small byte-pair encoding of CLIP's kind (lower case, words apart) from captions."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    symbols = byte_symbols()
    alphabet = [*symbols, *(symbol + END_OF_WORD for symbol in symbols)]
    model = Tokenizer(models.BPE(end_of_word_suffix=END_OF_WORD))
    model.normalizer = normalizers.Lowercase()  # pyright: ignore[reportAttributeAccessIssue]
    model.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [pre_tokenizers.BertPreTokenizer(), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=num_merges + len(alphabet),
        initial_alphabet=symbols,
        end_of_word_suffix=END_OF_WORD,
        show_progress=False,
    )
    model.train_from_iterator(captions, trainer)
    merges = json.loads(model.to_str())["model"]["merges"]
    return [" ".join(pair) for pair in merges[:num_merges]]
