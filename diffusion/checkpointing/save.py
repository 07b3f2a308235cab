"""Writing of checkpoints, and the copy of a state that is written while training changes it."""

import copy
import copyreg
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedWriter, BytesIO, FileIO
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.utils import serialization

from diffusion.checkpointing.layout import CHECKPOINT_INDEX, CHECKSUM_KIND, CHECKSUMS
from diffusion.files import atomic_path, write_atomically, write_json


class HostCopy:
    """A copy of a state in host memory, whose buffers are used again by the next save.

    Buffers of tensors on a GPU are pinned: the copies run at the speed of the bus, and the host waits once.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], torch.Tensor] = {}

    def update(self, content: Any) -> Any:
        """Copy a state: nested dictionaries, lists and tuples of tensors (sharded or not) and other values.

        Returns:
            The same with tensors on the CPU that share no memory with the state's; of a sharded tensor, this rank's
            part. The next call overwrites them.
        """
        before, self._buffers = self._buffers, {}
        copied = self._copy(content, (), before)
        if any(buffer.is_pinned() for buffer in map(local_shard, self._buffers.values())):
            torch.cuda.current_stream().synchronize()
        return copied

    def _copy(self, content: Any, path: tuple[Any, ...], before: dict[tuple[Any, ...], torch.Tensor]) -> Any:
        if isinstance(content, torch.Tensor):
            source = content.detach()
            buffer = before.get(path)
            if buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
                buffer = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
            local_shard(buffer).copy_(local_shard(source), non_blocking=True)
            self._buffers[path] = buffer
            return buffer
        if isinstance(content, dict):
            return {key: self._copy(value, (*path, key), before) for key, value in content.items()}
        if isinstance(content, (list, tuple)):
            return type(content)(self._copy(value, (*path, i), before) for i, value in enumerate(content))
        return copy.deepcopy(content)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, which shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def write_sharded(folder: Path, content: dict[str, Any], group: ProcessGroup | None) -> None:
    """Write a sharded checkpoint: each rank its file, then rank 0 the checksums and the index.

    To be called by all ranks of the group. When one cannot write, all raise a CheckpointException.
    """
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    # Without a CRC of each tensor, which takes longer than writing it: each file has an xxh64.
    with serialization.config.patch("save.compute_crc32", False):  # pyright: ignore[reportAttributeAccessIssue]
        save(content, storage_writer=_ChecksumWriter(folder), planner=planner, process_group=group)


def write_file(path: Path, content: dict[str, Any]) -> None:
    """Write a `.pt` checkpoint, which is there entirely or not at all: an OSError or RuntimeError says why not."""
    with atomic_path(path) as partial, partial.open("wb") as file:
        torch.save(content, file)


class _HashingFile(BufferedWriter):
    """A new file whose checksum is computed from what is written, before the disk has it."""

    def __init__(self, path: Path) -> None:
        super().__init__(FileIO(path, "w"))
        self.digest = xxhash.xxh64()

    def write(self, buffer: Any, /) -> int:
        self.digest.update(buffer)
        return super().write(buffer)


class _HashingFileSystem(FileSystem):
    """Keeps the checksums of the files that it writes."""

    def __init__(self) -> None:
        self.checksums: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:  # pyright: ignore
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _HashingFile(Path(path)) as file:
            yield file
        self.checksums[Path(path).name] = file.digest.hexdigest()


class _IndexPickler(pickle.Pickler):
    """Write an index for every supported version: torch 2.11 does not read the strides that newer ones add."""

    def reducer_override(self, obj: Any) -> Any:
        """Leave the strides out, which loading into tensors that exist does not need."""
        if isinstance(obj, TensorProperties):
            return copyreg.__newobj__, (TensorProperties,), obj.__getstate__()[:5]  # pyright: ignore
        return NotImplemented


class _ChecksumWriter(FileSystemWriter):
    """Writes the checksums of all ranks' files before the index."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = _HashingFileSystem()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Write this rank's file, and send its checksum to rank 0 with its entries."""
        written = super().write_data(plan, planner).value()
        result: Future[Any] = Future()
        result.set_result((written, self.fs.checksums))
        return result

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """Write checksums and index on rank 0, when all files are written."""
        folder = Path(self.path)
        written: list[WriteResult] = [entry for entries, _ in results for entry in entries]
        metadata.storage_data = {entry.index: entry.storage_data for entry in written}
        # No path: Python 3.13 names its class in another module than 3.11.
        metadata.storage_meta = StorageMeta(checkpoint_id=str(folder), save_id=self.save_id)
        buffer = BytesIO()
        _IndexPickler(buffer).dump(metadata)
        index = buffer.getvalue()
        checksums = {name: checksum for _, part in results for name, checksum in part.items()}
        checksums[CHECKPOINT_INDEX] = xxhash.xxh64(index).hexdigest()
        write_json(folder / CHECKSUMS, {name: {CHECKSUM_KIND: value} for name, value in sorted(checksums.items())})
        write_atomically(folder / CHECKPOINT_INDEX, index)
