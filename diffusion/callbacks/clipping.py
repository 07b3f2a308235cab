"""Gradient clipping by the global norm (Pascanu et al., "On the difficulty of training recurrent networks", 2013)."""

import torch
import torch.distributed
from composer import Callback, Logger, State
from torch import Tensor
from torch.distributed.tensor import DTensor

from diffusion.checkpointing.save import local_shard
from diffusion.trainer import HostNumber, LateLogger

GRADIENT_NORM = "grad_norm/total"
"""Metric: the norm of all gradients of a step over all ranks, before clipping."""

EPSILON = 1e-6
"""Added to the norm, as `torch.nn.utils.clip_grad_norm_` does."""


class ClipGradients(Callback):
    """Scale the gradients of a step down to a maximum norm over all parameters of all ranks, and log the norm.

    The host does not wait for the norm: it reads its copy when it reads the loss.
    """

    def __init__(self, max_norm: float) -> None:
        self.max_norm = max_norm
        self._norm = HostNumber()
        self._is_clipped = False

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Clip the gradients; a skipped step has none."""
        groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
        gradients = [weight.grad for group in groups for weight in group["params"] if weight.grad is not None]
        self._is_clipped = bool(gradients)
        if gradients:
            norm = _global_norm(gradients)
            coefficient = (self.max_norm / (norm + EPSILON)).clamp(max=1.0)
            torch._foreach_mul_([local_shard(gradient) for gradient in gradients], coefficient)  # pyright: ignore[reportPrivateImportUsage]
            self._norm = HostNumber()
            self._norm.start(norm)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log the norm."""
        if self._is_clipped:
            is_late = isinstance(logger, LateLogger)
            logger.log_metrics({GRADIENT_NORM: self._norm if is_late else self._norm.read()})  # pyright: ignore[reportArgumentType]


def _global_norm(gradients: list[Tensor]) -> Tensor:
    """Compute the Euclidean norm over all gradients, float32 []; over all ranks if FSDP2 shards them."""
    norm = torch.nn.utils.get_total_norm([local_shard(gradient) for gradient in gradients])
    if isinstance(gradients[0], DTensor):
        mesh = gradients[0].device_mesh  # (replicas,) shards
        squares = norm.square()
        torch.distributed.all_reduce(squares, group=mesh.get_group(mesh.ndim - 1))
        norm = squares.sqrt()
    return norm
