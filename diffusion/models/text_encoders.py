"""Language models as text encoders, from a local folder in the layout of transformers.

Shape letters: B batch, L tokens, D width of the text encoding.
"""

from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING, MODEL_MAPPING

from diffusion.errors import ConfigurationError, error_context
from diffusion.models.model_folders import load_pretrained
from diffusion.models.precision import without_float16


class LanguageModel(nn.Module):
    """A language model's last hidden states, zeros at the padding.

    A U-Net attends to the zeros; a transformer is given the mask, too.

    Args:
        text_encoder: the encoder of T5 or T5Gemma, or a decoder without its head, such as Qwen3's.
        pad_token_id: id of the padding.
    """

    def __init__(self, text_encoder: Any, pad_token_id: int) -> None:
        super().__init__()
        self.text_encoder, self.pad_token_id = text_encoder, pad_token_id

    @property
    def width(self) -> int:
        """D."""
        return hidden_width(self.text_encoder.config)

    def mask(self, token_ids: Tensor) -> Tensor:
        """Mask [B, L] of tokens that are no padding; the first always counts: the empty caption may have no token."""
        mask = token_ids != self.pad_token_id
        mask[:, 0] = True
        return mask

    def forward(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Encode captions int64 [B, L].

        Returns:
            Hidden states [B, L, D], and zeros [B, 1]: there is no vector for the whole caption, and MDS stores no empty
            array.
        """
        mask = self.mask(token_ids)
        with without_float16(self):  # Released ones were trained in bfloat16.
            hidden = self.text_encoder(input_ids=token_ids, attention_mask=mask).last_hidden_state
        return hidden * mask[..., None], hidden.new_zeros(len(hidden), 1)


def read_language_model(folder: str) -> tuple[type[Any], Any]:
    """Class and configuration of the language model in a folder; of an encoder-decoder, those of its encoder.

    No code of the folder is run.

    Raises:
        ConfigurationError: there is none that transformers knows, or the folder is `???`.
    """
    remedy = (
        "Give the folder of a language model that transformers knows: config.json, model.safetensors, tokenizer.json"
    )
    with error_context(f"model.text_encoder.path={folder}"):
        config: Any = load_pretrained(AutoConfig, folder, local_files_only=True, remedy=remedy)
        kind = MODEL_FOR_TEXT_ENCODING_MAPPING.get(type(config), None) or MODEL_MAPPING.get(type(config), None)
        if kind is None:
            raise ConfigurationError(f"{config.model_type} is no language model. {remedy}")
        if not isinstance(getattr(getattr(config, "encoder", config), "hidden_size", None), int):
            raise ConfigurationError(f"{config.model_type} is more than a language model. Give that of its text alone")
    config.is_encoder_decoder = False  # T5Gemma's encoder asks for it.
    config.use_cache = False  # A decoder's layers would keep keys and values for tokens to come.
    return kind, config  # pyright: ignore[reportReturnType]


def hidden_width(config: Any) -> int:
    """Width of a language model's hidden states."""
    return getattr(config, "encoder", config).hidden_size


def load_language_tokenizer(folder: str, max_tokens: int) -> Any:
    """Load the tokenizer in the folder of a language model; it pads at the end.

    Raises:
        ConfigurationError: there is none.
    """
    options: dict[str, Any] = {"padding_side": "right", "model_max_length": max_tokens}
    remedy = "There is no tokenizer that transformers loads: add tokenizer.json"
    with error_context(f"model.text_encoder.path={folder}"):
        tokenizer: Any = load_pretrained(AutoTokenizer, folder, local_files_only=True, remedy=remedy, **options)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ConfigurationError(f"a {type(tokenizer).__name__} was loaded. {remedy}")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
