"""Prompts made longer by a language model behind a server: a model that was trained on long captions draws short
prompts worse.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from diffusion.chat import Chat, ServerConfig, UnansweredError, is_refusal
from diffusion.config.fields import section_problems
from diffusion.errors import ConfigurationError, raise_all

logger = logging.getLogger(__name__)

INSTRUCTIONS = (
    "You write prompts for a text-to-image model. Rewrite the user's prompt as one paragraph of about 80 words that "
    "describes the image: each object that the prompt names, with its number, colour and position as they are there, "
    "then background, style and light. Add no further objects. Answer with the paragraph alone."
)

_MAX_TOKENS = 512


def rewrite_prompts(prompts: Sequence[str], server: ServerConfig, model: str, instructions: str) -> list[str]:
    """Rewrite prompts, each different one once; one without an answer stays as it is, with a warning.

    Raises:
        ConfigurationError: key, model or address is wrong.
        UnavailableError: the server is not there, or answers no more.
    """
    raise_all(ConfigurationError, list(section_problems(server, "server")))
    chat = Chat(server, model)
    chat.check()

    def rewrite(prompt: str) -> str | None:
        messages = [{"role": "system", "content": instructions}, {"role": "user", "content": prompt}]
        try:
            reply = chat.ask(messages, {"temperature": 0.0, "max_tokens": _MAX_TOKENS})
        except UnansweredError as error:
            if error.is_rejected:
                raise ConfigurationError(f"{server.url} rejects a prompt: {error}; correct model or prompt") from error
            return None
        return None if reply.finish_reason == "length" or is_refusal(reply) else " ".join(reply.text.split())

    different = list(dict.fromkeys(prompts))
    with ThreadPoolExecutor(server.concurrency) as pool:
        try:
            found = dict(zip(different, pool.map(rewrite, different), strict=True))
        finally:
            chat.stop()
    if unchanged := [prompt for prompt, text in found.items() if not text]:
        logger.warning("%d of %d prompts stay as they are, since the model did not rewrite them: %s ...",
                       len(unchanged), len(different), unchanged[0])  # fmt: skip
    return [found[prompt] or prompt for prompt in prompts]
