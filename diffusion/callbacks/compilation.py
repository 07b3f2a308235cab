"""Parallel compilation of the network's blocks before the first step."""

import logging
import time
from typing import Any

import torch
from composer import Callback, Logger, State
from composer.core.precision import get_precision_context

from diffusion.config.schema import Config
from diffusion.config.training import Device
from diffusion.datasets.batch import SHAPED, BatchKey
from diffusion.launch import compile_threads
from diffusion.models.fast.parallel import Compilers, recording
from diffusion.models.latent_diffusion import Batch, LatentDiffusion

log = logging.getLogger(__name__)


class ParallelCompilation(Callback):
    """Let processes compile the distinct blocks for each size of images before the first forward pass.

    Each rank does it for itself: a compiled graph names its device.
    """

    def __init__(self, config: Config, device: Device) -> None:
        self._sizes = config.data.known_sizes if config.plugins.train_dataset is None else []
        self._compilers: Compilers | None = Compilers(compile_threads(), config.model, config.performance, device)

    def before_forward(self, state: State, logger: Logger) -> None:
        """Record the blocks' calls with the first microbatch, compile, and wait."""
        if self._compilers is None:
            return
        start = time.monotonic()
        model: Any = getattr(state.model, "module", state.model)  # DDP's forward would expect a backward pass.
        with recording(model.network) as calls, get_precision_context(state.precision, state.precision_config):
            for batch in self._batches(state.batch, model):
                model(batch)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        errors = self._compilers.compile(calls)
        self._compilers = None
        log.info("compiled %d blocks in parallel in %.0f s", len(calls), time.monotonic() - start)
        if errors:
            log.warning("%d of them will be compiled in the first step: %s", len(errors), errors[0])

    def _batches(self, batch: Batch, model: LatentDiffusion) -> list[Batch]:
        """Return the batch for each size of images, of which only the shapes matter."""
        return [
            {key: _resize(value, key, size, model.vae_factor) for key, value in batch.items()} for size in self._sizes
        ] or [batch]


def _resize(value: torch.Tensor, key: str, size: tuple[int, int], vae_factor: int) -> torch.Tensor:
    if key not in SHAPED:
        return value
    factor = 1 if key == BatchKey.IMAGE else vae_factor
    return value.new_zeros(*value.shape[:2], *(side // factor for side in size))
