"""Checks of a machine, on recorded probes of healthy and of faulty ones."""

import math
import os
import resource
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from diffusion.config.loading import load_config
from diffusion.config.schema import Config
from diffusion.config.training import Device
from diffusion.operations.checks import gpu as gpu_checks
from diffusion.operations.checks import machine as machine_checks
from diffusion.operations.checks.check import Job, Stage, run_checks
from diffusion.operations.checks.device import computes_bf16
from diffusion.operations.checks.gpu import GpuMeter, GpuProbe, probe_gpus
from diffusion.operations.checks.machine import (
    Demand,
    DiskProbe,
    MachineProbe,
    WriteProbe,
    check_cores,
    check_file_limit,
    check_memory,
    check_output_space,
    check_output_speed,
    check_shared_memory,
    checkpoint_folder,
    measure_write_speed,
    probe_disk,
    probe_machine,
)
from diffusion.operations.checks.verdicts import Level, Verdict

GPU = GpuProbe(
    name="GPU 0 (NVIDIA A100)",
    total_bytes=80 * 10**9,
    free_bytes=79 * 10**9,
    foreign_bytes=0,
    uncorrected_errors=0,
    remapping_failed=False,
    slowdowns=(),
)
NODE = MachineProbe(
    num_cores=96,
    memory_bytes=1000 * 10**9,
    available_bytes=900 * 10**9,
    shm_bytes=500 * 10**9,
    shm_free_bytes=490 * 10**9,
    file_limit=65536,
    file_limit_max=65536,
)
DEMAND = Demand(
    num_ranks=8,
    num_workers=64,
    shm_bytes=10**9,
    num_files=600,
    memory_bytes=20e9,
    gpu_bytes=40e9,
    gpu_bytes_with_reserve=40e9 / 0.9,
    checkpoint_bytes=14 * 10**9,
    storage_bytes=140 * 10**9,
)
DISK = DiskProbe(folder=Path("/runs"), device=1, free_bytes=10**12, is_writable=True, held_bytes=0)


def run_at_start(
    machine: MachineProbe = NODE, demand: Demand = DEMAND, gpus: tuple[GpuProbe, ...] = (GPU, GPU)
) -> list[Verdict]:
    """The verdicts of a start of training with these probes."""
    results = {
        probe_machine: machine,
        machine_checks.find_demand: demand,
        machine_checks.probe_output_disk: DISK,
        probe_gpus: list(gpus),
    }
    device = Device.cpu if demand.gpu_bytes is None else Device.gpu
    job = Job(config=Config(), device=device, results=results)
    return run_checks([*machine_checks.CHECKS, *gpu_checks.CHECKS], job, Stage.start)


JOB = Job(config=Config(), device=Device.gpu)


def levels(verdicts: list[Verdict]) -> set[Level]:
    return {verdict.level for verdict in verdicts}


def test_a_healthy_node_gives_no_warning():
    assert levels(run_at_start()) == {Level.ok}


def test_a_small_machine_with_a_small_run_gives_no_warning():
    small = replace(
        NODE,
        num_cores=2,
        memory_bytes=8 * 10**9,
        available_bytes=5 * 10**9,
        shm_bytes=4 * 10**9,
        shm_free_bytes=4 * 10**9,
        file_limit=1024,
    )
    tiny = replace(
        DEMAND, num_ranks=2, num_workers=2, shm_bytes=10**6, num_files=320, memory_bytes=2.3e9, gpu_bytes=None
    )
    assert levels(run_at_start(small, tiny, ())) == {Level.ok}


@pytest.mark.parametrize(
    ("check", "reading", "level", "text"),
    [
        (check_cores, {"num_cores": 8}, Level.warning, "8 cores for 8 ranks and 64 loader workers"),
        (check_memory, {"available_bytes": 10**10}, Level.warning, "10.0 GB of 1.0 TB memory"),
        (check_shared_memory, {"shm_free_bytes": 64 * 10**6}, Level.problem, "64.0 MB of 500.0 GB free"),
        (check_shared_memory, {"shm_free_bytes": 15 * 10**8}, Level.warning, "1.5 GB of 500.0 GB free"),
        (check_file_limit, {"file_limit": 512}, Level.problem, "may open 512 files, a rank needs about 600"),
        (check_file_limit, {"file_limit": 1024}, Level.warning, "may open 1024 files"),
    ],
)
def test_what_a_machine_lacks(check, reading, level, text):
    verdict = check(replace(NODE, **reading), DEMAND)
    assert verdict.level is level
    assert text in verdict.what
    assert verdict.remedy


@pytest.mark.parametrize(
    ("gpu", "check", "level", "text"),
    [
        ({"total_bytes": 24 * 10**9}, "GPU memory", Level.problem, "has 24.0 GB of memory, 40.0 GB are needed"),
        ({"total_bytes": 42 * 10**9}, "GPU memory", Level.warning, "has 42.0 GB of memory"),
        ({"foreign_bytes": 5 * 10**9}, "GPU in use", Level.warning, "other processes hold 5.0 GB"),
        ({"foreign_bytes": 6 * 10**10, "free_bytes": 2 * 10**10}, "GPU in use", Level.problem, "hold 60.0 GB"),
        ({"uncorrected_errors": 3}, "GPU errors", Level.warning, "had 3 uncorrectable memory errors"),
        ({"remapping_failed": True}, "GPU errors", Level.problem, "cannot replace"),
        ({"slowdowns": ("too hot",)}, "GPU clocks", Level.warning, "slowed down: too hot"),
    ],
)
def test_what_is_wrong_with_a_gpu(gpu, check, level, text):
    (verdict,) = [one for one in run_at_start(gpus=(GPU, replace(GPU, **gpu))) if one.level is not Level.ok]
    assert (verdict.check, verdict.level) == (check, level)
    assert text in verdict.what


def test_gpus_that_nvml_does_not_show_and_a_run_without_gpus():
    assert levels([one for one in run_at_start(gpus=()) if one.check == "GPUs"]) == {Level.warning}
    assert not [one for one in run_at_start(demand=replace(DEMAND, gpu_bytes=None), gpus=()) if "GPU" in one.check]


def test_space_and_speed_of_the_output_folder():
    assert check_output_space(replace(DISK, free_bytes=10**9), DEMAND).level is Level.problem
    little = replace(DISK, free_bytes=10**11)
    assert check_output_space(little, DEMAND).level is Level.warning
    assert check_output_space(replace(little, held_bytes=5 * 10**10), DEMAND).level is Level.ok
    assert check_output_space(replace(DISK, is_writable=False), DEMAND).level is Level.problem

    def speed(bytes_per_second: float) -> Verdict:
        (found,) = check_output_speed(WriteProbe(folder=Path("/runs"), bytes_per_second=bytes_per_second), DEMAND)
        return found

    assert "about 14 s" in speed(1e9).what
    assert speed(1e7).level is Level.warning


def test_checkpoints_of_a_store_are_written_to_the_output_folder_first():
    config = load_config("tests/tools/toy.yaml", ["output_folder=/runs/toy"])
    assert checkpoint_folder(config) == Path("/runs/toy")
    config.trainer.checkpoint_folder = "s3://bucket/toy"
    assert checkpoint_folder(config) == Path("/runs/toy")
    config.trainer.checkpoint_folder = "/large/toy"
    assert checkpoint_folder(config) == Path("/large/toy")


def test_readings_of_this_machine(tmp_path):
    reading = probe_machine(JOB)
    assert 1 <= reading.num_cores <= (os.cpu_count() or 1)
    assert 0 < reading.available_bytes <= reading.memory_bytes
    assert reading.file_limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_bytes(bytes(1234))
    disk = probe_disk(tmp_path, with_content=True)
    assert (disk.held_bytes, disk.is_writable) == (1234, True)
    absent = tmp_path / "not" / "there"
    assert probe_disk(absent).device == disk.device
    assert measure_write_speed(absent, 2**20) > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sub"]


def test_what_the_kernel_would_give_up_is_left_of_a_containers_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_checks, "CGROUP", tmp_path)
    assert machine_checks._container_memory() == (None, None)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("900\n")
    assert machine_checks._container_memory() == (None, None)
    (tmp_path / "memory.max").write_text("1000\n")
    assert machine_checks._container_memory() == (1000, 100)
    stat = "anon 500\nfile 340\ninactive_anon 7\ninactive_file 100\nactive_file 240\nslab_reclaimable 50\n"
    (tmp_path / "memory.stat").write_text(stat + "slab_unreclaimable 10\nslab 60\n")
    assert machine_checks._container_memory() == (1000, 490)
    for used, left in ((1900, 0), (300, 1000)):
        (tmp_path / "memory.current").write_text(f"{used}\n")
        assert machine_checks._container_memory() == (1000, left)


class FakeNVMLError(Exception):
    pass


def fake_nvml(**functions) -> SimpleNamespace:
    """A driver with two GPUs; the second is not free of faults."""

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
        "nvmlClocksThrottleReasonHwThermalSlowdown": 64,
        "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": 128,
        "nvmlClocksThrottleReasonHwSlowdown": 8,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda number: number,
        "nvmlDeviceGetHandleByUUID": {"GPU-b": 1}.__getitem__,
        "nvmlDeviceGetName": lambda handle: "H100",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=100, free=100 - 30 * handle, used=30 * handle),
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [
            SimpleNamespace(pid=os.getppid(), usedGpuMemory=20 * handle),
            SimpleNamespace(pid=1, usedGpuMemory=None),
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=10 * handle),
        ],
        "nvmlDeviceGetTotalEccErrors": lambda handle, kind, counter: 2 * handle,
        "nvmlDeviceGetRemappedRows": not_supported,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 64 * handle,
        "nvmlDeviceGetSamples": samples,
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=10),
    }
    return SimpleNamespace(**(driver | functions))


def test_nvml_is_read_and_memory_of_the_job_is_not_foreign(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    first, second = probe_gpus(JOB, fake_nvml())
    assert (first.name, first.foreign_bytes, first.uncorrected_errors, first.slowdowns) == ("GPU 0 (H100)", 0, 0, ())
    assert (second.free_bytes, second.foreign_bytes, second.uncorrected_errors) == (70, 20, 2)
    assert second.slowdowns == ("too hot",)
    assert not second.remapping_failed


def test_processes_of_another_namespace_are_not_judged(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    ours = SimpleNamespace(pid=2**22 + 1, usedGpuMemory=5 * 10**9)  # Above the largest id that Linux gives.
    found = probe_gpus(JOB, fake_nvml(nvmlDeviceGetComputeRunningProcesses=lambda handle: [ours]))
    assert [gpu.foreign_bytes for gpu in found] == [None, None]
    assert levels(run_at_start(gpus=(replace(GPU, foreign_bytes=None),))) == {Level.ok}


def test_a_gpu_whose_memory_nvml_cannot_read_is_named(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def lost(handle: int) -> SimpleNamespace:
        if handle == 0:
            raise FakeNVMLError
        return SimpleNamespace(total=100, free=70, used=30)

    driver = fake_nvml(nvmlDeviceGetMemoryInfo=lost)
    found = probe_gpus(JOB, driver)
    assert [gpu.free_bytes for gpu in found] == [None, 70]
    (verdict,) = [one for one in run_at_start(gpus=tuple(found)) if one.check == "GPUs"]
    assert (verdict.level, "GPU 0" in verdict.what) == (Level.warning, True)
    assert GpuMeter(driver).read() == pytest.approx((0.6, 0.3)), "of the GPU that answers"

    def gone(*arguments: int) -> SimpleNamespace:
        raise FakeNVMLError

    assert GpuMeter(fake_nvml(nvmlDeviceGetMemoryInfo=gone)).read() == pytest.approx((0.6, math.nan), nan_ok=True)
    assert probe_gpus(JOB, fake_nvml(nvmlDeviceGetHandleByIndex=gone)) == []


@pytest.mark.parametrize(("capability", "computes"), [(7, False), (8, True)])
def test_emulated_bf16_does_not_count(monkeypatch, capability, computes):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=capability))
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda device: True)
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    assert computes_bf16() is computes


def test_only_visible_gpus_are_read_and_none_without_a_driver(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    (only,) = probe_gpus(JOB, fake_nvml())
    assert only.free_bytes == 70

    def no_driver() -> None:
        raise FakeNVMLError

    assert probe_gpus(JOB, fake_nvml(nvmlInit=no_driver)) == []
    assert GpuMeter(fake_nvml(nvmlInit=no_driver)).read() is None


def test_utilisation_is_the_mean_of_the_new_samples_or_the_present_value(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    meter = GpuMeter(fake_nvml())
    assert meter.read() == pytest.approx((0.6, 0.15))
    assert meter.read() == pytest.approx((0.1, 0.15))
