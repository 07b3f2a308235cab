"""What the averages that a run stores in files of their own take."""

import math

from diffusion.config.quantities import parse_time
from diffusion.config.schema import Config
from diffusion.config.training import NumberFormat

STORED_BYTES = {NumberFormat.fp32: 4, NumberFormat.fp16: 2, NumberFormat.bf16: 2}


def count_average_files(config: Config, num_iterations: int) -> int | None:
    """Files of `algorithms.ema.power`: of each width at each interval after the start, and at the end.

    Args:
        config: the configuration.
        num_iterations: length of the run in steps.

    Returns:
        The number; None where the start is in epochs, whose length only the data knows.
    """
    ema = config.algorithms.ema
    if ema is None or ema.power is None:
        return 0
    scale = {"num_batches": num_iterations, "global_batch_size": config.data.global_batch_size}
    start = parse_time(ema.start, "algorithms.ema.start").in_batches(**scale)
    every = parse_time(ema.power.snapshot_interval, "algorithms.ema.power.snapshot_interval").in_batches(**scale)
    if start is None or every is None:
        return None
    first, interval = max(1, math.ceil(start)), int(every)
    at_intervals = num_iterations // interval - first // interval
    at_the_end = 1 if num_iterations % interval and num_iterations > first else 0
    return (at_intervals + at_the_end) * len(ema.power.relative_widths)


def average_file_bytes(config: Config, num_parameters: int) -> int:
    """Bytes of the tensors in one such file."""
    power = config.algorithms.ema.power if config.algorithms.ema is not None else None
    return num_parameters * STORED_BYTES[power.snapshot_precision] if power is not None else 0
