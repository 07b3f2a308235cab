"""Client of a server that speaks the chat-completions protocol: vLLM, SGLang, llama.cpp, or a service.

A failure is of the server or of one request. The server's end the command once it has answered nothing for
`patience_seconds`; meanwhile requests are repeated. A request's (`UnansweredError`) are for the caller.
"""

import email.utils
import json
import os
import random
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from omegaconf import MISSING

from diffusion.config.fields import MAX_SECONDS, bounded
from diffusion.config.secrets import is_secret_name, is_variable, redact
from diffusion.errors import ConfigurationError, UnavailableError, printable, similar_names

_CONNECT_SECONDS = 5.0

_MIN_PAUSE, _MAX_PAUSE = 0.5, 30.0
"""Seconds between attempts, which double, where the server does not say for how long it is busy."""

_MAX_BYTES = 2**22
"""Longest answer."""

_MAX_TOKENS = 2**32
"""Most tokens of an answer that are counted: sums of them stay far below 2^63."""

_REFUSED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_BUSY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
_TRANSIENT = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_EARLY)
_ABSENT = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)


_REFUSAL = re.compile(
    r"""(?i)^[^\w"'\u201c\u2018]*(sorry,? (but )?)?("""
    r"(i'?m|i am|we are|we're) ((very |so )?sorry|unable to|not able to|afraid)\b"
    r"|(i|we) (can'?t|can ?not|won'?t|will not|must decline)\b|as an ai\b"
    r"|unable to (assist|help|comply|process|provide|describe|identify)\b)"
)
"""Beginnings of answers that decline."""


@dataclass(kw_only=True)
class ServerConfig:
    """A server that speaks the chat-completions protocol, and how it is used. It does not determine the data."""

    url: str = MISSING
    """Address up to `/v1`, such as `http://localhost:8000/v1`."""

    key_variable: str | None = None
    """Environment variable with the key of the server, such as `OPENAI_API_KEY`; null: no key is sent."""

    concurrency: int = bounded(32, min=1)
    """Requests at the same time, of each worker."""

    timeout_seconds: float = bounded(120.0, above=0, max=MAX_SECONDS)
    """Time for an answer, after which the request is repeated."""

    attempts: int = bounded(5, min=1)
    """Attempts for an image that gets no answer, or none that can be used, while the server answers others. Waiting
    for a server that is busy is no attempt."""

    patience_seconds: float = bounded(300.0, above=0, max=MAX_SECONDS)
    """Time without any answer after which the command ends; started again, it continues."""

    dollars_per_million_prompt_tokens: float | None = bounded(None, min=0)
    """Price of what is read, for the cost per 1,000 images; null: unknown."""

    dollars_per_million_completion_tokens: float | None = bounded(None, min=0)
    """Price of what is written; null: unknown."""

    def problems(self, key: str) -> Iterator[str]:
        """Describe wrong addresses and names."""
        if self.url != MISSING and not re.fullmatch(r"https?://[^@?#\s]+", self.url):
            yield (
                f"{key}.url is '{redact(self.url)}'; give http://HOST:PORT/v1 without user, password and query (the "
                f"key is read from the environment variable {key}.key_variable)."
            )
        name = self.key_variable
        if name is not None and not (is_variable(name) and is_secret_name(name)):
            yield (  # Without the value, which may be the key itself.
                f"{key}.key_variable is no name of an environment variable that ends as names of secrets do; name one "
                "such as MY_API_KEY: values of variables whose names end so are kept out of logs."
            )
        if self.patience_seconds < self.timeout_seconds:
            yield (
                f"{key}.patience_seconds is {self.patience_seconds:g}, less than {key}.timeout_seconds, so that the "
                "first late answer would end the command. Set several times as much."
            )

    def dollars(self, prompt_tokens: int, completion_tokens: int) -> float | None:
        """Return the price of tokens; None if it is unknown."""
        prices = self.dollars_per_million_prompt_tokens, self.dollars_per_million_completion_tokens
        if prices == (None, None):
            return None
        return (prompt_tokens * (prices[0] or 0) + completion_tokens * (prices[1] or 0)) / 1e6


class UnansweredError(Exception):
    """The server does not answer a request, though it may answer others."""

    def __init__(self, message: str, *, failures: int, is_rejected: bool) -> None:
        super().__init__(message)
        self.failures = failures
        self.is_rejected = is_rejected
        """True if the server said that the request is wrong."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """An answer of the model."""

    text: str
    finish_reason: str
    """`stop`, `length` (cut at `max_tokens`), `content_filter` ..., or `refusal`."""
    prompt_tokens: int
    completion_tokens: int
    failures: int
    """Attempts before it."""


class _TemporaryError(Exception):
    """An attempt failed, and another one may succeed."""

    def __init__(self, message: str, *, pause: float | None = None, is_busy: bool = False) -> None:
        super().__init__(message)
        self.pause = pause
        self.is_busy = is_busy


class Chat:
    """Asks a model of a server; may be used by several threads."""

    def __init__(self, config: ServerConfig, model: str) -> None:
        self._config, self._model, self._url = config, model, config.url.rstrip("/")
        self._key = None if config.key_variable is None else os.environ.get(config.key_variable, "").strip()
        if config.key_variable is not None and not self._key:
            raise ConfigurationError(
                f"the environment variable {config.key_variable}, the key of {self._url}, is not set"
            )
        if self._key and not (self._key.isascii() and self._key.isprintable()):
            raise ConfigurationError(
                f"the environment variable {config.key_variable} holds characters that no key has, such as line breaks"
            )
        self._sessions = threading.local()
        self._stopped = threading.Event()
        self._open_from = time.monotonic()
        self.begin()

    def check(self) -> None:
        """Check that the server is there, takes the key, and has the model.

        Raises:
            UnavailableError: nothing answers.
            ConfigurationError: it refuses the key, or serves other models.
        """
        try:
            listed = self._request("GET", "/models", None, 2 * _CONNECT_SECONDS)
            names = [str(one["id"]) for one in listed["data"] if isinstance(one, dict) and "id" in one]
        except _TemporaryError as error:
            raise UnavailableError(
                f"no chat server answers at {self._url} ({error}); start it, or correct the URL"
            ) from error
        except (UnansweredError, _AbsentError, LookupError, TypeError):
            return  # A gateway that does not list its models.
        if names and self._model not in names:
            shown = similar_names(self._model, names) or names[:8]
            raise ConfigurationError(f"{self._url} has no model {self._model}; it has {shown_answer(', '.join(shown))}")

    def ask(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Reply:
        """Ask for a completion, with further keys of the request; those that are None are left out.

        Raises:
            UnansweredError: the server rejects this request, or all attempts failed.
            ConfigurationError: the key or the model is wrong.
            UnavailableError: the server has answered nothing for `patience_seconds`, or the client was stopped.
        """
        body = {"model": self._model, "messages": list(messages), **options}
        body = {name: value for name, value in body.items() if value is not None}
        failures = waits = 0
        while True:
            self._sleep(0.0)
            while (pause := self._open_from - time.monotonic()) > 0:
                self._sleep(pause + random.random() * min(pause, 1.0))  # Not all at once.
            try:
                answer = self._request("POST", "/chat/completions", body, self._config.timeout_seconds)
                reply = _reply(answer, failures)
            except _TemporaryError as error:
                failures, waits = failures + (not error.is_busy), waits + 1
                self._check_patience(error)
                if failures >= self._config.attempts:
                    raise UnansweredError(str(error), failures=failures, is_rejected=False) from error
                pause = min(_MIN_PAUSE * 2.0 ** min(waits - 1, 10), _MAX_PAUSE) if error.pause is None else error.pause
                if error.is_busy:
                    self._open_from = max(self._open_from, time.monotonic() + pause)
                else:
                    self._sleep(pause + random.random() * min(pause, 1.0))
            except _AbsentError as error:
                raise ConfigurationError(
                    f"{self._url}/chat/completions: {error}. Correct the URL, which ends with /v1, or the model"
                ) from error
            except UnansweredError as error:
                error.failures += failures
                raise
            else:
                self.begin()
                return reply

    def begin(self) -> None:
        """Count the silence of the server from now, after a time without requests."""
        self._last_answer = time.monotonic()

    def stop(self) -> None:
        """Let no thread wait any longer, or ask again."""
        self._stopped.set()

    def _sleep(self, seconds: float) -> None:
        if self._stopped.wait(max(seconds, 0.0)):
            raise UnavailableError(f"{self._url}: stopped")

    def _check_patience(self, error: _TemporaryError) -> None:
        silent, patience = time.monotonic() - self._last_answer, self._config.patience_seconds
        if silent > patience or (error.pause or 0.0) > patience:
            wait = f" and asks to wait for {error.pause:.0f} s" if error.pause else ""
            raise UnavailableError(
                f"{self._url} has answered nothing for {silent:.0f} s{wait} ({error}): run the command again when "
                "the server is there, with fewer requests at a time if it is busy"
            )

    def _request(self, method: str, path: str, body: Any, seconds: float) -> Any:
        """Return the parsed content of an answer."""
        import requests  # Here: it takes a tenth of a second.
        import urllib3

        def sign(request: Any) -> Any:  # Else requests takes a password from ~/.netrc.
            if self._key:
                request.headers["Authorization"] = f"Bearer {self._key}"
            return request

        if not hasattr(self._sessions, "session"):
            self._sessions.session = requests.Session()
        deadline = time.monotonic() + seconds
        try:
            with self._sessions.session.request(
                method, self._url + path, json=body, auth=sign, stream=True, allow_redirects=False,
                timeout=(_CONNECT_SECONDS, seconds),
            ) as answer:  # fmt: skip
                content = _read(answer, deadline)
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            reason = error.args[0] if error.args else None
            if isinstance(reason, urllib3.exceptions.MaxRetryError):  # Without a connection no request is at fault.
                what = f"no connection: {type(reason.reason).__name__}"
                raise _TemporaryError(what, is_busy=True) from error
            is_late = isinstance(error, requests.Timeout | urllib3.exceptions.TimeoutError)
            what = f"no whole answer within {seconds:g} s" if is_late else f"it breaks off ({type(error).__name__})"
            raise _TemporaryError(what) from error
        if answer.status_code != HTTPStatus.OK:
            raise self._error(answer.status_code, answer.headers, content)
        try:
            value = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise _TemporaryError("the answer is not JSON") from error
        if method == "POST" and isinstance(value, dict) and (within := value.get("error")):  # As gateways send.
            code = str(within.get("code")) if isinstance(within, dict) else ""
            is_status = re.fullmatch("[45][0-9]{2}", code)
            raise self._error(int(code), answer.headers, content) if is_status else _TemporaryError(_message(content))
        return value

    def _error(self, status: int, headers: Mapping[str, str], content: bytes) -> Exception:
        """Make the exception of an answer that is not OK."""
        message = f"{status} {_message(content)}".strip()
        if status in _REFUSED:
            how = f"the key of {self._config.key_variable}" if self._key else "requests without a key (key_variable)"
            return ConfigurationError(f"{self._url} refuses {how}: {message}")
        if status in _ABSENT:
            return _AbsentError(message)
        if status in _BUSY:
            return _TemporaryError(message, pause=_retry_after(headers.get("Retry-After")), is_busy=True)
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _TRANSIENT:
            return _TemporaryError(message)
        if status < HTTPStatus.BAD_REQUEST:
            return ConfigurationError(f"{self._url} answers with {message}, not with a completion; correct the URL")
        return UnansweredError(message, failures=1, is_rejected=True)


class _AbsentError(Exception):
    """There is no such path, or no such model."""


def _read(answer: Any, deadline: float) -> bytes:
    """Read an answer as it comes: each part of one that trickles is in time, but not the whole."""
    content = b""
    while chunk := answer.raw.read1(2**16, decode_content=True):
        content += chunk
        if len(content) > _MAX_BYTES:
            raise _TemporaryError(f"the answer is longer than {_MAX_BYTES} bytes")
        if time.monotonic() > deadline:
            raise _TemporaryError("the answer trickles")
    return content


def _reply(answer: Any, failures: int) -> Reply:
    try:
        choice = answer["choices"][0]
        message, usage = choice["message"], answer.get("usage") or {}
        text, refusal = message.get("content") or "", message.get("refusal")
        prompt_tokens, completion_tokens = (
            min(max(int(usage.get(f"{name}_tokens") or 0), 0), _MAX_TOKENS) for name in ("prompt", "completion")
        )
        reason = str(choice.get("finish_reason") or "stop")
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise _TemporaryError("the answer is no chat completion") from error
    if not isinstance(text, str):
        raise _TemporaryError("the answer is no text")
    return Reply(
        text=str(refusal) if refusal else text,
        finish_reason="refusal" if refusal else reason,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        failures=failures,
    )


def is_refusal(reply: Reply) -> bool:
    """Return whether the model, or a filter behind it, declines to answer."""
    return reply.finish_reason in ("refusal", "content_filter") or declines(reply.text)


def declines(text: str) -> bool:
    """Return whether a text begins as refusals do."""
    return _REFUSAL.search(text.replace("\u2019", "'")) is not None


def _message(content: bytes) -> str:
    """Return the first line of a server's message."""
    text = content[:4096].decode("utf-8", "replace")
    try:
        value = json.loads(text)
        error = value.get("error", value)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError, RecursionError):
        pass
    line = (text.strip().splitlines() or [""])[0]
    return shown_answer(line)[:300]


def shown_answer(text: str) -> str:
    """Return what a server answers for messages, without keys and control characters."""
    return redact(printable(text))


def _retry_after(value: str | None) -> float | None:
    """Return the seconds of the header Retry-After, which has seconds or a date."""
    if value is None:
        return None
    try:
        return max(float(value), 0.0)
    except ValueError:
        pass
    try:
        return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except ValueError:
        return None
