"""With `performance.parallel_compilation` the first step finds every graph in Inductor's cache."""

import contextlib
import multiprocessing
import subprocess
import sys

import psutil
import pytest
import torch
from composer import Callback, Logger, State
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from diffusion.config.loading import load_config
from diffusion.config.model import Architecture, ModelConfig, PerformanceConfig
from diffusion.config.training import Device
from diffusion.models.fast.parallel import BlockCall, Compilers
from diffusion.train import train
from tests.tools.training_runs import ROOT, environment

SETTINGS = ("trainer.max_duration=2ba", "trainer.device_train_microbatch_size=4", "algorithms.ema=null")


class CountGraphs(Callback):
    """Counts the graphs of the first step that Inductor found in its cache, and those that it compiled."""

    found: dict[str, int] = {}

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == 1:
            names = ("fxgraph_cache_hit", "fxgraph_cache_miss")
            type(self).found = {name: counters["inductor"][name] for name in names}


@pytest.mark.slow
def test_the_first_step_finds_all_its_graphs(tmp_path):
    overrides = [
        f"output_folder={tmp_path}",
        "performance={compilation: blocks, parallel_compilation: true}",
        f"plugins.callbacks=[{{path: {__name__}.CountGraphs}}]",
        *SETTINGS,
    ]
    is_first = not torch.distributed.is_initialized()
    torch._dynamo.reset()
    counters.clear()
    with fresh_cache():
        train(load_config("tests/tools/toy.yaml", overrides))
    if is_first:
        torch.distributed.destroy_process_group()
    assert CountGraphs.found == {"fxgraph_cache_hit": 8, "fxgraph_cache_miss": 0}


def test_an_error_of_a_process_is_returned(monkeypatch):
    fork = multiprocessing.get_context("fork")  # It need not import what this process has.
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: fork)
    call = BlockCall("absent", {}, (), {}, torch.device("cpu"), None, is_sharded=False)
    config = ModelConfig(architecture=Architecture.tiny)
    [error] = Compilers(1, config, PerformanceConfig(), Device.cpu).compile([call])
    assert "absent" in error


RANK = """\
import multiprocessing, sys
import torch.distributed as dist
from diffusion.config.model import Architecture, ModelConfig, PerformanceConfig
from diffusion.config.training import Device
from diffusion.errors import DataError
from diffusion.launch import run_command
from diffusion.models.fast.parallel import Compilers

def main():
    compilers = Compilers(2, ModelConfig(architecture=Architecture.tiny), PerformanceConfig(), Device.cpu)
    print(*(process.pid for process in multiprocessing.active_children()), flush=True)
    sys.stdin.read()
    raise DataError("a shard is damaged")

fork = multiprocessing.get_context("fork")
multiprocessing.get_context = lambda method: fork
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
run_command(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True])
def test_processes_end_with_a_rank_that_ends_before_the_first_step(is_killed):
    pipe = subprocess.PIPE
    rank = subprocess.Popen([sys.executable, "-c", RANK], cwd=ROOT, env=environment(), stdin=pipe, stdout=pipe)
    assert rank.stdin is not None and rank.stdout is not None
    processes = [psutil.Process(int(pid)) for pid in rank.stdout.readline().split()]
    try:
        rank.kill() if is_killed else rank.stdin.close()
        assert rank.wait(300) == (-9 if is_killed else 2)
        assert len(processes) == 2
        assert psutil.wait_procs(processes, timeout=300)[1] == []
    finally:
        for process in (rank, *processes):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
