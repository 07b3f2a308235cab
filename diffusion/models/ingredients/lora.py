"""LoRA (Hu et al. 2021): the network uses W + alpha / rank * B A, where W is frozen and the thin matrices are trained.

The layers are peft's, whose files diffusers loads. Checkpoints hold W, A and B under the names `X.base_layer.weight`,
`X.lora_A.default.weight` and `X.lora_B.default.weight`.
"""

from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diffusion.config.ingredients import LoraConfig
from diffusion.errors import ConfigurationError, MachineError
from diffusion.models.architectures import with_seed
from diffusion.models.ingredients.base import Ingredient
from diffusion.models.networks import component_name

_ADAPTER = "default"
_A, _B = f".lora_A.{_ADAPTER}.weight", f".lora_B.{_ADAPTER}.weight"
_BASE = ".base_layer."


def add_lora(network: nn.Module, config: LoraConfig, seed: int) -> None:
    """Freeze a network and add trainable matrices to the configured layers, in place.

    A is random from the seed. B starts at zero, so the output of the network is unchanged at first.

    Raises:
        MachineError: peft is not installed.
        ConfigurationError: the network has no layer of a target's name.
    """
    if find_spec("peft") is None:
        raise MachineError("model.lora needs the package peft: uv pip install -e '.[lora]'")
    adapter = _peft_config(config)
    for target in config.targets:
        if not any(name == target or name.endswith(f".{target}") for name, _ in network.named_modules()):
            is_transformer = component_name(network) == "transformer"
            names = "img_qkv_proj, txt_kv_proj or to_out.0" if is_transformer else "to_q, proj_in or ff.net.2"
            raise ConfigurationError(
                f"model.lora.targets: no layer of the network is called '{target}'. Give names such as {names}"
            )
    from peft import inject_adapter_in_model

    network.requires_grad_(False)
    try:
        with_seed(seed, lambda: inject_adapter_in_model(adapter, network, adapter_name=_ADAPTER))
    except ValueError as error:
        raise ConfigurationError(f"model.lora.targets={config.targets}: {error}") from error


def _peft_config(config: LoraConfig) -> Any:
    from peft import LoraConfig as PeftConfig

    return PeftConfig(r=config.rank, lora_alpha=config.alpha, target_modules=list(config.targets))  # pyright: ignore


def has_lora(weights: Mapping[str, Tensor]) -> bool:
    """Return whether weights include matrices of LoRA."""
    return any(name.endswith(_A) for name in weights)


def merged(weights: Mapping[str, Tensor], config: LoraConfig) -> dict[str, Tensor]:
    """Weights of the equivalent network without LoRA: W + alpha / rank * B A."""
    plain = {name.replace(_BASE, "."): tensor for name, tensor in weights.items() if not name.endswith((_A, _B))}
    for layer in [name.removesuffix(_A) for name in weights if name.endswith(_A)]:
        weight = plain[f"{layer}.weight"]
        product = weights[layer + _B].float().flatten(1) @ weights[layer + _A].float().flatten(1)
        plain[f"{layer}.weight"] = (weight + config.alpha / config.rank * product.view_as(weight)).to(weight.dtype)
    return plain


def kohya_layout(weights: Mapping[str, Tensor], config: LoraConfig, names: Mapping[str, str]) -> dict[str, Tensor]:
    """LoRA's matrices of a U-Net by the names of kohya's sd-scripts.

    Args:
        weights: weights of a U-Net with LoRA.
        config: rank and alpha.
        names: names in the original layout (`unet_names`) for SDXL; empty for other U-Nets.
    """
    found: dict[str, Tensor] = {}
    for layer in [name.removesuffix(_A) for name in weights if name.endswith(_A)]:
        name = names.get(f"{layer}.weight", f"{layer}.weight").removesuffix(".weight")
        name = "lora_unet_" + name.replace(".", "_")
        found[f"{name}.lora_down.weight"] = weights[layer + _A].contiguous()
        found[f"{name}.lora_up.weight"] = weights[layer + _B].contiguous()
        found[f"{name}.alpha"] = torch.tensor(config.alpha)
    return found


def write_lora(folder: Path, weights: Mapping[str, Tensor], config: LoraConfig) -> None:
    """Write LoRA's matrices as a file for `pipeline.load_lora_weights`.

    Raises:
        OSError: the file cannot be written.
    """
    from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import StableDiffusionPipeline

    layers: dict[str, Any] = {
        name.replace(f".{_ADAPTER}.", "."): weights[name].contiguous()
        for name in sorted(weights)
        if name.endswith((_A, _B))
    }
    metadata = _peft_config(config).to_dict()
    StableDiffusionPipeline.save_lora_weights(folder, unet_lora_layers=layers, unet_lora_adapter_metadata=metadata)


class LoraIngredient(Ingredient):
    """Trains LoRA's matrices in place of all weights."""

    key = "lora"
    freezes_weights = True

    def __init__(self, config: LoraConfig) -> None:
        self._config = config

    def adapt(self, network: nn.Module, parts: Sequence[nn.Module], missing: Collection[str], seed: int) -> None:
        """Freeze all weights, and add the matrices.

        Raises:
            MachineError: peft is not installed.
            ConfigurationError: the network has no layer of a target's name, or a part would stay at random weights.
        """
        for key in missing:
            raise ConfigurationError(
                f"init_from.checkpoint has no weights for model.{key}, and with model.lora it is not trained. Remove "
                f"model.{key}, or train all weights first (model.lora=null)"
            )
        for part in parts:
            part.requires_grad_(False)
        add_lora(network, self._config, seed)

    def merged(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Merge the matrices, if there are any."""
        return merged(weights, self._config) if has_lora(weights) else weights
