import pytest

from diffusion.config.checks import check
from diffusion.config.data import DataConfig, StreamConfig
from diffusion.config.schema import Config
from diffusion.config.training import TrainerConfig
from diffusion.errors import ConfigurationError


def configuration(stream: StreamConfig, **options) -> Config:
    data = DataConfig(local="/data", streams=[stream], resolution=256, global_batch_size=8, **options)
    return Config(run_name="r", data=data, trainer=TrainerConfig(max_duration="550000ba"))


def check_stream(root: str | None, **options) -> None:
    check(configuration(StreamConfig(name="a", **options), remote=root), world_size=1, vae_factor=8)


def test_an_s3_store_needs_an_s3_remote() -> None:
    address = "https://objects.example.com"
    check_stream(None, remote="s3://bucket/a", endpoint_url=address, profile="mine")
    check_stream("s3://bucket", endpoint_url=address)
    with pytest.raises(ConfigurationError, match=r"stream 'a' has endpoint_url and profile, but its remote is None"):
        check_stream(None, endpoint_url=address, profile="mine")
    with pytest.raises(ConfigurationError, match=r"has profile, but its remote is sftp://host/a"):
        check_stream("s3://bucket", remote="sftp://host/a", profile="mine")
    with pytest.raises(ConfigurationError, match=r"endpoint_url of stream 'a' is 'objects', but must be an address"):
        check_stream("s3://bucket", endpoint_url="objects")


def test_at_least_one_attempt() -> None:
    with pytest.raises(ConfigurationError, match=r"data.download_retry is 0, but must be at least 1"):
        check(configuration(StreamConfig(name="a"), download_retry=0), world_size=1, vae_factor=8)
