"""Prompts as arguments of diffusers' pipelines, where their own encoding is not that of the training.

A pipeline encodes one chunk of CLIP's length, and knows no adapter over several chunks or behind a language model. An
export with either holds the folder `text_adapter/` beside `text_encoder/` and `tokenizer/`.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from transformers import CLIPTextModel, CLIPTokenizer

from diffusion.config.ingredients import TextAdapterConfig
from diffusion.config.model import ModelConfig
from diffusion.datasets.transforms import Placement
from diffusion.errors import ConfigurationError
from diffusion.files import read_json, write_json
from diffusion.models.conditioning import Conditioner
from diffusion.models.ingredients.text_adapter import FOLDER, WEIGHTS, TextAdapterIngredient, build_text_adapter
from diffusion.models.model_folders import load_pretrained
from diffusion.models.pretrained import load_language_model, read_safetensors
from diffusion.models.sampling import expand_prompts
from diffusion.models.text_encoders import load_language_tokenizer
from diffusion.models.tokenizers import tokenize

CONFIG = "config.json"


def has_own_encoding(config: ModelConfig) -> bool:
    """Return whether a pipeline's own encoding of prompts is not that of the model."""
    return config.text_encoder.chunks > 1 or config.text_encoder.path is not None


def write_prompt_encoder(folder: Path, config: ModelConfig) -> None:
    """Write `text_adapter/` of an exported model, but for the weights of an adapter.

    Args:
        folder: the export.
        config: section `model` of the configuration.
    """
    text, options = config.text_encoder, config.text_adapter
    settings = {
        "is_language_model": text.path is not None,
        "chunks": text.chunks,
        "max_tokens": text.max_tokens,
        "is_masked": config.architecture.is_transformer,
        "adapter": None if options is None else asdict(options),
    }
    (folder / FOLDER).mkdir()
    write_json(folder / FOLDER / CONFIG, settings)


def read_text_adapter(folder: Path) -> dict[str, Tensor]:
    """Read the adapter in `text_adapter/` of an export by its names in the model; empty if there is none.

    Raises:
        DataError: the file is damaged.
    """
    path = folder / FOLDER / WEIGHTS
    weights = read_safetensors(path) if path.is_file() else {}
    return {f"{TextAdapterIngredient.part}.{name}": value for name, value in weights.items()}


class PromptEncoder:
    """Encodes prompts for the pipeline of an exported model."""

    def __init__(self, folder: str | Path) -> None:
        """Load the text encoder, tokenizer and adapter of an export, on the CPU and in float32; see `to`.

        Raises:
            ConfigurationError: a part is missing.
            DataError: a file is damaged.
        """
        path = Path(folder).expanduser()
        if not (path / FOLDER).is_dir():
            raise ConfigurationError(f"{folder} holds no {FOLDER}/: give an export of a model that needs it")
        settings = read_json(path / FOLDER / CONFIG)
        self._num_chunks, self._is_masked = settings["chunks"], settings["is_masked"]
        if settings["is_language_model"]:
            self._tokenizer = load_language_tokenizer(str(path / "tokenizer"), settings["max_tokens"])
            encoder = load_language_model(str(path / "text_encoder"), self._tokenizer.pad_token_id)
        else:
            self._tokenizer = load_pretrained(CLIPTokenizer, str(path), "tokenizer", local_files_only=True)
            encoder = load_pretrained(CLIPTextModel, str(path), "text_encoder", local_files_only=True)
        self._adapter = None
        if settings["adapter"] is not None:
            self._adapter = build_text_adapter(TextAdapterConfig(**settings["adapter"]), encoder)
            self._adapter.load_state_dict(read_safetensors(path / FOLDER / WEIGHTS))
        self._text_encoder, self._device, self._dtype = encoder.eval(), torch.device("cpu"), torch.float32
        self._conditioner = Conditioner(
            self._text_encoder,
            self._tokenize([""])[0],
            num_chunks=self._num_chunks,
            is_extended=False,
            is_masked=self._is_masked,
            is_adapted=self._adapter is not None and not settings["is_language_model"],
        )

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "PromptEncoder":
        """Encode on the device of a pipeline from now on, in float32, into embeddings of its dtype."""
        self._device, self._dtype = torch.device(device), dtype
        self._text_encoder.to(self._device)  # pyright: ignore[reportArgumentType]
        if self._adapter is not None:
            self._adapter.to(self._device)
        return self

    def _tokenize(self, prompts: Sequence[str]) -> Tensor:
        return torch.from_numpy(tokenize(self._tokenizer, prompts, self._num_chunks)).long()

    @torch.no_grad()
    def _encode(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        ids = self._tokenize(prompts).to(self._device)
        conditioning = self._conditioner.encode_prompts(ids, Placement(0, 0, 0, 0, 0, 0))
        text = conditioning.text
        embeds = text if self._adapter is None else self._adapter(text, conditioning.mask)
        arguments = {"embeds": embeds.to(self._dtype)}
        if self._is_masked:
            assert conditioning.mask is not None
            arguments["attention_mask"] = conditioning.mask
        return arguments

    def __call__(
        self, prompts: str | Sequence[str], negative_prompts: str | Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Encode prompts.

        Args:
            prompts: one, or P of them.
            negative_prompts: one for all or one per prompt; None is the empty caption, as in training.

        Returns:
            Keyword arguments of the pipeline.
        """
        texts, negatives = expand_prompts(prompts, negative_prompts, 1)
        positive = {f"prompt_{name}": value for name, value in self._encode(texts).items()}
        return positive | {f"negative_prompt_{name}": value for name, value in self._encode(negatives).items()}
