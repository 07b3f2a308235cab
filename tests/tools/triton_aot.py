"""Ahead-of-time compilation of Triton kernels, for a GPU that this machine need not have."""

import math
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

ARCHITECTURES = (80, 90, 100)
"""Compute capabilities times ten: A100, H100 and H200, B200."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A compiled kernel.

    Attributes:
        name: of its function.
        num_registers: of a thread.
        num_spilled: bytes of local memory of a thread for values without a register.
        ptx: its code.
    """

    name: str
    num_registers: int
    num_spilled: int
    ptx: str


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch of a kernel.

    Attributes:
        kernel: the function.
        grid: number of programs along each axis.
        args: arguments by position, tensors as their dtypes.
        kwargs: arguments by name, options such as `num_warps` included.
    """

    kernel: JITFunction
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def compile(self, arch: int) -> Kernel:
        """What the launch would compile on a GPU of an architecture; tensors are aligned to 16 bytes."""
        with triton_driver(arch):
            compiled = self.kernel.warmup(*self.args, grid=self.grid, **self.kwargs)
        return measure(compiled)


class _AbsentGpu:
    """Triton's driver of a GPU that is not there."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # Kernels are kept by device.

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def triton_driver(arch: int) -> Iterator[None]:
    """Let Triton compile for an architecture, whatever this machine has."""
    before = dict(vars(driver))  # `driver.active` itself would look for a GPU.
    driver.set_active(_AbsentGpu(arch))
    try:
        yield
    finally:
        vars(driver).update(before)


class _Recorder(TorchDispatchMode):
    """Note what is launched: operators of torch, and the Triton kernels within operators of our own."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch | OpOverload] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own, kwargs = OPDEFS.get(func._schema.name), kwargs or {}
        result = NotImplemented
        with self:
            if own is not None:
                result = own._init_fn(*args, **kwargs)
            elif func.namespace == "aten":
                result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if func.namespace == "aten" and not func.is_view and "empty" not in func._schema.name:
            self.launches.append(func)
        return func(*args, **kwargs)


def launches(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """What a function would launch on a GPU, without one.

    Args:
        function: called with tensors without data, which say that they are on a GPU (`is_cuda`). They are on the CPU:
            slices of tensors on a GPU ask for one.
        args: its arguments.
        kwargs: those by name.

    Returns:
        A `Launch` for each Triton kernel, also of our operators; the `OpOverload` for each operator of torch.
    """
    recorder = _Recorder()

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        args = tuple(arg.dtype if isinstance(arg, torch.Tensor) else arg for arg in args)
        assert not any(isinstance(arg, torch.Tensor) for arg in kwargs.values())
        if callable(grid):
            grid = grid(dict(zip(self.arg_names, args, strict=False)) | kwargs)
        recorder.launches.append(Launch(kernel=self, grid=tuple(grid), args=args, kwargs=kwargs))

    with FakeTensorMode() as mode, mock.patch.object(JITFunction, "run", record):
        args, kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
        with mock.patch.object(torch.Tensor, "is_cuda", True), recorder:
            function(*args, **kwargs)
    return recorder.launches


def measure(compiled: Any) -> Kernel:
    """Read what a kernel that `triton.compile` returned takes of a GPU."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert usage, report
    ptx = compiled.asm["ptx"]
    # Arrays, such as a cosine's, are in local memory too.
    arrays = sum(int(size) for size in re.findall(r"^\s*\.local .*\[(\d+)\];", ptx, re.MULTILINE))
    return Kernel(
        name=compiled.metadata.name,
        num_registers=int(usage[1]),
        num_spilled=max(0, int(usage[2]) - math.ceil(arrays / 8) * 8),
        ptx=ptx,
    )
