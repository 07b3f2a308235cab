"""Redaction of secrets in configurations and command lines: passwords, keys, tokens, and URLs with them."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

HIDDEN = "***"
"""Replaces a secret."""

_SECRET_NAME = re.compile(
    r"(password|passwd|passphrase|secret|token|"
    r"(^|_)(pwd|jwt|passwords|secrets|credentials?|authorization|bearer|webhook(_url)?|connection_string|"
    r"(api|access|auth|bearer|hf|refresh|sas)_?tokens|"
    r"(api|access|secret|private|account|sas|storage|auth|hf|azure|gcs|openai|anthropic|wandb|encryption|signing|"
    r"subscription)_?keys?(_id)?))_?\d*$"
)
"""Names of keys and environment variables with secret values: `hf_token` and `HF_TOKEN_2`, but not `token_ids`."""

_SECRET_VARIABLE = re.compile(r"_(PASS|PAT)_?\d*$")
"""Further names of variables; a key such as `low_pass` holds no secret."""

_KNOWN_SHAPES = re.compile(
    r"\b(AKIA|ASIA)[0-9A-Z]{16}\b|\bhf_[A-Za-z0-9]{20,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}"
    r"|\bsk-[A-Za-z0-9_-]{20,}|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*"
    r"|\bxox[a-z]-[\w-]{10,}|\bglpat-[\w-]{20,}|\bAIza[\w-]{35}|\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+"
    r"|(?<=hooks\.slack\.com/)[\w/]+|\bBearer [\w.~+/=-]{12,}"
)
"""Formats of the keys of AWS, Hugging Face, GitHub, OpenAI, Slack, GitLab and Google, JWTs, and private keys."""

_HEADER = re.compile(r"""(?i)\b(authorization["']?: *["']?|cookie["']?: *["']?(?=[\w.-]+=))[^\r\n"']+""")
_USER_IN_URL = re.compile(r"""(?<=://)([^/\s]+|[^/\s:]+:(?!\d+/)[^\s"']+)@""")
_SIGNATURE_IN_URL = re.compile(
    r"(?i)((?<=[?&;])(?:[\w-]*(?:signature|token|key|secret|password|credential|sig)|(?:[\w-]*[_-])?"
    r"(?:pwd|pass|auth|jwt))=|\bAccountKey=)[^&\s#]+"
)
"""Also of the connection strings of Azure."""

_MIN_LENGTH = 8
"""Shorter values of environment variables are not redacted, since they may be common words."""


def is_secret_name(name: str) -> bool:
    """Return whether the value of a key or environment variable of this name is a secret."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-. ]", "_", name)
    return (_SECRET_NAME.search(words.lower()) or _SECRET_VARIABLE.search(name)) is not None


def is_variable(name: str) -> bool:
    """Return whether a text can be the name of an environment variable, and not a secret in its place."""
    return re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) is not None


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
    secrets = [
        text
        for name, text in os.environ.items()
        if len(text) >= _MIN_LENGTH and is_secret_name(name) and name != "PWD"  # The working directory.
    ]
    for secret in sorted(secrets, key=len, reverse=True):
        value = value.replace(secret, HIDDEN)
    value = _USER_IN_URL.sub(f"{HIDDEN}@", value)
    value = _SIGNATURE_IN_URL.sub(rf"\1{HIDDEN}", value)
    value = _HEADER.sub(rf"\1{HIDDEN}", value)
    return _KNOWN_SHAPES.sub(HIDDEN, value)


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Redact secrets in a command line with `key.sub=value`, whose value is YAML, and `--option value`."""
    result: list[str] = []
    hides_next = False
    for argument in arguments:
        head, equals, text = argument.partition("=") if "=" in argument else ("", "", argument)
        key = head.lstrip("-").rpartition(".")[2]
        try:
            value = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError):  # A malformed value is hidden as a whole.
            value, key = text, next(filter(is_secret_name, re.findall(r"[\w-]+", text)), key)
        shown = HIDDEN if hides_next else redact({key: value})[key]
        if shown == value:
            result.append(redact(argument))
        elif isinstance(shown, str):
            result.append(f"{head}{equals}{shown}")
        else:
            dumped = yaml.safe_dump(shown, default_flow_style=True, sort_keys=False, width=math.inf)
            result.append(f"{head}{equals}{dumped.strip()}")
        option = argument.lstrip("-").rpartition(".")[2]
        hides_next = not equals and argument.startswith("-") and is_secret_name(option)
    return result
