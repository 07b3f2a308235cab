"""How FSDP2 and its checkpoints are set up: the few private or surprising parts of Composer and torch, in one place."""

import datetime
import io
import logging
import pickle
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from composer.utils.parallelism import FSDP2Config
from torch import nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.fsdp import FSDPModule
from torch.torch_version import TorchVersion

from diffusion.errors import DataError

log = logging.getLogger(__name__)

BOOKKEEPING = ("state.callbacks.", "state.schedulers.", "state.integrations.", "state.metadata.", "rng.")
"""Keys that an older checkpoint may lack; those of model, optimizer and data may not."""

_SAFE_MODULES = {
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.serialization",
}
_SAFE_NAMES = {
    ("torch", "Size"),
    ("torch", "device"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("builtins", "dict"),
    ("builtins", "list"),
    ("builtins", "tuple"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
}


class _MetadataUnpickler(pickle.Unpickler):
    """Reads the index of a sharded checkpoint, which is a pickle, and refuses all that an index does not need."""

    def find_class(self, module: str, name: str) -> Any:
        if module in _SAFE_MODULES and "." not in name and not name.startswith("_load"):
            found = super().find_class(module, name)
            if isinstance(found, type) or name == "_get_layout":
                return found
        if (module, name) in _SAFE_NAMES or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a checkpoint")


def check_metadata(checkpoint: Path) -> None:
    """Refuse a sharded checkpoint whose index would run code, before anything else reads it.

    Raises:
        DataError: it is damaged, or not an index.
    """
    path = checkpoint / ".metadata"
    try:
        with path.open("rb") as file:
            _MetadataUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, TypeError) as error:
        raise DataError(f"{path} is not the index of a checkpoint: {error}. Nothing of it was loaded.") from error


def load_safely(source: Any) -> Any:
    """torch.load of tensors and plain containers only, with the NumPy arrays and time spans that Composer stores.

    Raises:
        DataError: there is something else in it, which might run code.
    """
    import numpy as np
    from numpy._core.multiarray import _reconstruct, scalar  # pyright: ignore[reportAttributeAccessIssue]

    numpy_types = [np.ndarray, np.dtype, _reconstruct, scalar, *(type(np.dtype(kind)) for kind in "?bhilqBHILQefd")]
    with torch.serialization.safe_globals([datetime.timedelta, TorchVersion, *numpy_types]):
        try:
            return torch.load(source, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            reason = re.search(r"Unsupported \w+: (.*?) was not", str(error))
            what = f"it holds {reason.group(1)}, which does not belong in a checkpoint" if reason else str(error)
            raise DataError(f"{getattr(source, 'name', source)}: {what}. Nothing of it was loaded") from error


class SafeLoadPlanner(DefaultLoadPlanner):
    """Loads no code with the entries that are not tensors."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Decode an entry that is not a tensor."""
        content = load_safely(value)
        key = read_item.dest_index.fqn
        self.state_dict[key] = content
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[key], content)


class TolerantLoadPlanner(SafeLoadPlanner):
    """Lets bookkeeping keys be absent as well: callbacks may change between runs, weights may not."""

    def create_local_plan(self) -> LoadPlan:
        """Drop bookkeeping keys that the checkpoint lacks, and keep their current values."""
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        for key in [key for key in self.state_dict if key not in stored and key.startswith(BOOKKEEPING)]:
            log.info("not in the checkpoint, keeps its current value: %s", key)
            self.state_dict.pop(key)
        return super().create_local_plan()


class ElasticFSDP2Config(FSDP2Config):
    """FSDP2 whose checkpoints load safely at any world size and with other callbacks."""

    @property
    def load_planner(self) -> DefaultLoadPlanner:
        """A new planner for each load."""
        return TolerantLoadPlanner()


def reduce_scatter_averages() -> bool:
    """Whether this backend's reduce_scatter(AVG) divides by the world size: gloo of torch 2.7 adds without dividing."""
    if dist.get_world_size() == 1:
        return True
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    output, inputs = torch.empty(1, device=device), torch.ones(dist.get_world_size(), device=device)
    dist.reduce_scatter_tensor(output, inputs, op=dist.ReduceOp.AVG)
    return abs(output.item() - 1.0) < 1e-6


def correct_gradient_average(model: nn.Module) -> None:
    """Divide FSDP2's gradients by the world size where the backend forgets to."""
    if reduce_scatter_averages():
        return
    world_size = dist.get_world_size()

    def divide(gradient: torch.Tensor) -> None:
        gradient.div_(world_size)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(divide)
