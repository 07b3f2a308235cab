import re
import subprocess
import sys

import pytest
import torch

from diffusion.config.model import Architecture, ModelConfig
from diffusion.errors import ConfigurationError
from diffusion.models import count_parameters
from diffusion.models.architectures import ARCHITECTURES, STABLE_DIFFUSION_2, build_network, build_vae, side_factor


def test_stable_diffusion_2_has_exactly_the_published_parameters():
    assert count_parameters(ModelConfig()) == {"network": 865_910_724, "vae": 83_653_863, "text_encoder": 340_387_840}


def test_stable_diffusion_xl_has_exactly_the_published_parameters():
    counts = count_parameters(ModelConfig(architecture=Architecture.stable_diffusion_xl))
    first, second = 123_060_480, 694_659_840
    assert counts == {"network": 2_567_463_684, "vae": 83_653_863, "text_encoder": first + second}


def test_changes_in_the_configuration_reach_the_unet():
    config = ModelConfig(architecture=Architecture.tiny, network={"block_out_channels": [16, 32], "norm_num_groups": 4})
    whole = count_parameters(ModelConfig(architecture=Architecture.tiny))["network"]
    assert count_parameters(config)["network"] < whole / 5


@pytest.mark.parametrize(
    ("architecture", "millions"),
    [(Architecture.transformer_s, 80), (Architecture.transformer_m, 300), (Architecture.transformer_l, 1000)],
)
def test_transformers_in_three_sizes(architecture, millions):
    counts = count_parameters(ModelConfig(architecture=architecture))
    assert counts["network"] == pytest.approx(millions * 1e6, rel=0.2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"block_out_chanels": [16, 32], "foo": 1},
            ["model.network.block_out_chanels", "model.network.block_out_channels?", "model.network.foo"],
        ),
        ({"block_out_channels": None}, ["model.network.block_out_channels is None"]),
        ({"block_out_channels": [16]}, ["model.network", "{'block_out_channels': [16]}"]),
        ({"norm_num_groups": 5}, ["model.network", "{'norm_num_groups': 5}"]),
        ({"norm_num_groups": 0}, ["model.network.norm_num_groups is 0"]),
        ({"down_block_types": ["Absent", "DownBlock2D"]}, ["model.network", "Absent"]),
    ],
)
def test_errors_in_changes_name_their_keys(changes, named):
    with pytest.raises(ConfigurationError) as caught, torch.device("meta"):
        build_network(ModelConfig(architecture=Architecture.tiny, network=changes))
    assert all(name in str(caught.value) for name in named)


@pytest.mark.parametrize("value", [0, -4, 2.5, "a", None, True, [2, 2]])
def test_counts_are_whole_and_at_least_1(value):
    networks = {
        Architecture.tiny: ["in_channels", "out_channels", "layers_per_block", "block_out_channels"],
        Architecture.tiny_transformer: ["in_channels", "patch_size", "hidden_size", "num_heads", "depth"],
    }
    with torch.device("meta"):
        for architecture, names in networks.items():
            for name in names:
                wrong = [16, 0] if isinstance(value, list) and architecture is Architecture.tiny else value
                config = ModelConfig(architecture=architecture, network={name: wrong})
                for use in (side_factor, build_network):
                    with pytest.raises(
                        ConfigurationError, match=rf"model\.network\.{name} is {re.escape(repr(wrong))}"
                    ):
                        use(config)
        with pytest.raises(ConfigurationError, match=r"autoencoder\.vae\.layers_per_block is 0"):
            build_vae(ARCHITECTURES[Architecture.tiny], {"layers_per_block": 0})
        build_network(ModelConfig(architecture=Architecture.tiny, network={"layers_per_block": [1, 2]}))
        build_network(ModelConfig(architecture=Architecture.tiny_pixel_transformer, network={"bottleneck_size": None}))


def test_changes_of_the_vae_are_checked():
    spec = ARCHITECTURES[Architecture.tiny]
    with pytest.raises(
        ConfigurationError, match=r"autoencoder\.vae\.latent_chanels .*autoencoder\.vae\.latent_channels"
    ):
        build_vae(spec, {"latent_chanels": 8})
    with torch.device("meta"):
        assert build_vae(spec, {"scaling_factor": 1, "latents_mean": [0, 0, 0, 0.5]}).config["scaling_factor"] == 1


def test_text_encoders_and_networks_fit_one_another():
    for spec in ARCHITECTURES.values():
        width = spec.network["cross_attention_dim" if spec.component == "unet" else "context_in_dim"]
        assert width == spec.text_width
        if spec.text_encoder_2 is not None:
            width = spec.text_encoder_2["projection_dim"] + 6 * spec.network["addition_time_embed_dim"]
            assert spec.network["projection_class_embeddings_input_dim"] == width
    assert STABLE_DIFFUSION_2.vae_factor == 8


def test_importing_starts_no_gpu_and_no_process_group():
    code = (
        "import diffusion.models, diffusion.evaluation.generate, diffusion.export, diffusion.demo_page, torch, sys\n"
        "assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()\n"
        "assert not {'streaming', 'composer'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=600)
