"""The quarter of an hour with a GPU: its rows train, take turns, and say what the GPU did."""

import sys

import pynvml
import pytest
import torch

from benchmarks.parts import describe_machine, measure_rates
from benchmarks.quarter_hour import CALLS, RATES, main, shape
from benchmarks.rows import read_rows
from benchmarks.runs import ResidentLatents, kernels_by_class, run_config
from diffusion.config.checks import check


def test_rows_for_a_gpu_have_valid_configurations():
    names = {name for waves in CALLS.values() for wave in waves for name in wave} - {RATES}
    for name in names:
        config = run_config(**shape(name, "cuda"), num_steps=10)
        check(config, world_size=1, side_factor=8, may_be_random=True)


def test_captions_end_once_in_each_chunk():
    data = ResidentLatents("tiny_transformer", 32, num_chunks=3, stores_text=True)
    chunks = data.token_ids.unflatten(1, (3, -1))
    end = chunks.max()
    assert ((chunks == end).sum(dim=2) == 1).all()
    assert (chunks[:, 2, 1] == end).any(), "an empty chunk"
    assert (chunks[:, 2, 1] != end).any()


def test_two_rows_are_timed_one_after_the_other(server, tmp_path, monkeypatch):
    """The processes of rows are forked."""
    monkeypatch.setattr(sys, "executable", str(server.programs(tmp_path / "bin") / "python"))
    names = ["trainer/256/32", "trainer/256/32/ddp/log_late"]
    command = ["quarter_hour.py", "first", "--out", str(tmp_path), "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", [*command, "--wave", *names, "--label", "test", "--minutes", "8"])
    main()
    rows = read_rows(tmp_path / "rows.jsonl")
    assert set(rows) == {f"{name}/test" for name in names}
    for row in rows.values():
        assert row["result"]["images_per_second"] == pytest.approx(2 / row["result"]["seconds"])
    turns = {name: tmp_path / "logs" / name.replace("/", "-") for name in names}
    first, second = (turns[name] for name in names)
    assert first.with_suffix(".done").stat().st_mtime <= second.with_suffix(".go").stat().st_mtime
    main()
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 2, "nothing is measured again"


def test_rates_are_those_of_a_device():
    found = measure_rates(torch.device("cpu"))
    assert found["matmul_flops"] > 0
    assert {name: len(times) for name, times in found["attention"].items()} == {
        "math, mask none": 2,
        "math, mask broadcast": 2,
    }


def test_kernels_are_summed_by_class():
    names = ["sm90_xmma_fprop_implicit_gemm_bf16", "nvjet_sm90_tst_1", "cudnn_sdpa_sm90_flash_bprop", "triton_poi_0"]
    events = [{"cat": "kernel", "name": name, "ts": 1000.0 * i, "dur": 1500.0} for i, name in enumerate(names)]
    events += [{"cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 9000.0, "dur": 500.0}]
    events += [{"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0.0, "dur": 250.0}] * 4
    found = kernels_by_class(events, num_steps=2)
    assert found["busy_ms"] == (4500 + 500) / 2 / 1000, "kernels that run at once count once"
    assert found["num_kernels"] == 2.5
    kinds = ["convolution", "matrix product", "attention", "fused"]
    assert found["classes"] == {**{kind: [0.75, 0.5] for kind in kinds}, "copy": [0.25, 0.5]}
    assert found["host"] == {"cudaLaunchKernel": [0.5, 2.0]}


def test_a_machine_is_described_before_the_fork_of_rows_without_cuda(monkeypatch):
    def refuse():
        raise AssertionError("rows could not use the GPU")

    monkeypatch.setattr(torch.cuda, "_lazy_init", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("nvmlInit", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetName", "nvmlSystemGetDriverVersion"):
        monkeypatch.setattr(pynvml, name, lambda *_: "H200")
    assert describe_machine(torch.device("cuda"))["cudnn"] > 90_000
