"""Captioner: an image-to-text model of transformers (Qwen-VL, BLIP ...) from a local folder.

captioner:
  path: diffusion.preparation.captioners.ImageToText
  arguments:
    folder: /models/Qwen3-VL-4B-Instruct
    prompt: [Describe this image in one sentence., Describe this image in detail.]
    max_new_tokens: 200
    precision: bf16
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from diffusion.errors import ConfigurationError
from diffusion.preparation.plugins import load_model


class ImageToText:
    """Captions by greedy decoding or beam search: the same image gets the same captions."""

    def __init__(
        self,
        folder: str,
        prompt: str | Sequence[str] | None = None,
        max_new_tokens: int = 40,
        num_beams: int = 1,
        device: str | None = None,
        precision: str = "fp32",
    ) -> None:
        """Load the model.

        Args:
            folder: model, image processor and tokenizer as `save_pretrained` writes them, with safetensors.
            prompt: instruction for a model with a chat template; for others beginning of the caption, such as `a
                photograph of`, and part of it. Each of several prompts gives a caption.
            max_new_tokens: longest caption, in tokens, without the prompt.
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
        self._prompts = [prompt] if prompt is None or isinstance(prompt, str) else list(prompt)
        self._chats = bool(getattr(self._processor, "chat_template", None))
        if self._chats:
            self._processor.tokenizer.padding_side = "left"  # An answer continues the last token.
        self._options = {"max_new_tokens": max_new_tokens, "num_beams": num_beams, "do_sample": False}

    @torch.inference_mode()
    def __call__(self, images: Sequence[Image.Image], captions: Sequence[list[str]]) -> list[list[str]]:
        """Return the captions of each image, one by each prompt; those of the source are ignored."""
        by_prompt = [self._caption(images, prompt) for prompt in self._prompts]
        return [list(texts) for texts in zip(*by_prompt, strict=True)]

    def _caption(self, images: Sequence[Image.Image], prompt: str | None) -> list[str]:
        if self._chats:
            text = {"type": "text", "text": prompt or "Describe this image."}
            inputs = self._processor.apply_chat_template(
                [[{"role": "user", "content": [{"type": "image", "image": image}, text]}] for image in images],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
                processor_kwargs={"padding": True},
            )
        else:
            texts = {} if prompt is None else {"text": [prompt] * len(images)}
            inputs = self._processor(images=list(images), return_tensors="pt", **texts)
        inputs = inputs.to(self._model.device)
        inputs["pixel_values"] = inputs["pixel_values"].to(self._model.dtype)
        tokens = self._model.generate(**inputs, **self._options)
        if self._chats:
            tokens = tokens[:, inputs["input_ids"].shape[1] :]
        return [text.strip() for text in self._processor.batch_decode(tokens, skip_special_tokens=True)]
