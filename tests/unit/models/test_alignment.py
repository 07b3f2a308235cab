"""Alignment with an image encoder: its closed form, routed tokens, microbatches, and models without it."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, SwinConfig, SwinModel, ViTMAEConfig, ViTMAEModel

from diffusion.config.ingredients import AlignmentConfig, TokenRoutingConfig
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
from diffusion.errors import ConfigurationError
from diffusion.loading import used_weights
from diffusion.models import build_model, fast
from diffusion.models.build import load_weights
from diffusion.models.ingredients.alignment import load_image_encoder
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.planning.memory import _network_counts
from tests.tools.image_encoders import MEAN, STD, write_image_encoder
from tests.tools.latent_models import gradients, perturb

UNET = {"block_out_channels": [16, 32], "norm_num_groups": 4}
NETWORKS = {
    Architecture.tiny: UNET,
    Architecture.tiny_xl: {**UNET, "attention_head_dim": [2, 2]},
    Architecture.tiny_transformer: {"hidden_size": 32, "num_heads": 2, "depth": 6, "axes_dim": (8, 8)},
}
TRANSFORMER = Architecture.tiny_transformer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_image_encoder(tmp_path_factory.mktemp("encoder"))


def config_of(folder: Path | None, architecture: Architecture = TRANSFORMER, **more) -> ModelConfig:
    alignment = None if folder is None else AlignmentConfig(path=str(folder), width=40)
    return ModelConfig(
        architecture=architecture, network=NETWORKS[architecture], alignment=alignment, frozen_seed=3, **more
    )


def build(config: ModelConfig) -> LatentDiffusion:
    flow = config.architecture is TRANSFORMER
    objective = ObjectiveConfig(prediction_type=PredictionType.flow if flow else PredictionType.v_prediction)
    model = build_model(config, objective, resolution=32, seed=17).train()
    named = sorted(model.named_parameters(), key=lambda pair: "alignment" in pair[0])
    perturb((parameter for _, parameter in named), 0.1)
    return model


def batch(num: int = 6, height: int = 32, width: int = 24) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        BatchKey.IMAGE: torch.randint(0, 256, (num, 3, height, width), generator=generator, dtype=torch.uint8),
        BatchKey.TOKEN_IDS: torch.randint(1, 2000, (num, 24), generator=generator),
        BatchKey.PLACEMENT: torch.tensor([height, width, 0, 0, height, width]).expand(num, -1),
        BatchKey.SAMPLE: torch.arange(num) * 1000,
        BatchKey.STEP: torch.full((num,), 7),
    }


def terms(model: LatentDiffusion, part: dict[str, Tensor]) -> dict[str, Tensor]:
    found = model.loss(model.forward(part), part)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("kind", ["dinov2", "vit"])
def test_features_are_those_of_transformers_at_any_size(tmp_path, kind):
    encoder = load_image_encoder(str(write_image_encoder(tmp_path, kind)))
    images = batch(2)[BatchKey.IMAGE]
    pixels = F.interpolate(images / 255.0, (24, 20), mode="bicubic", antialias=True).clamp(0, 1)
    pixels = (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    network = AutoModel.from_pretrained(tmp_path, local_files_only=True).eval()
    options = {} if kind == "dinov2" else {"interpolate_pos_encoding": True}
    with torch.no_grad():
        expected = network(pixel_values=pixels, **options).last_hidden_state[:, 1:]  # Without CLS.
    found = encoder(images, (6, 5))
    torch.testing.assert_close(found.flatten(2).transpose(1, 2), expected)


@pytest.mark.parametrize("architecture", list(NETWORKS))
def test_loss_is_less_the_mean_similarity_at_each_position(folder, architecture):
    model, images = build(config_of(folder, architecture)), batch()
    states: list[Tensor] = []
    source = model.network.blocks[1] if architecture is TRANSFORMER else model.network.mid_block  # pyright: ignore
    source.register_forward_hook(lambda *call: states.append(call[2]))  # pyright: ignore
    found = terms(model, images)
    (hidden,) = states
    hidden = hidden if hidden.ndim == 3 else hidden.flatten(2).transpose(1, 2)
    # Latents are 8 x 6, tokens 4 x 3; the middle of the tiny U-Nets is 4 x 3, too.
    features = load_image_encoder(str(folder))(images[BatchKey.IMAGE], (4, 3)).flatten(2).transpose(1, 2)
    projected = model.get_submodule("alignment.projector")(hidden)
    cosines = (projected * features).sum(-1) / (projected.norm(dim=-1) * features.norm(dim=-1))
    torch.testing.assert_close(found["alignment"], -0.5 * cosines.mean())
    plain = build(config_of(None, architecture))
    assert torch.equal(found["diffusion"], plain.loss(plain.forward(images), images))  # pyright: ignore


def test_coarser_states_are_compared_with_means_of_features(folder):
    """As in Stable Diffusion 2, whose middle has a quarter of the image encoder's positions along a side."""
    network = {"block_out_channels": [8, 8, 16], "norm_num_groups": 4, "down_block_types": ["DownBlock2D"] * 3}
    network |= {"up_block_types": ["UpBlock2D"] * 3, "attention_head_dim": 2}
    model = build(replace(config_of(folder, Architecture.tiny), network=network))
    seen: list[Tensor] = []
    model.get_submodule("alignment.projector").register_forward_hook(lambda *call: seen.append(call[2]))
    found = terms(model, batch(height=32, width=32))["alignment"]
    features = load_image_encoder(str(folder))(batch(height=32, width=32)[BatchKey.IMAGE], (4, 4))
    means = features.unflatten(3, (2, 2)).unflatten(2, (2, 2)).mean(dim=(3, 5))  # [B, E, 2, 2]
    cosines = F.cosine_similarity(seen[0], means.flatten(2).transpose(1, 2), dim=-1)
    torch.testing.assert_close(found, -0.5 * cosines.mean())


def test_tokens_that_are_routed_around_the_block_are_not_compared(folder):
    model = build(config_of(folder, token_routing=TokenRoutingConfig(share=0.5, first=1, last=-2)))
    seen: list[Tensor] = []
    model.get_submodule("alignment.projector").register_forward_hook(lambda *call: seen.append(call[2]))
    found = terms(model, batch())["alignment"]
    all_kept = model.caller.call.kept
    assert all_kept is not None and seen[0].shape == (6, 6, 24)
    features = load_image_encoder(str(folder))(batch()[BatchKey.IMAGE], (4, 3)).flatten(2).transpose(1, 2)
    kept = torch.stack([one[index] for one, index in zip(features, all_kept, strict=True)])
    torch.testing.assert_close(found, -0.5 * F.cosine_similarity(seen[0], kept, dim=-1).mean())


def test_neither_microbatches_nor_recomputation_nor_compilation_matter(folder, traced):
    """Tokens are routed."""
    config, whole = config_of(folder, token_routing=TokenRoutingConfig(share=0.5, first=1, last=-2)), batch()
    expected = gradients(build(config), [whole])
    cut = [{key: value[part] for key, value in whole.items()} for part in (slice(0, 4), slice(4, 6))]
    found = {"microbatches": gradients(build(config), cut)}
    recomputed = build(config)
    recomputed.network.enable_gradient_checkpointing()
    found["recomputed"] = gradients(recomputed, [whole])
    compiled = build(config)
    fast.apply(compiled.network, PerformanceConfig(compilation=Compilation.blocks), Device.cpu)
    found["compiled"] = gradients(compiled, [whole])
    for way, values in found.items():
        assert len(values) == len(expected)
        for one, other in zip(values, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, msg=way)


def test_validation_and_later_phases_do_without(folder):
    config = config_of(folder)
    model, plain = build(config), build(config_of(None))
    assert model.eval_forward(batch()).values == {}
    assert torch.equal(model.eval_forward(batch()).prediction, plain.eval_forward(batch()).prediction)
    weights = used_weights(model.state_dict(), config, plain)  # The next phase leaves the projection.
    load_weights(plain, weights, "phase 1")
    projection = model.get_submodule("alignment")
    before = {name: value.clone() for name, value in projection.state_dict().items()}
    load_weights(model, plain.state_dict(), "phase 1")  # Or begins with it.
    assert all(torch.equal(value, before[name]) for name, value in projection.state_dict().items())


def test_a_model_in_eval_mode_has_the_loss_of_training_and_validation_has_one_term(folder):
    model, images = build(config_of(folder)).eval(), batch()
    found = terms(model, images)
    for name, value in terms(model.train(), images).items():
        torch.testing.assert_close(found[name], value)
    assert isinstance(model.loss(model.eval_forward(images), images), Tensor)


def test_the_plan_counts_the_projection_and_the_frozen_encoder(folder):
    config = config_of(folder)
    counts, plain = _network_counts(to_yaml(config)), _network_counts(to_yaml(config_of(None)))
    model = build(config)
    trained = sum(parameter.numel() for parameter in model.get_submodule("alignment").parameters())
    frozen = sum(parameter.numel() for parameter in model.frozen_parts[-1].parameters())
    assert [one - other for one, other in zip(counts, plain, strict=True)][:3] == [trained, 0, frozen]


def test_what_is_no_image_encoder_is_refused(tmp_path, folder):
    with pytest.raises(ConfigurationError, match=r"model\.alignment\.path"):
        build(config_of(tmp_path))
    (write_image_encoder(tmp_path) / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigurationError, match="image_mean"):
        build(config_of(tmp_path))
    config = replace(config_of(folder), alignment=AlignmentConfig(path=str(folder), block=6))
    with pytest.raises(ConfigurationError, match=r"model\.alignment\.block is 6"):
        build(config)


@pytest.mark.parametrize("kind", ["vit_mae", "swin"])
def test_an_encoder_without_a_grid_of_patches_is_refused(tmp_path, folder, kind):
    if kind == "swin":
        network = SwinModel(SwinConfig(image_size=16, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[1, 1]))
    else:
        options = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
        network = ViTMAEModel(ViTMAEConfig(image_size=16, patch_size=4, **options))
    network.save_pretrained(tmp_path)
    shutil.copy(folder / "preprocessor_config.json", tmp_path)
    with pytest.raises(ConfigurationError, match="no grid of patches"):
        load_image_encoder(str(tmp_path))
