import numpy as np
import pytest
import torch

from diffusion.config.model import Architecture, ModelConfig, ObjectiveConfig
from diffusion.datasets.batch import BatchKey
from diffusion.datasets.transforms import Placement
from diffusion.errors import ConfigurationError
from diffusion.models import LatentDiffusion, build_model, load_frozen_parts, tiny_xl
from diffusion.models.tokenizers import END_OF_WORD, build_tokenizer, tokenize
from tests.tools.pipelines import read_pipeline, write_model

PROMPTS = ["a red circle on a black background", "", "a green square " * 12]
SMALL = {"block_out_channels": [16, 32], "norm_num_groups": 4, "attention_head_dim": [2, 2]}


@pytest.fixture(scope="module")
def model() -> LatentDiffusion:
    return tiny_xl()


@pytest.fixture(scope="module")
def pipeline(model, tmp_path_factory):
    """The pipeline of diffusers with the same weights; its tokenizers pad as the released ones do."""
    pipeline = read_pipeline(write_model(model, tmp_path_factory.mktemp("folder")))
    assert pipeline.tokenizer.pad_token == pipeline.tokenizer.eos_token != pipeline.tokenizer_2.pad_token
    return pipeline


def batch_of(num: int = 6) -> dict:
    generator = torch.Generator().manual_seed(0)
    captions = [f"a red circle number {i}" for i in range(num)]
    return {
        BatchKey.IMAGE: torch.randint(0, 256, (num, 3, 32, 40), generator=generator, dtype=torch.uint8),
        BatchKey.TOKEN_IDS: torch.from_numpy(tokenize(build_tokenizer(Architecture.tiny_xl), captions)).long(),
        BatchKey.PLACEMENT: torch.tensor([Placement(100 + i, 1000 + i, 0, 3 * i, 32, 40) for i in range(num)]),
        BatchKey.SAMPLE: torch.arange(num),
        BatchKey.STEP: torch.zeros(num, dtype=torch.int64),
    }


def small_model(**objective) -> LatentDiffusion:
    config = ModelConfig(architecture=Architecture.tiny_xl, network=SMALL)
    return build_model(config, ObjectiveConfig(**objective), resolution=32, seed=17)


def test_captions_are_encoded_as_by_diffusers(model, pipeline):
    expected, _, pooled, _ = pipeline.encode_prompt(PROMPTS, do_classifier_free_guidance=False)
    token_ids = torch.from_numpy(tokenize(model.tokenizer, PROMPTS)).long()
    found = model.conditioner.encode_text(token_ids)
    assert found.hidden.shape == (3, 24, 64)
    torch.testing.assert_close(found.hidden, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.pooled, pooled, rtol=0, atol=1e-6)


def test_the_padding_of_the_first_encoder_matters(model):
    token_ids = torch.from_numpy(tokenize(model.tokenizer, ["a"])).long()
    plain = model.text_encoder.text_encoder(token_ids, output_hidden_states=True).hidden_states[-2]
    found = model.conditioner.encode_text(token_ids).hidden[..., :24]
    assert torch.equal(plain[:, :3], found[:, :3]), "up to the end of the caption"
    assert not torch.allclose(plain[:, 4:], found[:, 4:])


def test_images_are_those_of_diffusers(model, pipeline):
    latents = torch.randn(2, 4, 8, 10, generator=torch.Generator().manual_seed(1))
    placed = {"original_size": (70, 50), "height": 32, "width": 40}
    expected = pipeline(
        PROMPTS[:2], negative_prompt=["blue", ""], latents=latents, num_inference_steps=3, guidance_scale=3.0,
        crops_coords_top_left=(6, 2), target_size=(32, 40), output_type="np", **placed,
    ).images  # fmt: skip
    found = model.generate(
        PROMPTS[:2], ["blue", ""], latents=latents, num_inference_steps=3, guidance_scale=3.0, crop=(6, 2),
        output="tensor", progress=False, **placed,
    )  # fmt: skip
    np.testing.assert_allclose(found.permute(0, 2, 3, 1).numpy(), expected, rtol=0, atol=1e-4)


def test_the_model_heeds_sizes_and_crops_and_the_whole_caption(model):
    options = {"num_inference_steps": 1, "seed": 0, "output": "tensor", "progress": False}
    plain = model.generate("a", **options)
    assert torch.equal(plain, model.generate("a", original_size=(32, 32), **options))
    assert not torch.equal(plain, model.generate("a", original_size=(32, 31), **options))
    assert not torch.equal(plain, model.generate("a", crop=(0, 1), **options))
    batch = batch_of()
    other = {**batch, BatchKey.PLACEMENT: batch[BatchKey.PLACEMENT] + 1}
    assert not torch.equal(model(batch).prediction, model(other).prediction)
    conditioning = model.conditioner.encode_batch(batch, batch[BatchKey.TOKEN_IDS]).to(torch.bfloat16)
    assert (conditioning.text.dtype, conditioning.pooled.dtype) == (torch.bfloat16, torch.bfloat16)
    assert torch.equal(conditioning.placement, batch[BatchKey.PLACEMENT]), "1001 is no bfloat16"


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_images_latents_and_stored_texts_give_the_same_loss(dropout):
    model = small_model(caption_dropout=dropout)
    from_images = batch_of()
    expected = model.loss(model(from_images), from_images).item()
    posterior = model.vae.encode(from_images[BatchKey.IMAGE].float() / 127.5 - 1).latent_dist
    text = model.conditioner.encode_text(from_images[BatchKey.TOKEN_IDS])
    latents = {key: value for key, value in from_images.items() if key != BatchKey.IMAGE} | {
        BatchKey.LATENT_MEAN: posterior.mean.detach().half(),
        BatchKey.LATENT_LOGVAR: posterior.logvar.detach().half(),
    }
    assert model.loss(model(latents), latents).item() == pytest.approx(expected, rel=1e-3)
    stored = {
        **latents,
        BatchKey.TEXT_EMBEDDING: text.hidden.half(),
        BatchKey.POOLED_TEXT_EMBEDDING: text.pooled.half(),
    }
    assert model.loss(model(stored), stored).item() == pytest.approx(expected, rel=1e-3)
    other = {**stored, BatchKey.POOLED_TEXT_EMBEDDING: torch.zeros_like(text.pooled).half()}
    changed = (model(other).prediction - model(stored).prediction).abs().amax(dim=(1, 2, 3)) > 0
    assert changed.any(), "the pooled text is used"
    assert bool(changed.all()) == (dropout == 0.0), "a dropped caption's is that of the empty caption"


def test_draws_are_those_of_the_batch():
    model, batch = small_model(caption_dropout=0.0), batch_of()
    draws = model(batch).draws
    for found, key in ((draws.placement, BatchKey.PLACEMENT), (draws.content, BatchKey.IMAGE)):
        assert torch.equal(found, batch[key])
    assert torch.equal(draws.token_ids, batch[BatchKey.TOKEN_IDS])


def test_data_without_sizes_and_crops_is_rejected(model):
    batch = batch_of()
    del batch[BatchKey.PLACEMENT]
    with pytest.raises(ValueError, match="encode it again"):
        model(batch)


def test_both_text_encoders_come_from_a_diffusers_folder(tmp_path):
    source = load_frozen_parts(ModelConfig(architecture=Architecture.tiny_xl, frozen_seed=5))
    source.vae.save_pretrained(tmp_path / "vae")
    source.text_encoder.text_encoder.save_pretrained(tmp_path / "text_encoder")
    with pytest.raises(ConfigurationError, match="text_encoder_2"):
        tiny_xl(str(tmp_path))
    source.text_encoder.text_encoder_2.save_pretrained(tmp_path / "text_encoder_2")
    loaded = tiny_xl(str(tmp_path))
    for one, other in zip(source.text_encoder.parameters(), loaded.text_encoder.parameters(), strict=True):
        assert torch.equal(one, other)
        assert not other.requires_grad
    assert not loaded.text_encoder.training


def test_ids_are_those_of_clip_padded_as_for_the_second_encoder():
    tokenizer = build_tokenizer(Architecture.stable_diffusion_xl)
    ids = tokenize(tokenizer, ["a red circle"])[0].tolist()
    words = [tokenizer.convert_tokens_to_ids(word + END_OF_WORD) for word in ("a", "red", "circle")]
    assert ids == [49406, *words, 49407, *[0] * 72]


def test_unknown_options_are_rejected():
    with pytest.raises(TypeError, match="resolutoin"):
        tiny_xl(resolutoin=64)  # pyright: ignore[reportCallIssue]
