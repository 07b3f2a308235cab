"""A number on the device that the host reads later, without waiting for later work."""

from typing import Any

import torch
from torch import Tensor


class HostNumber:
    """A copy of a number in host memory, made in the order of the device's work."""

    def __init__(self) -> None:
        self._copy = torch.zeros(())
        self._copied: Any = None

    def start(self, number: Tensor) -> None:
        """Start to copy a tensor [] of any dtype."""
        if self._copy.dtype != number.dtype or self._copy.is_pinned() != number.is_cuda:
            self._copy = torch.empty((), dtype=number.dtype, pin_memory=number.is_cuda)
        self._copy.copy_(number, non_blocking=True)
        if number.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> float:
        """Return the number of the last `start`, after waiting for its copy and for nothing later."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copy.item()
