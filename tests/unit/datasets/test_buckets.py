import pytest

from diffusion.datasets.buckets import bucket_names, bucket_of, bucket_range, parse_edges
from diffusion.errors import ConfigurationError


def test_names():
    assert bucket_names((256, 512, 768, 1024)) == ["256-512", "512-768", "768-1024", "1024-up"]
    assert bucket_names((64,)) == ["64-up"]


@pytest.mark.parametrize(
    ("side", "bucket"),
    [
        (1, None),
        (255, None),
        (256, "256-512"),
        (511, "256-512"),
        (512, "512-1024"),
        (1024, "1024-up"),
        (9999, "1024-up"),
    ],
)
def test_bucket_of(side, bucket):
    assert bucket_of(side, (256, 512, 1024)) == bucket


def test_ranges_are_those_of_the_names():
    assert [bucket_range(name) for name in bucket_names((256, 512))] == [(256, 512), (512, None)]
    for name in ("train", "256", "256-512.partial", "up-256", "-1-5"):
        with pytest.raises(ConfigurationError, match="256-512 or 1024-up"):
            bucket_range(name)


def test_parse_edges():
    assert parse_edges(["64", 128]) == (64, 128)


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([], "there is none"),
        ([256, "x"], "whole number"),
        ([0, 256], "1 or more"),
        ([-5], "1 or more"),
        ([256.5], "whole number"),
        ([512, 256, 256], "ascend; try 256 512"),
    ],
)
def test_wrong_edges(edges, message):
    with pytest.raises(ConfigurationError, match=message):
        parse_edges(edges)
