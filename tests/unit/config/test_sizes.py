import pytest

from diffusion.config.data import DataConfig, ImageSize, Mixing, StreamConfig, ValidationConfig, image_sizes
from diffusion.config.sizes import size_problems


def problems(*streams: StreamConfig, mixing: Mixing = Mixing.bucket, resolution: int = 1024) -> list[str]:
    data = DataConfig(local="/data", streams=list(streams), resolution=resolution, global_batch_size=256, mixing=mixing)
    return list(size_problems(data, None, vae_factor=8))


def test_a_stream_has_its_own_size_or_a_square():
    streams = [StreamConfig(name="a"), StreamConfig(name="b", resolution=[896, 1152])]
    assert image_sizes(streams, 1024) == [ImageSize(1024, 1024), ImageSize(896, 1152)]
    assert str(ImageSize(896, 1152)) == "896 x 1152"
    assert problems(*streams) == []
    assert problems(*streams, mixing=Mixing.groups) == []
    named = [StreamConfig(name="896x1152"), StreamConfig(name="1024x1024", resolution=[1024, 1024])]
    assert image_sizes(named, 512) == [ImageSize(896, 1152), ImageSize(1024, 1024)]
    assert problems(*named) == []


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (
            StreamConfig(name="a", resolution=[896]),
            "the resolution of 'a' is [896], but must be height and width",
        ),
        (StreamConfig(name="a", resolution=[0, 8]), "the resolution of 'a' is [0, 8], but must be height and"),
        (StreamConfig(name="a", resolution=[900, 1152]), "is [900, 1152], but both must be multiples of 8"),
        (StreamConfig(name="900x1152"), "'900x1152' is [900, 1152], but both must be multiples of 8"),
        (StreamConfig(name="896x1152", resolution=[1152, 896]), "is [1152, 896], but its name says 896 x 1152 pixels."),
    ],
)
def test_what_does_not_fit(stream, message):
    (problem,) = problems(stream)
    assert message in problem
    data = DataConfig(local="/data", streams=[StreamConfig(name="a")], resolution=1024, global_batch_size=256)
    (problem,) = size_problems(data, ValidationConfig(local="/v", streams=[stream]), 8)
    assert problem.startswith("validation.streams: ") and message in problem


def test_several_sizes_cannot_be_mixed_slot_by_slot():
    streams = [StreamConfig(name="a"), StreamConfig(name="b", resolution=[896, 1152])]
    (problem,) = problems(*streams, mixing=Mixing.mixed)
    assert problem.startswith("data.streams hold images of 896 x 1152, 1024 x 1024 pixels, and data.mixing is mixed")
    assert "Set data.mixing=bucket, or data.mixing=groups with data.group_size." in problem
    assert problems(*streams[1:], mixing=Mixing.mixed) == []
