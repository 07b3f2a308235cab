"""Averages of any width from files, against the same average tracked directly, on a trajectory of weights."""

import os
import runpy
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from diffusion.checkpointing.remote import RemoteCheckpoints
from diffusion.ema.averaging import PowerFunction, WeightAverage
from diffusion.ema.callbacks import AverageSnapshots
from diffusion.ema.posthoc import (
    AverageRecord,
    fetch_averages,
    list_averages,
    read_combination,
    reconstruct,
    write_average,
)
from diffusion.errors import ConfigurationError, DataError, MachineError
from diffusion.formats.run_folder import AVERAGES

ROOT = Path(__file__).resolve().parents[3]
NUM_STEPS, INTERVAL = 2000, 100
TRACKED = (0.05, 0.10)
WANTED = (0.05, 0.06, 0.08, 0.10, 0.12)


def follow(dtype: torch.dtype, run: Path) -> dict[float, Tensor]:
    """Weights of a size of 0.05 drift and diffuse; store two averages, and return all that were tracked, at the end."""
    generator = torch.Generator().manual_seed(5)
    parameters = {"unet.w": nn.Parameter(0.05 * torch.randn(1000, generator=generator))}
    drift = 1e-5 * torch.randn(1000, generator=generator)
    averages = {width: WeightAverage(parameters, PowerFunction(width)) for width in (*TRACKED, *WANTED)}
    for step in range(2, NUM_STEPS + 1):
        with torch.no_grad():
            parameters["unet.w"].add_(drift + 3e-4 * torch.randn(1000, generator=generator))
        for average in averages.values():
            average.update()
        if step % INTERVAL == 0:
            for width in TRACKED:
                record = AverageRecord(label=PowerFunction(width).label, step=step, time=averages[width].time)
                write_average(run / AVERAGES, record, {"unet.w": averages[width].averages["unet.w"].to(dtype)})
    return {width: average.averages["unet.w"] for width, average in averages.items()}


@pytest.fixture(scope="module")
def trajectories(tmp_path_factory) -> dict[str, tuple[Path, dict[float, Tensor]]]:
    root = tmp_path_factory.mktemp("trajectories")
    types = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    return {name: (root / name, follow(dtype, root / name)) for name, dtype in types.items()}


def deviation(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("width", WANTED)
@pytest.mark.parametrize(("precision", "limit"), [("fp32", 3e-5), ("fp16", 3e-4), ("bf16", 2.5e-3)])
def test_a_reconstructed_average_is_the_tracked_one(trajectories, precision, limit, width):
    run, tracked = trajectories[precision]
    path, combination = reconstruct(run, width)
    found = load_file(path)["unet.w"]
    assert found.dtype == torch.float32
    assert deviation(found, tracked[width]) < limit
    others = [deviation(tracked[other], tracked[width]) for other in TRACKED if other != width]
    assert precision == "bf16" or deviation(found, tracked[width]) < 0.1 * min(others)
    assert len(combination.coefficients) == 2 * NUM_STEPS // INTERVAL


def test_an_average_can_end_at_any_stored_step(trajectories):
    run, _ = trajectories["fp32"]
    path, combination = reconstruct(run, 0.1, step=700)
    assert path.name == "step-000700-width-0.1.safetensors"
    assert len(combination.coefficients) == 14
    stored = load_file(run / AVERAGES / path.name)["unet.w"]
    assert deviation(load_file(path)["unet.w"], stored) < 1e-6


def test_the_command(trajectories, monkeypatch, capsys):
    run, _ = trajectories["fp32"]
    main = runpy.run_path(str(ROOT / "scripts" / "reconstruct_ema.py"))["main"]
    monkeypatch.setattr(sys, "argv", ["reconstruct_ema.py", str(run), "--width", "0.09", "0.07"])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        str(run / "reconstructed" / f"step-002000-width-{width}.safetensors") for width in (0.09, 0.07)
    ]
    assert "40 averages" in lines[0]
    monkeypatch.setattr(sys, "argv", ["reconstruct_ema.py", str(run), "--width", "0.3"])
    with pytest.raises(ConfigurationError):
        main()


def test_what_cannot_be_reconstructed_is_told(tmp_path):
    with pytest.raises(ConfigurationError, match=r"algorithms\.ema\.power"):
        reconstruct(tmp_path, 0.08)
    record = AverageRecord(label="width-0.1", step=10, time=7)
    path = write_average(tmp_path / AVERAGES, record, {"unet.w": torch.ones(8)})
    (tmp_path / AVERAGES / f".{path.name}.partial").write_bytes(b"left behind")
    assert list_averages(tmp_path) == [(path, record)]
    write_average(tmp_path / AVERAGES, AverageRecord(label="width-0.1", step=20, time=17), {"unet.w": torch.ones(9)})
    with pytest.raises(DataError, match=r"unet\.w"):
        reconstruct(tmp_path, 0.08)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DataError, match=r"step-000010-width-0\.1\.safetensors"):
        reconstruct(tmp_path, 0.08)
    save_file({"unet.w": torch.ones(8)}, path)
    with pytest.raises(DataError, match=r"step-000010-width-0\.1\.safetensors"):
        reconstruct(tmp_path, 0.08)


def test_a_file_that_cannot_be_written_is_told(tmp_path):
    record = AverageRecord(label="width-0.1", step=10, time=7)
    write_average(tmp_path / AVERAGES, record, {"unet.w": torch.ones(8)})
    (tmp_path / "reconstructed").write_text("in the way")
    with pytest.raises(MachineError, match="reconstructed"):
        reconstruct(tmp_path, 0.08)


def test_equal_averages_give_equal_bytes(tmp_path):
    record = AverageRecord(label="width-0.1", step=10, time=7)
    tensors = {f"unet.{name}": torch.arange(6.0).reshape(2, 3).T for name in "abcdef"}
    paths = [
        write_average(tmp_path / str(i), record, dict(list(tensors.items())[::step])) for i, step in ((0, 1), (1, -1))
    ]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    found = dict(read_combination(paths, [0.75, 0.25]))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_start_removes_the_averages_of_later_steps(tmp_path):
    for run, step in [(tmp_path, 100), (tmp_path, 300), (tmp_path / "store", 100), (tmp_path / "store", 300)]:
        write_average(run / AVERAGES, AverageRecord(label="width-0.1", step=step, time=step), {"w": torch.ones(2)})
    ema: Any = None
    remote = RemoteCheckpoints(str(tmp_path / "store"), timeout=1.0)
    snapshots = AverageSnapshots(ema, tmp_path / AVERAGES, interval="100ba", dtype=torch.float32, remote=remote)
    state: Any = SimpleNamespace(timestamp=SimpleNamespace(batch=SimpleNamespace(value=200)))
    logger: Any = None
    snapshots.fit_start(state, logger)
    for run in (tmp_path, tmp_path / "store"):
        assert [record.step for _, record in list_averages(run)] == [100]


def test_averages_that_the_store_has_anew_are_fetched_again(tmp_path):
    store, record = tmp_path / "store", AverageRecord(label="width-0.1", step=100, time=100)
    for number in range(2):
        path = write_average(store / AVERAGES, record, {"w": torch.full((2,), float(number))})
        later = time.time() + 100 * number
        os.utime(path, (later, later))
        fetch_averages(str(store), tmp_path / "run")
    assert (tmp_path / "run" / AVERAGES / path.name).read_bytes() == path.read_bytes()
