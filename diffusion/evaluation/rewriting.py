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


class Rewriter:
    """Rewrites prompts by a model of a server.

    Raises:
        ConfigurationError: key, model or address is wrong.
        UnavailableError: the server is not there.
    """

    def __init__(self, server: ServerConfig, model: str, instructions: str) -> None:
        raise_all(ConfigurationError, list(section_problems(server, "server")))
        self._server, self._instructions = server, instructions
        self._chat = Chat(server, model)
        self._chat.check()

    def __call__(self, prompts: Sequence[str]) -> list[str]:
        """Rewrite prompts, each different one once; one without an answer stays as it is, with a warning.

        Raises:
            ConfigurationError: key or model is wrong.
            UnavailableError: the server answers no more.
        """
        different = list(dict.fromkeys(prompts))
        self._chat.begin()
        with ThreadPoolExecutor(self._server.concurrency) as pool:
            try:
                found = dict(zip(different, pool.map(self._rewrite, different), strict=True))
            finally:
                self._chat.stop()
        if unchanged := [prompt for prompt, text in found.items() if not text]:
            logger.warning("%d of %d prompts stay as they are, since the model did not rewrite them: %s ...",
                           len(unchanged), len(different), unchanged[0])  # fmt: skip
        return [found[prompt] or prompt for prompt in prompts]

    def _rewrite(self, prompt: str) -> str | None:
        messages = [{"role": "system", "content": self._instructions}, {"role": "user", "content": prompt}]
        try:
            reply = self._chat.ask(messages, {"temperature": 0.0, "max_tokens": _MAX_TOKENS})
        except UnansweredError as error:
            if error.is_rejected:
                message = f"{self._server.url} rejects a prompt: {error}; correct model or prompt"
                raise ConfigurationError(message) from error
            return None
        return None if reply.finish_reason == "length" or is_refusal(reply) else " ".join(reply.text.split())
