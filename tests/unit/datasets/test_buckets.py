import pytest

from diffusion.datasets.buckets import EdgeBuckets, lowest_side, parse_edges
from diffusion.errors import ConfigurationError


def test_names():
    assert EdgeBuckets((256, 512, 768, 1024)).names == ["256-512", "512-768", "768-1024", "1024-up"]
    assert EdgeBuckets((64,)).names == ["64-up"]


def test_the_lowest_side_is_that_of_the_name():
    assert [lowest_side(name) for name in EdgeBuckets((256, 512)).names] == [256, 512]
    for name in ("train", "256", "256-512.partial", "up-256", "-1-5"):
        with pytest.raises(ConfigurationError, match="256-512 or 1024-up"):
            lowest_side(name)


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
