"""Averages of weights as files of their own: safetensors with what they are, under names that say it, too.

    RUN/averages/step-000100-width-0.05.safetensors         stored while training
    s3://bucket/prefix/averages/...                         the same, where checkpoints go to an object store
    RUN/reconstructed/step-000100-width-0.08.safetensors    made from them afterwards

The tensors have the names of the model's parameters (`unet.conv_in.weight`). Equal averages give equal bytes.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from diffusion.errors import ConfigurationError, DataError
from diffusion.files import atomic_path

STORED, RECONSTRUCTED = "averages", "reconstructed"
"""Folders of a run."""

AVERAGE_SUFFIX = ".safetensors"

_RECORD = "average"
_NAME = re.compile(r"step-\d+-[a-z]+-[\d.e-]+\.safetensors")


@dataclass(frozen=True, kw_only=True)
class AverageRecord:
    """What a file holds."""

    label: str
    """The profile: `width-0.05`."""

    step: int
    """Step of the run after which it was taken."""

    time: int
    """Number of weights that the average has seen."""

    @property
    def file_name(self) -> str:
        """Its name in a folder of averages."""
        return f"step-{self.step:06d}-{self.label}.safetensors"


def write_average(folder: Path, record: AverageRecord, tensors: dict[str, Tensor]) -> Path:
    """Write an average under the name of its record; the file is whole or not there.

    Args:
        folder: is created.
        record: what it is.
        tensors: on the CPU, by the model's parameter names.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / record.file_name
    # One entry only: the order of several is not defined.
    metadata = {_RECORD: json.dumps(asdict(record), sort_keys=True)}
    try:
        with atomic_path(path) as partial:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    return path


def read_record(path: Path) -> AverageRecord:
    """Read what a file holds.

    Raises:
        DataError: it is damaged, or not such a file.
    """
    with _open(path) as file:
        metadata = file.metadata() or {}
    try:
        return AverageRecord(**json.loads(metadata[_RECORD]))
    except (KeyError, ValueError, TypeError) as error:
        raise DataError(f"{path} does not say what it is an average of: it was not written by this package") from error


def read_combination(paths: Iterable[Path], coefficients: Iterable[float]) -> Iterator[tuple[str, Tensor]]:
    """Sum files of the same names, each times a number, one tensor after the other.

    Yields:
        Name and sum, fp32; summed in float64.

    Raises:
        DataError: a file is damaged, or has other tensors than the first.
    """
    terms = list(zip(paths, coefficients, strict=True))
    with contextlib.ExitStack() as stack:
        files = [(path, stack.enter_context(_open(path)), number) for path, number in terms]
        for name in sorted(files[0][1].keys()):
            total = torch.zeros((), dtype=torch.float64)
            for path, file, coefficient in files:
                try:
                    total = total + file.get_tensor(name).double() * coefficient
                except (SafetensorError, RuntimeError) as error:
                    raise DataError(f"{path}: {name} does not fit {terms[0][0]}: {error}") from error
            yield name, total.to(torch.float32)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is not an average of weights, or damaged ({error}). Remove it") from error


def list_averages(run: Path) -> list[tuple[Path, AverageRecord]]:
    """The averages that a run has stored, oldest first.

    Raises:
        ConfigurationError: there are none.
        DataError: one is damaged.
    """
    folder = run / STORED
    files = sorted(path for path in folder.glob("*.safetensors") if _NAME.fullmatch(path.name))
    if not files:
        raise ConfigurationError(
            f"{folder} holds no averages: give the folder of a run that was trained with algorithms.ema.power"
        )
    return sorted(((path, read_record(path)) for path in files), key=lambda item: (item[1].step, item[1].label))
