"""Combinations of network, parallelism, compilation, recomputation and parts: two microbatches and a step, in bf16."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.core import Precision
from composer.distributed.fsdp2 import prepare_fully_shard
from composer.distributed.fsdp2_utils import generate_composer_model_policy
from torch import Tensor

from diffusion.config.loading import load_config
from diffusion.config.schema import Config
from diffusion.config.training import Device
from diffusion.ema.averaging import Exponential, WeightAverage, reshard, trainable_parameters
from diffusion.models.fast import compilation
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.sharding import fsdp_config, fsdp_modules, set_last_microbatch
from diffusion.train import build_optimizer, build_training_model
from tests.tools.image_encoders import write_image_encoder
from tests.unit.models.fast.test_fast_unet import process_group  # noqa: F401

OPTIONS = {
    "unet": [],
    "xl": ["model={architecture: tiny_xl, network: {}}"],
    "transformer": ["model={architecture: tiny_transformer, network: {}}", "objective.prediction_type=flow"],
    "fsdp": [],
    "reshard": ["trainer.reshard_after_forward=true"],
    "ddp": ["trainer.parallelism=ddp"],
    "plain": ["performance.compilation=none"],
    "blocks": ["performance.compilation=blocks"],
    "stages": ["performance.compilation=stages"],
    "text": ["performance.compile_text_encoder=true"],
    "whole": ["performance.compilation=unet"],
    "recompute": ["trainer.activation_checkpointing=true"],
    "muon": ["optimizer.name=muon"],
    "scores": ["model.score_conditioning={columns: [{name: a}]}"],
    "adapter": ["model.text_adapter={}", "model.text_encoder.chunks=2"],
    "routing": ["model.token_routing={share: 0.5, first: 1, last: -2}"],
    "alignment": ["model.alignment={path: IMAGES, width: 32}"],
    "lora": ["init_from={checkpoint: a}", "model.lora={rank: 2}"],
}
SLOW = [
    "unet ddp whole recompute lora",
    "unet ddp stages scores",
    "unet reshard plain recompute adapter muon",
    "xl fsdp stages recompute text lora",
    "xl reshard plain recompute alignment scores muon",
    "transformer fsdp blocks recompute routing adapter muon",
    "transformer fsdp whole routing alignment",
    "transformer reshard plain recompute routing alignment scores muon",
]
TRANSFORMER = {"hidden_size": 32, "num_heads": 2, "depth": 4, "axes_dim": [8, 8]}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image_encoder(tmp_path_factory.mktemp("images"))


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilation with the graphs of forward and backward pass, and without generated code."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    compilation._compiled.cache_clear()


def configure(words: list[str], images: Path) -> Config:
    overrides = [option.replace("IMAGES", str(images)) for word in words for option in OPTIONS[word]]
    config = load_config("tests/tools/toy.yaml", ["trainer.precision=amp_bf16", *overrides])
    if "transformer" in words:
        config.model.network = dict(TRANSFORMER)
        if config.model.lora is not None:
            config.model.lora.targets = ["img_qkv_proj", "txt_kv_proj"]
    return config


def build(config: Config) -> LatentDiffusion:
    model: Any = build_training_model(config, Device.cpu, is_new=False)
    model.conditioner.lower_precision(torch.bfloat16)
    if config.trainer.parallelism.value == "fsdp":
        settings, policy = fsdp_config(config.trainer), generate_composer_model_policy(model)
        prepare_fully_shard(model, settings, Precision.AMP_BF16, policy)
    return model.train()


def batch(model: LatentDiffusion, number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    found: dict[str, Any] = {
        "token_ids": torch.from_numpy(model.tokenize(["a red circle", "a blue star"])).long(),
        "sample": torch.arange(2) + 2 * number,
        "slot": torch.arange(2) + 2 * number,
        "step": torch.zeros(2, dtype=torch.long),
        "stream": torch.zeros(2, dtype=torch.long),
        "scores": torch.tensor([[1.0], [float("nan")]]),
        "placement": torch.tensor([[64, 64, 0, 0, 32, 32]] * 2),
    }
    if hasattr(model, "alignment"):
        return found | {"image": torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=generator)}
    latents = torch.randn(2, 4, 8, 8, generator=generator).half()
    return found | {"latent_mean": latents, "latent_logvar": torch.full_like(latents, -8.0)}


def loss_of(model: LatentDiffusion, number: int) -> Tensor:
    own = batch(model, number)
    with torch.autocast("cpu", torch.bfloat16):
        loss: Any = model.loss(model(own), own)
    return sum(loss.values()) if isinstance(loss, dict) else loss


@pytest.mark.usefixtures("process_group", "traced")
@pytest.mark.parametrize(
    "words",
    [
        "unet fsdp blocks recompute scores",
        "transformer ddp blocks recompute routing scores",
        *(pytest.param(words, marks=pytest.mark.slow) for words in SLOW),
    ],
)
def test_a_step_has_the_loss_of_the_plain_network_and_reaches_all_weights(words, images):
    words = words.split()
    config = configure(words, images)
    model = build(config)
    optimizer = build_optimizer(config, model)
    losses = []
    for number in range(2):
        if config.trainer.parallelism.value == "fsdp":
            set_last_microbatch(fsdp_modules(model), number == 1)
        losses.append(loss_of(model, number))
        (losses[-1] / 2).backward()
    parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
    assert [name for name, one in parameters.items() if one.grad is None] == []

    fast = {"fsdp", "reshard", "blocks", "stages", "text", "whole", "recompute"}
    plain = build(configure([*(word for word in words if word not in fast), "ddp", "plain"], images))
    with torch.no_grad():
        torch.testing.assert_close(losses, [loss_of(plain, number) for number in range(2)], rtol=2e-2, atol=1e-3)

    optimizer.step()
    average = WeightAverage(trainable_parameters(model), Exponential(0.9))
    average.update()
    reshard(model)
    average.swap()
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(model.eval_forward(batch(model, 0))[0]).all()
