"""What is hidden in configurations and command lines, and what is not."""

import pytest

from diffusion.config.loading import load, to_public_yaml
from diffusion.config.schema import Config
from diffusion.config.secrets import is_secret_name, redact, redact_arguments
from diffusion.config.training import Plugin
from diffusion.errors import ConfigurationError


@pytest.mark.parametrize("name", ["api_key", "apiKey", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "password", "x-api-key"])
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["token_ids", "tokenizer", "key", "monkey", "num_tokens", "keep_every", "max_token_length"]
)
def test_names_of_other_things(name: str) -> None:
    assert not is_secret_name(name)


def test_secrets_are_hidden_by_name_by_shape_in_addresses_and_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STORE_PASSWORD": "correct horse", "HOME": "/home/someone", "SHORT_TOKEN": "abc"}.items():
        monkeypatch.setenv(name, value)
    config = {
        "secret_access_key": "x1",
        "remote": "sftp://me:pass@host/data?X-Amz-Signature=abc123&part=2",
        "note": ["the correct horse of abc", "AKIAABCDEFGHIJKLMNOP"],
        "place": "/home/someone",
        "token": None,
        "lr": 1e-4,
    }
    assert redact(config) == {
        "secret_access_key": "***",
        "remote": "sftp://***@host/data?X-Amz-Signature=***&part=2",
        "note": ["the *** of abc", "***"],
        "place": "/home/someone",
        "token": None,
        "lr": 1e-4,
    }


def test_secrets_are_hidden_in_a_command_line() -> None:
    arguments = [
        "run.yaml",
        "optimizer.lr=1",
        "a.api_key=x",
        "--token",
        "y",
        "p=[{path: m, arguments: {api_key: z, n: 1}}]",
    ]
    assert redact_arguments(arguments) == [
        "run.yaml",
        "optimizer.lr=1",
        "a.api_key=***",
        "--token",
        "***",
        "p=[{path: m, arguments: {api_key: ***, n: 1}}]",
    ]


def test_a_configuration_is_written_without_its_secrets() -> None:
    config = Config(run_name="a")
    config.plugins.callbacks = [Plugin(path="a.B", arguments={"api_key": "planted", "size": 3})]
    text = to_public_yaml(config)
    assert "planted" not in text
    assert "api_key: '***'" in text
    assert "size: 3" in text
    assert config.plugins.callbacks[0].arguments["api_key"] == "planted"


def test_a_malformed_override_is_quoted_without_its_secret():
    for override in ("wandb.api_key=[planted", "plugins.loggers=[{path: m, arguments: {api_key: planted, n: }]"):
        with pytest.raises(ConfigurationError) as caught:
            load(Config, "yamls/tiny/phase1.yaml", [override])
        assert "planted" not in str(caught.value)
