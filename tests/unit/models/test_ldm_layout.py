"""The original layout: its names, and what diffusers reads of such a file."""

import copy
from pathlib import Path

import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline, StableDiffusionXLPipeline
from diffusers.loaders.single_file_utils import (
    convert_ldm_unet_checkpoint,
    convert_ldm_vae_checkpoint,
    convert_open_clip_checkpoint,
)
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel

from diffusion.config.ingredients import LoraConfig
from diffusion.config.model import Architecture, ModelConfig
from diffusion.errors import ConfigurationError, DataError
from diffusion.models import tiny
from diffusion.models.architectures import ARCHITECTURES, build_network, build_text_encoder, build_vae, with_seed
from diffusion.models.build import tiny_transformer
from diffusion.models.conditioning import DualTextEncoder
from diffusion.models.ingredients.lora import add_lora, kohya_layout, merged
from diffusion.models.latents import latent_space
from diffusion.models.ldm_layout import read_single_file, single_file, unet_names
from diffusion.models.pretrained import (
    SCHEDULER_KEY,
    FrozenParts,
    build_pipeline,
    freeze,
    released_state_dict,
    write_pipeline,
)
from diffusion.models.sampling import build_noise_scheduler, exported_scheduler
from diffusion.models.tokenizers import build_tokenizer

UNET = "model.diffusion_model."
SHOWN = {
    Architecture.stable_diffusion_2: [
        "model.diffusion_model.input_blocks.3.0.op.weight",
        "model.diffusion_model.input_blocks.8.1.transformer_blocks.0.attn2.to_k.weight",
        "model.diffusion_model.output_blocks.2.1.conv.weight",
        "model.diffusion_model.output_blocks.5.2.conv.weight",
        "model.diffusion_model.output_blocks.11.0.skip_connection.weight",
        "first_stage_model.encoder.down.1.block.0.nin_shortcut.weight",
        "first_stage_model.decoder.up.3.upsample.conv.weight",
        "first_stage_model.decoder.mid.attn_1.proj_out.weight",
        "cond_stage_model.model.positional_embedding",
        "cond_stage_model.model.transformer.resblocks.22.attn.in_proj_weight",
        "cond_stage_model.model.ln_final.weight",
    ],
    Architecture.stable_diffusion_xl: [
        "model.diffusion_model.label_emb.0.2.weight",
        "model.diffusion_model.middle_block.1.transformer_blocks.9.ff.net.0.proj.weight",
        "model.diffusion_model.output_blocks.2.2.conv.weight",
        "conditioner.embedders.0.transformer.text_model.encoder.layers.11.mlp.fc1.weight",
        "conditioner.embedders.1.model.transformer.resblocks.31.mlp.c_proj.bias",
        "conditioner.embedders.1.model.text_projection",
    ],
}
NUM_UNET_WEIGHTS = {Architecture.stable_diffusion_2: 686, Architecture.stable_diffusion_xl: 1680}


@pytest.mark.parametrize("architecture", SHOWN)
def test_the_names_of_the_released_models(architecture):
    """At full size, without values; the names and numbers are those of Stability's files."""
    spec = ARCHITECTURES[architecture]
    with torch.device("meta"):
        unet, vae = build_network(ModelConfig(architecture=architecture)), build_vae(spec)
        text_encoder = build_text_encoder(spec)
    found = single_file(unet, vae, text_encoder)
    assert [name for name in SHOWN[architecture] if name not in found] == []
    assert sum(name.startswith(UNET) for name in found) == NUM_UNET_WEIGHTS[architecture]
    assert sum(name.startswith("first_stage_model.") for name in found) == 248
    prefix, encoder = "cond_stage_model.model.", text_encoder
    if isinstance(text_encoder, DualTextEncoder):
        prefix, encoder = "conditioner.embedders.1.model.", text_encoder.text_encoder_2
    parts = {
        unet: convert_ldm_unet_checkpoint(found, unet.config),
        vae: convert_ldm_vae_checkpoint(found, vae.config),
        encoder: convert_open_clip_checkpoint(encoder, found, prefix),
    }
    for module, converted in parts.items():
        shapes = {name: tensor.shape for name, tensor in released_state_dict(module).items()}
        assert {name: tensor.shape for name, tensor in converted.items()} == shapes


def build(architecture: Architecture, activation: str) -> tuple[torch.nn.Module, FrozenParts]:
    """A small model with each kind of layer of the released ones."""
    spec = ARCHITECTURES[architecture]
    config = ModelConfig(architecture=architecture, network={"block_out_channels": [16, 32], "norm_num_groups": 4})
    text_encoder = with_seed(3, lambda: build_text_encoder(spec))
    if not isinstance(text_encoder, DualTextEncoder):
        changed = CLIPTextConfig(**{**spec.text_encoder, "num_hidden_layers": 2, "hidden_act": activation})
        text_encoder = with_seed(3, lambda: CLIPTextModel(changed))
    vae = with_seed(2, lambda: build_vae(spec, {"mid_block_add_attention": True}))
    for part in (vae, text_encoder):
        freeze(part)
    frozen = FrozenParts(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=build_tokenizer(architecture),
        latent_scaling=latent_space(vae).scaling,
    )
    return with_seed(1, lambda: build_network(config)), frozen


@pytest.mark.parametrize(
    ("architecture", "activation"),
    [(Architecture.tiny, "gelu"), (Architecture.tiny, "quick_gelu"), (Architecture.tiny_xl, "gelu")],
    ids=["OpenCLIP", "CLIP", "xl"],
)
def test_diffusers_reads_the_same_model_from_file_and_folder(architecture, activation, tmp_path):
    network, frozen = build(architecture, activation)
    scheduler = exported_scheduler(tiny().noise_scheduler)
    write_pipeline(tmp_path / "folder", network=network, frozen=frozen, scheduler=scheduler)
    file = tmp_path / "model.safetensors"
    save_file(single_file(network, frozen.vae, frozen.text_encoder), file)
    kind = StableDiffusionXLPipeline if architecture is Architecture.tiny_xl else StableDiffusionPipeline
    expected = kind.from_pretrained(tmp_path / "folder")
    found = kind.from_single_file(str(file), config=str(tmp_path / "folder"), local_files_only=True)
    for name, part in expected.components.items():
        if isinstance(part, torch.nn.Module):
            ours, theirs = part.state_dict(), found.components[name].state_dict()
            assert ours.keys() == theirs.keys()
            assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []
    images = []
    for pipeline in (expected, found):
        pipeline.set_progress_bar_config(disable=True)
        options = {"num_inference_steps": 2, "output_type": "pt", "generator": torch.Generator().manual_seed(0)}
        images.append(pipeline("a red circle", height=32, width=32, **options).images)
    # Products of matrices depend on where in memory a matrix begins.
    assert (images[0] - images[1]).abs().max() < 1e-5 and images[0].std() > 0.01

    weights = read_single_file(file, network)
    state = network.state_dict()
    assert weights.keys() == {f"unet.{name}" for name in state}
    assert all(torch.equal(weights[f"unet.{name}"], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("architecture", [Architecture.tiny, Architecture.tiny_xl])
def test_diffusers_adds_lora_in_kohya_s_layout(architecture, tmp_path):
    network, frozen = build(architecture, "gelu")
    names = unet_names(network) if architecture is Architecture.tiny_xl else {}
    lora = LoraConfig(rank=2, alpha=6.0, targets=["to_q", "to_out.0", "ff.net.0.proj"])
    pipeline = build_pipeline(network=network, vae=frozen.vae, frozen=frozen, scheduler=DDIMScheduler())
    with_lora = copy.deepcopy(network)
    add_lora(with_lora, lora, seed=0)
    for parameter in with_lora.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    weights = with_lora.state_dict()
    save_file(kohya_layout(weights, lora, names), tmp_path / "lora.safetensors")
    pipeline.load_lora_weights(tmp_path, weight_name="lora.safetensors")
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    expected, found = merged(weights, lora), pipeline.unet.state_dict()
    assert found.keys() == expected.keys()
    assert max((found[name] - expected[name]).abs().max() for name in expected) < 1e-6


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """A file with what it was trained as in its header."""
    model = tiny(seed=5, prediction_type="epsilon")
    path = tmp_path_factory.mktemp("ldm") / "model.safetensors"
    scheduler = exported_scheduler(build_noise_scheduler(model.objective)).to_json_string()
    metadata = {SCHEDULER_KEY: scheduler, "resolution": "64"}
    save_file(single_file(model.unet, model.vae, model.text_encoder), path, metadata)
    return path


def test_a_notebook_reads_weights_and_prediction_type(file, tmp_path, caplog):
    loaded, expected = tiny(network=file), tiny(seed=5)
    assert (loaded.objective.prediction_type, loaded.resolution) == ("epsilon", 64)
    assert all(torch.equal(one, two) for one, two in zip(loaded.parameters(), expected.parameters(), strict=True))
    assert "assumed" not in caplog.text
    half = {name: tensor.half() for name, tensor in load_file(file).items()}
    save_file(half, tmp_path / "half.safetensors")
    loaded = tiny(network=tmp_path / "half.safetensors")
    assert "the prediction type of its network is assumed" in caplog.text
    assert all(
        torch.equal(one, two.half().float())
        for one, two in zip(loaded.parameters(), expected.parameters(), strict=True)
    )


def test_what_is_no_such_file_is_refused(file, tmp_path):
    with pytest.raises(ConfigurationError, match="pickle"):
        tiny(network=tmp_path / "model.ckpt")
    with pytest.raises(DataError, match="is not a file of weights"):
        tiny(network=tmp_path / "absent.safetensors")
    with pytest.raises(ConfigurationError, match="has a transformer"):
        tiny_transformer(network=file)
    weights = load_file(file)
    save_file({name: tensor for name, tensor in weights.items() if UNET not in name}, tmp_path / "vae.safetensors")
    with pytest.raises(ConfigurationError, match=r"holds no model\.diffusion_model"):
        tiny(network=tmp_path / "vae.safetensors")
    save_file(weights | {f"{UNET}other": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigurationError, match="0 weights missing, 1 unknown"):
        tiny(network=tmp_path / "other.safetensors")


def test_weights_without_a_name_are_refused():
    network, frozen = build(Architecture.tiny, "gelu")
    network.add_module("other", torch.nn.Linear(1, 1))
    with pytest.raises(ConfigurationError, match=r"no name for other\.weight"):
        single_file(network, frozen.vae, frozen.text_encoder)
