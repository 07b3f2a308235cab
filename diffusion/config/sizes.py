"""Sizes of images: what has to fit when streams have a `resolution` of their own."""

from collections.abc import Iterator, Sequence

from diffusion.config.data import DataConfig, Mixing, StreamConfig, ValidationConfig, image_sizes, named_size


def size_problems(data: DataConfig, validation: ValidationConfig | None, vae_factor: int | None) -> Iterator[str]:
    """Sentences about what does not fit.

    Args:
        data: the configuration's section `data`.
        validation: the configuration's section `validation`.
        vae_factor: side of an image over side of its latent; None where it is not known yet.
    """
    resolution = data.resolution
    if vae_factor is not None and resolution >= 1 and resolution % vae_factor:
        below = resolution // vae_factor * vae_factor
        yield (
            f"data.resolution is {resolution}, which is not a multiple of {vae_factor}, the factor by which the VAE "
            f"shrinks an image. Use {' or '.join(str(n) for n in (below, below + vae_factor) if n > 0)}."
        )
    streams = data.streams if isinstance(data.streams, list) else []
    problems = list(_of_streams(streams, "data.streams", vae_factor))
    if validation is not None and isinstance(validation.streams, list):
        problems += _of_streams(validation.streams, "validation.streams", vae_factor)
    yield from problems
    sizes = [] if problems or data.mixing is not Mixing.mixed else sorted(set(image_sizes(streams, resolution)))
    if len(sizes) > 1:
        yield (
            f"data.streams hold images of {', '.join(map(str, sizes))} pixels, and data.mixing is mixed, which puts "
            "any streams into one batch: a batch has one size. Set data.mixing=bucket, or data.mixing=groups with "
            "data.group_size."
        )


def _of_streams(streams: Sequence[StreamConfig], key: str, vae_factor: int | None) -> Iterator[str]:
    for stream in streams:
        given, named, where = stream.resolution, named_size(stream.name), f"{key}: the resolution of '{stream.name}'"
        if given is not None and (len(given) != 2 or min(given) < 1):
            yield f"{where} is {given}, but must be height and width in pixels, as in [896, 1152]."
        elif given is not None and named is not None and tuple(given) != named:
            yield f"{where} is {given}, but its name says {named} pixels. Leave it out, or rename the folder."
        elif vae_factor is not None and any(side % vae_factor for side in given or named or ()):
            yield (
                f"{where} is {given or list(named or ())}, but both must be multiples of {vae_factor}, the factor by "
                "which the VAE shrinks an image."
            )
