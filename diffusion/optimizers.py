"""AdamW on local shards; Muon (Jordan et al. 2024) for the matrices of a network and AdamW for the rest; WSD.

The momentum of a matrix is replaced by the nearest matrix with orthonormal rows or columns, which needs the whole
matrix. FSDP2 shards matrices by rows: each is gathered by one rank, which returns the rows of the result.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from diffusion.checkpointing.save import local_shard

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic polynomial, whose iterates map (0, 1] into [0.68, 1.13]."""

NUM_ITERATIONS = 5

UPDATE_SCALE = 0.2
"""Root mean square of an update of a full matrix over the learning rate, as AdamW's (Liu et al. 2025, section 2.2)."""

MAX_STACK = 2**26
"""Numbers of the matrices that are orthogonalised together: 128 MiB in bf16."""


class AdamW(torch.optim.AdamW):
    """AdamW that computes on the local shards of DTensors.

    Its state consists of DTensors, as torch's. A step costs the host less, since no operation has to find out how
    its DTensors are sharded.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Collect weights, gradients and state of a group in the lists, each as the part of this rank."""
        is_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local_shard, tensors)
        return is_complex

    def complete_state(self) -> None:
        """Give weights that have had no gradient yet the state of step 0, which has no effect.

        A checkpoint holds the state of all weights: torch would store that of step 1, and continue with it.
        """
        for group in self.param_groups:
            names = ["momentum_buffer"] if "momentum" in group else ["exp_avg", "exp_avg_sq"]
            for weight in group["params"]:
                if not self.state[weight]:
                    self.state[weight] = {name: torch.zeros_like(weight) for name in names}
                    if "momentum" not in group:
                        self.state[weight]["step"] = torch.zeros((), device=weight.device)


class Muon(AdamW):
    """Muon with Nesterov momentum for parameter groups with a `momentum`, AdamW for the others.

    For a matrix W [R, C] with gradient G:

        M <- momentum * M + (1 - momentum) * G
        O = newton_schulz(momentum * M + (1 - momentum) * G)
        W <- (1 - lr * weight_decay) * W - lr * 0.2 * sqrt(max(R, C)) * O

    The scale of O gives the update the size of AdamW's, so that its learning rate and weight decay fit (Liu et al.
    2025, arXiv:2502.16982, equation 4). A convolution's weight [out, in, k, k] is a matrix [out, in * k * k].

    Args:
        params: parameter groups; weights of those with a `momentum`, its decay, have two or more dimensions.
        settings: of AdamW; learning rate and weight decay hold for all groups without their own.
    """

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the state without AdamW's conversion of files of old releases of torch, which asks each for a step."""
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters that have gradients; all ranks together."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if "momentum" not in group]
        loss = super().step(closure)
        self.param_groups = groups
        for group in groups:
            if "momentum" in group:
                self._update_matrices(group)
        return loss

    def _update_matrices(self, group: dict[str, Any]) -> None:
        weights = [weight for weight in group["params"] if weight.grad is not None]
        weights.sort(key=matrix_shape)  # Equal shapes are orthogonalised together.
        updates = (self._momentum(weight, group["momentum"]) for weight in weights)
        for weight, update in zip(weights, orthogonalize(weights, updates), strict=True):
            scale = UPDATE_SCALE * math.sqrt(max(matrix_shape(weight)))
            shard = local_shard(weight)
            shard.mul_(1 - group["lr"] * group["weight_decay"])
            shard.add_(update.reshape(shard.shape), alpha=-group["lr"] * scale)

    def _momentum(self, weight: nn.Parameter, decay: float) -> Tensor:
        """Nesterov momentum of this rank's rows after another gradient, [rows, C]."""
        state = self.state[weight]
        assert weight.grad is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        gradient, momentum = local_shard(weight.grad), local_shard(state["momentum_buffer"])
        momentum.lerp_(gradient, 1 - decay)
        update = gradient.lerp(momentum, decay).reshape(len(gradient), matrix_shape(weight)[1])
        return update.to(torch.bfloat16) if update.is_cuda else update


def build_muon(model: nn.Module, groups: Iterable[dict[str, Any]], *, momentum: float, **settings: Any) -> Muon:
    """Build the optimizer of a model's parameter groups, each divided into hidden matrices and the rest."""
    inside = set(hidden_matrices(model))
    divided: list[dict[str, Any]] = []
    for group in groups:
        matrices = [weight for weight in group["params"] if weight in inside]
        others = [weight for weight in group["params"] if weight not in inside]
        divided += [{**group, "params": matrices, "momentum": momentum}, {**group, "params": others}]
    return Muon([group for group in divided if group["params"]], **settings)


def scale_rates(optimizer: AdamW, wide: Collection[nn.Parameter], ratio: float) -> None:
    """Let the updates of hidden states have the same size at any width (muP; Yang et al. 2022, table 8).

    A matrix with wide inputs gets a group of its own. Its learning rate is divided by the ratio, with Muon by its root:
    the spectral norm of its updates grows with the root only. The weight decay of a step stays.

    Args:
        optimizer: of the model's parameters, without a state.
        wide: matrices whose inputs are as wide as the network.
        ratio: width of the network over the width that the learning rates are meant for.
    """
    matrices = set(wide)
    for group in optimizer.param_groups[:]:
        factor = math.sqrt(ratio) if "momentum" in group else ratio
        own = [weight for weight in group["params"] if weight in matrices]
        group["params"] = [weight for weight in group["params"] if weight not in matrices]
        rates = {"lr": group["lr"] / factor, "weight_decay": group["weight_decay"] * factor}
        optimizer.add_param_group({**group, "params": own, **rates})
    optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Trained weights of linear layers and convolutions within stacks of layers, which are `nn.ModuleList`.

    Input and output layers and embeddings of time and sizes lie outside of stacks in all networks of the project, and
    so do all layers of a VAE's discriminator. Norms and biases have one dimension.
    """
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inside = {parameter for stack in stacks for parameter in stack.parameters()}
    return [weight for weight in model.parameters() if weight in inside and weight.requires_grad and weight.ndim > 1]


def matrix_shape(weight: Tensor) -> tuple[int, int]:
    """Shape of a weight as a matrix."""
    return weight.shape[0], weight.shape[1:].numel()


def newton_schulz(matrices: Tensor) -> Tensor:
    """Move the singular values of each matrix [K, R, C] near 1, into about [0.7, 1.2], in its dtype.

    Singular values below about 0.002 of the Frobenius norm stay smaller. In fp32 the iterations run on the small Gram
    matrix, which is faster; in 16 bits this would lose the small singular values.
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    if x.dtype == torch.float32:
        squares = x @ x.mT
        factor = product = _factor(squares)
        for _ in range(NUM_ITERATIONS - 1):
            squares = factor @ squares @ factor
            factor = _factor(squares)
            product = factor @ product
        x = product @ x
    else:
        a, b, c = COEFFICIENTS
        for _ in range(NUM_ITERATIONS):
            squares = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(squares, squares, squares, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _factor(squares: Tensor) -> Tensor:
    """Factor of an iteration, a I + b S + c S^2, from the Gram matrices S [K, R, R]."""
    a, b, c = COEFFICIENTS
    factor = torch.baddbmm(squares, squares, squares, beta=b, alpha=c)
    factor.diagonal(dim1=1, dim2=2).add_(a)
    return factor


def newton_schulz_flops(shape: tuple[int, int]) -> int:
    """Count the operations of `newton_schulz` for a matrix in 16 bits."""
    short, long = sorted(shape)
    return NUM_ITERATIONS * 2 * (2 * short * short * long + short**3)


def newton_schulz_each(matrices: Iterable[Tensor]) -> Iterator[Tensor]:
    """Compute `newton_schulz` of matrices [R, C], in batches of neighbours of one shape.

    A batch has at most `MAX_STACK` numbers, or one matrix.
    """
    for shape, neighbours in groupby(matrices, key=lambda matrix: matrix.shape):
        size = max(1, MAX_STACK // shape.numel())
        while batch := list(islice(neighbours, size)):
            yield from newton_schulz(torch.stack(batch))


def warmup_stable_decay(step: int, *, warmup: float, cooldown: float, total: int, final: float) -> float:
    """Compute the multiplier of the learning rate of a step: linear, constant, then 1 - sqrt (Hagele et al. 2024).

    Args:
        step: steps before this one.
        warmup: steps of the increase from 0.
        cooldown: steps of the decay, the last ones of the run.
        total: steps of the run.
        final: multiplier at the end of the run.
    """
    if step < warmup:
        return step / warmup
    passed = max(0.0, step - (total - cooldown)) / cooldown
    return 1 - (1 - final) * math.sqrt(passed)


# Sharded matrices


def orthogonalize(weights: Sequence[Tensor], updates: Iterable[Tensor]) -> Iterator[Tensor]:
    """Orthogonalise the updates [rows, C] of weights, of which a rank holds some rows, or all if they are not sharded.

    Each sharded matrix is computed by one rank, from the same numbers for any number of ranks. A rank sends and
    receives its shard of all matrices twice. Replicas (HSDP) compute the same.

    Args:
        weights: parameters, all sharded (DTensor) or none.
        updates: this rank's rows.
    """
    if not weights or not isinstance(weights[0], DTensor):
        return newton_schulz_each(updates)
    mesh = weights[0].device_mesh  # (replicas,) shards
    return iter(_orthogonalize_shards([matrix_shape(w) for w in weights], list(updates), mesh.get_group(mesh.ndim - 1)))


def _orthogonalize_shards(
    shapes: list[tuple[int, int]], shards: list[Tensor], group: dist.ProcessGroup
) -> list[Tensor]:
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    owners = deal([newton_schulz_flops(shape) for shape in shapes], num_ranks)
    dealt = [index for owner in range(num_ranks) for index, one in enumerate(owners) if one == owner]
    mine = [index for index in dealt if owners[index] == rank]
    sent = [sum(shards[index].numel() for index in dealt if owners[index] == owner) for owner in range(num_ranks)]
    rows = [[num_rows(shapes[index][0], num_ranks, source) for index in mine] for source in range(num_ranks)]
    sizes = [[num * shapes[index][1] for num, index in zip(part, mine, strict=True)] for part in rows]
    received = [sum(part) for part in sizes]

    # Gather my matrices
    outgoing = torch.cat([shards[index].flatten() for index in dealt])
    incoming = outgoing.new_empty(sum(received))
    dist.all_to_all_single(incoming, outgoing, received, sent, group)
    pieces = [part.split(size) for part, size in zip(incoming.split(received), sizes, strict=True)]
    matrices = [torch.cat(parts).view(shapes[index]) for index, *parts in zip(mine, *pieces, strict=True)]

    # Return the rows of the results
    results = [result.split(list(num)) for result, *num in zip(newton_schulz_each(matrices), *rows, strict=True)]
    incoming = torch.cat([part.flatten() for parts in zip(*results, strict=True) for part in parts] or [incoming])
    dist.all_to_all_single(outgoing, incoming, sent, received, group)
    shares = dict(zip(dealt, outgoing.split([shards[index].numel() for index in dealt]), strict=True))
    return [shares[index] for index in range(len(shards))]


def deal(costs: list[int], num_ranks: int) -> list[int]:
    """Choose the rank of each matrix: the most expensive first, each to the rank with the least so far."""
    loads, owners = [0] * num_ranks, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += costs[index]
    return owners


def num_rows(size: int, num_ranks: int, rank: int) -> int:
    """Rows of a matrix on a rank, as `torch.chunk` cuts them."""
    length = -(-size // num_ranks)
    return max(0, min(length, size - rank * length))
