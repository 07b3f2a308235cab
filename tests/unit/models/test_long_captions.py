"""Captions that are longer than CLIP's 77 tokens, in chunks."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from diffusion.callbacks.batch import CountChunks
from diffusion.config.ingredients import TextAdapterConfig
from diffusion.config.model import Architecture, ModelConfig, ObjectiveConfig, TextEncoderConfig
from diffusion.datasets.batch import BatchKey, split_batch
from diffusion.models import build_model
from diffusion.models.architectures import ARCHITECTURES, build_text_encoder, text_shape, with_seed
from diffusion.models.conditioning import encode_tokens
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.pretrained import tokenizer_identity
from diffusion.models.tokenizers import build_tokenizer, caption_tokenizer, tokenize
from tests.tools.latent_models import caption_batch, perturb

LENGTH, CONTENT = 24, 22
"""Tokens of a chunk of the tiny text encoder, and those of a caption in it."""

WORDS = ["red", "circle", "blue", "square", "green", "star", "white", "triangle"]
LONG = " ".join(WORDS[i % 8] for i in range(2 * CONTENT + 5))
SMALL = {"hidden_size": 64, "num_heads": 4, "depth": 2, "axes_dim": (8, 8)}


def build(
    num_chunks: int, architecture: Architecture = Architecture.tiny_transformer, **options: Any
) -> LatentDiffusion:
    network = SMALL if architecture is Architecture.tiny_transformer else {}
    text = TextEncoderConfig(chunks=num_chunks)
    config = ModelConfig(architecture=architecture, network=network, text_encoder=text, frozen_seed=3, **options)
    model = build_model(config, ObjectiveConfig(caption_dropout=0), resolution=32, seed=17)
    perturb(model.network.parameters(), 0.05)
    return model


def test_each_chunk_has_a_start_and_an_end_of_its_own():
    tokenizer = build_tokenizer(Architecture.tiny)
    start, end, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    words = tokenizer(LONG, add_special_tokens=False)["input_ids"]
    assert len(words) == 2 * CONTENT + 5
    expected = [
        [start, *words[:CONTENT], end],
        [start, *words[CONTENT : 2 * CONTENT], end],
        [start, *words[2 * CONTENT :], end, *[pad] * (CONTENT - 5)],
        [start, end, *[pad] * CONTENT],
    ]
    ids = tokenize(tokenizer, [LONG, ""], 4)
    assert ids[0].reshape(4, LENGTH).tolist() == expected
    assert ids[1].reshape(4, LENGTH).tolist() == [expected[-1]] * 4, "the empty caption"
    assert tokenize(tokenizer, [LONG], 2)[0].reshape(2, LENGTH).tolist() == expected[:2], "the rest is cut off"


def test_one_chunk_is_clip():
    tokenizer = build_tokenizer(Architecture.stable_diffusion_2)
    captions = ["", "a red circle", "horse! " * 100]
    plain = tokenizer(captions, padding="max_length", truncation=True, max_length=77, return_tensors="np")
    np.testing.assert_array_equal(tokenize(tokenizer, captions), plain["input_ids"])
    assert text_shape(ModelConfig()) == (77, 1024)
    assert text_shape(ModelConfig(text_encoder=TextEncoderConfig(chunks=3))) == (231, 1024)


@pytest.mark.parametrize("architecture", [Architecture.tiny, Architecture.tiny_xl])
def test_chunks_are_encoded_by_themselves(architecture):
    spec = ARCHITECTURES[architecture]
    encoder = with_seed(1, lambda: build_text_encoder(spec)).eval()
    tokenizer = caption_tokenizer(ModelConfig(architecture=architecture, text_encoder=TextEncoderConfig(chunks=3)))
    ids = torch.from_numpy(tokenizer([LONG, "a red circle"])).long()
    with torch.no_grad():
        hidden, pooled = encode_tokens(encoder, ids, 3)
        parts = [encoder(chunk)[:2] for chunk in ids.split(LENGTH, dim=1)]
    assert torch.equal(hidden, torch.cat([part[0] for part in parts], dim=1))
    torch.testing.assert_close(pooled, parts[0][1])
    assert hidden.shape == (2, 3 * LENGTH, spec.text_width)


def test_the_mask_ends_after_the_last_used_token():
    model = build(4)
    ids = caption_batch(model, LONG, "", "a red circle", LONG[: LONG.index("star")])[BatchKey.TOKEN_IDS]
    conditioning = model.conditioner.encode_batch({}, ids)
    assert conditioning.mask is not None
    assert conditioning.mask.sum(dim=1).tolist() == [2 * LENGTH + 5 + 2, 2, 5, 7]
    assert conditioning.mask[0, : 2 * LENGTH + 7].all()


@pytest.mark.parametrize("architecture", [Architecture.tiny_transformer, Architecture.tiny])
@pytest.mark.parametrize("layers", [None, 1])
def test_words_beyond_77_tokens_change_the_prediction(architecture, layers):
    text = " ".join(WORDS[i % 8] for i in range(85))
    assert text.endswith("green")
    for num_chunks, is_read in ((4, True), (1, False)):
        adapter = None if layers is None else TextAdapterConfig(layers=layers)
        model = build(num_chunks, architecture, text_adapter=adapter)
        with torch.no_grad():
            one, other = model.forward(caption_batch(model, text, text.removesuffix("green") + "blue")).prediction
        assert bool((one - other).abs().max() > 1e-4) == is_read


@pytest.mark.parametrize("architecture", [Architecture.tiny_transformer, Architecture.tiny])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_only_used_chunks_are_encoded(architecture, dropout):
    model = build(3, architecture, text_adapter=TextAdapterConfig(layers=1))
    model.objective.caption_dropout = dropout
    entries = caption_batch(model, LONG, "", "a red circle", LONG[: LONG.index("star")])
    entries[BatchKey.SAMPLE] = torch.arange(4)
    state: Any = SimpleNamespace(batch=dict(entries))
    CountChunks(model.conditioner).after_dataloader(state, Mock())
    assert state.batch[BatchKey.NUM_CHUNKS] == (3, 0, 1, 1)
    encoded = []
    with torch.no_grad():
        expected = [model.forward(part).prediction for size in (4, 2) for part in split_batch(entries, size)]
        model.forward(state.batch)  # Encodes the empty caption once.
        model.text_encoder.register_forward_hook(lambda module, arguments, _: encoded.append(len(arguments[0])))
        found = [model.forward(part).prediction for size in (4, 2) for part in split_batch(state.batch, size)]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert encoded == [5, 3, 2]


def test_loss_and_images():
    model = build(3)
    entries = caption_batch(model, LONG, "a star")
    with torch.no_grad():
        whole = model.forward(entries).prediction
        parts = [model.forward({key: value[i : i + 1] for key, value in entries.items()}).prediction for i in range(2)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-5)
    options = {"num_inference_steps": 2, "seed": 0, "output": "tensor", "progress": False, "height": 32, "width": 32}
    one, other = model.generate([LONG, LONG + " star"], **options | {"seed": [0, 0]})
    assert not torch.equal(one, other)


def test_ids_of_other_chunks_have_another_identity():
    tokenizer = build_tokenizer(Architecture.tiny)
    assert tokenizer_identity(tokenizer, 3) != tokenizer_identity(tokenizer)
