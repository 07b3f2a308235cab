"""LoRA (Hu et al. 2021): the U-Net uses W + alpha / rank * B A, where W is frozen and the thin matrices are trained.

The layers are peft's, whose files diffusers loads. Checkpoints hold W, A and B under the names `X.base_layer.weight`,
`X.lora_A.default.weight` and `X.lora_B.default.weight`.
"""

from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor, nn

from diffusion.config.model import LoraConfig
from diffusion.errors import ConfigurationError, MachineError
from diffusion.models.architectures import with_seed
from diffusion.models.stored_weights import StoredWeights

_ADAPTER = "default"
_A, _B = f".lora_A.{_ADAPTER}.weight", f".lora_B.{_ADAPTER}.weight"
_BASE = ".base_layer."


def add_lora(unet: nn.Module, config: LoraConfig, seed: int) -> None:
    """Freeze a U-Net and add trainable matrices to the configured layers, in place.

    B starts at zero, so the output of the U-Net is unchanged at first.

    Args:
        unet: a UNet2DConditionModel.
        config: rank and targets.
        seed: seed of A.

    Raises:
        MachineError: peft is not installed.
        ConfigurationError: the U-Net has no layer of a target's name.
    """
    if find_spec("peft") is None:
        raise MachineError("model.lora needs the package peft: pip install -e '.[lora]'")
    assert isinstance(unet, UNet2DConditionModel)
    adapter = _peft_config(config)
    for target in config.targets:
        if not any(name == target or name.endswith(f".{target}") for name, _ in unet.named_modules()):
            raise ConfigurationError(
                f"model.lora.targets: no layer of the U-Net is called '{target}'. Give names such as to_q, proj_in or "
                "ff.net.2"
            )
    unet.requires_grad_(False)
    try:
        with_seed(seed, lambda: unet.add_adapter(adapter, adapter_name=_ADAPTER))
    except ValueError as error:
        raise ConfigurationError(f"model.lora.targets={config.targets}: {error}") from error


def _peft_config(config: LoraConfig) -> Any:
    from peft import LoraConfig as PeftConfig

    return PeftConfig(r=config.rank, lora_alpha=config.alpha, target_modules=list(config.targets))  # pyright: ignore


def has_lora(weights: StoredWeights) -> bool:
    """Whether a U-Net's weights include matrices of LoRA."""
    return any(name.endswith(_A) for name in weights.shapes)


def merged(weights: StoredWeights, config: LoraConfig | None) -> StoredWeights:
    """Weights of the equivalent U-Net without LoRA: W + alpha / rank * B A, computed when they are read."""
    assert config is not None, "weights with LoRA come with its configuration"
    stored = {name.replace(_BASE, "."): name for name in weights.shapes if not name.endswith((_A, _B))}
    scale = config.alpha / config.rank

    def read(names: Collection[str]) -> dict[str, Tensor]:
        layers = {name: name.removesuffix(".weight") for name in names}
        layers = {name: layer for name, layer in layers.items() if layer + _A in weights.shapes}
        found = weights.read([*(stored[name] for name in names), *(la + m for la in layers.values() for m in (_A, _B))])
        tensors = {name: found[stored[name]] for name in names}
        for name, layer in layers.items():
            weight = tensors[name]
            product = found[layer + _B].float().flatten(1) @ found[layer + _A].float().flatten(1)
            tensors[name] = (weight + scale * product.view_as(weight)).to(weight.dtype)
        return tensors

    shapes = {name: weights.shapes[original] for name, original in stored.items()}
    return StoredWeights(source=weights.source, shapes=shapes, read=read)


def write_lora(folder: Path, weights: StoredWeights, config: LoraConfig) -> None:
    """Write LoRA's matrices as a file for `pipeline.load_lora_weights`.

    Raises:
        OSError: the file cannot be written.
    """
    from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import StableDiffusionPipeline

    names = sorted(name for name in weights.shapes if name.endswith((_A, _B)))
    layers: dict[str, Any] = {
        name.replace(f".{_ADAPTER}.", "."): tensor.contiguous() for name, tensor in weights.read(names).items()
    }
    metadata = _peft_config(config).to_dict()
    StableDiffusionPipeline.save_lora_weights(folder, unet_lora_layers=layers, unet_lora_adapter_metadata=metadata)
