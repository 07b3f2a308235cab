"""Counts of a configured network against the network that is built."""

import warnings
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from diffusion.composer_models import AutoencoderTraining
from diffusion.config.data import ImageSize
from diffusion.config.loading import load_config
from diffusion.config.locations import is_location
from diffusion.config.model import AutoencoderConfig
from diffusion.config.training import Device, Precision
from diffusion.errors import ConfigurationError
from diffusion.models import build_model
from diffusion.models.architectures import TINY, build_vae, text_shape
from diffusion.models.ingredients import Caller
from diffusion.models.ingredients.lora import add_lora
from diffusion.models.precision import AUTOCAST_DTYPES
from diffusion.planning.fleets import Fleet, rate_for
from diffusion.planning.memory import (
    FlashAttentionShapes,
    ParameterCounts,
    activation_bytes,
    largest_unit,
    meta_forward,
    meta_parts,
    parameter_counts,
    plan_memory,
)
from diffusion.planning.plan import plan_run, training_flops
from diffusion.train import build_optimizer, build_training_model
from tests.tools.language_models import WIDTHS, write_language_model
from tests.tools.toys import write_vgg

LORA = ["model.lora={rank: 3, targets: [to_q, conv1]}", "init_from.checkpoint=somewhere"]
SIZE = ImageSize(32, 32)


def toy(*overrides):
    return load_config("tests/tools/toy.yaml", list(overrides))


def num_parameters(module, *, trained=None):
    parameters = module.parameters()
    return sum(p.numel() for p in parameters if trained is None or p.requires_grad is trained)


@pytest.fixture(scope="module")
def model():
    config = toy(*LORA)
    assert config.model.lora is not None
    model = build_model(config.model, config.objective, resolution=32, seed=17)
    add_lora(model.unet, config.model.lora, seed=17)
    return model


def test_of_lora_the_matrices_are_trained_and_the_weights_are_not(model):
    counts, everything = parameter_counts(toy(*LORA)), parameter_counts(toy())
    assert counts.trained == num_parameters(model.unet, trained=True)
    assert counts.fixed == num_parameters(model.unet, trained=False)
    assert counts.frozen == num_parameters(model.vae) + num_parameters(model.text_encoder)
    assert (everything.trained, everything.fixed) == (num_parameters(model.unet, trained=False), 0)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_moments_are_those_that_the_optimizer_holds(name):
    config = toy("model.text_adapter={layers: 1}", f"optimizer.name={name}")
    optimizer = build_optimizer(config, build_training_model(config, Device.cpu))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moments = [one for state in optimizer.state.values() for key, one in state.items() if key != "step"]
    assert sum(one.nbytes for one in moments) == plan_memory(config, parameter_counts(config), 1).states[0].optimizer


def test_operations_of_lora_are_those_that_torch_counts(model):
    inputs = torch.randn(1, 4, 8, 8), torch.tensor([3]), torch.randn(1, 24, 64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.unet(*inputs, return_dict=False)[0].sum().backward()
    assert training_flops(toy(*LORA), SIZE) == counter.get_total_flops()
    every, few = training_flops(toy(), SIZE), training_flops(toy(*LORA), SIZE)
    assert every is not None and few is not None
    assert 0.6 < few / every < 0.8, "no gradients of most weights"
    fleet = Fleet(name="measured", num_gpus=1, images_per_second={32: 100.0}, architecture=toy().model.architecture)
    whole, lora = toy(), toy(*LORA)
    whole.model.network = lora.model.network = {}
    assert rate_for(fleet, whole) == 100.0
    assert 120 < rate_for(fleet, lora) < 170


def test_gradients_of_matrices_are_reduced_and_less_is_kept(model):
    resnets = [module for module in model.unet.modules() if type(module).__name__ == "ResnetBlock2D"]
    assert largest_unit(toy(*LORA)) == max(num_parameters(resnet, trained=True) for resnet in resnets)
    few, every = activation_bytes(toy(*LORA), SIZE), activation_bytes(toy(), SIZE)
    assert few is not None and every is not None
    assert few < 1.2 * every


@pytest.mark.parametrize("has_mask", [True, False])
def test_attention_keeps_the_mask_of_the_padding_unless_an_ingredient_drops_it(monkeypatch, has_mask):
    if not has_mask:
        monkeypatch.setattr(Caller, "condition", lambda caller, conditioning, call: conditioning._replace(mask=None))
    model = load_config("yamls/tiny/transformer.yaml", may_lack=is_location).model
    network, ingredients = meta_parts(model)
    network.set_attn_processor(FlashAttentionShapes())
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: shapes.append(one.shape) or one, lambda one: one):
        meta_forward(model, network, ingredients, SIZE, torch.float32)
    num_tokens, num_positions = text_shape(model)[0], 4 * 4
    assert shapes.count((1, num_tokens + num_positions)) == network.config["depth"] * has_mask


def test_a_text_adapter_is_trained_and_under_lora_it_is_fixed():
    adapter = ["model.text_adapter={layers: 2}"]
    config = toy(*adapter)
    built = build_model(config.model, config.objective, resolution=32, seed=17)
    plain, counts = parameter_counts(toy()), parameter_counts(config)
    size = num_parameters(built.get_submodule("text_adapter"))
    assert (counts.trained, counts.fixed, counts.frozen) == (num_parameters(built), plain.fixed, plain.frozen)
    assert counts.trained - plain.trained == size
    assert largest_unit(config) == max(largest_unit(toy()), size)
    assert parameter_counts(toy(*adapter, *LORA)).fixed == parameter_counts(toy(*LORA)).fixed + size
    pairs = [(training_flops(toy(*adapter, *few), SIZE), training_flops(toy(*few), SIZE)) for few in ([], LORA)]
    more, under_lora = (one - other for one, other in pairs if one is not None and other is not None)
    assert more > 3 * under_lora > 0, "forward only"
    grown = [activation_bytes(toy(*given), SIZE) for given in ([], adapter)]
    assert grown[0] is not None and grown[1] is not None
    assert 0 < grown[1] - grown[0] < grown[0]


def test_text_that_is_stored_has_the_width_of_the_language_model(tmp_path):
    folder = write_language_model(tmp_path, "t5")
    text = [f"model.text_encoder={{path: {folder}, max_tokens: 96}}", "model.text_adapter={layers: 1, width: 64}"]
    tiers = [plan_run(toy(*text, f"data.text_embeddings={stored}")).tiers for stored in ("false", "true")]
    sizes = [one.sample_bytes or 0 for one in tiers]
    assert sizes[1] - sizes[0] == 2 * 96 * WIDTHS["t5"] != 2 * 96 * 64


@pytest.mark.parametrize("precision", Precision)
def test_frozen_memory_is_that_of_the_precisions_in_which_a_gpu_holds_the_weights(tmp_path, precision):
    text = f"model.text_encoder={{path: {write_language_model(tmp_path, 'qwen3')}}}"
    config = toy(text, "model.text_adapter={layers: 1}", f"trainer.precision={precision.value}")
    model: Any = build_training_model(config, Device.cpu)
    if precision in AUTOCAST_DTYPES:
        model.conditioner.lower_precision(AUTOCAST_DTYPES[precision])
    frozen = sum(parameter.nbytes for part in model.frozen_parts for parameter in part.parameters())
    assert plan_memory(config, parameter_counts(config), 1).frozen_bytes == frozen


@pytest.mark.parametrize("parallelism", ["ddp", "fsdp"])
def test_memory_and_checkpoints_of_lora(parallelism):
    counts = parameter_counts(toy(*LORA))
    plan = plan_run(toy(*LORA, f"trainer.parallelism={parallelism}", "algorithms.ema.decays=[0.9,0.99]"))
    (memory,) = [one for one in plan.memory.states if one.is_chosen]
    copy = counts.trained + counts.fixed if parallelism == "fsdp" else 0
    assert memory.weights == 4 * (counts.trained + counts.fixed + copy)
    assert (memory.gradients, memory.optimizer, memory.ema) == tuple(n * counts.trained for n in (4, 8, 8))
    assert plan.checkpoints.largest_bytes == 4 * counts.fixed + 20 * counts.trained
    assert (plan.num_parameters, plan.memory.frozen_bytes) == (counts.trained, 4 * counts.frozen)
    unit = counts.trained if parallelism == "ddp" else 2 * largest_unit(toy(*LORA))
    assert plan.memory.reduction_bytes == 4 * unit


def test_shards_are_rounded_up_in_whole_numbers():
    config = toy("plan.num_gpus=8", "trainer.num_replicas=8")
    memory = plan_memory(config, ParameterCounts(49, 50), 49 * 8).states[1]
    assert (memory.weights, memory.gradients) == (4 * (1 + 2), 4)


def test_a_vae_with_a_discriminator_and_a_perceptual_loss(tmp_path):
    write_vgg(tmp_path / "vgg.pth")
    changes = {"block_out_channels": [16, 32, 32], "norm_num_groups": 4}
    weights = {"adversarial_weight": 0.5, "perceptual_weight": 1.0, "vgg_weights": str(tmp_path / "vgg.pth")}
    built = AutoencoderTraining(build_vae(TINY, changes), AutoencoderConfig(**weights, vae=changes), seed=0)
    config = toy("task=autoencoder")
    config.autoencoder = AutoencoderConfig(**weights, vae=changes)
    with warnings.catch_warnings(action="error"):
        counts = parameter_counts(config)
    assert (counts.trained, counts.fixed) == (num_parameters(built, trained=True), 0)
    assert counts.trained > num_parameters(built.vae)
    assert counts.frozen == num_parameters(built._frozen["perceptual"])
    config.autoencoder = AutoencoderConfig(vae=changes)
    assert parameter_counts(config)[:3] == (num_parameters(built.vae), 0, 0)
    with pytest.raises(ConfigurationError, match="VAE"):
        rate_for(Fleet(name="measured", num_gpus=1, images_per_second={32: 100.0}), config)
