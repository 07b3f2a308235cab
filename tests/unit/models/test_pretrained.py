from pathlib import Path

import pytest
import torch
from transformers import CLIPTokenizer

from diffusion.config.model import Architecture, FlowConfig, ModelConfig, ObjectiveConfig, PredictionType
from diffusion.errors import ConfigurationError, DataError
from diffusion.models import LatentDiffusion, build_model
from diffusion.models.architectures import TINY, build_vae, count_parameters, with_seed
from diffusion.models.latents import LatentScaling, fold_scaling, latent_space
from diffusion.models.pretrained import read_pipeline_network, read_vae
from diffusion.models.sampling import image_seeds, initial_latents
from diffusion.models.tokenizers import build_clip_tokenizer, clip_merges, tokenize
from tests.tools.pipelines import images_of_model, images_of_pipeline, read_pipeline, write_model

PROMPTS = ["a red circle", "Blue star, 42!"]


def build(architecture: Architecture, scaling: LatentScaling | None = None, **objective) -> LatentDiffusion:
    unet = {"block_out_channels": [16, 32], "norm_num_groups": 4, "sample_size": 8}
    config = ModelConfig(architecture=architecture, network=unet, frozen_seed=3)
    settings = {"prediction_type": PredictionType.v_prediction, **objective}
    model = build_model(config, ObjectiveConfig(**settings), resolution=32, seed=17).eval()
    if scaling is not None:
        model.latent_scaling = scaling
    return model


PER_CHANNEL = LatentScaling((0.3, -1.2, 0.1, 2.0), (0.5, 1.7, 0.9, 3.0))


@pytest.mark.parametrize(
    ("architecture", "scaling", "objective"),
    [
        (Architecture.tiny, LatentScaling((0.0,), (1 / 0.18215,)), {}),
        (Architecture.tiny, PER_CHANNEL, {"zero_terminal_snr": True}),
        (Architecture.tiny, PER_CHANNEL, {"prediction_type": PredictionType.epsilon}),
        (Architecture.tiny, PER_CHANNEL, {"prediction_type": PredictionType.flow, "flow": FlowConfig(shift=3.0)}),
        (Architecture.tiny_xl, PER_CHANNEL, {}),
    ],
    ids=["factor", "zero terminal SNR", "epsilon", "flow", "xl"],
)
def test_a_pipeline_gives_the_images_of_generate(architecture, scaling, objective, tmp_path):
    model = build(architecture, scaling, **objective)
    if scaling is not PER_CHANNEL:
        model.vae.register_to_config(scaling_factor=0.18215)
    folder = write_model(model, tmp_path / "folder")
    assert not [path for path in folder.rglob("*") if path.suffix in (".bin", ".pt", ".pkl", ".ckpt")]
    pipeline = read_pipeline(folder)
    assert (pipeline.unet.config.sample_size, pipeline.vae_scale_factor) == (8, 4)
    latents = initial_latents(image_seeds(5, 2), (4, 8, 8), torch.device("cpu"))
    options = {"num_inference_steps": 4, "guidance_scale": 3.0, "latents": latents}
    for negative in (None, "a green square"):
        expected = images_of_model(model, PROMPTS, negative, **options)
        negatives = None if negative is None else [negative] * 2
        found = images_of_pipeline(pipeline, PROMPTS, negative_prompt=negatives, **options)
        assert (found - expected).abs().max() < 1e-4
    assert (images_of_model(model, PROMPTS, **options) - expected).abs().max() > 1e-3


@pytest.mark.parametrize(("has_convolutions", "factor"), [(True, 1.0), (False, 0.18215)])
def test_a_folded_vae_has_the_latents_of_the_unet(has_convolutions, factor):
    torch.manual_seed(0)
    changes = {"use_quant_conv": has_convolutions, "use_post_quant_conv": has_convolutions}
    vae = build_vae(TINY, changes).eval()
    before = {name: tensor.clone() for name, tensor in vae.state_dict().items()}
    images, latents = torch.rand(2, 3, 16, 16) * 2 - 1, torch.randn(2, 4, 4, 4)
    with torch.no_grad():
        folded = fold_scaling(vae, PER_CHANNEL, factor)
        found, expected = folded.encode(images).latent_dist, vae.encode(images).latent_dist
        assert (factor * found.mean - PER_CHANNEL.normalise(expected.mean)).abs().max() < 1e-5
        std = torch.tensor(PER_CHANNEL.std).view(1, -1, 1, 1)
        assert (factor * found.std - expected.std / std).abs().max() < 1e-5
        decoded = vae.decode(PER_CHANNEL.denormalise(latents), return_dict=False)[0]
        assert (folded.decode(latents / factor, return_dict=False)[0] - decoded).abs().max() < 1e-5
    assert latent_space(folded).scaling == LatentScaling.of_factor(factor)
    assert all(torch.equal(before[name], tensor) for name, tensor in vae.state_dict().items())


FLUX_LAYOUT = {"latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}


def save_vae(folder: Path, **changes) -> Path:
    """A VAE of 16 channels with random weights and FLUX.1's scaling, in a folder of diffusers."""
    scaling = {"scaling_factor": 0.3611, "shift_factor": 0.1159}
    with_seed(5, lambda: build_vae(TINY, FLUX_LAYOUT | scaling | changes)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("architecture", [Architecture.tiny, Architecture.tiny_xl, Architecture.tiny_transformer])
def test_a_pipeline_with_a_vae_of_16_channels_gives_the_images_of_generate(architecture, tmp_path):
    vae = str(save_vae(tmp_path / "vae"))
    with pytest.raises(ConfigurationError, match=r"16 channels.*Set model\.network\.in_channels=16"):
        build_model(ModelConfig(architecture=architecture, vae=vae), ObjectiveConfig(), resolution=32, seed=17)
    config = ModelConfig(architecture=architecture, vae=vae, network={"in_channels": 16}, frozen_seed=3)
    objective = ObjectiveConfig(prediction_type=PredictionType.flow)
    model = build_model(config, objective, resolution=32, seed=17).eval()
    assert model.latent_scaling == LatentScaling((0.1159,), (1 / 0.3611,))
    assert count_parameters(config)["network"] == sum(p.numel() for p in model.network.parameters())
    pipeline = read_pipeline(write_model(model, tmp_path / "folder"))
    latents = initial_latents(image_seeds(5, 1), (16, 8, 8), torch.device("cpu"))
    settings = {"num_inference_steps": 4, "guidance_scale": 3.0, "latents": latents}
    expected = images_of_model(model, PROMPTS[:1], **settings)
    assert (images_of_pipeline(pipeline, PROMPTS[:1], **settings) - expected).abs().max() < 1e-4


def test_a_vae_is_read_from_its_folder_and_from_one_that_holds_it(tmp_path):
    save_vae(tmp_path / "run" / "vae")
    vae = with_seed(1, lambda: build_vae(TINY, FLUX_LAYOUT))
    expected = with_seed(5, lambda: build_vae(TINY, FLUX_LAYOUT)).state_dict()
    for folder in (tmp_path / "run", tmp_path / "run" / "vae"):
        found = read_vae(str(folder), vae)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    other = build_vae(TINY, FLUX_LAYOUT | {"norm_num_groups": 4})
    with pytest.raises(ConfigurationError, match=r"norm_num_groups is 2 there and 4 here.*autoencoder\.vae"):
        read_vae(str(tmp_path / "run"), other)
    with pytest.raises(ConfigurationError, match="AutoencoderKL could not be loaded"):
        read_vae(str(tmp_path), vae)


def test_clip_s_tokenizer_is_loaded_as_it_was(tmp_path):
    tokenizer = build_clip_tokenizer(clip_merges(), 77)
    tokenizer.save_pretrained(tmp_path)
    loaded = CLIPTokenizer.from_pretrained(tmp_path)
    captions = ["", "A photograph of an astronaut, riding a horse!", "naïve café ☃ " * 40]
    assert (tokenize(loaded, captions) == tokenize(tokenizer, captions)).all()
    assert loaded.pad_token_id == 0


def test_a_unet_in_several_files_equals_that_in_one(tmp_path):
    unet = build(Architecture.tiny).unet
    unet.save_pretrained(tmp_path / "unet", max_shard_size=200_000)
    assert len(list((tmp_path / "unet").glob("*.safetensors"))) > 3
    found, tensors = read_pipeline_network(tmp_path, unet), unet.state_dict()
    assert found.keys() == {f"unet.{name}" for name in tensors}
    assert all(torch.equal(found[f"unet.{name}"], tensor) for name, tensor in tensors.items())


def test_weights_of_another_network_with_the_same_shapes_are_rejected(tmp_path):
    model = build(Architecture.tiny)
    write_model(model, tmp_path / "folder")
    other = ModelConfig(architecture=Architecture.tiny, network={"block_out_channels": [16, 32], "norm_num_groups": 8})
    unet = build_model(other, ObjectiveConfig(), resolution=32, seed=1).unet
    with pytest.raises(ConfigurationError, match=r"unet/config\.json: norm_num_groups"):
        read_pipeline_network(tmp_path / "folder", unet)


def test_a_configuration_of_another_class_is_rejected(tmp_path):
    unet = build(Architecture.tiny).unet
    unet.save_pretrained(tmp_path / "unet")
    (tmp_path / "unet" / "config.json").write_text('{"attention_bias_of_tomorrow": 1}')
    with pytest.raises(ConfigurationError, match="attention_bias_of_tomorrow"):
        read_pipeline_network(tmp_path, unet)


def test_missing_or_damaged_files_are_named(tmp_path):
    unet = build(Architecture.tiny).unet
    with pytest.raises(ConfigurationError, match=r"unet .*config\.json"):
        read_pipeline_network(tmp_path, unet)
    unet.save_config(tmp_path / "unet")
    (tmp_path / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(b"\x80\x04nonsense")
    with pytest.raises(DataError, match=r"diffusion_pytorch_model\.safetensors"):
        read_pipeline_network(tmp_path, unet)
