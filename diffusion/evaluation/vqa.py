"""Questions about images to a vision-language model (VQA): the probability of an answer.

Shape letters: Q questions, A answers, V tokens of the vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

from diffusion.errors import ConfigurationError, error_context
from diffusion.models.model_folders import load_pretrained
from diffusion.models.pretrained import freeze, module_identity

ASKED = "{question} Answer in one word."
"""Text of a question (GenEval 2's)."""

NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


class VisionLanguageModel:
    """A chat model of transformers that sees images, such as Qwen3-VL, from a folder with a chat template.

    Raises:
        ConfigurationError: the folder has no such model.
    """

    def __init__(self, folder: str, device: torch.device) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        options: dict[str, Any] = {
            "local_files_only": True,
            "remedy": "Give a folder with config.json, safetensors, tokenizer files, preprocessor_config.json and a "
            "chat template of a vision-language model such as Qwen3-VL",
        }
        with error_context(f"protocol.networks.vqa={folder}"):
            self._processor: Any = load_pretrained(AutoProcessor, folder, **options)
            model: Any = load_pretrained(AutoModelForImageTextToText, folder, dtype="auto", **options)
        self._model: Any = freeze(model).to(device)
        self._processor.tokenizer.padding_side = "left"  # The answer follows the last token of each question.
        self.identity = f"{model.config.model_type} {module_identity(model)}"

    @torch.no_grad()
    def probabilities(self, image: Image.Image, questions: Sequence[str], answers: Sequence[str]) -> list[list[float]]:
        """Probability of each answer (a word) to each question: the reply's first token begins one of its forms."""
        chats = [
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "image": image},
                        {"type": "text", "text": ASKED.format(question=question)},
                    ],
                }
            ]
            for question in questions
        ]
        inputs = self._processor.apply_chat_template(
            chats,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True},
        )
        outputs = self._model.generate(
            **inputs.to(self._model.device, self._model.dtype),
            max_new_tokens=1,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens_QV = outputs.logits[0].double().softmax(dim=-1)
        return torch.stack([tokens_QV[:, self._tokens(answer)].sum(dim=1) for answer in answers], dim=1).tolist()

    def _tokens(self, answer: str) -> list[int]:
        """First tokens of the forms of an answer, without a lone space; of digits only if they are one token."""
        tokenizer = self._processor.tokenizer
        ids = {form: tokenizer.encode(form, add_special_tokens=False) for form in forms(answer)}
        first = {tokens[0] for form, tokens in ids.items() if len(tokens) == 1 or not form.strip().isdigit()}
        if not (found := sorted(token for token in first if tokenizer.decode([token]).strip())):
            raise ConfigurationError(f"answer {answer!r} has several tokens; write the number as a word")
        return found


def forms(answer: str) -> list[str]:
    """Forms of an answer that count as the same: lower case and capitalised, a number in digits, after a space."""
    word = answer.lower()
    words = [word, word.capitalize()]
    if word in NUMBER_WORDS:
        words.append(str(NUMBER_WORDS.index(word)))
    return [*words, *(f" {one}" for one in words)]
