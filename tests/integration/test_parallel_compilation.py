"""With `performance.parallel_compilation` the first step finds every graph in Inductor's cache."""

import multiprocessing

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
