"""Reading of checkpoints, in which no code of theirs is run.

The index of a sharded checkpoint is a pickle. Torch and Composer read it, the entries that are not tensors, and whole
`.pt` files with the full power of pickle. So `check_safe` reads each of them before: the index with an unpickler
that knows nothing but what an index consists of, the rest with torch's `weights_only`.
"""

import datetime
import errno
import io
import json
import pickle
import re
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath
from stat import S_ISDIR
from typing import Any, TypeVar

import numpy as np
import torch
import yaml
from numpy._core.multiarray import _reconstruct, scalar  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor
from torch.distributed.checkpoint import metadata as index_classes
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future
from torch.serialization import _get_layout
from torch.torch_version import TorchVersion

from diffusion import storage
from diffusion.checkpointing.layout import CHECKPOINT_INDEX, CHECKSUM_KIND, CHECKSUMS
from diffusion.config.model import Weights
from diffusion.errors import DataError, MachineError, UnavailableError, UserError
from diffusion.files import file_mode, hash_file

_NUMPY_TYPES = [np.ndarray, np.dtype, _reconstruct, scalar, *(type(np.dtype(kind)) for kind in "?bhilqBHILQefd")]
_SAFE_TYPES = [datetime.timedelta, TorchVersion, *_NUMPY_TYPES]
"""Types that Composer stores beside tensors and plain containers."""

_NUM_THREADS = 8

T = TypeVar("T")

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
)
"""Exceptions of reading a damaged pickle or archive."""


class UnsafeCheckpointError(DataError):
    """A checkpoint holds what might run code, or reach outside of its folder. Nothing of it was loaded."""


# The index of a sharded checkpoint


class _Sealed(type):
    """A class that a pickle cannot change."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"{cls.__name__}.{name} must not be assigned")


def _sealed(make: Callable[..., Any], name: str = "") -> type:
    """Make a class whose calls return what `make` returns, in the place of a class or function of the index."""
    return _Sealed(name or make.__name__, (), {"__new__": lambda cls, *arguments: make(*arguments)})


_FILLED = (
    *(index_classes.Metadata, index_classes.MetadataIndex, StorageMeta, index_classes.TensorProperties),
    *(TensorStorageMetadata, index_classes.BytesStorageMetadata, index_classes.ChunkStorageMetadata, _StorageInfo),
)
"""Dataclasses whose empty objects the pickle fills."""

_INDEX_CLASSES = {
    **{(kind.__module__, kind.__name__): _sealed(partial(object.__new__, kind), kind.__name__) for kind in _FILLED},
    (index_classes.__name__, "_MEM_FORMAT_ENCODING"): _sealed(index_classes._MEM_FORMAT_ENCODING),
    ("torch.serialization", "_get_layout"): _sealed(_get_layout),
    ("torch", "Size"): _sealed(torch.Size),
    **{
        (module, name): _sealed(PurePosixPath)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath")
    },
}
"""Classes of an index, beside dtypes and plain containers."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (found := _INDEX_CLASSES.get((module, name))) is None:
            raise UnsafeCheckpointError(f"{module}.{name} does not belong in it")
        return found


def read_metadata(checkpoint: Path) -> Metadata:
    """Read torch's metadata of a sharded checkpoint: its index.

    Raises:
        UnsafeCheckpointError: the index would run code, or names files outside of the folder.
        DataError: it is missing, damaged, or not an index.
        MachineError: it cannot be read.
    """
    path = checkpoint / CHECKPOINT_INDEX
    content = patiently(path, path.read_bytes)
    try:
        index = _IndexUnpickler(io.BytesIO(content)).load()
        _check_index(index)
    except UnsafeCheckpointError as error:
        raise UnsafeCheckpointError(f"{path} is not the index of a checkpoint: {error}. Nothing was loaded") from error
    except _DAMAGE as error:
        raise DataError(f"{path} is not the index of a checkpoint: {error}. Nothing was loaded") from error
    return index


def _check_index(index: Metadata) -> None:
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise TypeError("it has another form")
    for key, entry in index.storage_data.items():
        file, offset, length = entry.relative_path, entry.offset, entry.length
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise UnsafeCheckpointError(f"it names the file {file!r}, outside of its folder")
        if vars(entry).get("transform_descriptors"):
            raise UnsafeCheckpointError(f"it names a transformation of {key.fqn}, which this package never writes")
        if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
            raise ValueError(f"{key.fqn} is at {offset!r}, {length!r}")
        if key.fqn not in index.state_dict_metadata:
            raise ValueError(f"{key.fqn} has no description")


def stored_files(index: Metadata) -> dict[str, int]:
    """The files of a sharded checkpoint, each with the least number of its bytes."""
    ends: dict[str, int] = {}
    for entry in index.storage_data.values():
        ends[entry.relative_path] = max(ends.get(entry.relative_path, 0), entry.offset + entry.length)
    return ends


class SafeReader(FileSystemReader):
    """Reads a sharded checkpoint whose index runs no code."""

    def read_metadata(self) -> Metadata:
        """Read the index; a DataError if it is damaged, or would run code."""
        index = read_metadata(Path(self.path))
        index.storage_meta = StorageMeta(load_id=self.load_id)
        return index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's entries; a MachineError if its file system fails."""
        return patiently(Path(self.path), partial(super().read_data, plan, planner))


# Files and entries


def is_sharded(checkpoint: Path) -> bool:
    """Return whether a checkpoint is a folder; a MachineError if it cannot be looked at."""
    return patiently(checkpoint, lambda: S_ISDIR(file_mode(checkpoint)))


def load_safely(source: Path | io.BytesIO, name: str, *, mmap: bool = False) -> Any:
    """torch.load of tensors and plain containers, with the NumPy arrays and time spans that Composer stores.

    Raises:
        UnsafeCheckpointError: it holds something else, which might run code.
        DataError: it is damaged, or in a form that is not read.
        MachineError: the file cannot be read.
    """
    read = partial(torch.load, source, map_location="cpu", weights_only=True, mmap=mmap)
    with torch.serialization.safe_globals(_SAFE_TYPES):
        try:
            return patiently(source, read) if isinstance(source, Path) else read()
        except _DAMAGE as error:
            if rejected := re.search(r"GLOBAL ([\w.]+)", str(error)):
                raise UnsafeCheckpointError(
                    f"{name}: it holds {rejected[1]}, which does not belong in a checkpoint. Nothing was loaded"
                ) from error
            problem = "holds what this version does not read" if "Unsupported" in str(error) else "is damaged"
            raise DataError(f"{name} {problem}: {_reason(error)}") from error


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


def as_user_error(error: CheckpointException, checkpoint: Path | str) -> UserError:
    """The error of a distributed load as one message."""
    rank, (cause, _) = next(iter(error.failures.items()))
    if isinstance(cause, UserError):
        return cause
    where = f"checkpoint {checkpoint} cannot be loaded" + (f" (rank {rank})" if rank else "")
    if isinstance(cause, OSError):
        return _unread(where, cause)
    kind = UnsafeCheckpointError if re.search(r"GLOBAL [\w.]+", str(cause)) else DataError
    return kind(f"{where}: {_reason(cause)}. Choose another one, or remove it")


# Checks


def check_safe(checkpoint: Path) -> None:
    """Check that a checkpoint runs no code when it is read, without its tensors.

    Raises:
        UnsafeCheckpointError: it would run code.
        DataError: it is damaged.
    """
    if not is_sharded(checkpoint):
        load_safely(checkpoint, str(checkpoint), mmap=True)
        return
    index = read_metadata(checkpoint)
    entries = defaultdict(list)
    for key, entry in index.storage_data.items():
        if not isinstance(index.state_dict_metadata[key.fqn], TensorStorageMetadata):
            entries[checkpoint / entry.relative_path].append((key.fqn, entry))

    def check_entries(path: Path) -> None:
        with path.open("rb") as file:
            for key, entry in entries[path]:
                file.seek(entry.offset)
                load_safely(io.BytesIO(file.read(entry.length)), f"{path}, entry {key}")

    for path in entries:
        patiently(path, partial(check_entries, path))


def check_bytes(checkpoint: Path) -> None:
    """Compare a checkpoint with its checksums: those in a file's archive, or those beside a folder's files.

    Raises:
        UnsafeCheckpointError: its index would run code.
        DataError: its bytes have changed.
    """
    if is_sharded(checkpoint):
        names = sorted({CHECKPOINT_INDEX, *stored_files(read_metadata(checkpoint))})
        stored = read_checksums(checkpoint)
        if missing := [name for name in names if name not in stored]:
            raise DataError(f"{checkpoint / CHECKSUMS} has no checksum of {missing[0]}")
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            for name, checksum in zip(names, pool.map(lambda name: _checksum(checkpoint / name), names), strict=True):
                if checksum != stored[name]:
                    raise DataError(f"{checkpoint / name} does not have its checksum: its bytes have changed")
        return

    def find_damaged() -> str | None:
        with zipfile.ZipFile(checkpoint) as archive:
            return archive.testzip()

    try:
        damaged = patiently(checkpoint, find_damaged)
    except _DAMAGE as error:
        raise DataError(f"{checkpoint} is damaged: {error}") from error
    if damaged is not None:
        raise DataError(f"{checkpoint} is damaged: {damaged} does not have its checksum")


def read_checksums(folder: Path) -> dict[str, str]:
    """Read the checksums of a folder's files, by name; a DataError if they are missing or damaged."""
    path = folder / CHECKSUMS
    content = patiently(path, path.read_bytes)
    try:
        return {str(name): str(entry[CHECKSUM_KIND]) for name, entry in json.loads(content).items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _checksum(path: Path) -> str:
    return patiently(path, lambda: hash_file(path, CHECKSUM_KIND))


def patiently(path: Path, read: Callable[[], T]) -> T:
    """Read a file of a checkpoint, again while its file system fails in a way that may pass.

    Raises:
        DataError: it is missing.
        MachineError: it cannot be read, which says nothing of its content.
    """
    try:
        return storage.retry(str(path), read)
    except OSError as error:
        raise _unread(f"{path} cannot be read", error) from error
    except UnavailableError as error:
        raise MachineError(f"{error}. If it stays so, move the checkpoint away") from error


def _unread(problem: str, error: OSError) -> UserError:
    """The error of a file that is missing or damaged (EINVAL: it names an impossible position), or is not read."""
    reason = f"{problem}: {error.strerror or error}"
    if error.errno in (None, errno.EINVAL, errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
        return DataError(reason)
    return MachineError(f"{reason}. Check its permissions and its disk, and run the same command again")


# What a checkpoint holds


class StoredState:
    """The entries of a checkpoint by dotted keys such as `state.model.unet.conv_in.weight`, read in one process.

    Sharded checkpoints and files have the same keys.

    Raises:
        DataError: its index is damaged, or would run code; or the file is.
        MachineError: it cannot be read.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint, self._is_sharded = checkpoint, is_sharded(checkpoint)
        if self._is_sharded:
            self._entries: dict[str, Any] = read_metadata(checkpoint).state_dict_metadata
        else:
            self._entries = dict(_flatten(load_safely(checkpoint, f"checkpoint {checkpoint}", mmap=True)))

    def keys(self, prefix: str = "") -> list[str]:
        """List the keys with a prefix."""
        return [key for key in self._entries if key.startswith(prefix)]

    def read(self, keys: Collection[str]) -> dict[str, Any]:
        """Read entries to the CPU; a DataError if one is damaged, or would run code."""
        entries = {key: self._entries[key] for key in keys}
        if not self._is_sharded:
            return {key: value.clone() if isinstance(value, Tensor) else value for key, value in entries.items()}
        content = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            if isinstance(entry, TensorStorageMetadata)
            else None
            for key, entry in entries.items()
        }
        planner = SafeLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # no_dist asks for that.
                load(content, storage_reader=SafeReader(self._checkpoint), planner=planner, no_dist=True)
        except CheckpointException as error:
            raise as_user_error(error, self._checkpoint) from error
        return content

    def read_below(self, prefix: str) -> dict[str, Any]:
        """Read all entries whose keys begin with a prefix, by the rest of their keys."""
        return {key.removeprefix(prefix): value for key, value in self.read(self.keys(prefix)).items()}


def _flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The values in nested dictionaries and lists, by dotted keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield key, value
        return
    for name, content in items:
        yield from _flatten(content, f"{key}.{name}" if key else str(name))


def read_config_values(checkpoint: Path) -> dict[str, Any]:
    """Read the values of the configuration of the run that has written a checkpoint.

    Raises:
        DataError: the checkpoint is damaged, or was not written by this package.
    """
    state, key = StoredState(checkpoint), "state.callbacks.RunRecord.config"
    if key not in state.keys(key):
        raise DataError(f"checkpoint {checkpoint} has no configuration: it was not written by this package")
    return yaml.safe_load(state.read([key])[key])


def read_identities(checkpoint: Path) -> dict[str, str]:
    """Read the identities of the frozen parts that a run was trained with; none from older versions."""
    return StoredState(checkpoint).read_below("state.callbacks.RunRecord.identities.")


def read_position(checkpoint: Path) -> tuple[int, dict[str, str | int | None]]:
    """Read the number of optimizer steps before a checkpoint, and the fingerprint of the order of its samples.

    Raises:
        DataError: the checkpoint is damaged, or of a run whose data was not in this package's order.
    """
    state = StoredState(checkpoint)
    steps = state.read_below("state.timestamp.Timestamp.").get("batch")
    order = state.read_below("state.dataset_state.train.").get("order")
    if not isinstance(steps, int) or not isinstance(order, str):
        raise DataError(f"checkpoint {checkpoint} does not record the order of its samples")
    return steps, json.loads(order)


# The weights of the model

_MODEL = "state.model."
AVERAGES_PREFIX = "state.callbacks.LateStartEMA."


def read_weights(checkpoint: Path, weights: str, *, is_checked: bool = False) -> dict[str, Tensor]:
    """Read the weights of a model from a checkpoint, in one process, after a comparison with its checksums.

    An average holds the trained weights; frozen ones are those of the model.

    Args:
        checkpoint: file or folder.
        weights: "raw" for the training weights, "ema" for the first average, or an average's label: `decay-0.999`.
        is_checked: the checksums have been compared on this node.

    Returns:
        Weights on the CPU by their names in the model, such as `unet.conv_in.weight`.

    Raises:
        DataError: the checkpoint is damaged, or holds no such average.
    """
    if not is_checked:
        check_bytes(checkpoint)
    state = StoredState(checkpoint)
    if weights == Weights.raw:
        if not state.keys(_MODEL):
            raise DataError(f"checkpoint {checkpoint} holds no model")
        return state.read_below(_MODEL)
    labels = str(state.read_below(f"{AVERAGES_PREFIX}labels").get("", "")).split()
    if weights != Weights.ema and weights not in labels:
        there = f"the averages {', '.join(labels)}" if labels else "no averages (they had not started, or are off)"
        choices = ", ".join((Weights.raw.value, *labels))
        raise DataError(f"checkpoint {checkpoint} holds {there}, but no weights {weights!r}: choose {choices}")
    is_first = weights == Weights.ema or weights == labels[0]
    average = state.read_below(AVERAGES_PREFIX + ("averages." if is_first else f"others.{weights}."))
    if not average:
        raise DataError(f"checkpoint {checkpoint} holds no average of the weights (it had not started, or is off)")
    frozen = [key for key in state.keys(_MODEL) if key.removeprefix(_MODEL) not in average]
    return {key.removeprefix(_MODEL): value for key, value in state.read(frozen).items()} | average
