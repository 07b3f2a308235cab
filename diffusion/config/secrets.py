"""Redaction of secrets in configurations and command lines: passwords, keys, tokens, and URLs with them."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "***"
"""Replaces a secret."""

_SECRET_NAME = re.compile(
    r"(^|_)(password|passwd|passphrase|secret|token|credentials?|authorization|"
    r"(api|access|secret|private|account|sas)_?key(_id)?)$"
)
"""Names of keys and environment variables with secret values: `hf_token`, but not `token_ids`."""

_KNOWN_SHAPES = re.compile(
    r"\b(AKIA|ASIA)[0-9A-Z]{16}\b|\bhf_[A-Za-z0-9]{20,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}"
    r"|\bsk-[A-Za-z0-9_-]{20,}|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*"
)
"""Formats of the keys of AWS, Hugging Face, GitHub and OpenAI, and of private keys."""

_USER_IN_URL = re.compile(r"(?<=://)[^/\s]+@")
_SIGNATURE_IN_URL = re.compile(r"(?i)(?<=[?&])([\w-]*(?:signature|token|key|secret|password|credential|sig)=)[^&\s#]+")
_NESTED = re.compile(r"""(?P<head>["']?(?P<name>[\w-]+)["']?:\s*)("[^"]*"|'[^']*'|[^,{}\[\]\s]+)""")
"""Entry of a YAML mapping on one line, as in `{api_key: x}`."""

_MIN_LENGTH = 8
"""Shorter values of environment variables are not redacted, since they may be common words."""


def is_secret_name(name: str) -> bool:
    """Return whether the value of a key or environment variable of this name is a secret."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-. ]", "_", name)
    return _SECRET_NAME.search(words.lower()) is not None


def redact(value: Any) -> Any:
    """Copy plain containers with `***` for each secret.

    A secret is recognised by its key, by its format, in a URL, or as the value of an environment variable whose name
    says so.
    """
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if child not in (None, "") and is_secret_name(str(key)) else redact(child)
            for key, child in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact(child) for child in value]
    if not isinstance(value, str):
        return value
    secrets = [text for name, text in os.environ.items() if len(text) >= _MIN_LENGTH and is_secret_name(name)]
    for secret in sorted(secrets, key=len, reverse=True):
        value = value.replace(secret, HIDDEN)
    value = _USER_IN_URL.sub(f"{HIDDEN}@", value)
    value = _SIGNATURE_IN_URL.sub(rf"\1{HIDDEN}", value)
    return _KNOWN_SHAPES.sub(HIDDEN, value)


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Redact secrets in a command line with `key.sub=value` and `--option value`."""
    result: list[str] = []
    hides_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        names_secret = is_secret_name(name.lstrip("-").rpartition(".")[2])
        if hides_next:
            result.append(HIDDEN)
        elif equals and names_secret:
            result.append(f"{name}={HIDDEN}")
        else:
            result.append(_NESTED.sub(_hide_nested, redact(argument)))
        hides_next = names_secret and not equals and argument.startswith("-")
    return result


def _hide_nested(entry: re.Match[str]) -> str:
    return entry["head"] + HIDDEN if is_secret_name(entry["name"]) else entry[0]
