"""The quick checks at the start of training."""

import logging
import time
from dataclasses import replace

import pytest

from diffusion.config.data import Representation
from diffusion.config.loading import load_config
from diffusion.config.schema import Config
from diffusion.config.training import Device
from diffusion.datasets.loader import train_loader
from diffusion.errors import ConfigurationError, MachineError
from diffusion.operations.checks import registry
from diffusion.operations.checks.check import Job
from diffusion.operations.checks.machine import MachineProbe, probe_machine
from diffusion.operations.checks.registry import check_caches, check_machines
from tests.tools.training_runs import ROOT
from tests.tools.written_data import data_config, write_encoded


def toy(tmp_path, *overrides: str):
    return load_config(ROOT / "tests/tools/toy.yaml", [f"output_folder={tmp_path}/run", *overrides])


def healthy_machine() -> MachineProbe:
    """This one with room in its memory, whatever else it does."""
    room = {"available_bytes": 10**11, "memory_bytes": 10**11, "shm_free_bytes": 10**10, "shm_bytes": 10**10}
    return replace(probe_machine(Job(config=Config(), device=Device.cpu)), **room)


def be_machine(monkeypatch, probe: MachineProbe) -> None:
    monkeypatch.setattr(registry, "Job", lambda **values: Job(**values, results={probe_machine: probe}))


def test_a_healthy_start_is_quiet_and_quick(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    be_machine(monkeypatch, healthy_machine())
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        check_machines(toy(tmp_path, "data.num_workers=2"), Device.cpu)
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 5
    assert [record.message for record in caplog.records if record.name.startswith("diffusion")] == []


def test_a_problem_ends_the_start_and_a_warning_is_logged(tmp_path, monkeypatch, caplog):
    config = toy(tmp_path, "data.num_workers=2", "data.global_batch_size=4096")
    here = healthy_machine()
    be_machine(monkeypatch, replace(here, shm_free_bytes=10**6))
    with pytest.raises(MachineError, match=r"^/dev/shm has 1.0 MB .*data.prefetch_factor"):
        check_machines(config, Device.cpu)
    be_machine(monkeypatch, replace(here, available_bytes=10**6))
    check_machines(config, Device.cpu)
    assert [text.split(" of ")[0] for text in caplog.messages] == ["1.0 MB"]
    assert "lower data.num_workers" in caplog.text


def test_a_cache_limit_below_what_is_needed_at_once_ends_the_start(tmp_path):
    root = write_encoded(tmp_path, {"a": 400, "b": 240})
    remote = {"remote": str(root), "representation": Representation.latents}
    for limit, is_enough in (("40kb", False), ("10mb", True), (None, True)):
        data = data_config(tmp_path / f"cache-{limit}", "a", "b", cache_limit=limit, **remote)
        dataset = train_loader(data, seed=3, tokenize=None, rank_batch_size=8).dataset
        config = replace(toy(tmp_path), data=data)
        if is_enough:
            check_caches(config, dataset)  # pyright: ignore[reportArgumentType]
        else:
            with pytest.raises(ConfigurationError, match=r"data.cache_limit is 40kb"):
                check_caches(config, dataset)  # pyright: ignore[reportArgumentType]
        dataset.close()  # pyright: ignore[reportAttributeAccessIssue]
