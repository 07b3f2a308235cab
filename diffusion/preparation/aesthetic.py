"""Scorer: an aesthetic predictor on CLIP's image embeddings, as LAION's (Schuhmann et al. 2022, LAION-5B).

    scorers:
      - path: diffusion.preparation.aesthetic.AestheticScore
        column: aesthetic
        arguments: {clip: /models/clip-vit-large-patch14, head: /models/aesthetic.safetensors}

The head is one linear layer (`weight` [1, D], `bias` [1]) or a chain of them (`layers.0.weight`, `layers.2.weight` ...,
applied in the order of the numbers with nothing between), in a safetensors file. A `.pth` file of such tensors becomes
one with

    safetensors.torch.save_file(torch.load("head.pth", weights_only=True), "head.safetensors")
"""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import CLIPImageProcessor, CLIPVisionModelWithProjection

from diffusion.errors import DataError
from diffusion.preparation.plugins import load_model

DIGITS = 3
"""Decimals of a score: more would show how a batch was cut, by the rounding of its sums."""

_LAYER = re.compile(r"(?:.*?(\d+)\.)?(weight|bias)")


class AestheticScore:
    """Score of each image, for LAION's heads between about 1 and 10; the published recipe keeps 4.5 and more."""

    def __init__(self, clip: str, head: str, device: str | None = None, precision: str = "fp32") -> None:
        """Load CLIP and the head.

        Args:
            clip: CLIP as `save_pretrained` writes it (the whole model or its vision part), with safetensors.
            head: safetensors file of the head.
            device: `cpu`, `cuda`, `cuda:1`; None is the GPU of the worker, else the CPU.
            precision: of CLIP's weights: `fp32`, `bf16` or `fp16`; the head is fp32.

        Raises:
            DataError: a file is missing or damaged, or the head does not fit CLIP's embeddings.
            ConfigurationError: there is no such precision.
            MachineError: there is no such device.
        """
        classes = CLIPImageProcessor, CLIPVisionModelWithProjection
        self._processor, self._clip = load_model(clip, "clip", "CLIP", classes, device=device, precision=precision)
        self._head = load_head(Path(head), self._clip.config.projection_dim).to(self._clip.device)

    @torch.inference_mode()
    def __call__(self, images: Sequence[Image.Image], captions: Sequence[list[str]]) -> list[float]:
        """Return the score of each image; captions are ignored."""
        pixels = self._processor(list(images), return_tensors="pt")["pixel_values"]
        embeddings = self._clip(pixels.to(self._clip.device, self._clip.dtype)).image_embeds.float()
        scores = self._head(nn.functional.normalize(embeddings, dim=-1)).squeeze(-1)
        return [round(score, DIGITS) for score in scores.double().tolist()]


def load_head(path: Path, num_features: int) -> nn.Sequential:
    """Load a linear head, [B, features] to [B, 1], from a safetensors file; no code is run.

    Raises:
        DataError: there is no such file, it is damaged, or its layers do not fit.
    """
    if path.suffix != ".safetensors" or not path.is_file():
        raise DataError(
            f"head: {path} is not a safetensors file; put a linear head there, with the tensors weight "
            f"[1, {num_features}] and bias [1] (nothing is downloaded)"
        )
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise DataError(f"head: {path} is damaged ({error}); copy it again") from error
    layers: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _LAYER.fullmatch(name)
        if match is None:
            raise DataError(f"head: {path}: tensor {name} is no weight and no bias of a linear layer")
        layers.setdefault(int(match[1] or 0), {})[match[2]] = tensor.float()
    modules: list[nn.Linear] = []
    width = num_features
    for number, layer in sorted(layers.items()):
        try:
            linear = nn.Linear(width, len(layer["weight"]), bias="bias" in layer)
            linear.load_state_dict(layer)
        except (KeyError, TypeError, RuntimeError) as error:
            shapes = {name: list(tensor.shape) for name, tensor in layer.items()}
            raise DataError(
                f"head: {path}: layer {number} is {shapes}, but {width} features come in; is it for this CLIP?"
            ) from error
        modules.append(linear)
        width = linear.out_features
    if not modules or width != 1:
        raise DataError(f"head: {path} gives {width} numbers for an image, not one score")
    return nn.Sequential(*modules).requires_grad_(False)
