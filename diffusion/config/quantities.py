"""Times and sizes in a configuration: `550000ba`, `0.94dur`, `500gb`."""

import re
from dataclasses import dataclass

from diffusion.errors import ConfigurationError

TIME_UNITS = {"ba": "batches", "sp": "samples", "ep": "epochs", "dur": "fraction of the run"}
SIZE_UNITS = {"b": 1, "kb": 2**10, "mb": 2**20, "gb": 2**30, "tb": 2**40, "pb": 2**50}

_NUMBER_AND_UNIT = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)", re.IGNORECASE)


@dataclass(frozen=True)
class Time:
    """A point in a run, or a length of it."""

    value: float
    """Number of units: a whole number, or for `dur` a fraction in [0, 1]."""

    unit: str
    """One of `TIME_UNITS`."""

    def in_batches(self, *, num_batches: int, global_batch_size: int) -> float | None:
        """Convert to optimizer steps.

        Args:
            num_batches: length of the run in optimizer steps.
            global_batch_size: samples of one optimizer step.

        Returns:
            The number of optimizer steps; None for epochs, whose length depends on the data.
        """
        if self.unit == "ba":
            return self.value
        if self.unit == "sp":
            return self.value / global_batch_size
        if self.unit == "dur":
            return self.value * num_batches
        return None


def parse_time(text: str, key: str) -> Time:
    """Parse a time string of Composer.

    Args:
        text: a number and one of `TIME_UNITS`, such as `10ba`.
        key: key of the configuration, for the message.

    Raises:
        ConfigurationError: the text is not such a time.
    """
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None or match[2].lower() not in TIME_UNITS:
        units = ", ".join(f"{unit} ({meaning})" for unit, meaning in TIME_UNITS.items())
        raise ConfigurationError(f"{key} is '{text}', but must be a number and a unit: {units}.")
    value, unit = float(match[1]), match[2].lower()
    if unit == "dur" and value > 1:
        raise ConfigurationError(f"{key} is '{text}', but must be between 0dur and 1dur.")
    if unit != "dur" and "." in match[1]:
        raise ConfigurationError(f"{key} is '{text}', but must be a whole number of {TIME_UNITS[unit]}.")
    return Time(value, unit)


def parse_size(text: str, key: str) -> int:
    """Parse a size such as `500gb` (1 gb is 2^30 bytes, as in Streaming) into bytes.

    Args:
        text: a number and one of `SIZE_UNITS`, or a number of bytes.
        key: key of the configuration, for the message.

    Raises:
        ConfigurationError: the text is not such a size.
    """
    match = _NUMBER_AND_UNIT.fullmatch(text if not text.strip().isdigit() else f"{text.strip()}b")
    if match is None or match[2].lower() not in SIZE_UNITS:
        raise ConfigurationError(
            f"{key} is '{text}', but must be a number and a unit ({', '.join(SIZE_UNITS)}), as in 500gb."
        )
    return int(float(match[1]) * SIZE_UNITS[match[2].lower()])
