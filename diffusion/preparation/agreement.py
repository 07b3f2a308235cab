"""Scorer: agreement of captions with their image, by CLIP (CLIPScore, Hessel et al. 2021).

scorers:
  - path: diffusion.preparation.agreement.ClipScore
    column: clip_score
    arguments: {clip: /models/clip-vit-large-patch14}
filters: {conditions: [{column: clip_score, min: 20}]}
"""

from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize
from transformers import CLIPModel, CLIPProcessor

from diffusion.preparation.plugins import load_model

DIGITS = 2
"""Decimals of a score: more would show how a batch was cut, by the rounding of its sums."""


class ClipScore:
    """100 x cosine of an image and the caption that agrees with it least, or 0 where that is negative.

    CLIP reads 77 tokens: of a longer caption, the beginning.
    """

    def __init__(self, clip: str, device: str | None = None, precision: str = "fp32") -> None:
        """Load CLIP.

        Args:
            clip: CLIP as `save_pretrained` writes it, with safetensors.
            device: `cpu`, `cuda`, `cuda:1`; None is the GPU of the worker, else the CPU.
            precision: of the weights: `fp32`, `bf16` or `fp16`.

        Raises:
            DataError: a file is missing.
            ConfigurationError: there is no such precision.
            MachineError: there is no such device.
        """
        classes = CLIPProcessor, CLIPModel
        self._processor, self._clip = load_model(clip, "clip", "CLIP", classes, device=device, precision=precision)

    @torch.inference_mode()
    def __call__(self, images: Sequence[Image.Image], captions: Sequence[list[str]]) -> list[float | None]:
        """Return the score of each image; None for one without captions."""
        texts = [text for some in captions for text in some]
        if not texts:
            return [None] * len(images)
        inputs = self._processor(
            text=texts, images=list(images), return_tensors="pt", padding=True, truncation=True
        ).to(self._clip.device)  # fmt: skip
        inputs["pixel_values"] = inputs["pixel_values"].to(self._clip.dtype)
        outputs = self._clip(**inputs)
        of_images, of_texts = (normalize(one.float(), dim=-1) for one in (outputs.image_embeds, outputs.text_embeds))
        scores: list[float | None] = []
        for image, some in zip(of_images, of_texts.split([len(some) for some in captions]), strict=True):
            cosines: Tensor = some @ image
            scores.append(round(100 * max(float(cosines.min()), 0.0), DIGITS) if len(some) else None)
        return scores
