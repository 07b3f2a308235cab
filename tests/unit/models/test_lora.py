import pytest
import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

from diffusion.config.ingredients import LoraConfig
from diffusion.config.model import Architecture, ModelConfig
from diffusion.errors import ConfigurationError
from diffusion.models.architectures import build_network
from diffusion.models.ingredients.lora import add_lora, has_lora, merged, write_lora


def small_unet() -> UNet2DConditionModel:
    torch.manual_seed(0)
    return build_network(
        ModelConfig(architecture=Architecture.tiny, network={"block_out_channels": [16, 32], "norm_num_groups": 4})
    ).eval()


@torch.no_grad()
def predict(unet: UNet2DConditionModel) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    noise, text = torch.randn(2, 4, 8, 8, generator=generator), torch.randn(2, 5, 64, generator=generator)
    return unet(noise, torch.tensor([3, 700]), text, return_dict=False)[0]


@torch.no_grad()
def train_a_little(unet: UNet2DConditionModel) -> None:
    for parameter in unet.parameters():
        if parameter.requires_grad:
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))


TARGETS = ["to_q", "to_out.0", "ff.net.0.proj", "conv1", "conv_shortcut"]


def test_only_the_new_matrices_are_trained_and_at_first_they_change_nothing():
    unet = small_unet()
    before = predict(unet)
    weights = {name: tensor.clone() for name, tensor in unet.state_dict().items()}
    state = torch.get_rng_state()
    add_lora(unet, LoraConfig(rank=3, alpha=6.0, targets=TARGETS), seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(predict(unet), before)
    trained = {name for name, parameter in unet.named_parameters() if parameter.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    found = {
        name.replace(".base_layer", ""): tensor for name, tensor in unet.state_dict().items() if name not in trained
    }
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)
    one, two = (small_unet(), small_unet())
    add_lora(one, LoraConfig(rank=3), seed=5)
    add_lora(two, LoraConfig(rank=3), seed=6)
    name = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q.lora_A.default.weight"
    torch.manual_seed(99)
    again = small_unet()
    add_lora(again, LoraConfig(rank=3), seed=5)
    assert torch.equal(one.state_dict()[name], again.state_dict()[name])
    assert not torch.equal(one.state_dict()[name], two.state_dict()[name])


def test_merged_weights_give_the_results_of_the_matrices():
    unet, config = small_unet(), LoraConfig(rank=3, alpha=6.0, targets=TARGETS)
    before = predict(unet)
    add_lora(unet, config, seed=5)
    train_a_little(unet)
    expected = predict(unet)
    assert (expected - before).abs().max() > 1e-2
    stored = unet.state_dict()
    assert has_lora(stored)
    plain = merged(stored, config)
    other = small_unet()
    assert plain.keys() == other.state_dict().keys()
    other.load_state_dict(plain)
    assert (predict(other) - expected).abs().max() < 1e-5


def test_diffusers_loads_the_matrices(tmp_path):
    unet, config = small_unet(), LoraConfig(rank=3, alpha=6.0, targets=TARGETS)
    add_lora(unet, config, seed=5)
    train_a_little(unet)
    write_lora(tmp_path, unet.state_dict(), config)
    other = small_unet()
    options = {"weight_name": "pytorch_lora_weights.safetensors", "prefix": "unet", "local_files_only": True}
    other.load_lora_adapter(str(tmp_path), **options)
    assert (predict(other) - predict(unet)).abs().max() < 1e-5


def test_a_layer_that_is_not_there_is_named():
    for targets, message in ((["to_q", "to_x"], "no layer of the network is called 'to_x'"), (["norm1"], "norm1")):
        with pytest.raises(ConfigurationError, match=message):
            add_lora(small_unet(), LoraConfig(targets=targets), seed=0)
