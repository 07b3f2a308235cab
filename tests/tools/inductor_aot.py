"""Code that Inductor generates for a GPU that this machine need not have.

Autograd asks CUDA for a stream as soon as it meets a tensor of a GPU, with or without data. So modules and inputs are
on the CPU, and a graph moves to the GPU after it has been differentiated and partitioned, before Inductor lowers it.
"""

import ast
import contextlib
import re
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._guards import detect_fake_mode
from torch._inductor import codecache, compile_fx, config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import IRNode
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties
from torch.utils._pytree import tree_map_only
from torch.utils._triton import has_triton

from tests.tools.triton_aot import Kernel, measure, triton_driver


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A graph that Inductor has lowered.

    Attributes:
        is_backward: whether it is the backward pass of another.
        source: Inductor's Python file: Triton kernels, and a function `call` with all allocations and launches.
        inputs: sizes, strides and dtype of each argument of `call`.
    """

    is_backward: bool
    source: str
    inputs: list[Any]

    def execute(self, load: Callable[..., Any]) -> dict[str, Any]:
        """Execute the file, with `load` in place of `AsyncCompile.triton`, and return its names."""
        names = {"__name__": "generated"}
        with mock.patch.object(AsyncCompile, "triton", load):
            exec(compile(self.source, "<inductor>", "exec"), names)
        return names

    def kernels(self, arch: int, *, every_tiling: bool = False) -> list[Kernel]:
        """Compile the Triton kernels.

        Args:
            arch: for which architecture.
            every_tiling: each candidate of the autotuner, and not only the first.
        """
        tuned, kernels = [], []
        compile_source = triton.compile

        def load(self: AsyncCompile, name: str, source: str, device_str: str = "cuda") -> None:
            tuned.append(getattr(codecache.PyCodeCache.load(source), name))

        def compile_and_measure(*args: Any, **kwargs: Any) -> Any:
            compiled = compile_source(*args, **kwargs)
            kernels.append(measure(compiled))
            return compiled

        with _gpu(arch):
            self.execute(load)
        with _gpu(arch), mock.patch.object(triton, "compile", compile_and_measure):
            for kernel in tuned:
                kernel.device_props = kernel.device_props._replace(cc=arch)
                for tiling in kernel.configs if every_tiling else kernel.configs[:1]:
                    kernel._precompile_config(tiling)
        return kernels


@contextlib.contextmanager
def lowering_for_gpu(arch: int = 90) -> Iterator[list[Graph]]:
    """What `torch.compile` traces on the CPU is lowered for a GPU, and not run: results are tensors without values.

    Attention stays the operator of the CPU.

    Yields:
        The graphs, in the order of lowering.
    """
    graphs: list[Graph] = []
    codegen_and_compile = compile_fx._InProcessFxCompile.codegen_and_compile

    def lower(self: Any, gm: torch.fx.GraphModule, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        mode = detect_fake_mode(inputs)
        assert mode is not None
        for node in gm.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
        with mode:
            moved = tree_map_only(Tensor, lambda x: _empty(x.shape, x.stride(), x.dtype, "cuda"), list(inputs))
        return codegen_and_compile(self, gm, moved, *args, **kwargs)

    def generate(self: GraphLowering) -> Any:
        code, _ = self.codegen()
        inputs = [_layout(one) for one in self.graph_inputs.values()]
        graphs.append(Graph(is_backward=self.is_backward, source=code.value, inputs=inputs))
        outputs = [_layout(output) for output in self.graph_outputs]
        return types.SimpleNamespace(call=lambda _: [_empty(*output) if output else None for output in outputs])

    with (
        _gpu(arch),
        mock.patch.object(compile_fx._InProcessFxCompile, "codegen_and_compile", lower),
        mock.patch.object(GraphLowering, "compile_to_module", generate),
        config.patch(fx_graph_cache=False, compile_threads=1),
    ):
        torch._dynamo.reset()
        yield graphs
    torch._dynamo.reset()


def _layout(value: Any) -> tuple[Any, ...] | None:
    """Sizes, strides and dtype of a graph's input or output; None of one that is no tensor."""
    if not (isinstance(value, IRNode) and value.has_tensor_output()):
        return None
    return [int(size) for size in value.get_size()], [int(step) for step in value.get_stride()], value.get_dtype()


def _empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


@contextlib.contextmanager
def _gpu(arch: int) -> Iterator[None]:
    """Properties of a GPU of an architecture (the sizes are the H200's), for Inductor and Triton."""
    properties = types.SimpleNamespace(
        name="absent GPU",
        major=arch // 10,
        multi_processor_count=132,
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
    )
    replacements: list[tuple[Any, str, Any]] = [
        (torch.cuda, "get_device_capability", lambda *_: divmod(arch, 10)),
        (CudaInterface, "get_device_properties", staticmethod(lambda *_: properties)),
        (CudaInterface.Worker, "get_device_properties", staticmethod(lambda *_: properties)),
        (CudaInterface, "is_bf16_supported", staticmethod(lambda *_, **__: True)),
        (CudaInterface, "is_available", staticmethod(lambda: True)),
        (torch._C, "_select_conv_backend", lambda *_, **__: torch._C._ConvBackend.Cudnn),  # It asks for bf16.
        (triton_helpers, "set_driver_to_gpu", lambda: None),
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(triton_driver(arch))
        for target, name, value in replacements:
            stack.enter_context(mock.patch.object(target, name, value))
        for cached in (DeviceProperties.create, has_triton):  # Of the GPU that is there, or is not.
            stack.callback(cached.cache_clear)  # Entered last: cleared first.
            cached.cache_clear()
        yield


# Bytes that the kernels of generated code read and write


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """A launch of a Triton kernel.

    Attributes:
        kernel: its name.
        num_read: bytes: each tensor once, or once per loop over it.
        num_written: bytes.
    """

    kernel: str
    num_read: int
    num_written: int


def traffic(graph: Graph) -> list[Traffic]:
    """The launches of Triton kernels, in order; convolutions and matrix products are none.

    `call` runs with tensors without data, and each launch is counted instead.
    """
    found = []

    def load(self: AsyncCompile, name: str, source: str, device_str: str = "cuda") -> Any:
        return types.SimpleNamespace(run=lambda *args, stream: found.append(_count(name, source, args)))

    def nothing(*args: Any) -> None:
        pass

    names = graph.execute(load)
    names.update({name: nothing for name in names if name.startswith("assert_")})
    names.update(get_raw_stream=nothing, empty_strided_cuda=lambda *layout: _empty(*layout, device="meta"))
    with (
        mock.patch.object(torch.cuda, "_DeviceGuard", contextlib.nullcontext),
        mock.patch.object(torch.cuda, "set_device", nothing),
    ):
        names["call"]([_empty(*layout, device="meta") for layout in graph.inputs])
    return found


def _count(name: str, kernel: str, args: Sequence[Any]) -> Traffic:
    signature = re.search(r"'signature': (\{[^}]*\})", kernel)
    assert signature
    parameters = zip(ast.literal_eval(signature[1]), args, strict=False)  # Constants follow.
    sizes = {key: arg.nbytes for key, arg in parameters if isinstance(arg, Tensor)}
    parts = re.split(r"\n    for ", kernel)  # Before the first loop, and from each loop to the next.
    read = sum(sizes[key] for part in parts for key in set(re.findall(r"tl\.load\((\w+)", part)))
    return Traffic(
        kernel=name, num_read=read, num_written=sum(sizes[key] for key in set(re.findall(r"tl\.store\((\w+)", kernel)))
    )
