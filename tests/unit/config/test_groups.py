import pytest

from diffusion.config.checks import check
from diffusion.config.data import DataConfig, Mixing, StreamConfig
from diffusion.config.groups import group_size, legal_world_sizes, microbatch_size
from diffusion.config.schema import Config
from diffusion.config.training import TrainerConfig
from diffusion.errors import ConfigurationError


def configuration(mixing: Mixing, size: int | None) -> Config:
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
        trainer=TrainerConfig(max_duration="550000ba"),
    )
    config.algorithms.ema = None
    return config


@pytest.mark.parametrize(
    ("mixing", "size", "world_size"),
    [(Mixing.mixed, None, 32), (Mixing.bucket, None, 32), (Mixing.groups, 8, 32)],
)
def test_what_fits(mixing, size, world_size):
    check(configuration(mixing, size), world_size=world_size)


@pytest.mark.parametrize(
    ("mixing", "size", "world_size", "message"),
    [
        (Mixing.groups, None, 1, r"data.mixing is groups without data.group_size"),
        (Mixing.bucket, 8, 1, r"data.group_size is 8, but data.mixing is bucket"),
        (Mixing.groups, 24, 1, r"data.group_size is 24, which does not divide data.global_batch_size 256"),
        (Mixing.groups, 0, 1, r"data.group_size is 0, but must be at least 1"),
        (Mixing.groups, 16, 32, r"32 ranks cannot share the 16 groups .* ranks are 1, 2, 4, 8, 16\."),
    ],
)
def test_what_does_not_fit(mixing, size, world_size, message):
    with pytest.raises(ConfigurationError, match=message):
        check(configuration(mixing, size), world_size=world_size)


@pytest.mark.parametrize(
    ("mixing", "group", "limit", "world_size", "size"),
    [
        (Mixing.mixed, None, 128, 1, 128),
        (Mixing.mixed, None, 128, 8, 32),
        (Mixing.mixed, None, None, 8, 32),
        (Mixing.bucket, None, 12, 8, 8),
        (Mixing.mixed, None, 1, 8, 1),
        (Mixing.groups, 16, 64, 2, 16),
        (Mixing.groups, 16, 6, 2, 4),
        (Mixing.groups, 16, None, 1, 16),
    ],
)
def test_the_microbatch_is_the_largest_divisor_up_to_the_limit(mixing, group, limit, world_size, size):
    assert microbatch_size(configuration(mixing, group).data, limit, world_size) == size


def test_sizes():
    assert legal_world_sizes(12) == [1, 2, 3, 4, 6, 12]
    assert legal_world_sizes(12, 2) == [1, 2, 3, 6]
    assert group_size(configuration(Mixing.groups, 16).data) == 16
    assert group_size(configuration(Mixing.mixed, None).data) == 1
