"""What is hidden in configurations and command lines, and what is not."""

import pytest

from diffusion.chat import ServerConfig
from diffusion.config.checks import check
from diffusion.config.fields import check_sections
from diffusion.config.keys import schema_keys
from diffusion.config.loading import load, to_public_yaml
from diffusion.config.schema import Config
from diffusion.config.secrets import is_secret_name, redact, redact_arguments
from diffusion.config.training import Plugin
from diffusion.datasets.streams import StreamLocation, find_marked
from diffusion.errors import ConfigurationError, DataError
from diffusion.launch import CommandParser
from diffusion.operations.supervisor import split_command
from diffusion.preparation.config import PrepareConfig


def test_names_of_secrets() -> None:
    names = (
        "api_key apiKey HF_TOKEN AWS_SECRET_ACCESS_KEY password x-api-key AZURE_STORAGE_KEY HF_TOKEN_2 MY_API_KEY_2 "
    )
    names += "MY_API_KEY_2 GITHUB_PAT DB_PASS SASTOKEN password2 PGPASSWORD api_keys account_keys GCS_KEY HF_KEY"
    assert [name for name in names.split() if not is_secret_name(name)] == []


def test_names_of_other_things() -> None:
    names = "token_ids tokenizer key monkey num_tokens keep_every max_token_length key_hash path patch passes compass "
    names += "pat include_pat pass low_pass tokens num_passes sort_key keys token_routing HOME PATH SSH_AUTH_SOCK"
    keys = [*names.split(), *schema_keys(Config), *schema_keys(PrepareConfig)]
    assert [name for name in keys if is_secret_name(name)] == []


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


@pytest.mark.parametrize(
    "value",
    [
        *({name: "planted"} for name in ("pwd", "bearer", "webhook", "openai_key", "secrets")),
        {"api_keys": ["planted"], "hf_tokens": {"main": "planted", "others": ["planted"]}},
        *(f"https://host/x?a=1&{name}=planted" for name in ("pwd", "pass", "auth", "jwt", "db_pass")),
        "DefaultEndpointsProtocol=https;AccountKey=planted==;EndpointSuffix=core",
        "https://hooks.slack.com/services/T0/B0/planted",
        ["Authorization: Bearer planted", "Cookie: sid=planted"],
        "{'Authorization': 'Basic planted'}",
        "xoxb-1234567890-planted",
        "glpat-planted_1234567890123",
        "AIzaplanted1234567890abcdefghijklmnopqr",
        "eyJplanted1234567.eyJzdWIiOiIxIn0.planted",
        "https://user:planted/planted@host/x",
    ],
)
def test_other_kinds_of_secrets(value: object) -> None:
    assert "planted" not in str(redact(value))


def test_what_looks_like_a_secret_and_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWD", "/home/someone")
    values = {
        "tokens": [49406, 1, "<s>"],
        "pass": "second",
        "first_pass": True,
        "low_pass": 0.25,
        "max_tokens": 24,
        "groups": {"tokens": {"mean": 3.5, "all": [1, 2]}, "special_tokens": ["<s>"]},
        "page": "https://host/x?compass=north&passes=2&author=me",
        "webhook_variable": "NAME",
        "notes": ["/home/someone/x", "http://host:80/a@b", "Bearer of good news; key=3", "a cookie: of chocolate"],
    }
    assert redact(values) == values


def test_what_follows_an_at_sign_in_a_password_is_hidden_and_paths_stay() -> None:
    assert redact("sftp://me:p@ssw0rd@host/x and s3://bucket/a@b") == "sftp://***@host/x and s3://bucket/a@b"


def test_messages_hide_passwords_in_addresses() -> None:
    root = "sftp://me:pl@nted@host/d"
    config = Config(run_name="a", output_folder=root)
    config.data.local = root
    with pytest.raises(ConfigurationError) as of_sections:
        check_sections(config)
    with pytest.raises(ConfigurationError, match="output_folder") as of_relations:
        check(config, world_size=1)
    files = {(None, f"{root}/withdrawn.json"): []}
    with pytest.raises(DataError, match="withdrawn") as of_data:
        find_marked(StreamLocation(name="a", remote=f"{root}/train/a", local="/x", files=files))
    assert not any("nted" in str(caught.value) for caught in (of_sections, of_relations, of_data))


@pytest.mark.parametrize("pasted", ["https://chat.example.com/hooks/planted", "planted-token"])
def test_a_secret_in_place_of_its_variable_is_not_shown(pasted: str) -> None:
    config = Config(run_name="a", output_folder="/x")
    config.operations.supervision.webhook_variable = pasted
    server = ServerConfig(url="http://host/v1", key_variable=pasted)
    for section, key in ((config, "webhook_variable"), (server, "key_variable")):
        with pytest.raises(ConfigurationError, match=key) as caught:
            check_sections(section)
        assert "planted" not in str(caught.value)


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
        "p=[{path: m, arguments: {api_key: '***', n: 1}}]",
    ]


@pytest.mark.parametrize(
    "argument",
    [
        "p.headers={Authorization: Bearer planted}",
        "p={token: [planted]}",
        "p={token: {a: planted}}",
        "p={token: >-\n  planted}",
        '{"api_key": "planted"}',
    ],
)
def test_secrets_are_hidden_in_a_structure_on_a_command_line(argument: str) -> None:
    assert "planted" not in redact_arguments([argument])[0]


def test_wrong_arguments_are_quoted_without_secrets() -> None:
    with pytest.raises(ConfigurationError) as of_parser:
        CommandParser().parse_args(["--wandb_api_key=planted"])
    with pytest.raises(ConfigurationError) as of_supervisor:
        split_command(["composer", "run.py", "a.api_key=planted"])
    assert not any("planted" in str(caught.value) for caught in (of_parser, of_supervisor))


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
