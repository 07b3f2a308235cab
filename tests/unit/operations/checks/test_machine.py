"""Checks of a machine and its GPUs, of healthy and of faulty ones."""

import logging
import math
import os
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from diffusion.config.loading import load_config
from diffusion.config.model import InitFromConfig
from diffusion.config.training import Device, Parallelism
from diffusion.errors import MachineError
from diffusion.operations.checks import machine as machine_checks
from diffusion.operations.checks.gpu import GpuMeter, check_gpu_errors, check_gpu_memory, computes_bf16, gpu_handles
from diffusion.operations.checks.machine import (
    RANK_BYTES,
    Demand,
    available_memory,
    check_machines,
    check_memory,
    check_output_folder,
    check_output_space,
    check_shared_memory,
    checkpoint_folder,
    file_bytes,
    find_demand,
)
from diffusion.operations.checks.verdicts import Level
from diffusion.planning.memory import parameter_counts
from diffusion.planning.storage import plan_checkpoints
from tests.tools.training_runs import ROOT

GB = 10**9
DEMAND = Demand(shm_bytes=GB, memory_bytes=20e9, gpu_bytes=40e9, checkpoint_bytes=14 * GB, storage_bytes=140 * GB)


def test_what_a_machine_lacks():
    assert check_memory(30 * GB, DEMAND).level is Level.ok
    assert check_memory(10 * GB, DEMAND).level is Level.warning
    assert check_shared_memory(2 * GB, DEMAND).level is Level.ok
    assert check_shared_memory(64 * 10**6, DEMAND).level is Level.problem


@pytest.mark.parametrize(
    ("free", "held", "level"),
    [(GB, 0, Level.problem), (100 * GB, 0, Level.warning), (100 * GB, 50 * GB, Level.ok), (200 * GB, 0, Level.ok)],
)
def test_space_for_checkpoints(tmp_path, monkeypatch, free, held, level):
    monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    monkeypatch.setattr(machine_checks, "file_bytes", lambda folder: held)
    assert check_output_space(tmp_path / "run", DEMAND).level is level
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written():
    assert check_output_space(Path("/dev/null/run"), DEMAND).level is Level.problem


def test_checkpoints_of_a_store_are_written_to_the_output_folder_first():
    config = load_config("tests/tools/toy.yaml", ["output_folder=/runs/toy"])
    assert checkpoint_folder(config) == Path("/runs/toy")
    config.trainer.checkpoint_folder = "s3://bucket/toy"
    assert checkpoint_folder(config) == Path("/runs/toy")
    config.trainer.checkpoint_folder = "/large/toy"
    assert checkpoint_folder(config) == Path("/large/toy")


def test_checkpoints_in_a_store_take_no_disk_and_averages_do():
    config = load_config("tests/tools/toy.yaml")
    local = find_demand(config, Device.cpu, num_ranks=1, ranks_per_node=1)
    config.trainer.checkpoint_folder = "s3://bucket/toy"
    stored = find_demand(config, Device.cpu, num_ranks=1, ranks_per_node=1)
    assert local.storage_bytes is not None and local.storage_bytes > local.checkpoint_bytes
    assert stored == replace(local, storage_bytes=0)
    power = "algorithms.ema.power={relative_widths: [0.1, 0.2], snapshot_interval: 2ba, snapshot_precision: bf16}"
    config = load_config("tests/tools/toy.yaml", [power])
    local = find_demand(config, Device.cpu, num_ranks=1, ranks_per_node=1)
    kept = plan_checkpoints(config, parameter_counts(config)).kept_bytes
    averages = 3 * 2 * 2 * parameter_counts(config).trained  # At steps 4, 6 and 8.
    assert kept is not None and local.storage_bytes == kept + averages
    config.trainer.checkpoint_folder = "s3://bucket/toy"
    assert find_demand(config, Device.cpu, num_ranks=1, ranks_per_node=1).storage_bytes == averages, "local copies"


def test_each_rank_builds_the_model_and_reads_initial_weights_or_a_checkpoint_in_host_memory():
    config = load_config("tests/tools/toy.yaml", ["trainer.parallelism=fsdp", "model.network.block_out_channels=[96]"])
    counts = parameter_counts(config)

    def needed() -> float:
        return find_demand(config, Device.gpu, num_ranks=8, ranks_per_node=8).memory_bytes / 8 - RANK_BYTES

    trained = counts.trained + counts.fixed
    assert needed() == pytest.approx(4 * (trained + counts.frozen), abs=1)
    config.init_from = InitFromConfig(checkpoint="weights")
    assert needed() == pytest.approx(4 * (2 * trained + counts.frozen), abs=1)
    config.trainer.parallelism = Parallelism.ddp
    checkpoint_bytes = find_demand(config, Device.gpu, num_ranks=8, ranks_per_node=8).checkpoint_bytes
    assert checkpoint_bytes > 4 * (2 * trained + counts.frozen)
    assert needed() == pytest.approx(checkpoint_bytes, abs=1)


def test_files_of_a_folder_are_added_up(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_bytes(bytes(1234))
    assert file_bytes(tmp_path) == 1234


def test_a_full_disk_cannot_be_written(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        assert check_output_folder(folder).level is Level.problem
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    assert check_output_folder(folder).level is Level.ok


def test_reclaimable_memory_of_a_container_is_available(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_checks, "CGROUP", tmp_path)
    of_machine = available_memory()
    assert of_machine > 1000
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("900\n")
    assert available_memory() > 1000
    (tmp_path / "memory.max").write_text("1000\n")
    assert available_memory() == 100
    stat = "anon 500\nfile 340\ninactive_anon 7\ninactive_file 100\nactive_file 240\nslab_reclaimable 50\n"
    (tmp_path / "memory.stat").write_text(stat + "slab_unreclaimable 10\nslab 60\n")
    assert available_memory() == 490
    for used, left in ((1900, 0), (300, 1000)):
        (tmp_path / "memory.current").write_text(f"{used}\n")
        assert available_memory() == left


# The start of training


def start(tmp_path: Path) -> None:
    config = load_config(
        ROOT / "tests/tools/toy.yaml",
        [f"output_folder={tmp_path}/run", "data.num_workers=2", "data.global_batch_size=4096"],
    )
    check_machines(config, Device.cpu)


def test_a_healthy_start_is_quiet_and_quick(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(machine_checks, "available_memory", lambda: 100 * GB)
    start(tmp_path)
    began = time.process_time()
    start(tmp_path)
    assert time.process_time() - began < 5
    assert [record.message for record in caplog.records if record.name.startswith("diffusion")] == []


def test_a_problem_ends_the_start_and_a_warning_is_logged(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(machine_checks, "available_memory", lambda: 10**6)
    start(tmp_path)
    assert "data.num_workers" in caplog.text
    monkeypatch.setattr(machine_checks, "SHM", tmp_path / "absent")
    with pytest.raises(MachineError, match=r"data\.prefetch_factor"):
        start(tmp_path)


# GPUs


def memory(used: int, total: int = 80 * GB) -> SimpleNamespace:
    return SimpleNamespace(total=total, free=total - used, used=used)


class FakeNVMLError(Exception):
    pass


def fake_nvml(**functions) -> SimpleNamespace:
    """A driver with two GPUs of 80 GB; a foreign process holds 20 GB of the second."""

    def samples(handle: int, kind: int, since: int):
        taken = [
            SimpleNamespace(timeStamp=t, sampleValue=SimpleNamespace(uiVal=value)) for t, value in [(5, 40), (9, 80)]
        ]
        return 1, [sample for sample in taken if sample.timeStamp > since]

    def not_supported(*arguments):
        raise FakeNVMLError

    driver = {
        "NVMLError": FakeNVMLError,
        "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
        "NVML_VOLATILE_ECC": 0,
        "NVML_GPU_UTILIZATION_SAMPLES": 1,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda number: number,
        "nvmlDeviceGetHandleByUUID": {"GPU-b": 1}.__getitem__,
        "nvmlDeviceGetName": lambda handle: "H100",
        "nvmlDeviceGetMemoryInfo": lambda handle: memory(used=24 * GB * handle),
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [
            SimpleNamespace(pid=os.getppid(), usedGpuMemory=20 * GB * handle),
            SimpleNamespace(pid=1, usedGpuMemory=None),
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=10 * GB * handle),
        ],
        "nvmlDeviceGetTotalEccErrors": lambda handle, kind, counter: 0,
        "nvmlDeviceGetRemappedRows": not_supported,
        "nvmlDeviceGetSamples": samples,
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=10),
    }
    return SimpleNamespace(**(driver | functions))


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def found(functions: dict, needed: float = 40e9) -> dict[str, Level]:
    """Levels of the verdicts on the GPUs of a driver, by the name of the check."""
    nvml = fake_nvml(**functions)
    return {verdict.check: verdict.level for verdict in [*check_gpu_memory(needed, nvml), *check_gpu_errors(nvml)]}


def processes(*num_bytes: int, pid: int = 1):
    return lambda handle: [SimpleNamespace(pid=pid, usedGpuMemory=num) for num in num_bytes]


def test_memory_of_other_processes_is_named():
    (verdict,) = [one for one in check_gpu_memory(40e9, fake_nvml()) if one.check == "GPU in use"]
    assert (verdict.level, "20.0 GB on GPU 1 (H100)" in verdict.what) == (Level.warning, True)
    assert found({"nvmlDeviceGetComputeRunningProcesses": processes(GB)}) == {"GPUs": Level.ok}
    assert found({}, 70e9)["GPU in use"] is Level.problem, "it does not fit beside them"
    of_another_namespace = 2**22 + 1  # Above the largest ID that Linux gives.
    assert found({"nvmlDeviceGetComputeRunningProcesses": processes(5 * GB, pid=of_another_namespace)}) == {
        "GPUs": Level.ok
    }


def test_what_is_wrong_with_a_gpu():
    healthy = {"nvmlDeviceGetComputeRunningProcesses": processes()}
    assert found(healthy) == {"GPUs": Level.ok}
    assert found(healthy, 90e9)["GPU memory"] is Level.problem
    errors = {"nvmlDeviceGetTotalEccErrors": lambda handle, kind, counter: 3}
    assert found(healthy | errors)["GPU errors"] is Level.warning
    remapped = {"nvmlDeviceGetRemappedRows": lambda handle: (1, 1, 0, 1)}
    assert found(healthy | remapped)["GPU errors"] is Level.problem


def test_a_gpu_that_no_rank_uses_does_not_count():
    driver = fake_nvml(nvmlDeviceGetRemappedRows=lambda handle: (1, 1, 0, handle))
    assert [verdict.check for verdict in check_gpu_memory(70e9, driver, num_gpus=1)] == ["GPUs"]
    assert list(check_gpu_errors(driver, num_gpus=1)) == []
    assert GpuMeter(driver, num_gpus=1).read() == pytest.approx((0.6, 0.0))


def lost(handle: int) -> SimpleNamespace:
    if handle == 0:
        raise FakeNVMLError
    return memory(used=24 * GB)


def gone(*arguments: int) -> SimpleNamespace:
    raise FakeNVMLError


def test_a_gpu_whose_memory_nvml_cannot_read_is_named():
    driver = fake_nvml(nvmlDeviceGetMemoryInfo=lost)
    (verdict,) = [one for one in check_gpu_memory(40e9, driver) if one.check == "GPUs"]
    assert (verdict.level, "GPU 0" in verdict.what) == (Level.warning, True)
    assert GpuMeter(driver).read() == pytest.approx((0.6, 0.3)), "of the GPU that answers"
    assert GpuMeter(fake_nvml(nvmlDeviceGetMemoryInfo=gone)).read() == pytest.approx((0.6, math.nan), nan_ok=True)
    assert found({"nvmlDeviceGetHandleByIndex": gone}) == {"GPUs": Level.warning}


def test_only_visible_gpus_are_read_and_none_without_a_driver(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    assert gpu_handles(fake_nvml()) == {"GPU 0 (H100)": 1}
    no_driver = fake_nvml(nvmlInit=gone)
    assert gpu_handles(no_driver) == {}
    assert GpuMeter(no_driver).read() is None


def test_utilisation_is_the_mean_of_the_new_samples_or_the_present_value():
    meter = GpuMeter(fake_nvml())
    assert meter.read() == pytest.approx((0.6, 0.15))
    assert meter.read() == pytest.approx((0.1, 0.15))


@pytest.mark.parametrize(("capability", "computes"), [(7, False), (8, True)])
def test_emulated_bf16_does_not_count(monkeypatch, capability, computes):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=capability))
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda device: True)
    monkeypatch.setattr("torch.version.cuda", "12.6")
    assert computes_bf16() is computes
