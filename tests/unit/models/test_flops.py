"""The count of operations is that of torch's counter, for every family, several sizes and changed configurations."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from diffusion.config.ingredients import LoraConfig, TextAdapterConfig
from diffusion.config.model import Architecture, ModelConfig
from diffusion.datasets.batch import BatchKey
from diffusion.models.architectures import build_network
from diffusion.models.build import tiny
from diffusion.models.flops import batch_flops, count_flops
from diffusion.models.ingredients.lora import add_lora
from diffusion.models.networks import text_width_of
from diffusion.planning.memory import meta_parts

SMALL = {"block_out_channels": [16, 32], "norm_num_groups": 4}


def meta_network(config):
    with torch.device("meta"):
        return build_network(config)


def counted(network, height, width, num_tokens, adapter=None):
    """Forward, and forward + backward, by torch's counter."""
    config = network.config
    with torch.device("meta"):
        latents = torch.empty(1, config["in_channels"], height, width)
        text = torch.empty(1, num_tokens, text_width_of(network))
        added = None
        if config.get("addition_embed_type") == "text_time":
            width_of_ids = 6 * config["addition_time_embed_dim"]
            pooled = config["projection_class_embeddings_input_dim"] - width_of_ids
            added = {"text_embeds": torch.empty(1, pooled), "time_ids": torch.empty(1, 6)}
        timesteps = torch.zeros(1, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        options = {"added_cond_kwargs": added} if added else {}
        text = text if adapter is None else adapter(text)
        predicted = network(latents, timesteps, text, **options, return_dict=False)[0]
        forward = counter.get_total_flops()
        predicted.sum().backward()
    return forward, counter.get_total_flops()


CASES = {
    "sd2 bucket": (Architecture.stable_diffusion_2, {}, (48, 80), 77),
    "tiny": (Architecture.tiny, {}, (8, 8), 24),
    "odd sizes": (Architecture.tiny, SMALL, (9, 14), 5),
    "convolutional projections": (Architecture.tiny, {**SMALL, "use_linear_projection": False}, (8, 8), 24),
    "deeper": (
        Architecture.tiny,
        {**SMALL, "layers_per_block": [1, 2], "transformer_layers_per_block": [1, 3]},
        (8, 16),
        24,
    ),
    "transformer": (Architecture.transformer_s, {}, (32, 48), 77),
    "tiny transformer": (Architecture.tiny_transformer, {"depth": 2, "mlp_ratio": 2.5}, (8, 6), 24),
    "pixels": (Architecture.tiny_pixel_transformer, {"depth": 2, "resolution_embeds": True}, (32, 24), 24),
    "tiny sdxl": (Architecture.tiny_xl, {}, (24, 36), 24),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_as_torch_counts(case):
    architecture, changed, (height, width), num_tokens = case
    unet = meta_network(ModelConfig(architecture=architecture, network=changed))
    flops = count_flops(unet.config, height=height, width=width, num_tokens=num_tokens)
    assert flops is not None
    assert (flops.forward, flops.training) == counted(unet, height, width, num_tokens)


@pytest.mark.parametrize("architecture", [Architecture.tiny, Architecture.transformer_s])
def test_the_adapter_and_the_gradients_of_its_text_are_counted(architecture):
    config = ModelConfig(architecture=architecture, text_adapter=TextAdapterConfig(layers=2))
    network, ingredients = meta_parts(config)
    num_tokens = 24
    flops = count_flops(network.config, height=16, width=16, num_tokens=num_tokens, ingredients=ingredients)
    assert flops is not None
    assert (flops.forward, flops.training) == counted(network, 16, 16, num_tokens, ingredients[0].module)


def test_under_lora_weights_have_no_gradients():
    """Torch counts the matrices, and no gradients before the first of them: less than 3 % of Stable Diffusion 2's."""
    unet = meta_network(ModelConfig())
    flops = count_flops(unet.config, height=32, width=32, num_tokens=77)
    assert flops is not None
    with torch.device("meta"):
        add_lora(unet, LoraConfig(), seed=0)
    assert flops.adapting == pytest.approx(counted(unet, 32, 32, 77)[1], rel=0.03)
    assert flops.adapting < 0.75 * flops.training


def test_figures_of_sd2():
    config = meta_network(ModelConfig()).config
    small, large = (count_flops(config, height=side, width=side, num_tokens=77) for side in (32, 64))
    assert small is not None and large is not None
    assert (round(small.forward / 1e9, 1), round(small.training / 1e9, 1)) == (181.1, 539.3)
    assert (round(large.forward / 1e9, 1), round(large.training / 1e9, 1)) == (804.3, 2408.7)
    config = meta_network(ModelConfig(architecture=Architecture.stable_diffusion_xl)).config
    largest = count_flops(config, height=128, width=128, num_tokens=77)
    assert largest is not None
    assert round(largest.forward / 1e9) == 6761


def test_an_unknown_block_is_not_counted():
    config = {**meta_network(ModelConfig(architecture=Architecture.tiny)).config}
    config["down_block_types"] = ("AttnDownBlock2D", "DownBlock2D")
    assert count_flops(config, height=8, width=8, num_tokens=24) is None
    batch = {BatchKey.LATENT_MEAN: torch.empty(2, 4, 8, 8), BatchKey.TOKEN_IDS: torch.zeros(2, 24)}
    assert math.isnan(batch_flops(config, batch, vae_factor=4))


@pytest.mark.parametrize(
    "changed",
    [
        {"conv_in_kernel": 1},
        {"conv_out_kernel": 1},
        {"downsample_padding": 0},
        {"encoder_hid_dim": 64},
        {"only_cross_attention": True},
        {"resnet_time_scale_shift": "scale_shift"},
        {"reverse_transformer_layers_per_block": [1, 2], "transformer_layers_per_block": [1, 2]},
        {"time_embedding_type": "fourier"},
    ],
)
def test_networks_that_are_not_counted_as_torch_counts_are_unknown(changed):
    network = meta_network(ModelConfig(architecture=Architecture.tiny, network=changed))
    size = {"height": 9, "width": 9, "num_tokens": 24}
    plain = count_flops(meta_network(ModelConfig(architecture=Architecture.tiny)).config, **size)
    assert plain is not None and counted(network, *size.values())[0] != plain.forward
    assert count_flops(network.config, **size) is None


def test_a_batch_of_groups_of_several_shapes_and_one_of_images():
    model = tiny()
    ids = torch.zeros(6, 24)

    def of(*shapes):
        counts = [count_flops(model.unet.config, height=height, width=width, num_tokens=24) for height, width in shapes]
        return sum(count.training for count in counts if count is not None)

    latents = [torch.empty(2, 4, 8, 8), torch.empty(2, 4, 6, 10), torch.empty(2, 4, 8, 8)]
    groups = {BatchKey.LATENT_MEAN: latents, BatchKey.TOKEN_IDS: ids}
    assert model.batch_flops(groups) == 4 * of((8, 8)) + 2 * of((6, 10))
    images = {BatchKey.IMAGE: torch.empty(6, 3, 24, 40), BatchKey.TOKEN_IDS: ids}
    assert model.batch_flops(images) == 6 * of((6, 10))
