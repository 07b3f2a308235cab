"""Checkpoints that try to run code when they are loaded: each creates the file `proof`."""

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader


class Evil:
    """Its pickle creates a file when it is loaded."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.proof}",)


def evil_index(checkpoint: Path, proof: Path) -> None:
    metadata = FileSystemReader(checkpoint).read_metadata()
    metadata.planner_data["evil"] = Evil(proof)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def index_that_truncates_a_file(checkpoint: Path, proof: Path) -> None:
    """A class of torch.serialization that opens a file for writing, which is harm enough."""
    opens = b"ctorch.serialization\n_open_zipfile_writer_file\n(V" + str(proof).encode() + b"\ntR."
    (checkpoint / ".metadata").write_bytes(opens)


def evil_entry(checkpoint: Path, proof: Path) -> None:
    replace_entry(checkpoint, Evil(proof), lambda name: name == "state.callbacks.RunRecord.config")


def evil_optimizer_entry(checkpoint: Path, proof: Path) -> None:
    replace_entry(checkpoint, Evil(proof), lambda name: "param_groups" in name and name.endswith(".lr"))


def evil_tensor(checkpoint: Path, proof: Path) -> None:
    replace_entry(checkpoint, Evil(proof), lambda name: name == "state.model.unet.conv_in.weight")


def replace_entry(checkpoint: Path, value: Any, is_wanted: Callable[[str], bool]) -> None:
    """Append another content for an entry and let the index point to it."""
    metadata = FileSystemReader(checkpoint).read_metadata()
    index = next(index for index in metadata.storage_data if is_wanted(index.fqn))
    buffer = io.BytesIO()
    torch.save(value, buffer)
    place = metadata.storage_data[index]
    with (checkpoint / place.relative_path).open("ab") as file:
        place.offset, place.length = file.tell(), len(buffer.getvalue())
        file.write(buffer.getvalue())
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def evil_file(checkpoint: Path, proof: Path) -> None:
    state = torch.load(checkpoint, weights_only=False)
    state["state"]["callbacks"]["RunRecord"]["more"] = Evil(proof)
    torch.save(state, checkpoint)


ATTACKS = [
    ("fsdp", evil_index),
    ("fsdp", index_that_truncates_a_file),
    ("fsdp", evil_entry),
    ("fsdp", evil_optimizer_entry),
    ("fsdp", evil_tensor),
    ("ddp", evil_file),
]
