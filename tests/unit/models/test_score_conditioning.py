"""Conditioning on scores: closed forms, dropped and missing scores, microbatches, exports."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from diffusion.config.ingredients import LoraConfig, ScoreColumn, ScoreConditioningConfig
from diffusion.config.loading import to_yaml
from diffusion.config.model import (
    Architecture,
    Compilation,
    ModelConfig,
    ObjectiveConfig,
    PerformanceConfig,
    PredictionType,
)
from diffusion.config.training import Device
from diffusion.datasets.batch import BatchKey
from diffusion.models import build_model, fast
from diffusion.models.build import load_weights
from diffusion.models.ingredients import find_ingredients
from diffusion.models.ingredients.score_conditioning import ScoreEmbedding, drop_scores, fourier_features
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.planning.memory import _network_counts
from tests.tools.latent_models import gradients, latent_batch, perturb

NETWORKS = {
    Architecture.tiny: {
        "block_out_channels": [16],
        "down_block_types": ["DownBlock2D"],
        "up_block_types": ["UpBlock2D"],
        "attention_head_dim": [2],
        "norm_num_groups": 4,
    },
    Architecture.tiny_xl: {"block_out_channels": [16, 32], "norm_num_groups": 4, "attention_head_dim": [2, 2]},
    Architecture.tiny_transformer: {"hidden_size": 32, "num_heads": 2, "depth": 2, "axes_dim": (8, 8)},
}
COLUMNS = [ScoreColumn(name="aesthetic", mean=5.0, std=1.5), ScoreColumn(name="sharpness", std=100.0)]
NAN = math.nan


def config_of(architecture: Architecture, dropout: float | None, **more) -> ModelConfig:
    scores = None if dropout is None else ScoreConditioningConfig(columns=COLUMNS, dropout=dropout)
    return ModelConfig(
        architecture=architecture, network=NETWORKS[architecture], score_conditioning=scores, frozen_seed=3, **more
    )


def build(
    dropout: float | None, architecture: Architecture = Architecture.tiny, *, is_trained: bool = True
) -> LatentDiffusion:
    flow = architecture is Architecture.tiny_transformer
    objective = ObjectiveConfig(prediction_type=PredictionType.flow if flow else PredictionType.v_prediction)
    model = build_model(config_of(architecture, dropout), objective, resolution=32, seed=17).train()
    named = sorted(model.named_parameters(), key=lambda pair: "score" in pair[0])
    perturb((parameter for name, parameter in named if is_trained or "score" not in name), 0.1)
    return model


def batch(num: int = 6) -> dict[str, Tensor]:
    return latent_batch(num, spread=1000, step=7) | {
        BatchKey.PLACEMENT: torch.tensor([32, 32, 0, 0, 32, 32]).expand(num, -1),
        BatchKey.SCORES: torch.tensor([[5.0, NAN], [7.0, 40.0], [NAN, NAN]]).repeat(2, 1)[:num],
    }


def embedding_of(model: LatentDiffusion) -> ScoreEmbedding:
    embedding = model.get_submodule("score_embedding")
    assert isinstance(embedding, ScoreEmbedding)
    return embedding


def images(model: LatentDiffusion, prompts: str | list[str], **options: Any) -> Tensor:
    fixed = {"num_inference_steps": 2, "seed": 0, "output": "tensor", "progress": False}
    found = model.generate(prompts, **{**fixed, **options})
    assert isinstance(found, Tensor)
    return found


def test_features_are_sines_and_cosines_of_six_octaves():
    found = fourier_features(torch.tensor([[2.0, NAN]]))
    angles = [2 * math.pi * 2.0 / period for period in (16, 8, 4, 2, 1, 0.5)]
    expected = torch.tensor([math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles])
    torch.testing.assert_close(found[0, 0], expected)
    assert found[0, 1].isnan().all()


@pytest.mark.parametrize("architecture", list(NETWORKS))
def test_zero_at_first_then_of_normalised_scores(architecture):
    plain, fresh = build(None, architecture), build(0.0, architecture, is_trained=False)
    assert torch.equal(plain.forward(batch()).prediction, fresh.forward(batch()).prediction)
    assert torch.equal(images(plain, "a"), images(fresh, "a", scores={"aesthetic": 7.0}))
    model = build(0.0, architecture)
    embedding = embedding_of(model)
    added = embedding(embedding.features(torch.tensor([[8.0, NAN]])))
    known = torch.cat([fourier_features(torch.tensor([[2.0]]))[0, 0], embedding.none[1]])
    expected = embedding.out_layer(torch.nn.functional.silu(embedding.in_layer(known)))
    torch.testing.assert_close(added[0], expected)
    outputs = [model.forward(batch() | {BatchKey.SCORES: scores}).prediction for scores in both_scores()]
    is_equal = [torch.equal(*pair) for pair in zip(*outputs, strict=True)]
    assert is_equal == [False, True, True, True, True, True], "each sample has its own scores"


def both_scores() -> list[Tensor]:
    scores = batch()[BatchKey.SCORES]
    other = scores.clone()
    other[0, 0] += 1
    return [scores, other]


def test_it_is_trained_with_the_network():
    model = build(0.5)
    gradients(model, [batch()])
    found = [parameter.grad for parameter in embedding_of(model).parameters()]
    assert len(found) == 5 and all(grad is not None and grad.abs().max() > 0 for grad in found)


def test_scores_are_dropped_one_by_one_by_their_address():
    sample = torch.arange(20000)
    step = torch.zeros_like(sample)
    is_dropped = drop_scores(torch.ones(20000, 2), 17, step, sample, 0.3).isnan()
    share = 0.3
    assert (is_dropped.double().mean(0) - share).abs().max() < 0.01
    assert abs(is_dropped.all(1).double().mean() - share**2) < 0.01
    assert torch.equal(drop_scores(torch.ones(1, 2), 17, step[:1], sample[7:8], 0.3).isnan(), is_dropped[7:8])
    assert not torch.equal(drop_scores(torch.ones(20000, 2), 17, step + 1, sample, 0.3).isnan(), is_dropped)


def test_only_training_drops_scores():
    always, never = build(1.0), build(0.0)
    outputs = [model.eval_forward(batch()).prediction for model in (always, never)]
    assert torch.equal(*outputs)
    outputs = [model.forward(batch()).prediction for model in (always, never)]
    none = never.forward(batch() | {BatchKey.SCORES: torch.full((6, 2), NAN)}).prediction
    assert torch.equal(outputs[0], none)
    assert not torch.equal(outputs[1], none)


@pytest.mark.parametrize("architecture", [Architecture.tiny, Architecture.tiny_transformer])
def test_microbatches_have_the_same_scores_and_gradients(architecture):
    whole = batch()
    parts = [{key: value[part] for key, value in whole.items()} for part in (slice(4), slice(4, 6))]
    found = [gradients(build(0.5, architecture), cut) for cut in ([whole], parts)]
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", list(NETWORKS))
@pytest.mark.parametrize("scores", [None, {"sharpness": 40.0, "aesthetic": 7.0}])
def test_a_folded_network_gives_the_same_images(architecture, scores):
    model, plain = build(0.1, architecture), build(None, architecture)
    (ingredient,) = find_ingredients(config_of(architecture, 0.1))
    weights = ingredient.exported(model.state_dict(), model.network, scores or {})
    plain.network.load_state_dict({n.partition(".")[2]: w for n, w in weights.items() if n.startswith(model.component)})
    prompts = ["a red circle", "a star"]
    expected = images(model, prompts, scores=scores)
    torch.testing.assert_close(images(plain, prompts), expected, rtol=0, atol=1e-4)
    assert not torch.equal(expected, images(model, prompts, scores={"aesthetic": 3.0}))


def test_scores_that_the_model_does_not_know():
    with pytest.raises(ValueError, match="trained with aesthetic, sharpness"):
        images(build(0.1), "a", scores={"aesthetics": 7.0})
    for score in (29.5, -19.5):  # Those of 5.5 and 4.5: features repeat.
        with pytest.raises(ValueError, match=f"aesthetic={score} is more than 16"):
            images(build(0.1), "a", scores={"aesthetic": score})
    with pytest.raises(ValueError, match=r"without model\.score_conditioning"):
        images(build(None), "a", scores={"aesthetic": 7.0})


def test_weights_without_scores_leave_them_as_they_are():
    plain, model = build(None), build(0.1, is_trained=False)
    load_weights(model, plain.state_dict(), "elsewhere")
    assert torch.equal(model.forward(batch()).prediction, plain.forward(batch()).prediction)


def test_compiled_in_one_graph(traced):
    model = build(0.5)
    fast.apply(model.network, PerformanceConfig(compilation=Compilation.unet), Device.cpu)
    expected = gradients(build(0.5), [batch(), batch(4)])
    for one, two in zip(expected, gradients(model, [batch(), batch(4)]), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


def test_parameters_are_planned():
    counts = [_network_counts(to_yaml(config_of(Architecture.tiny, dropout))) for dropout in (None, 0.1)]
    size = sum(parameter.numel() for parameter in embedding_of(build(0.1)).parameters())
    assert counts[1] == counts[0]._replace(trained=counts[0].trained + size)
    lora = [_network_counts(to_yaml(config_of(Architecture.tiny, d, lora=LoraConfig()))) for d in (None, 0.1)]
    assert lora[1] == lora[0]._replace(fixed=lora[0].fixed + size)
