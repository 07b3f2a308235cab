"""Compilation of the distinct blocks of a network in parallel processes.

Inductor compiles in Python, one graph after the other. Here an eager forward pass records the arguments of each block.
Processes then run one distinct block each, forward and backward, on memory of the same shapes, which fills Inductor's
cache on disk. The first step of training finds its graphs there. A block that it does not find, it compiles.
"""

import atexit
import contextlib
import functools
import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor import config as inductor
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves, tree_map_only

from diffusion.config.model import ModelConfig, PerformanceConfig
from diffusion.config.training import Device
from diffusion.launch import end_with_parent
from diffusion.models import fast
from diffusion.models.architectures import build_network
from diffusion.models.fast.compilation import find_blocks, outer_norms
from diffusion.models.fast.norms import autocast_dtype, use_low_precision_norms
from diffusion.models.ingredients import adapt, find_ingredients
from diffusion.models.networks import Network


@dataclass(frozen=True)
class BlockCall:
    """A call of a block in training, without values: all tensors are on the meta device."""

    name: str
    """Name of the block in the network."""

    parameters: dict[str, nn.Parameter]
    """Parameters of the block during the call, which FSDP2 has gathered and cast."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    device: torch.device

    autocast: torch.dtype | None
    """Dtype of autocast; None without."""

    is_sharded: bool
    """The block is a unit of FSDP2, which Dynamo names in its graphs."""

    @property
    def signature(self) -> str:
        """Equal for calls that share a graph, if the blocks have the same configuration."""
        values = (list(self.parameters.values()), self.args, self.kwargs)
        return str(tree_map_only(Tensor, lambda t: (*t.shape, t.stride(), t.dtype, t.requires_grad), values))


@contextlib.contextmanager
def recording(network: nn.Module) -> Iterator[list[BlockCall]]:
    """Collect the distinct calls of compiled blocks, which run uncompiled and keep nothing for the backward pass."""
    calls: dict[str, BlockCall] = {}

    def record(name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        parameters = {key: _parameter(weight, "meta") for key, weight in block.named_parameters()}
        args, kwargs = tree_map_only(Tensor, lambda tensor: _on(tensor, "meta"), (args, kwargs))
        autocast = autocast_dtype(tensors[0])
        call = BlockCall(name, parameters, args, kwargs, tensors[0].device, autocast, isinstance(block, FSDPModule))
        calls.setdefault(f"{block} {call.signature}", call)

    blocks = find_blocks(network)
    compiled = {*blocks, *outer_norms(network, blocks)}
    hooks = [
        module.register_forward_pre_hook(functools.partial(record, name), with_kwargs=True)
        for name, module in network.named_modules()
        if module in compiled
    ]
    found: list[BlockCall] = []
    with torch.compiler.set_stance("force_eager"), torch.autograd.graph.saved_tensors_hooks(_drop, _drop):
        yield found
    for hook in hooks:
        hook.remove()
    found += calls.values()


def _drop(_: Any) -> Any:
    return None


def _on(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return memory of the same shape, strides and dtype on a device, that requires a gradient if the tensor does."""
    requires_grad = tensor.requires_grad
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device, requires_grad=requires_grad
    )


def _parameter(weight: Tensor, device: torch.device | str) -> nn.Parameter:
    return nn.Parameter(_on(weight.detach(), device), weight.requires_grad)


class Compilers:
    """Processes that fill Inductor's cache, each with the network on the meta device.

    Args:
        num_processes: number of processes, which start at once.
        model: configuration of the network.
        performance: its options.
        device: device of training.
    """

    def __init__(self, num_processes: int, model: ModelConfig, performance: PerformanceConfig, device: Device) -> None:
        # CUDA does not survive a fork.
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(num_processes, spawn, _start, (os.getpid(), model, performance, device))
        for _ in range(num_processes):
            self._pool.submit(int)
        self._processes = list(self._pool._processes.values())
        atexit.register(self.end)  # Runs before the exit handler of multiprocessing, which waits for the processes.

    def end(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            process.kill()

    def compile(self, calls: list[BlockCall]) -> list[str]:
        """Compile blocks and end the processes; return the errors."""
        # Global settings that the keys of Inductor's cache include.
        precision = str(torch.backends.cuda.matmul.fp32_precision)
        settings = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), precision
        try:
            with self._pool:
                futures = [self._pool.submit(_compile, call, settings) for call in calls]
        except BrokenProcessPool as error:  # A process has ended, while it started.
            return [str(error)]
        return [str(error) for error in map(Future.exception, futures) if error is not None]


_network: Network


def _start(parent: int, model: ModelConfig, performance: PerformanceConfig, device: Device) -> None:
    """Build the network as it is trained, on the meta device; the process ends with its parent."""
    global _network
    end_with_parent(signal.SIGKILL, parent)
    inductor.compile_threads = 1
    with torch.device("meta"):
        _network = build_network(model)
        if model.low_precision_norms:
            use_low_precision_norms(_network)
        fast.apply(_network, performance, device)
        adapt(_network, find_ingredients(model), initial=None, seed=0)
    _network.train()


def _compile(call: BlockCall, settings: tuple[int, bool, str]) -> None:
    """Run a block forward and backward, as training does."""
    num_threads, is_deterministic, matmul_precision = settings
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(is_deterministic)
    torch.backends.cuda.matmul.fp32_precision = matmul_precision
    block = _network.get_submodule(call.name)
    block.load_state_dict({name: _parameter(p, call.device) for name, p in call.parameters.items()}, assign=True)
    for module in block.modules() if call.is_sharded else ():
        module._is_fsdp_managed_module = module._fsdp_use_orig_params = True  # pyright: ignore -- as fully_shard does
    args, kwargs = tree_map_only(Tensor, lambda tensor: _on(tensor, call.device), (call.args, call.kwargs))
    with torch.autocast(call.device.type, call.autocast, enabled=call.autocast is not None):
        outputs = tree_leaves(block(*args, **kwargs))
    torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
    block.to_empty(device="meta")
