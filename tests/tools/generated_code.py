"""Bytes that the kernels of Inductor's generated code read and write."""

import ast
import math
import re
from dataclasses import dataclass

SIZES = {"bf16": 2, "fp16": 2, "fp32": 4, "i64": 8, "i32": 4, "i1": 1}

_TENSOR = r"(?:assert_size_stride\((\w+), |(\w+) = (?:empty_strided_cuda|reinterpret_tensor)\((?:\w+, )?)\(([^)]*)\)"
"""Name and shape of a tensor where it first stands."""


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


def traffic(source: str) -> list[Traffic]:
    """The launches of Triton kernels in a file of Inductor's, in order; convolutions and matrix products are none."""
    kernels = dict(re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", source, re.DOTALL))
    call = source[source.index("def call(") :]
    tensors = re.findall(_TENSOR, call)
    numel = {first or second: _numel(shape) for first, second, shape in tensors}
    found = []
    for line in call.splitlines():
        renamed = re.match(r"\s*(\w+) = (\w+)(?:; del|$)", line)
        if renamed:
            numel[renamed[1]] = numel[renamed[2]]
        launch = re.match(r"\s*(triton_\w+)\.run\((.*), stream=", line)
        if launch:
            arguments = [arg.strip() for arg in re.split(r",(?![^()]*\))", launch[2])]
            found.append(_count(launch[1], kernels[launch[1]], [numel.get(arg) or _view(arg) for arg in arguments]))
    return found


def _count(name: str, kernel: str, numels: list[int]) -> Traffic:
    signature = re.search(r"'signature': (\{[^}]*\})", kernel)
    assert signature
    pointers = {key: kind for key, kind in ast.literal_eval(signature[1]).items() if kind.startswith("*")}
    sizes = {key: numel * SIZES[kind[1:]] for (key, kind), numel in zip(pointers.items(), numels, strict=False)}
    parts = re.split(r"\n    for ", kernel)  # Before the first loop, and from each loop to the next.
    read = sum(sizes[key] for part in parts for key in set(re.findall(r"tl\.load\((\w+)", part)))
    return Traffic(
        kernel=name, num_read=read, num_written=sum(sizes[key] for key in set(re.findall(r"tl\.store\((\w+)", kernel)))
    )


def _view(argument: str) -> int:
    """Elements of a view that is an argument; 0 of a number."""
    shape = re.match(r"reinterpret_tensor\(\w+, \(([^)]*)\)", argument)
    return _numel(shape[1]) if shape else 0


def _numel(shape: str) -> int:
    return math.prod(int(size) for size in shape.split(",") if size.strip())
