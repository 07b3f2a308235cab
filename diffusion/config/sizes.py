"""Sizes of pictures: what has to fit when streams have a `resolution` of their own."""

import re
from collections.abc import Iterator, Sequence

from diffusion.config.data import DataConfig, Mixing, PictureSize, StreamConfig, ValidationConfig, picture_sizes

_BUCKET_OF_ONE_SIZE = re.compile(r"([1-9][0-9]*)x([1-9][0-9]*)")
"""Name of a bucket that holds pictures for one size: height and width."""


def size_problems(data: DataConfig, validation: ValidationConfig | None, vae_factor: int | None) -> Iterator[str]:
    """Sentences about what does not fit.

    Args:
        data: the configuration's section `data`.
        validation: the configuration's section `validation`.
        vae_factor: side of a picture over side of its latent; None where it is not known yet.
    """
    resolution = data.resolution
    if vae_factor is not None and resolution >= 1 and resolution % vae_factor:
        below = resolution // vae_factor * vae_factor
        yield (
            f"data.resolution is {resolution}, which is not a multiple of {vae_factor}, the factor by which the VAE "
            f"shrinks a picture. Use {' or '.join(str(n) for n in (below, below + vae_factor) if n > 0)}."
        )
    streams = data.streams if isinstance(data.streams, list) else []
    problems = list(_of_streams(streams, "data.streams", resolution, vae_factor))
    if validation is not None and isinstance(validation.streams, list):
        problems += _of_streams(validation.streams, "validation.streams", resolution, vae_factor)
    yield from problems
    sizes = [] if problems or data.mixing is not Mixing.mixed else sorted(set(picture_sizes(streams, resolution)))
    if len(sizes) > 1:
        yield (
            f"data.streams hold pictures of {', '.join(map(str, sizes))} pixels, and data.mixing is mixed, which puts "
            "any streams into one batch: a batch has one size. Set data.mixing=bucket, or data.mixing=groups with "
            "data.group_size."
        )


def _of_streams(streams: Sequence[StreamConfig], key: str, resolution: int, vae_factor: int | None) -> Iterator[str]:
    for stream in streams:
        sides, where = stream.resolution, f"{key}: the resolution of stream '{stream.name}'"
        if sides is not None and (len(sides) != 2 or min(sides) < 1):
            yield f"{where} is {sides}, but must be height and width in pixels, as in [896, 1152]."
            continue
        if sides is not None and vae_factor is not None and any(side % vae_factor for side in sides):
            yield (
                f"{where} is {sides}, but both must be multiples of {vae_factor}, the factor by which the VAE shrinks "
                "a picture."
            )
            continue
        named = _BUCKET_OF_ONE_SIZE.fullmatch(stream.name)
        if named is not None and (size := PictureSize(*map(int, named.groups()))) != tuple(
            sides or [resolution, resolution]
        ):
            yield (
                f"{where} is {sides or resolution}, but its name says that it holds pictures for {size} pixels. Set "
                f"resolution: {list(size)}."
            )
