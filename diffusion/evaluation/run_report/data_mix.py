"""How many samples of each stream a run has drawn, against what its configuration asks for."""

from dataclasses import dataclass

import numpy as np

from diffusion.config.schema import Config
from diffusion.datasets.sample_order import GlobalOrder
from diffusion.errors import DataError
from diffusion.planning.provenance import build_order, find_folders
from diffusion.planning.streams import plan_epoch

MAX_COUNTED = 4_000_000
"""Samples of the order that are counted one by one, some seconds; beyond, a part of an epoch is worked out."""

MAX_EPOCHS = 64
"""Epochs whose order is opened; the others count as the first."""


@dataclass(frozen=True, kw_only=True)
class StreamMix:
    """One stream. None is not known."""

    name: str
    num_samples: int | None
    planned: float | None
    """Samples that the whole run draws."""

    drawn: int | None
    """Samples drawn so far."""


@dataclass(frozen=True, kw_only=True)
class DataMix:
    """All streams."""

    streams: list[StreamMix]
    is_exact: bool
    """Whether each draw was counted; false: the last epoch in proportion."""


def data_mix(config: Config, num_steps: int, num_images: int) -> DataMix:
    """Work out what a run has drawn of each stream.

    Args:
        config: of the run.
        num_steps: steps done.
        num_images: of the whole run, as planned.
    """
    plan = plan_epoch(config, num_images)
    drawn: list[int] | list[None] = [None] * len(plan.streams)
    is_exact = True
    if plan.streams and plan.problem is None and plan.num_steps is not None:
        try:
            drawn, is_exact = count_draws(build_order(config, find_folders(config, None)), num_steps)
        except DataError:  # The data is on another machine.
            drawn = [None] * len(plan.streams)
    streams = [
        StreamMix(
            name=stream.name,
            num_samples=stream.num_samples,
            planned=stream.epochs * stream.num_samples if stream.epochs is not None and stream.num_samples else None,
            drawn=number,
        )
        for stream, number in zip(plan.streams, drawn, strict=True)
    ]
    return DataMix(streams=streams, is_exact=is_exact)


def count_draws(order: GlobalOrder, num_steps: int, max_counted: int = MAX_COUNTED) -> tuple[list[int], bool]:
    """Samples that the first steps of a run draw of each stream.

    Args:
        order: of the run.
        num_steps: of the run.
        max_counted: samples of an unfinished epoch that are counted one by one.

    Returns:
        The numbers, and whether they are exact.
    """
    epochs, rest = divmod(num_steps, order.num_steps)
    draws = np.array([stream.draws for stream in order.streams], np.int64)
    of_epoch = [draws - np.array(order.epoch(epoch).dropped) for epoch in range(min(max(epochs, 1), MAX_EPOCHS))]
    total = sum(of_epoch[:epochs], np.zeros_like(draws)) + max(0, epochs - MAX_EPOCHS) * of_epoch[0]
    size = order.settings.global_batch_size
    if rest * size > max_counted:
        part = of_epoch[0] * rest / order.num_steps
        return [round(number) for number in (total + part).tolist()], False
    if rest:
        last = order.epoch(epochs)
        for first in range(0, rest, 256):
            stream = last.slots(first, min(first + 256, rest)).stream
            total = total + np.bincount(stream.ravel(), minlength=len(draws))
    return total.tolist(), epochs <= MAX_EPOCHS
