"""Reading checkpoints without running code from them.

The index of a sharded checkpoint (`.metadata`) is a pickle, and torch and Composer read it, the entries that are not
tensors, and whole `.pt` files with the full power of pickle. So each is first read here by readers that know nothing
but the contents of a checkpoint.
"""

import datetime
import io
import pickle
import re
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.torch_version import TorchVersion

from diffusion.errors import DataError

INDEX = ".metadata"

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
"""All that an index is made of, beside dtypes and plain containers."""

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

_ENTRY_START, _ENTRY_END, _ENTRY_END_BYTES = b"PK\x03\x04", b"PK\x05\x06", 22
"""How an entry, which is a zip archive of its own, begins, and how its last bytes begin."""


class UnsafeCheckpointError(DataError):
    """A checkpoint holds what might run code, or reach outside of its folder. Nothing of it was loaded."""


class _Sealed(type):
    """A class that a pickle cannot change."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"{cls.__name__}.{name} must not be assigned")


class _Inert(metaclass=_Sealed):
    """Stands in for a class of the index: keeps what the pickle says and does nothing."""

    arguments: tuple[Any, ...] = ()
    content: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.content = state


_INERT = {(module, name): _Sealed(name, (_Inert,), {}) for module, name in _INDEX_CLASSES}


def _is_dtype(module: str, name: str) -> bool:
    return module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)


class _Inspection(pickle.Unpickler):
    """Reads an index into objects that do nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if _is_dtype(module, name):
            return name
        if (found := _INERT.get((module, name))) is None:
            raise UnsafeCheckpointError(f"{module}.{name} does not belong in it")
        return found


class _IndexUnpickler(pickle.Unpickler):
    """Reads an index that was inspected."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _INDEX_CLASSES or _is_dtype(module, name):
            return super().find_class(module, name)
        raise UnsafeCheckpointError(f"{module}.{name} does not belong in it")


@dataclass(frozen=True)
class StoredEntry:
    """Where one entry of a sharded checkpoint lies."""

    name: str
    file: str
    offset: int
    length: int
    is_tensor: bool


def read_entries(checkpoint: Path) -> list[StoredEntry]:
    """List what a sharded checkpoint holds, by its index.

    Raises:
        UnsafeCheckpointError: the index would run code, or names files outside of the folder.
        DataError: it is missing, damaged, or not an index.
    """
    return _inspect(_read_index(checkpoint), checkpoint)


def _read_index(checkpoint: Path) -> bytes:
    try:
        return (checkpoint / INDEX).read_bytes()
    except OSError as error:
        raise DataError(f"checkpoint {checkpoint} has no index that can be read: {error.strerror}") from error


def _inspect(index: bytes, checkpoint: Path) -> list[StoredEntry]:
    where = f"{checkpoint / INDEX} is not the index of a checkpoint"
    try:
        return list(_entries(_Inspection(io.BytesIO(index)).load()))
    except UnsafeCheckpointError as error:
        raise UnsafeCheckpointError(f"{where}: {error}. Nothing of it was loaded") from error
    except _DAMAGE as error:
        raise DataError(f"{where}: {error}. Nothing of it was loaded") from error


def _entries(index: Any) -> Any:
    stored = index.content["state_dict_metadata"]
    for key, place in index.content["storage_data"].items():
        name, file = key.content["fqn"], place.content["relative_path"]
        offset, length = place.content["offset"], place.content["length"]
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise UnsafeCheckpointError(f"it names the file {file!r}, outside of its folder")
        if place.content.get("transform_descriptors"):
            raise UnsafeCheckpointError(f"{name} is to be transformed when read, which this package never writes")
        if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
            raise ValueError(f"{name} lies at {offset!r}, {length!r}")
        yield StoredEntry(name, file, offset, length, type(stored[name]).__name__ == "TensorStorageMetadata")


class SafeReader(FileSystemReader):
    """Reads a sharded checkpoint whose index is inspected first, the same bytes."""

    def read_metadata(self) -> Metadata:
        """Read the index.

        Raises:
            DataError: it is damaged, or would run code.
        """
        checkpoint = Path(self.path)
        index = _read_index(checkpoint)
        _inspect(index, checkpoint)
        metadata: Metadata = _IndexUnpickler(io.BytesIO(index)).load()
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata


def find_short_file(checkpoint: Path, entries: list[StoredEntry]) -> str | None:
    """What is wrong with the files that an index names: one is missing or too short; None if nothing is."""
    ends: dict[str, int] = {}
    for entry in entries:
        ends[entry.file] = max(ends.get(entry.file, 0), entry.offset + entry.length)
    for file, end in sorted(ends.items()):
        path = checkpoint / file
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            return f"{file} is missing"
        if size < end:
            return f"{file} has {size:,} of at least {end:,} bytes"
    return None


def check_entries(checkpoint: Path) -> None:
    """Look at every entry of a sharded checkpoint: tensors at both ends, the others entirely.

    Raises:
        UnsafeCheckpointError: an entry would run code.
        DataError: an entry is damaged.
    """
    by_file: dict[str, list[StoredEntry]] = {}
    for entry in read_entries(checkpoint):
        by_file.setdefault(entry.file, []).append(entry)
    for name, entries in by_file.items():
        try:
            with (checkpoint / name).open("rb") as file:
                for entry in sorted(entries, key=lambda entry: entry.offset):
                    _check_entry(file, entry, f"{checkpoint / name}, entry {entry.name}")
        except OSError as error:
            raise DataError(f"{checkpoint / name} cannot be read: {error.strerror}") from error


def _check_entry(file: Any, entry: StoredEntry, where: str) -> None:
    file.seek(entry.offset)
    if not entry.is_tensor:
        load_safely(io.BytesIO(file.read(entry.length)), where)
        return
    start = file.read(len(_ENTRY_START))
    file.seek(entry.offset + max(entry.length - _ENTRY_END_BYTES, 0))
    if start != _ENTRY_START or file.read(len(_ENTRY_END)) != _ENTRY_END:
        raise DataError(f"{where} is damaged")


def check_file(path: Path) -> None:
    """Read a `.pt` checkpoint against its checksums, and see that it holds tensors and plain containers only.

    Raises:
        UnsafeCheckpointError: it would run code.
        DataError: it is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except _DAMAGE as error:
        raise DataError(f"{path} is damaged: {error}") from error
    if damaged is not None:
        raise DataError(f"{path} is damaged: {damaged} does not have its checksum")
    load_safely(path, str(path), mmap=True)


def load_safely(source: Path | io.BytesIO, where: str, *, mmap: bool = False) -> Any:
    """torch.load of tensors and plain containers only, with the NumPy arrays and time spans that Composer stores.

    Args:
        source: a file, or its content.
        where: what to call it in messages.
        mmap: map tensors of a file instead of reading them.

    Raises:
        UnsafeCheckpointError: there is something else in it, which might run code.
        DataError: it is damaged.
    """
    import numpy as np
    from numpy._core.multiarray import _reconstruct, scalar  # pyright: ignore[reportAttributeAccessIssue]

    numpy_types = [np.ndarray, np.dtype, _reconstruct, scalar, *(type(np.dtype(kind)) for kind in "?bhilqBHILQefd")]
    with torch.serialization.safe_globals([datetime.timedelta, TorchVersion, *numpy_types]):
        try:
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
        except _DAMAGE as error:
            raise _load_error(error, source, where) from error


def _load_error(error: BaseException, source: Path | io.BytesIO, where: str) -> DataError:
    """What torch's restricted unpickler refused, told from what is merely damaged."""
    text = str(error)
    refused = re.search(r"GLOBAL ([\w.]+)", text)
    if refused is not None or (isinstance(error, pickle.UnpicklingError) and _is_intact(source)):
        what = refused[1] if refused is not None else _reason(error)
        return UnsafeCheckpointError(
            f"{where}: it holds {what}, which does not belong in a checkpoint. Nothing of it was loaded"
        )
    return DataError(f"{where} is damaged: {_reason(error)}")


def _reason(error: BaseException) -> str:
    """The first line that torch says about the matter."""
    text = str(error).rpartition("WeightsUnpickler error: ")[2]
    return text.splitlines()[0] if text else type(error).__name__


def _is_intact(source: Path | io.BytesIO) -> bool:
    """Whether an archive has the checksums that it was written with."""
    try:
        with zipfile.ZipFile(source) as archive:
            return archive.testzip() is None
    except _DAMAGE:
        return False


class SafeLoadPlanner(DefaultLoadPlanner):
    """Loads no code with the entries that are not tensors."""

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
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # As it is asked to be.
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
    return kind(f"{where}: {_reason(cause)}. Take another one, or remove it")
