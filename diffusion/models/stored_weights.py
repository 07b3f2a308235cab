"""Weights that are read in parts, and safetensors files larger than the memory."""

import json
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diffusion.errors import DataError

READ_BYTES = 256 * 2**20
"""Bytes of weights in memory while a file is written."""

_DTYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """Weights in a file or folder."""

    source: str
    """Path for messages."""

    shapes: Mapping[str, Tensor]
    """Names, shapes and dtypes, as tensors on the meta device."""

    read: Callable[[Collection[str]], dict[str, Tensor]]
    """Reads weights by name to the CPU."""

    def read_all(self) -> dict[str, Tensor]:
        """Read all weights."""
        return self.read(self.shapes.keys())

    def below(self, prefix: str) -> "StoredWeights":
        """Select names with a prefix, which is removed."""

        def read(names: Collection[str]) -> dict[str, Tensor]:
            return {
                name.removeprefix(prefix): tensor for name, tensor in self.read([prefix + n for n in names]).items()
            }

        found = {name.removeprefix(prefix): shape for name, shape in self.shapes.items() if name.startswith(prefix)}
        return StoredWeights(source=self.source, shapes=found, read=read)

    def over(self, base: "StoredWeights") -> "StoredWeights":
        """Merge with other weights; these take precedence."""

        def read(names: Collection[str]) -> dict[str, Tensor]:
            here = [name for name in names if name in self.shapes]
            there = [name for name in names if name not in self.shapes]
            return {**(base.read(there) if there else {}), **(self.read(here) if here else {})}

        return StoredWeights(source=self.source, shapes={**base.shapes, **self.shapes}, read=read)


def open_safetensors(files: Sequence[Path], source: Path) -> StoredWeights:
    """Open safetensors files.

    Args:
        files: files with disjoint names.
        source: path for messages.

    Raises:
        DataError: a file is missing or damaged, or holds a dtype other than float32, float16 or bfloat16.
    """
    paths: dict[str, Path] = {}
    shapes: dict[str, Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    part = file.get_slice(name)
                    paths[name] = path
                    shapes[name] = torch.empty(part.get_shape(), dtype=_DTYPES[part.get_dtype()], device="meta")
        except (SafetensorError, OSError, KeyError) as error:
            raise DataError(f"{path} is not a file of weights, or damaged: {error}") from error

    def read(names: Collection[str]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for path in sorted({paths[name] for name in names}):
            with safe_open(path, framework="pt") as file:
                tensors.update({name: file.get_tensor(name) for name in names if paths[name] == path})
        return tensors

    return StoredWeights(source=str(source), shapes=shapes, read=read)


def write_safetensors(path: Path, weights: StoredWeights, names: Collection[str], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file with `READ_BYTES` of weights in memory at a time.

    The library's writer needs all weights in memory. Equal weights and metadata give equal bytes.

    Args:
        path: the file, which the caller renames when it is complete.
        weights: source of the weights.
        names: names of the weights, in the order of the file.
        metadata: metadata of the header.

    Raises:
        OSError: the file cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        shape = weights.shapes[name]
        begin, end = end, end + shape.nbytes
        header[name] = {
            "dtype": _DTYPE_NAMES[shape.dtype],
            "shape": list(shape.shape),
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)))
        file.write(encoded)
        for group in cut_by_size(weights.shapes, names, READ_BYTES):
            _append(file, weights.read(group), group)


def _append(file: BinaryIO, tensors: dict[str, Tensor], names: list[str]) -> None:
    for name in names:
        file.write(tensors.pop(name).contiguous().flatten().view(torch.uint8).numpy().data)


def cut_by_size(shapes: Mapping[str, Tensor], names: Iterable[str], max_bytes: int) -> Iterator[list[str]]:
    """Group names, in their order, by at most `max_bytes` of weights; a larger weight is a group of its own."""
    group: list[str] = []
    size = 0
    for name in names:
        if group and size + shapes[name].nbytes > max_bytes:
            yield group
            group, size = [], 0
        group.append(name)
        size += shapes[name].nbytes
    if group:
        yield group
