"""Reading of checkpoints, in which no code of theirs is run.

The index of a sharded checkpoint is a pickle. Torch and Composer read it, the entries that are not tensors, and whole
`.pt` files with the full power of pickle. So `check_contents` reads each of them before, with unpicklers that know
nothing but what a checkpoint consists of.
"""

import datetime
import io
import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy._core.multiarray import _reconstruct, scalar  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.torch_version import TorchVersion

from diffusion.checkpointing.checksums import check_checksums
from diffusion.checkpointing.layout import INDEX
from diffusion.config.model import Weights
from diffusion.errors import DataError
from diffusion.models.stored_weights import StoredWeights

_METADATA = "torch.distributed.checkpoint.metadata"
_INDEX_CLASSES = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *((_METADATA, name) for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    (_METADATA, "TensorProperties"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")),
}
"""What an index consists of, beside dtypes and plain containers."""

_NUMPY_TYPES = [np.ndarray, np.dtype, _reconstruct, scalar, *(type(np.dtype(kind)) for kind in "?bhilqBHILQefd")]
_SAFE_TYPES = [datetime.timedelta, TorchVersion, *_NUMPY_TYPES]
"""What Composer stores beside tensors and plain containers."""

_DAMAGE = (
    pickle.UnpicklingError,
    EOFError,
    RuntimeError,
    AttributeError,
    ImportError,
    LookupError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
    OSError,
)
"""What reading a damaged pickle or archive raises."""


class UnsafeCheckpointError(DataError):
    """A checkpoint holds what might run code, or reach outside of its folder. Nothing of it was loaded."""


# The index of a sharded checkpoint


class _Sealed(type):
    """A class that a pickle cannot change."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"{cls.__name__}.{name} must not be assigned")


class _Inert(metaclass=_Sealed):
    """Takes the place of a class of the index: keeps what the pickle gives it and does nothing."""

    arguments: tuple[Any, ...] = ()
    content: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.content = state


_INERT = {(module, name): _Sealed(name, (_Inert,), {}) for module, name in _INDEX_CLASSES}


class _IndexUnpickler(pickle.Unpickler):
    """Reads an index into inert objects."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return name
        if (found := _INERT.get((module, name))) is None:
            raise UnsafeCheckpointError(f"{module}.{name} does not belong in it")
        return found


@dataclass(frozen=True)
class StoredEntry:
    """Location of an entry of a sharded checkpoint."""

    name: str
    file: str
    offset: int
    length: int
    is_tensor: bool


def read_entries(checkpoint: Path) -> list[StoredEntry]:
    """List the entries of a sharded checkpoint from its index.

    Raises:
        UnsafeCheckpointError: the index would run code, or names files outside of the folder.
        DataError: it is missing, damaged, or not an index.
    """
    path = checkpoint / INDEX
    try:
        with path.open("rb") as file:
            return list(_entries(_IndexUnpickler(file).load()))
    except UnsafeCheckpointError as error:
        raise UnsafeCheckpointError(f"{path} is not the index of a checkpoint: {error}. Nothing was loaded") from error
    except _DAMAGE as error:
        raise DataError(f"{path} is not the index of a checkpoint: {error}. Nothing was loaded") from error


def _entries(index: Any) -> Iterator[StoredEntry]:
    stored = index.content["state_dict_metadata"]
    for key, location in index.content["storage_data"].items():
        name, file = key.content["fqn"], location.content["relative_path"]
        offset, length = location.content["offset"], location.content["length"]
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise UnsafeCheckpointError(f"it names the file {file!r}, outside of its folder")
        if location.content.get("transform_descriptors"):
            raise UnsafeCheckpointError(f"it names a transformation of {name}, which this package never writes")
        if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
            raise ValueError(f"{name} is at {offset!r}, {length!r}")
        yield StoredEntry(name, file, offset, length, type(stored[name]).__name__ == "TensorStorageMetadata")


class SafeReader(FileSystemReader):
    """Reads a sharded checkpoint whose index runs no code."""

    def read_metadata(self) -> Metadata:
        """Read the index.

        Raises:
            DataError: it is damaged, or would run code.
        """
        read_entries(Path(self.path))
        return super().read_metadata()


# Files and entries


def load_safely(source: Path | io.BytesIO, name: str, *, mmap: bool = False) -> Any:
    """torch.load of tensors and plain containers, with the NumPy arrays and time spans that Composer stores.

    Args:
        source: a file, or its content.
        name: its name in messages.
        mmap: map the tensors of a file instead of reading them.

    Raises:
        UnsafeCheckpointError: it holds something else, which might run code.
        DataError: it is damaged.
    """
    with torch.serialization.safe_globals(_SAFE_TYPES):
        try:
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
        except _DAMAGE as error:
            if rejected := re.search(r"GLOBAL ([\w.]+)", str(error)):
                raise UnsafeCheckpointError(
                    f"{name}: it holds {rejected[1]}, which does not belong in a checkpoint. Nothing was loaded"
                ) from error
            raise DataError(f"{name} is damaged: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The first line of torch's message without its preamble."""
    text = str(error).rpartition("WeightsUnpickler error: ")[2]
    return text.splitlines()[0] if text else type(error).__name__


class SafeLoadPlanner(DefaultLoadPlanner):
    """Loads the entries that are not tensors without running code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Decode an entry that is not a tensor."""
        key = read_item.dest_index.fqn
        content = load_safely(value, key)
        self.state_dict[key] = content
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[key], content)


def load_sharded(content: dict[str, Any], checkpoint: Path) -> None:
    """Fill a flat dictionary in place with entries of a sharded checkpoint, in this process alone.

    Args:
        content: tensors to read into, and None for other entries, by the keys of the checkpoint.
        checkpoint: its folder.

    Raises:
        DataError: an entry is damaged, or would run code.
    """
    planner = SafeLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # no_dist asks for that.
            load(content, storage_reader=SafeReader(checkpoint), planner=planner, no_dist=True)
    except CheckpointException as error:
        raise as_data_error(error, checkpoint) from error


def as_data_error(error: CheckpointException, checkpoint: Path | str) -> DataError:
    """The error of a distributed load as one message."""
    rank, (cause, _) = next(iter(error.failures.items()))
    if isinstance(cause, DataError):
        return cause
    where = f"checkpoint {checkpoint} cannot be loaded" + (f" (rank {rank})" if rank else "")
    kind = UnsafeCheckpointError if re.search(r"GLOBAL [\w.]+", str(cause)) else DataError
    return kind(f"{where}: {_reason(cause)}. Choose another one, or remove it")


# Checks


def check_contents(checkpoint: Path, *, thoroughly: bool = True) -> None:
    """Check that a checkpoint runs no code when it is read, and that its bytes are those that were written.

    Args:
        checkpoint: file or folder.
        thoroughly: compare a folder with its checksums, which reads all of it. A file is always compared.

    Raises:
        UnsafeCheckpointError: it would run code.
        DataError: it is damaged.
    """
    if not checkpoint.is_dir():
        check_bytes(checkpoint)
        return
    entries = [entry for entry in read_entries(checkpoint) if not entry.is_tensor]
    for file in sorted({entry.file for entry in entries}):
        _check_entries(checkpoint / file, [entry for entry in entries if entry.file == file])
    if thoroughly:
        check_bytes(checkpoint)


def check_bytes(checkpoint: Path) -> None:
    """Compare a checkpoint with its checksums.

    Raises:
        UnsafeCheckpointError: it would run code.
        DataError: its bytes have changed.
    """
    if not checkpoint.is_dir():
        _check_file(checkpoint)
        return
    check_checksums(checkpoint, {INDEX, *(entry.file for entry in read_entries(checkpoint))})


def _check_entries(path: Path, entries: list[StoredEntry]) -> None:
    try:
        with path.open("rb") as file:
            for entry in entries:
                file.seek(entry.offset)
                load_safely(io.BytesIO(file.read(entry.length)), f"{path}, entry {entry.name}")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _check_file(path: Path) -> None:
    """Compare a `.pt` checkpoint with the checksums in its archive, and look for code."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except _DAMAGE as error:
        raise DataError(f"{path} is damaged: {error}") from error
    if damaged is not None:
        raise DataError(f"{path} is damaged: {damaged} does not have its checksum")
    load_safely(path, str(path), mmap=True)


# What a checkpoint holds


@dataclass(frozen=True, kw_only=True)
class StoredState:
    """The entries of a checkpoint by dotted keys such as `state.model.unet.conv_in.weight`, read on request.

    Sharded checkpoints and files have the same keys.
    """

    entries: dict[str, Tensor | None]
    """Tensors of the meta device; None for entries that are not tensors."""

    read: Callable[[Collection[str]], dict[str, Any]]
    """Reads the entries of some keys, to the CPU."""

    def read_below(self, prefix: str) -> dict[str, Any]:
        """Read all entries whose keys begin with a prefix, by the rest of their keys."""
        content = self.read([key for key in self.entries if key.startswith(prefix)])
        return {key.removeprefix(prefix): value for key, value in content.items()}


def open_state(checkpoint: Path) -> StoredState:
    """Open a checkpoint in one process.

    Raises:
        DataError: its index is damaged, or would run code; or the file is.
    """
    return _open_folder(checkpoint) if checkpoint.is_dir() else _open_file(checkpoint)


def _open_folder(checkpoint: Path) -> StoredState:
    stored = SafeReader(checkpoint).read_metadata().state_dict_metadata
    entries = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        if isinstance(entry, TensorStorageMetadata)
        else None
        for key, entry in stored.items()
    }

    def read(keys: Collection[str]) -> dict[str, Any]:
        shapes = {key: entries[key] for key in keys}
        content = {
            key: None if shape is None else torch.empty_like(shape, device="cpu") for key, shape in shapes.items()
        }
        if content:
            load_sharded(content, checkpoint)
        return content

    return StoredState(entries=entries, read=read)


def _open_file(checkpoint: Path) -> StoredState:
    content = dict(flatten(load_safely(checkpoint, f"checkpoint {checkpoint}", mmap=True)))

    def read(keys: Collection[str]) -> dict[str, Any]:
        values = {key: content[key] for key in keys}
        return {key: value.clone() if isinstance(value, Tensor) else value for key, value in values.items()}

    entries = {
        key: torch.empty_like(value, device="meta") if isinstance(value, Tensor) else None
        for key, value in content.items()
    }
    return StoredState(entries=entries, read=read)


def flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The values in nested dictionaries and lists, by dotted keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield key, value
        return
    for name, content in items:
        yield from flatten(content, f"{key}.{name}" if key else str(name))


def read_all(checkpoint: Path) -> dict[str, Any]:
    """Read everything in a checkpoint, in one process, by dotted keys such as `state.model.unet.conv_in.weight`.

    Raises:
        DataError: the checkpoint is damaged, or would run code.
    """
    return open_state(checkpoint).read_below("")


def read_record(checkpoint: Path) -> dict[str, Any]:
    """Read what a run has stored about itself in a checkpoint: `config` (YAML), `model`.

    Raises:
        DataError: the checkpoint is damaged, or was not written by this package.
    """
    record = open_state(checkpoint).read_below("state.callbacks.RunRecord.")
    if "config" not in record:
        raise DataError(f"checkpoint {checkpoint} has no configuration: it was not written by this package")
    return record


@dataclass(frozen=True, kw_only=True)
class Position:
    """The progress of a run."""

    num_steps: int
    """Optimizer steps that were done."""

    order: dict[str, str | int | None]
    """Fingerprint of the order of its samples (`diffusion.datasets.sample_order.GlobalOrder.fingerprint`)."""


def read_position(checkpoint: Path) -> Position:
    """Read the progress of a run at a checkpoint.

    Raises:
        DataError: the checkpoint is damaged, or of a run whose data was not in this package's order.
    """
    keys = {"steps": "state.timestamp.Timestamp.batch", "order": "state.dataset_state.train.order"}
    state = open_state(checkpoint)
    found = state.read([key for key in keys.values() if key in state.entries])
    steps, order = found.get(keys["steps"]), found.get(keys["order"])
    if not isinstance(steps, int) or not isinstance(order, str):
        raise DataError(f"checkpoint {checkpoint} does not record the order of its samples")
    return Position(num_steps=steps, order=json.loads(order))


# The U-Net's weights

_UNET = "unet."
_MODEL = "state.model."
_AVERAGES = "state.callbacks.LateStartEMA."
_LABELS = f"{_AVERAGES}labels"


def open_unet(checkpoint: Path, weights: str, *, is_checked: bool = False) -> StoredWeights:
    """Open the U-Net's weights of a checkpoint, in one process, after a comparison with its checksums.

    An average holds the trained weights; frozen ones are those of the model.

    Args:
        checkpoint: file or folder.
        weights: "raw" for the training weights, "ema" for the first average, or an average's label: `decay-0.999`.
        is_checked: the checksums have been compared on this node.

    Returns:
        Weights by the U-Net's own parameter names.

    Raises:
        DataError: the checkpoint is damaged, or holds no such average.
    """
    if not is_checked:
        check_bytes(checkpoint)
    state = open_state(checkpoint)
    shapes = {key: tensor for key, tensor in state.entries.items() if tensor is not None}
    stored = StoredWeights(source=f"checkpoint {checkpoint}", shapes=shapes, read=state.read)
    module = f"{_MODEL}module." if any(name.startswith(f"{_MODEL}module.") for name in shapes) else _MODEL
    raw = stored.below(module + _UNET)
    if weights == Weights.raw:
        if not raw.shapes:
            raise DataError(f"checkpoint {checkpoint} holds no U-Net")
        return raw
    labels = str(state.read([_LABELS])[_LABELS]).split() if _LABELS in state.entries else []
    if weights != Weights.ema and weights not in labels:
        there = f"holds {', '.join(labels)}" if labels else "holds no averages (they had not started)"
        raise DataError(f"checkpoint {checkpoint} {there}, but not the average {weights}: choose another one")
    is_first = weights == Weights.ema or weights == labels[0]
    average = stored.below(_AVERAGES + ("averages." if is_first else f"others.{weights}.") + _UNET)
    if not average.shapes:
        raise DataError(f"checkpoint {checkpoint} holds no average of the weights (it had not started)")
    return average.over(raw)


def read_unet(checkpoint: Path, weights: str) -> dict[str, Tensor]:
    """Read the weights that `open_unet` opens."""
    return open_unet(checkpoint, weights).read_all()
