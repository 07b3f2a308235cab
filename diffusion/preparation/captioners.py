"""Captioner: an image-to-text model of transformers (BLIP, GIT, BLIP-2 ...) from a local folder.

captioner:
  path: diffusion.preparation.captioners.ImageToText
  arguments: {folder: /models/blip-image-captioning-large}
  mode: missing
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from diffusion.errors import ConfigurationError
from diffusion.preparation.plugins import load_model


class ImageToText:
    """Captions by greedy decoding or beam search: the same image gets the same caption."""

    def __init__(
        self,
        folder: str,
        prompt: str | None = None,
        max_new_tokens: int = 40,
        num_beams: int = 1,
        device: str | None = None,
        precision: str = "fp32",
    ) -> None:
        """Load the model.

        Args:
            folder: model, image processor and tokenizer as `save_pretrained` writes them, with safetensors.
            prompt: beginning of each caption, such as `a photograph of`; it is part of the caption.
            max_new_tokens: longest continuation, in tokens.
            num_beams: beams; 1 is greedy decoding.
            device: `cpu`, `cuda`, `cuda:1`; None is the GPU of the worker, else the CPU.
            precision: of the weights: `fp32`, `bf16` or `fp16`.

        Raises:
            DataError: a file is missing in the folder.
            ConfigurationError: a number or a name is wrong.
            MachineError: there is no such device.
        """
        if max_new_tokens < 1 or num_beams < 1:
            raise ConfigurationError(
                f"max_new_tokens is {max_new_tokens} and num_beams is {num_beams}; both must be 1 or more"
            )
        # transformers 5 writes one file for the whole processor.
        whole = "processor_config.json"
        processor = whole if Path(folder, whole).is_file() else "preprocessor_config.json"
        self._processor, self._model = load_model(
            folder,
            "folder",
            "an image-to-text model",
            (AutoProcessor, AutoModelForImageTextToText),
            device=device,
            precision=precision,
            processor_file=processor,
        )
        self._prompt = prompt
        self._options = {"max_new_tokens": max_new_tokens, "num_beams": num_beams, "do_sample": False}

    @torch.inference_mode()
    def __call__(self, images: Sequence[Image.Image], captions: Sequence[list[str]]) -> list[str]:
        """Return a caption for each image; those of the source are ignored."""
        texts = {} if self._prompt is None else {"text": [self._prompt] * len(images)}
        inputs = self._processor(images=list(images), return_tensors="pt", **texts).to(self._model.device)
        inputs["pixel_values"] = inputs["pixel_values"].to(self._model.dtype)
        tokens = self._model.generate(**inputs, **self._options)
        return [text.strip() for text in self._processor.batch_decode(tokens, skip_special_tokens=True)]
