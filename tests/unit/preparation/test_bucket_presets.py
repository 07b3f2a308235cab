import math

import numpy as np
import pytest

from diffusion.config.data import named_size
from diffusion.config.loading import from_dict, load, missing_keys
from diffusion.datasets.buckets import EdgeBuckets, SizeBuckets, lowest_side
from diffusion.errors import ConfigurationError
from diffusion.preparation.buckets import SDXL_SIZES, build_buckets
from diffusion.preparation.config import BucketsConfig, PrepareConfig
from diffusion.preparation.filters import build_rules
from tests.tools.training_runs import ROOT

PAPER = {512: (1856, 1920, 1984, 2048), 576: (1664, 1728, 1792), 640: (1536, 1600), 704: (1344, 1408, 1472),
         768: (1280, 1344), 832: (1152, 1216), 896: (1088, 1152), 960: (1024, 1088), 1024: (1024,)}  # fmt: skip
"""Longer by shorter side of SDXL's sizes; 1344 x 704 is not among them."""


def buckets(**values):
    return build_buckets(from_dict(BucketsConfig, values, "test"))


def bucket(division, width, height):
    index = division.indices(np.array([width]), np.array([height]))[0]
    return None if index < 0 else division.names[index]


def one_by_one(division, width, height):
    """The definition: of the sizes that an image covers the nearest in the logarithm of the ratio, then the largest."""
    if isinstance(division, EdgeBuckets):
        index = sum(edge <= min(width, height) for edge in division.edges) - 1
        return None if index < 0 else division.names[index]
    covered = [size for size in division.sizes if size[0] <= height and size[1] <= width]
    if not covered and not division.upscale:
        return None
    sign = -1 if covered else 1

    def distance(size):
        return round(abs(math.log(size[1] / size[0]) - math.log(width / height)), 12), sign * size[0] * size[1]

    nearest = min(covered or division.sizes, key=distance)
    return f"{nearest[0]}x{nearest[1]}"


def test_the_default_is_sd2():
    assert buckets() == buckets(preset="sd2") == EdgeBuckets((256, 512, 768, 1024))
    assert buckets().names == ["256-512", "512-768", "768-1024", "1024-up"]
    assert [bucket(buckets(), 900, side) for side in (255, 256, 800)] == [None, "256-512", "768-1024"]


def test_sdxl_has_the_sizes_of_the_paper():
    sdxl = buckets(preset="sdxl")
    pairs = {(shorter, longer) for shorter, sides in PAPER.items() for longer in sides}
    assert set(SDXL_SIZES) == (pairs | {(longer, shorter) for shorter, longer in pairs}) - {(1344, 704)}
    assert len(sdxl.names) == len(set(sdxl.names)) == len(SDXL_SIZES) == 40
    assert sdxl.names[0] == "2048x512"
    assert sdxl.names[-1] == "512x2048"


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [
        (1024, 1024, "1024x1024"),
        (3000, 3000, "1024x1024"),
        (1152, 896, "896x1152"),
        (896, 1152, "1152x896"),
        (1920, 1080, "768x1344"),
        (1080, 1920, "1344x768"),
        (4096, 1024, "512x2048"),
        (20000, 600, "512x2048"),
        (1200, 1000, "896x1088"),  # 960x1088 is covered, too, and farther
        (1023, 1023, None),
        (2047, 512, "512x1984"),
        (1855, 575, None),
        (511, 4000, None),
    ],
)
def test_an_image_goes_to_the_nearest_ratio_that_it_covers(width, height, expected):
    assert bucket(buckets(preset="sdxl"), width, height) == expected


def test_the_nearest_ratio_is_nearest_in_logarithms():
    two = buckets(sizes=["100x100", "100x400"])
    assert [bucket(two, width, 100) for width in (100, 399, 400)] == ["100x100", "100x100", "100x400"]
    assert [bucket(two, 10 * width, 1000) for width in (199, 201)] == ["100x100", "100x400"]


def test_of_one_ratio_the_largest_that_is_covered():
    sizes = buckets(sizes=["512x512", "1024x1024", "256x256"])
    assert sizes.names == ["256x256", "512x512", "1024x1024"]
    assert [bucket(sizes, side, side) for side in (255, 256, 1023, 1024)] == [None, "256x256", "512x512", "1024x1024"]


def test_upscaling_takes_small_images_to_the_nearest_ratio():
    sizes = buckets(sizes=["512x512", "1024x1024", "256x1024"], upscale=True)
    assert [bucket(sizes, *size) for size in ((100, 100), (300, 90), (600, 600))] == ["512x512", "256x1024", "512x512"]


def test_names_can_be_parsed_back():
    for name in buckets(preset="sdxl").names:
        size = named_size(name)
        assert size in SDXL_SIZES
        assert lowest_side(name) == min(size)
    for name in ("256-512", "1024-up", "0x5", "5x", "x5", "05x5", "5x5x5", "5X5"):
        assert named_size(name) is None
    assert (lowest_side("256-512"), lowest_side("1024-up")) == (256, 1024)
    with pytest.raises(ConfigurationError, match="896x1152"):
        lowest_side("train")


def test_sizes_of_an_area():
    made = buckets(area={"side": 1024, "step": 64, "max_ratio": 4})
    assert isinstance(made, SizeBuckets)
    assert set(made.sizes) - set(SDXL_SIZES) == {(1344, 704)}
    assert set(SDXL_SIZES) <= set(made.sizes)


@pytest.mark.parametrize(("side", "step", "max_ratio"), [(512, 64, 2.0), (256, 32, 3.0), (64, 8, 1.5), (128, 128, 9)])
def test_sizes_of_an_area_keep_to_it(side, step, max_ratio):
    sizes = buckets(area={"side": side, "step": step, "max_ratio": max_ratio}).sizes
    assert (side, side) in sizes
    assert set(sizes) == {(width, height) for height, width in sizes}
    ratios = [width / height for height, width in sizes]
    assert ratios == sorted(ratios)
    for height, width in sizes:
        assert height % step == width % step == 0
        assert height * width <= side * side
        assert max(height, width) <= max_ratio * min(height, width)
        assert max(height, width) + step > side * side / min(height, width) or height * width >= 0.9 * side * side


@pytest.mark.parametrize(
    "values",
    [{}, {"preset": "sdxl"}, {"preset": "sdxl", "upscale": True}, {"sizes": ["64x64", "128x128", "64x128"]},
     {"area": {"side": 256, "step": 32}, "upscale": True}],
)  # fmt: skip
def test_many_images_at_once_go_to_the_same_buckets(values):
    division = buckets(**values)
    random = np.random.default_rng(1)
    widths, heights = (random.lognormal(5.5, 1.0, 3000).astype(np.int32) + 1 for _ in range(2))
    square = np.repeat(np.arange(60, 140, dtype=np.int32), 2)
    widths, heights = np.concatenate([widths, square[1:]]), np.concatenate([heights, square[:-1]])
    names = [*division.names, None]
    found = [names[index] for index in division.indices(widths, heights)]
    assert found == [one_by_one(division, *size) for size in zip(widths.tolist(), heights.tolist(), strict=True)]
    assert len(set(found)) > 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"preset": "sd3"}, "one of sd2, sdxl"),
        ({"preset": "sdxl", "edges": [256]}, "buckets.preset and buckets.edges are both given"),
        ({"sizes": []}, "sizes: there is none"),
        ({"sizes": ["1024"]}, "'1024': give height x width"),
        ({"sizes": ["64x64", "64x64"]}, "64x64 is given twice"),
        ({"edges": [512, 256]}, "they must ascend"),
        ({"edges": [256], "upscale": True}, "buckets.upscale"),
        ({"edges": [256], "min_samples": 4}, "buckets.min_samples"),
        ({"sizes": ["64x64"], "reject_small": True}, "buckets.reject_small"),
        ({"area": {"side": 1000}}, "try side 960"),
        ({"area": {"step": 0}}, "multiple of step"),
        ({"area": {"max_ratio": 0.5}}, "max_ratio is 0.5"),
        ({"area": {"max_ratio": math.inf}}, "max_ratio is inf"),
    ],
)
def test_mistakes(values, message):
    with pytest.raises(ConfigurationError, match=message):
        buckets(**values)


def test_the_yaml_that_ships_is_right_but_for_its_places():
    config = load(PrepareConfig, ROOT / "yamls/prepare.yaml")
    assert set(missing_keys(config)) == {"sources", "out"}
    assert build_buckets(config.buckets) == buckets(preset="sd2")
    names = [rule.name for rule in build_rules(config.filters, str)]
    assert names == ["shorter_side", "aspect_ratio", "caption_characters", "caption_words", "keyword",
                     "missing_language", "language", "missing_sharpness", "condition_sharpness"]  # fmt: skip


def test_overrides_and_mistakes_name_their_place(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("sources: [a]\nout: b\nfilters:\n  min_asthetic: 3\n")
    with pytest.raises(ConfigurationError, match=r"filters\.min_asthetic .*mine\.yaml.*4.*did you mean filters\.min_a"):
        load(PrepareConfig, path)
    path.write_text("sources: [a]\nout: b\n")
    config = load(PrepareConfig, path, ["filters.min_aesthetic=4.5", "duplicates.near=false", "engine=ray"])
    assert config.filters.min_aesthetic == 4.5
    assert config.duplicates is not None
    assert (config.duplicates.exact, config.duplicates.near) == (True, False)
    assert config.engine.value == "ray"
