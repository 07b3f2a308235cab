"""The plan for a GPU, which nothing here can run, holds configurations that training accepts."""

import json
import warnings

import torch

from benchmarks.clocks import SynchronisationWatch
from benchmarks.plan import Benchmark
from benchmarks.step_runs import run_config
from diffusion.config.checks import check
from diffusion.config.model import Architecture


def test_rows_for_a_gpu_have_valid_configurations(tmp_path):
    benchmark = Benchmark(device=torch.device("cuda", 0), architecture=Architecture.stable_diffusion_2)
    rows = [row for call in (1, 2, 3, 4) for row in benchmark.call(call)]
    assert len({row.name for row in rows}) == len(rows) > 30
    for row in rows:
        assert json.loads(json.dumps(row.parameters)) == row.parameters
        assert 0 < row.seconds < 570
        if "overrides" in row.parameters:
            given = row.parameters
            size = given.get("microbatch_size") or given["batch_size"]
            sizes = {"resolution": given["resolution"], "batch_size": size, "num_steps": 10}
            config = run_config(tmp_path, Architecture(given["architecture"]), overrides=given["overrides"], **sizes)
            check(config, world_size=1, vae_factor=8)


def test_synchronisations_are_counted_where_they_are_called(tmp_path):
    watch = SynchronisationWatch(str(tmp_path / "found.json"))
    watch.watch(torch.device("cpu"))
    for _ in range(3):
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    warnings.warn("something else", stacklevel=1)
    watch.fit_end(None, None)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["num_warnings"] == 3
    [(place, number)] = found["places"].items()
    assert number == 3
    assert "benchmarks/test_benchmark_plan.py" in place
