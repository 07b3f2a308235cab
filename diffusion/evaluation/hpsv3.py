"""HPSv3 (Ma et al. 2025): human preference for an image of a prompt, by a Qwen2-VL backbone with a reward head.

The authors' file has the weights of both. Its instruction has a place for the prompt, and a reward token whose hidden
state the head maps to the mean and the uncertainty of the score; the mean is the score.
"""

import hashlib
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from diffusion.errors import ConfigurationError, error_context, first_line
from diffusion.evaluation.protocol import text_hash
from diffusion.models.model_folders import load_pretrained
from diffusion.models.pretrained import freeze, module_identity

WEIGHTS, INSTRUCTION = "HPSv3.safetensors", "instruction.txt"
"""Files of the folder, beside those of Qwen2-VL-7B-Instruct without its weights."""

PROMPT, REWARD_TOKEN = "{text_prompt}", "<|Reward|>"
"""Parts of the instruction."""

NUM_PIXELS = 256 * 28 * 28
"""Pixels of an image after resizing, before its sides are rounded to whole patches (the authors' configuration).

Most squares become 448 x 448, others a patch smaller or larger: 768 x 768 becomes 420 x 420.
"""


class RewardModel:
    """Scores of images for their prompts, by the model in a folder with `WEIGHTS` and `INSTRUCTION`.

    Raises:
        ConfigurationError: a file is missing, or has other content.
    """

    def __init__(self, folder: str, device: torch.device) -> None:
        from transformers import AutoConfig, AutoProcessor, Qwen2VLModel

        path = Path(folder).expanduser()
        remedy = (
            "Give a folder with config.json, tokenizer files, chat template and preprocessor_config.json of "
            f"Qwen2-VL-7B-Instruct, {WEIGHTS}, and {INSTRUCTION} (docs/evaluation.md)"
        )
        with error_context(f"protocol.networks.hpsv3={folder}"):
            self._processor: Any = load_pretrained(AutoProcessor, path, local_files_only=True, remedy=remedy)
            config: Any = load_pretrained(AutoConfig, path, local_files_only=True, remedy=remedy)
            try:
                self._instruction = (path / INSTRUCTION).read_text(encoding="utf-8")
                if PROMPT not in self._instruction or self._instruction.count(REWARD_TOKEN) != 1:
                    raise ValueError(f"{INSTRUCTION} needs {PROMPT}, and {REWARD_TOKEN} once.")
                self._processor.tokenizer.add_tokens([REWARD_TOKEN], special_tokens=True)
                weights = load_file(path / WEIGHTS)
                self._head = _head_layers(weights, device)
                heads = ("rm_head.", "lm_head.")
                backbone = {backbone_name(one): weights[one] for one in weights if not one.startswith(heads)}
                # The authors' table has a row for each token of the tokenizer; Qwen2-VL's own has some to spare.
                config.get_text_config().vocab_size = len(backbone["language_model.embed_tokens.weight"])
                dtype = backbone["language_model.embed_tokens.weight"].dtype
                loaded: Any = Qwen2VLModel.from_pretrained(
                    None, config=config, state_dict=backbone, dtype=dtype, output_loading_info=True
                )
                model, info = loaded
                if lacking := info["missing_keys"]:
                    raise ValueError(f"{WEIGHTS} lacks {len(lacking)} weights, {min(lacking)} among them.")
            except (OSError, ValueError, LookupError, RuntimeError, AttributeError, SafetensorError) as error:
                raise ConfigurationError(f"{first_line(error)} {remedy}") from error
        self._model: Any = freeze(model).to(device)
        self._token = self._processor.tokenizer.convert_tokens_to_ids(REWARD_TOKEN)
        head = hashlib.sha256(b"".join(part.cpu().numpy().tobytes() for layer in self._head for part in layer))
        self.identity = " ".join([module_identity(model), head.hexdigest()[:16], text_hash(self._instruction)])

    @torch.no_grad()
    def score(self, image: Image.Image, prompt: str) -> float:
        """Score of an image for its prompt, the first output of the head; higher is better."""
        # Images are scored one by one, so that a score depends neither on a batch nor on the number of ranks.
        text = self._instruction.replace(PROMPT, prompt)
        content = [{"type": "image"}, {"type": "text", "text": text}]
        chat = self._processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = self._processor(text=[chat], images=[self._resized(image)], do_resize=False, return_tensors="pt")
        inputs = inputs.to(self._model.device, self._model.dtype)
        states_BLD = self._model(**inputs, use_cache=False).last_hidden_state
        hidden = states_BLD[inputs["input_ids"] == self._token].float()  # [1, D]
        for weight, bias in self._head[:-1]:
            hidden = F.relu(F.linear(hidden, weight, bias))
        return float(F.linear(hidden, *self._head[-1])[0, 0])  # Of mean and uncertainty.

    def _resized(self, image: Image.Image) -> Image.Image:
        """Resize to `NUM_PIXELS` with Pillow's bicubic filter."""
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        factor = self._processor.image_processor.patch_size * self._processor.image_processor.merge_size
        height, width = smart_resize(image.height, image.width, factor, min_pixels=NUM_PIXELS, max_pixels=NUM_PIXELS)
        return image.resize((width, height), Image.Resampling.BICUBIC)


def backbone_name(name: str) -> str:
    """Name of a weight in transformers' `Qwen2VLModel`, from that in a checkpoint of version 4.52 or newer, or older.

    Newer ones have `model.visual.` and `model.language_model.`, older ones `visual.` and `model.`.
    """
    name = name.removeprefix("model.")
    return name if name.startswith(("visual.", "language_model.")) else f"language_model.{name}"


def _head_layers(weights: dict[str, Tensor], device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Weight and bias of the head's linear layers, in their order."""
    numbers = sorted(int(found[1]) for name in weights if (found := re.fullmatch(r"rm_head\.(\d+)\.weight", name)))
    if not numbers:
        raise ValueError(f"{WEIGHTS} has no rm_head.")
    names = [[f"rm_head.{number}.{part}" for part in ("weight", "bias")] for number in numbers]
    return [(weights[weight].float().to(device), weights[bias].float().to(device)) for weight, bias in names]
