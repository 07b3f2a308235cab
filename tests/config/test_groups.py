import pytest

from diffusion.config.checks import check
from diffusion.config.data import DataConfig, Mixing, StreamConfig
from diffusion.config.groups import group_size, legal_world_sizes
from diffusion.config.schema import Config
from diffusion.config.training import TrainerConfig
from diffusion.errors import ConfigurationError


def configuration(mixing: Mixing, size: int | None, microbatch: int | None = None) -> Config:
    config = Config(
        run_name="r",
        data=DataConfig(
            local="/data",
            streams=[StreamConfig(name="a")],
            resolution=256,
            global_batch_size=256,
            mixing=mixing,
            group_size=size,
        ),
        trainer=TrainerConfig(max_duration="550000ba", device_train_microbatch_size=microbatch),
    )
    config.algorithms.ema = None
    return config


@pytest.mark.parametrize(
    ("mixing", "size", "microbatch", "world_size"),
    [(Mixing.mixed, None, 8, 32), (Mixing.bucket, None, 8, 32), (Mixing.groups, 8, 4, 32), (Mixing.groups, 8, None, 8)],
)
def test_what_fits(mixing, size, microbatch, world_size):
    check(configuration(mixing, size, microbatch), world_size=world_size)


@pytest.mark.parametrize(
    ("mixing", "size", "microbatch", "world_size", "message"),
    [
        (Mixing.groups, None, None, 1, r"data.mixing is groups without data.group_size"),
        (Mixing.bucket, 8, None, 1, r"data.group_size is 8, but data.mixing is bucket"),
        (Mixing.groups, 24, None, 1, r"data.group_size is 24, which does not divide data.global_batch_size 256"),
        (Mixing.groups, 0, None, 1, r"data.group_size is 0, but must be at least 1"),
        (Mixing.groups, 16, None, 32, r"32 ranks cannot share the 16 groups .* ranks are 1, 2, 4, 8, 16\."),
        (Mixing.groups, 16, 32, 4, r"device_train_microbatch_size is 32, which does not divide data.group_size 16"),
    ],
)
def test_what_does_not_fit(mixing, size, microbatch, world_size, message):
    with pytest.raises(ConfigurationError, match=message):
        check(configuration(mixing, size, microbatch), world_size=world_size)


def test_sizes():
    assert legal_world_sizes(12) == [1, 2, 3, 4, 6, 12]
    assert legal_world_sizes(12, 2) == [1, 2, 3, 6]
    assert group_size(configuration(Mixing.groups, 16).data) == 16
    assert group_size(configuration(Mixing.mixed, None).data) == 1
