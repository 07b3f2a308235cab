"""Hosts that are checked before a start: this one in earnest, others as they would answer."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from diffusion.config.data import DataConfig
from diffusion.config.loading import load_config
from diffusion.errors import MachineError
from diffusion.operations.checks import this_machine
from diffusion.operations.checks.device import Machine
from diffusion.operations.checks.gpus import GpuReading
from diffusion.operations.checks.hosts import Survey, choose_fit_hosts, command_over_ssh, survey
from diffusion.operations.checks.this_machine import check_this_machine
from diffusion.operations.checks.verdicts import Level, problem, to_json
from tests.tools.training_runs import ROOT

HOSTS = ["n0", "n1", "n2", "n3"]
DATA = DataConfig(global_batch_size=64)


def ask(answers: dict[str, Sequence[str]], patience: float = 60) -> Survey:
    usual = answer()
    return survey(HOSTS, lambda host: answers.get(host, usual), patience)


def answer(*, flops: float = 7e14, num_gpus: int = 8, verdicts: Sequence = ()) -> list[str]:
    reading = {"name": "any", "host": "any", "num_gpus": num_gpus, "flops": flops, "copied": 3e12}
    text = json.dumps({"reading": reading, "verdicts": to_json(verdicts)})
    return ["echo", "-e", f"Welcome!\\n{text}"]


def test_unfit_hosts_are_named_with_what_is_wrong_and_the_others_chosen():
    full = problem("output folder", "no room", "free space")
    found = ask(
        {
            "n0": ["sleep", "120"],
            "n1": answer(verdicts=[full]),
            "n2": ["sh", "-c", "echo 'ssh: connect to host n2: No route' >&2; exit 255"],
        },
        patience=20,
    )
    wrong = {verdict.where: verdict.sentence for verdict in found.verdicts if verdict.level is Level.problem}
    assert wrong["n0"].startswith("no answer for 20 s")
    assert wrong["n1"] == "no room: free space"
    assert wrong["n2"].startswith("it cannot be checked (ssh: connect to host n2: No route)")
    assert found.unfit == HOSTS[:3]
    assert choose_fit_hosts(found, wanted=None, ranks_per_host=None, data=DATA).hosts == ("n3",)


def test_a_host_that_is_out_of_line_is_replaced_by_a_spare_one_and_without_one_the_number_stays_legal():
    found = ask({"n1": answer(flops=4e14)})
    assert found.unfit == ["n1"]
    choice = choose_fit_hosts(found, wanted=2, ranks_per_host=None, data=DATA)
    assert (choice.hosts, choice.spare, choice.world_size) == (("n0", "n2"), ("n3",), 16)
    assert choose_fit_hosts(found, wanted=4, ranks_per_host=None, data=DATA).world_size == 16, "not 24 ranks"
    assert choose_fit_hosts(ask({"n1": answer(num_gpus=7)}), wanted=4, ranks_per_host=2, data=DATA).world_size == 4


def test_each_host_starts_as_many_ranks_as_it_has_gpus_so_that_others_are_left_out():
    found = ask({"n0": answer(num_gpus=16)})
    assert found.unfit == [], "it has more than others, which is no fault"
    choice = choose_fit_hosts(found, wanted=2, ranks_per_host=None, data=DATA)
    assert (choice.hosts, choice.world_size) == (("n1", "n2"), 16)
    assert choose_fit_hosts(found, wanted=2, ranks_per_host=8, data=DATA).hosts == ("n0", "n1")


def test_what_all_hosts_have_is_no_reason_to_choose_others():
    full = answer(verdicts=[problem("output folder", "no room", "free space")])
    found = ask(dict.fromkeys(HOSTS, full))
    assert found.unfit == []
    with pytest.raises(MachineError, match="all hosts: no room: free space"):
        choose_fit_hosts(found, wanted=2, ranks_per_host=8, data=DATA)


def test_this_machine_is_checked_and_found_unfit_where_checkpoints_cannot_be_written(tmp_path):
    folders = {"fit": tmp_path / "run", "unfit": Path("/dev/null/run")}
    command = [sys.executable, "-m", "diffusion.operations.checks.this_machine", str(ROOT / "tests/tools/toy.yaml")]
    found = survey(list(folders), lambda host: [*command, f"output_folder={folders[host]}"], patience=300)
    assert found.unfit == ["unfit"]
    texts = {verdict.where: verdict.what for verdict in found.verdicts}
    assert texts["unfit"] == "/dev/null/run cannot be written to: Not a directory"
    assert "is written at" in texts["fit"]
    assert [reading.flops for reading in found.readings] == [None, None], "only GPUs are compared"


def test_a_gpu_with_a_fault_makes_its_machine_unfit_and_the_slowest_one_counts(tmp_path, monkeypatch):
    gpu = GpuReading(
        name="GPU 1 (NVIDIA A100)",
        total_bytes=80 * 10**9,
        free_bytes=79 * 10**9,
        foreign_bytes=0,
        uncorrected_errors=0,
        remapping_failed=True,
        slowdowns=(),
    )
    log = "[ 9.9] NVRM: Xid (PCI:0000:86:00): 79, pid='<unknown>', GPU has fallen off the bus."
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(this_machine, "read_gpus", lambda: [replace(gpu, remapping_failed=False), gpu])
    monkeypatch.setattr(this_machine, "read_kernel_log", lambda: log)
    monkeypatch.setattr(
        this_machine,
        "measure_machine",
        lambda device: Machine(
            name="", datasheet_flops=None, matmul_flops=(7e14, 3e14)[device.index], copy_bytes_per_second=3e12
        ),
    )
    config = load_config(ROOT / "tests/tools/toy.yaml", [f"output_folder={tmp_path}", "trainer.device=auto"])
    reading, verdicts = check_this_machine(config)
    assert (reading.num_gpus, reading.flops, reading.copied) == (2, 3e14, 3e12)
    problems = {verdict.check for verdict in verdicts if verdict.level is Level.problem}
    assert problems == {"Xid errors", "GPU errors"}


def test_the_check_of_another_host_keeps_its_arguments_in_one_piece(tmp_path, monkeypatch):
    (tmp_path / "python").write_text('#!/bin/sh\nprintf "%s|" "$@"')
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setenv("BIN", str(tmp_path))
    *ssh, host, remote = command_over_ssh(["ssh", "-i", "key"], ["a.yaml", "x=[{a: 'b c'}, $HOME]"])("n7")
    assert (ssh[:3], host) == (["ssh", "-i", "key"], "n7")
    done = subprocess.run(["bash", "-c", remote], capture_output=True, text=True, check=True)
    assert done.stdout == "-m|diffusion.operations.checks.this_machine|a.yaml|x=[{a: 'b c'}, $HOME]|"
