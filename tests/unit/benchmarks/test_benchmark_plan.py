"""The plan for a GPU, which nothing here can run, holds configurations that training accepts."""

import json
import warnings

import torch

from benchmarks.plan import Benchmark
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
            check(run_config(**run, num_steps=10), world_size=1, side_factor=8)


def test_synchronisations_are_counted_by_line():
    watch = SynchronisationWatch()
    watch.watch(torch.device("cpu"))
    for _ in range(3):
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    warnings.warn("something else", stacklevel=1)
    found = watch.result()
    assert found["num_warnings"] == 3
    [(line, number)] = found["lines"].items()
    assert number == 3
    assert "benchmarks/test_benchmark_plan.py" in line
