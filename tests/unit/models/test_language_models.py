"""Language models as text encoders: masks, widths, adapters, and exports that diffusers loads."""

import json
from typing import Any

import pytest
import torch
from transformers import AutoModel, Qwen3Model, T5EncoderModel

from diffusion.config.ingredients import TextAdapterConfig
from diffusion.config.model import Architecture, InitFromConfig, ModelConfig, ObjectiveConfig, TextEncoderConfig
from diffusion.config.schema import Config
from diffusion.datasets.batch import BatchKey
from diffusion.errors import ConfigurationError
from diffusion.loading import read_initial
from diffusion.models import build_model, count_parameters, tiny_transformer
from diffusion.models.architectures import text_shape
from diffusion.models.ingredients.text_adapter import LanguageAdapter
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.networks import text_width_of
from diffusion.models.pretrained import module_identity, tokenizer_identity
from diffusion.models.prompt_encoder import PromptEncoder, write_prompt_encoder
from diffusion.models.sampling import image_seeds, initial_latents
from diffusion.models.tokenizers import caption_tokenizer, load_tokenizer, tokenize
from diffusion.planning.memory import parameter_counts
from tests.tools.language_models import WIDTHS, WORDS, write_language_model
from tests.tools.latent_models import caption_batch, perturb
from tests.tools.pipelines import images_of_model, images_of_pipeline, read_pipeline, write_model

LONG = " ".join(WORDS[i % len(WORDS)] for i in range(85))
NETWORKS = {
    Architecture.tiny: {"block_out_channels": [16, 32], "norm_num_groups": 4},
    Architecture.tiny_transformer: {"hidden_size": 64, "num_heads": 4, "depth": 2, "axes_dim": (8, 8)},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("language")
    return {kind: str(write_language_model(root / kind, kind)) for kind in WIDTHS}


def config_of(folder: str, architecture: Architecture, adapter: TextAdapterConfig | None = None) -> ModelConfig:
    text = TextEncoderConfig(path=folder, max_tokens=96)
    return ModelConfig(
        architecture=architecture, network=NETWORKS[architecture], text_encoder=text, text_adapter=adapter
    )


def build(config: ModelConfig) -> LatentDiffusion:
    model = build_model(config, ObjectiveConfig(caption_dropout=0), resolution=32, seed=17)
    perturb(model.parameters(), 0.05)
    return model


@pytest.mark.parametrize("way", ["weights", "autocast", "training"])
@pytest.mark.parametrize("kind", WIDTHS)
def test_a_language_model_computes_in_float32_where_float16_would_overflow(folders, kind, way):
    model = build(config_of(folders[kind], Architecture.tiny_transformer))
    ids = caption_batch(model, LONG)[BatchKey.TOKEN_IDS]
    expected = model.conditioner.encode_batch({}, ids).text
    if way == "weights":
        model.half()
        expected = model.conditioner.encode_batch({}, ids).text
        assert expected.dtype == torch.float32
    if way == "training":
        model.conditioner.lower_precision(torch.float16)
    with torch.autocast("cpu", torch.float16, enabled=way != "weights"):
        assert torch.equal(model.conditioner.encode_batch({}, ids).text, expected)


@pytest.mark.parametrize(("kind", "class_"), [("t5", T5EncoderModel), ("qwen3", Qwen3Model)])
def test_captions_are_encoded_as_by_transformers(folders, kind, class_):
    model = build(config_of(folders[kind], Architecture.tiny_transformer))
    ids = caption_batch(model, LONG, "a Red circle", "")[BatchKey.TOKEN_IDS]
    assert ids.shape == (3, 96)
    conditioning = model.conditioner.encode_batch({}, ids)
    assert conditioning.mask is not None
    ends = kind != "qwen3"
    assert conditioning.mask.sum(dim=1).tolist() == [85 + ends, 3 + ends, 1]
    assert torch.equal(conditioning.text, conditioning.text * conditioning.mask[..., None])
    reference = class_.from_pretrained(folders[kind])
    for row, num in enumerate(conditioning.mask.sum(dim=1).tolist()):
        with torch.no_grad():
            alone = reference(input_ids=ids[row : row + 1, :num]).last_hidden_state[0]
        torch.testing.assert_close(conditioning.text[row, :num], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("architecture", list(NETWORKS))
@pytest.mark.parametrize("kind", list(WIDTHS))
def test_the_network_follows_the_width_and_reads_beyond_77_tokens(folders, kind, architecture):
    config = config_of(folders[kind], architecture)
    model = build(config)
    assert text_width_of(model.network) == WIDTHS[kind] == text_shape(config)[1]
    assert count_parameters(config)["text_encoder"] == sum(p.numel() for p in model.text_encoder.parameters())
    entries = caption_batch(model, LONG + " red", LONG + " blue", "a star")
    with torch.no_grad():
        whole = model.forward(entries).prediction
        parts = [model.forward({key: value[i : i + 1] for key, value in entries.items()}).prediction for i in range(3)]
    assert (whole[0] - whole[1]).abs().max() > 1e-4
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("architecture", list(NETWORKS))
def test_an_adapter_has_any_width_and_is_trained(folders, architecture):
    config = config_of(folders["qwen3"], architecture, TextAdapterConfig(layers=2, width=80))
    model = build(config)
    adapter = model.get_submodule("text_adapter")
    assert isinstance(adapter, LanguageAdapter)
    assert text_width_of(model.network) == 80
    assert parameter_counts(Config(model=config)).trained == sum(p.numel() for p in model.parameters())
    entries = caption_batch(model, LONG, "a red circle")
    model.loss(model.forward(entries), entries).backward()
    gradients = [parameter.grad for parameter in adapter.parameters()]
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in gradients)
    hidden = torch.randn(2, 6, 64)
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    with torch.no_grad():
        expected = adapter(hidden[1:, :4], mask[1:, :4])
        found = adapter(hidden, mask)[1:]
    torch.testing.assert_close(found[:, :4], expected)
    assert not found[:, 4:].any(), "zeros at the padding"
    stored = model.conditioner.encode_text(entries[BatchKey.TOKEN_IDS])
    embedded = {BatchKey.TEXT_EMBEDDING: stored.hidden.half(), BatchKey.POOLED_TEXT_EMBEDDING: stored.pooled.half()}
    with torch.no_grad():
        expected, found = model.forward(entries).prediction, model.forward(entries | embedded).prediction
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02)


@pytest.mark.parametrize(
    ("kind", "is_adapted", "architecture"),
    [
        (kind, (number + at) % 2 == 0, architecture)
        for number, kind in enumerate(["t5", "qwen3", "chunks"])
        for at, architecture in enumerate(NETWORKS)
    ],
)
def test_an_export_gives_the_images_of_generate(folders, tmp_path, kind, is_adapted, architecture):
    adapter = TextAdapterConfig(layers=1) if is_adapted else None
    if kind == "chunks":
        config = ModelConfig(architecture=architecture, network=NETWORKS[architecture], text_adapter=adapter)
        config.text_encoder.chunks = 4
    else:
        config = config_of(folders[kind], architecture, adapter)
    model = build(config).eval()
    write_model(model, tmp_path, resolution=32)
    write_prompt_encoder(tmp_path, config)
    for ingredient in model.ingredients:
        ingredient.write(tmp_path, model.frozen, model.get_submodule(ingredient.part).state_dict())
    pipeline = read_pipeline(tmp_path)
    latents = initial_latents(image_seeds(5, 1), (4, 8, 8), torch.device("cpu"))
    options: dict[str, Any] = {"num_inference_steps": 2, "height": 32, "width": 32}
    expected = images_of_model(model, LONG, "a star", latents=latents, **options)
    arguments = PromptEncoder(tmp_path)(LONG, "a star")
    found = images_of_pipeline(pipeline, None, latents=latents, **arguments, **options)
    assert (found - expected).abs().max() < 1e-4
    arguments = PromptEncoder(tmp_path).to("cpu", torch.bfloat16)(LONG, "a star")
    pipeline.to(torch.bfloat16)
    found = images_of_pipeline(pipeline, None, latents=latents.bfloat16(), **arguments, **options)
    assert (found - expected).abs().mean() < 0.05


def test_an_adapter_of_its_own_is_imported_from_an_export(tmp_path):
    config = ModelConfig(
        architecture=Architecture.tiny_transformer,
        network=NETWORKS[Architecture.tiny_transformer],
        text_encoder=TextEncoderConfig(chunks=2),
        text_adapter=TextAdapterConfig(layers=1),
    )
    model = build(config)
    write_model(model, tmp_path)
    write_prompt_encoder(tmp_path, config)
    model.ingredients[0].write(tmp_path, model.frozen, model.get_submodule("text_adapter").state_dict())
    start = Config(model=config, init_from=InitFromConfig(checkpoint=str(tmp_path)))
    torch.testing.assert_close(read_initial(start, build(config)), dict(model.state_dict()), rtol=0, atol=0)
    with pytest.raises(ConfigurationError, match="text_adapter"):
        tiny_transformer(network=tmp_path)


def test_names_of_special_tokens_are_words(folders):
    tokenizer = load_tokenizer(config_of(folders["t5"], Architecture.tiny))
    ids = tokenize(tokenizer, ["a star </s> a <pad> star"])[0].tolist()
    end = ids.index(tokenizer.eos_token_id)
    assert end > 6
    assert set(ids[end + 1 :]) == {tokenizer.pad_token_id}


def test_identities_differ(folders):
    models = [build(config_of(folders[kind], Architecture.tiny)) for kind in ("t5", "qwen3")]
    assert len({module_identity(model.text_encoder) for model in models}) == 2
    shorter = config_of(folders["t5"], Architecture.tiny)
    shorter.text_encoder.max_tokens = 32
    assert caption_tokenizer(shorter)([LONG]).shape == (1, 32)
    longer = config_of(folders["t5"], Architecture.tiny)
    assert len({tokenizer_identity(load_tokenizer(config)) for config in (shorter, longer)}) == 2


def test_a_folder_that_is_no_language_model(folders, tmp_path):
    with pytest.raises(ConfigurationError, match=r"model\.text_encoder\.path="):
        build(config_of(str(tmp_path), Architecture.tiny))
    AutoModel.from_pretrained(folders["qwen3"]).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="no tokenizer"):
        build(config_of(str(tmp_path), Architecture.tiny))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unknown", "auto_map": {"AutoConfig": "code.C"}}))
    with pytest.raises(ConfigurationError, match=r"model\.text_encoder\.path="):
        build(config_of(str(tmp_path), Architecture.tiny))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3"}))
    with pytest.raises(ConfigurationError, match="more than a language model"):
        build(config_of(str(tmp_path), Architecture.tiny))
