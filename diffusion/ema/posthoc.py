"""From the averages that a run has stored to one of another width."""

from pathlib import Path

from diffusion.checkpointing.object_store import ObjectStore
from diffusion.checkpointing.remote import READ_PATIENCE
from diffusion.ema.average_files import (
    RECONSTRUCTED,
    STORED,
    AverageRecord,
    list_averages,
    read_combination,
    write_average,
)
from diffusion.ema.profiles import PowerFunction
from diffusion.ema.reconstruction import Combination, TimedProfile, combine_profiles
from diffusion.errors import ConfigurationError, DataError, MachineError


def reconstruct(run: Path, width: float, *, step: int | None = None) -> tuple[Path, Combination]:
    """Make an average of a width from those that a run has stored, and write it to `RUN/reconstructed/`.

    Args:
        run: the run folder.
        width: relative width; see `PowerFunction`.
        step: step at which the average ends, one of those stored; None: the last.

    Returns:
        The file (fp32), and how it was made.

    Raises:
        ConfigurationError: nothing is stored, or nothing of that step, or the width is impossible.
        DataError: a stored average is damaged.
        MachineError: the file cannot be written.
    """
    wanted = PowerFunction(width)
    stored = list_averages(run)
    last = stored[-1][1].step if step is None else step
    stored = [(path, record) for path, record in stored if record.step <= last]
    ends = [record for _, record in stored if record.step == last]
    if not ends:
        steps = sorted({record.step for _, record in list_averages(run)})
        raise ConfigurationError(f"{run} holds no average of step {last}: there are {', '.join(map(str, steps))}")
    profiles = [TimedProfile(_gamma(record.label, path), record.time) for path, record in stored]
    combination = combine_profiles(profiles, TimedProfile(wanted.gamma, ends[0].time))
    tensors = dict(read_combination([path for path, _ in stored], combination.coefficients.tolist()))
    record = AverageRecord(label=wanted.label, step=last, time=ends[0].time)
    try:
        return write_average(run / RECONSTRUCTED, record, tensors), combination
    except OSError as error:
        raise MachineError(f"{run / RECONSTRUCTED} cannot be written: {error.strerror or error}") from error


def fetch_averages(url: str, run: Path) -> None:
    """Download the averages that a run has stored beside its checkpoints, except those that are here already.

    Args:
        url: `s3://bucket/prefix` of the run's checkpoints.
        run: the run folder here.

    Raises:
        ConfigurationError: the URL is of another kind.
        MachineError: the store cannot be read, or the disk not be written.
    """
    store = ObjectStore(url, patience=READ_PATIENCE)
    for name, stored in store.files().items():
        local = run / name
        is_here = local.is_file() and local.stat().st_size == stored.num_bytes
        if name.startswith(f"{STORED}/") and not is_here:
            store.download(name, local)


def _gamma(label: str, path: Path) -> float:
    kind, _, width = label.partition("-")
    if kind != "width":
        raise DataError(f"{path} is not a power-function average, but {label}: remove it")
    return PowerFunction(float(width)).gamma
