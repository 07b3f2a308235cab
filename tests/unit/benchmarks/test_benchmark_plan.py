"""The plan for a GPU holds configurations that training accepts, and processes that can be forked."""

import json
import warnings

import pynvml
import torch

from benchmarks.plan import Benchmark, describe_machine
from benchmarks.runs import SynchronisationWatch, run_config
from diffusion.config.checks import check


def test_rows_for_a_gpu_have_valid_configurations():
    benchmark = Benchmark(torch.device("cuda", 0))
    rows = [row for call in (1, 2, 3, 4) for row in benchmark.call(call)]
    assert len({row.name for row in rows}) == len(rows) > 30
    for row in rows:
        assert json.loads(json.dumps(row.parameters)) == row.parameters
        assert 0 < row.seconds < 570
        if "overrides" in row.parameters:
            run = {key: row.parameters[key] for key in ("architecture", "resolution", "batch_size", "overrides")}
            check(run_config(**run, num_steps=10), world_size=1, side_factor=8, may_be_random=True)


def test_a_machine_is_described_before_the_fork_of_rows_without_cuda(monkeypatch):
    def refuse():
        raise AssertionError("rows could not use the GPU")

    monkeypatch.setattr(torch.cuda, "_lazy_init", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("nvmlInit", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetName", "nvmlSystemGetDriverVersion"):
        monkeypatch.setattr(pynvml, name, lambda *_: "H200")
    assert describe_machine(torch.device("cuda"))["cudnn"] > 90_000


def test_synchronisations_are_counted_by_line():
    watch = SynchronisationWatch()
    watch.watch(torch.device("cpu"))
    for _ in range(3):
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    warnings.warn("this mode does not yet detect all synchronizing operations", stacklevel=1)
    found = watch.result()
    assert found["num_warnings"] == 3
    [(line, number)] = found["lines"].items()
    assert number == 3
    assert "benchmarks/test_benchmark_plan.py" in line
