"""Captioner: an image-to-text model of transformers (BLIP, GIT, BLIP-2 ...) from a local folder.

captioner:
  path: diffusion.preparation.captioners.ImageToText
  arguments: {folder: /models/blip-image-captioning-large}
  mode: missing
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from diffusion.errors import ConfigurationError, error_context
from diffusion.preparation.plugins import check_model_folder, choose_device, choose_dtype, load_part


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
        dtype = choose_dtype(precision)
        self._device = choose_device(device)
        # transformers 5 writes one file for the whole processor.
        whole = "processor_config.json"
        processor = whole if Path(folder, whole).is_file() else "preprocessor_config.json"
        path = check_model_folder(folder, "folder", "an image-to-text model", processor)
        with error_context("folder"):
            self._processor: Any = load_part(AutoProcessor, path)
            model: Any = load_part(AutoModelForImageTextToText, path, dtype=dtype)
        self._model = model.eval().to(self._device)
        self._dtype = dtype
        self._prompt = prompt
        self._options = {"max_new_tokens": max_new_tokens, "num_beams": num_beams, "do_sample": False}

    @torch.inference_mode()
    def __call__(self, images: Sequence[Image.Image], captions: Sequence[list[str]]) -> list[str]:
        """Return a caption for each image; those of the source are ignored."""
        texts = {} if self._prompt is None else {"text": [self._prompt] * len(images)}
        inputs = self._processor(images=list(images), return_tensors="pt", **texts).to(self._device)
        inputs["pixel_values"] = inputs["pixel_values"].to(self._dtype)
        tokens = self._model.generate(**inputs, **self._options)
        return [text.strip() for text in self._processor.batch_decode(tokens, skip_special_tokens=True)]
