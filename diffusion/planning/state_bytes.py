"""The parts of a training state that a rank holds."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes that one rank holds, without activations."""

    weights: int
    gradients: int
    optimizer: int
    ema: int
    """Of all averages."""

    @property
    def total(self) -> int:
        """Everything counted."""
        return self.weights + self.gradients + self.optimizer + self.ema
