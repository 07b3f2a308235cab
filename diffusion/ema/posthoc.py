"""Averages of any width after the training, from stored averages of a few widths at several times.

Karras et al. 2024, section 3.2 and appendix C: each stored average is the trajectory of the weights integrated against
a known profile p(tau). A sum of stored averages is the trajectory integrated against the same sum of profiles. So the
coefficients are those whose sum of profiles is nearest to the profile of the wanted width.

Averages are safetensors files, whose tensors have the names of the model's parameters (`unet.conv_in.weight`):

    RUN/averages/step-000100-width-0.05.safetensors         stored while training
    s3://bucket/prefix/averages/...                         the same, where checkpoints go to an object store
    RUN/reconstructed/step-000100-width-0.08.safetensors    made from them afterwards
"""

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from diffusion.checkpointing.remote import READ_TIMEOUT, RemoteCheckpoints
from diffusion.ema.averaging import PowerFunction
from diffusion.errors import ConfigurationError, DataError, explained_writes
from diffusion.files import atomic_path
from diffusion.formats.run_folder import AVERAGES, RECONSTRUCTED

AVERAGE_SUFFIX = ".safetensors"

_RECORD = "average"
_NAME = re.compile(r"step-(\d+)-[a-z]+-[\d.e-]+\.safetensors")


# The combination of profiles


class TimedProfile(NamedTuple):
    """p(tau) = (gamma + 1) tau^gamma / time^(gamma + 1) for tau in [0, time], which integrates to 1."""

    gamma: float
    time: float


class Combination(NamedTuple):
    """A sum of stored averages."""

    coefficients: np.ndarray
    """float64 [K], which sum to 1."""

    error: float
    """|sum of profiles - wanted profile| / |wanted profile|, in the L2 norm over time."""

    @property
    def amplification(self) -> float:
        """Sum of the coefficients' magnitudes: the factor by which rounding errors of the averages can grow."""
        return float(np.abs(self.coefficients).sum())


def inner_product(one: TimedProfile, other: TimedProfile) -> float:
    """Integral of the product of two profiles over time, in closed form.

    With m the smaller and M the larger time, and a, b the exponents:
    (a + 1) (b + 1) m^(a + b + 1) / ((a + b + 1) t_a^(a + 1) t_b^(b + 1))
    = (a + 1) (b + 1) / (a + b + 1) * (m / t_a)^a (m / t_b)^b / M.
    """
    a, b = one.gamma, other.gamma
    low, high = min(one.time, other.time), max(one.time, other.time)
    overlap = (low / one.time) ** a * (low / other.time) ** b / high
    return (a + 1) * (b + 1) / (a + b + 1) * overlap


def combine_profiles(stored: Sequence[TimedProfile], wanted: TimedProfile) -> Combination:
    """Find the combination of stored profiles that is nearest to a wanted one.

    Least squares in the L2 norm over time, under the condition that the coefficients sum to 1: without it, the part of
    the weights that does not move would be scaled. The wanted profile's time is at most the last stored one.
    """
    products = np.array([[inner_product(one, other) for other in stored] for one in stored])
    target = np.array([inner_product(one, wanted) for one in stored])
    # Profiles are scaled to unit norm, since the system is ill-conditioned enough.
    norms = np.sqrt(np.diag(products))
    system = np.zeros((len(stored) + 1, len(stored) + 1))
    system[:-1, :-1] = products / np.outer(norms, norms)
    system[:-1, -1] = system[-1, :-1] = norms.min() / norms
    solution = np.linalg.lstsq(system, np.append(target / norms, norms.min()), rcond=1e-13)[0]
    coefficients = solution[:-1] / norms
    coefficients /= coefficients.sum()
    square = inner_product(wanted, wanted)
    residual = coefficients @ products @ coefficients - 2 * coefficients @ target + square
    return Combination(coefficients=coefficients, error=math.sqrt(max(residual, 0.0) / square))


# Files of averages


@dataclass(frozen=True, kw_only=True)
class AverageRecord:
    """Description of an average, in its file."""

    label: str
    """The profile: `width-0.05`."""

    step: int
    """Step of the run after which it was taken."""

    time: int
    """Number of weights that are averaged."""

    @property
    def file_name(self) -> str:
        """Its name in a folder of averages."""
        return f"step-{self.step:06d}-{self.label}{AVERAGE_SUFFIX}"


def write_average(folder: Path, record: AverageRecord, tensors: dict[str, Tensor]) -> Path:
    """Write an average, whose tensors on the CPU have the model's names. Equal averages give equal bytes.

    Raises:
        MachineError: it cannot be written.
    """
    path = folder / record.file_name
    # One entry only: the order of several is not defined.
    metadata = {_RECORD: json.dumps(asdict(record), sort_keys=True)}
    with explained_writes(path, "Make room and start the same command again"):
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as partial:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata)
    return path


def step_of(name: str) -> int:
    """Step in the name of an average; -1 for another file."""
    found = _NAME.fullmatch(name)
    return -1 if found is None else int(found[1])


def list_averages(run: Path) -> list[tuple[Path, AverageRecord]]:
    """List the averages that a run has stored, oldest first.

    Raises:
        ConfigurationError: there are none.
        DataError: one is damaged.
    """
    folder = run / AVERAGES
    files = sorted(path for path in folder.glob(f"*{AVERAGE_SUFFIX}") if step_of(path.name) >= 0)
    if not files:
        raise ConfigurationError(
            f"{folder} holds no averages: give the folder of a run that was trained with algorithms.ema.power"
        )
    return sorted(((path, _read_record(path)) for path in files), key=lambda item: (item[1].step, item[1].label))


def read_combination(paths: Iterable[Path], coefficients: Iterable[float]) -> Iterator[tuple[str, Tensor]]:
    """Sum averages, each times a coefficient, one tensor after the other.

    Yields:
        Name and sum, fp32; summed in float64.

    Raises:
        DataError: a file is damaged, or has other tensors than the first.
    """
    terms = list(zip(paths, coefficients, strict=True))
    with contextlib.ExitStack() as stack:
        files = [(path, stack.enter_context(_open(path)), coefficient) for path, coefficient in terms]
        for name in sorted(files[0][1].keys()):
            total = torch.zeros((), dtype=torch.float64)
            for path, file, coefficient in files:
                try:
                    total = total + file.get_tensor(name).double() * coefficient
                except (SafetensorError, RuntimeError) as error:
                    raise DataError(f"{path}: {name} does not fit {terms[0][0]}: {error}") from error
            yield name, total.to(torch.float32)


def fetch_averages(uri: str, run: Path) -> None:
    """Download the averages beside a run's checkpoints (`s3://bucket/prefix`) that its folder lacks, or has older.

    Raises:
        DataError: the URI is not that of a store.
        MachineError: the store cannot be read, or the disk not be written.
    """
    remote = RemoteCheckpoints(uri, timeout=READ_TIMEOUT)
    for name, file in remote.files().items():
        if name.startswith(f"{AVERAGES}/"):
            remote.download_file(file, run / name)


def _read_record(path: Path) -> AverageRecord:
    with _open(path) as file:
        metadata = file.metadata() or {}
    try:
        return AverageRecord(**json.loads(metadata[_RECORD]))
    except (KeyError, ValueError, TypeError) as error:
        raise DataError(f"{path} has no description of an average: it was not written by this package") from error


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is not an average of weights, or damaged ({error}). Remove it") from error


# Reconstruction


def reconstruct(run: Path, width: float, *, step: int | None = None) -> tuple[Path, Combination]:
    """Make an average of a relative width from those that a run has stored, and write it to `RUN/reconstructed/`.

    It ends at a step that is stored, by default at the last one.

    Returns:
        The file (fp32), and its composition.

    Raises:
        ConfigurationError: nothing is stored, or nothing of that step, or the width is impossible.
        DataError: a stored average is damaged.
        MachineError: the file cannot be written.
    """
    wanted = PowerFunction(width)
    stored = list_averages(run)
    steps = sorted({record.step for _, record in stored})
    last = steps[-1] if step is None else step
    if last not in steps:
        raise ConfigurationError(f"{run} holds no average of step {last}: there are {', '.join(map(str, steps))}")
    stored = [(path, record) for path, record in stored if record.step <= last]
    time = stored[-1][1].time
    profiles = [TimedProfile(_gamma(record.label, path), record.time) for path, record in stored]
    combination = combine_profiles(profiles, TimedProfile(wanted.gamma, time))
    tensors = dict(read_combination([path for path, _ in stored], combination.coefficients.tolist()))
    record = AverageRecord(label=wanted.label, step=last, time=time)
    return write_average(run / RECONSTRUCTED, record, tensors), combination


def _gamma(label: str, path: Path) -> float:
    kind, _, width = label.partition("-")
    if kind != "width":
        raise DataError(f"{path} is not a power-function average, but {label}: remove it")
    return PowerFunction(float(width)).gamma
