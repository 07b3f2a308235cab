"""Nodes that are out of line are named and left out: on recorded readings, and with a rank that was stopped."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import DistStoreError, HashStore  # pyright: ignore[reportPrivateImportUsage]

from diffusion.config.data import DataConfig, Mixing
from diffusion.config.loading import load_config
from diffusion.errors import MachineError
from diffusion.operations.checks import ranks, registry
from diffusion.operations.checks.gpu import check_xids
from diffusion.operations.checks.nodes import NodeSpeed, compare_nodes, unfit_nodes
from diffusion.operations.checks.ranks import NoAnswerError, _write_speed, await_ranks, pairings
from diffusion.operations.checks.verdicts import Level, merge, problem
from diffusion.operations.hosts import choose_hosts
from tests.tools.hosts import Network
from tests.tools.training_runs import ROOT

NODE = NodeSpeed(name="node 0", host="n0", num_gpus=8, flops=7e14, copied=3e12, written=2e9, link=2.2e10)
NODES = [
    replace(NODE, name=f"node {number}", host=f"n{number}", flops=7e14 * (1 + 0.02 * (number % 3)))
    for number in range(5)
]
NAMES = [node.name for node in NODES]

LOG = """\
[   12.1] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15
[ 4711.3] NVRM: Xid (PCI:0000:3b:00): 31, pid=1234, name=python, Ch 00000008, MMU Fault
[ 9999.9] NVRM: Xid (PCI:0000:86:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
"""


class HurriedStore(HashStore):
    """Takes longer than a wait for a rank may take, also where the key is there."""

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        if keys != ["doctor/here/silent"] or not self.check(keys):  # pyright: ignore[reportAttributeAccessIssue]
            raise DistStoreError(f"wait timeout, keys: {keys}")


def rank_of_three(monkeypatch, rank: int) -> HurriedStore:
    """Be a rank of three nodes, n0 to n2, of one rank each; returns their store."""
    store = HurriedStore()
    for number in range(3):
        store.set(f"doctor/host/{number}", f"n{number}")
    values = {"is_initialized": True, "get_global_rank": rank, "get_world_size": 3, "get_local_world_size": 1}
    for name, value in values.items():
        monkeypatch.setattr(ranks.dist, name, lambda value=value: value)
    monkeypatch.setattr(ranks, "_store", lambda: store)
    return store


def blamed(nodes: list[NodeSpeed]) -> list[str]:
    return unfit_nodes([node.name for node in nodes], compare_nodes(nodes))


def test_nodes_that_vary_a_little_are_all_fit():
    assert {verdict.level for verdict in compare_nodes(NODES)} == {Level.ok}
    assert blamed(NODES) == []


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ({"flops": 5e14}, "matrix product"),
        ({"copied": 1e12}, "memory copy"),
        ({"written": 1e8}, "disk of nodes"),
        ({"written": 0.0}, "disk of nodes"),
        ({"link": 1e9}, "network of nodes"),
        ({"num_gpus": 7}, "GPUs of nodes"),
    ],
)
def test_the_node_that_is_out_of_line_is_named(fault, check):
    nodes = [*NODES[:3], replace(NODES[3], **fault), NODES[4]]
    (found,) = [verdict for verdict in compare_nodes(nodes) if verdict.level is not Level.ok]
    assert found.check == check
    assert found.where == "node 3"
    assert "n3 has" in found.what
    assert blamed(nodes) == ["node 3"]


def test_of_two_nodes_the_slower_one_is_named_and_a_cpu_run_needs_no_gpus():
    slow = replace(NODES[1], flops=3e14)
    assert blamed([NODES[0], slow]) == ["node 1"]
    on_cpu = [replace(node, num_gpus=0) for node in NODES]
    assert blamed(on_cpu) == []
    assert "GPUs of nodes" not in {verdict.check for verdict in compare_nodes(on_cpu)}


@pytest.mark.parametrize(("num_nodes", "partners"), [(1, [0]), (2, [1, 1]), (3, [1, 2, 1]), (4, [2] * 4), (8, [2] * 8)])
def test_nodes_have_two_partners_where_that_is_possible(num_nodes, partners):
    ways = pairings(num_nodes)
    for pairs in ways:
        nodes = [node for pair in pairs for node in pair]
        assert len(nodes) == len(set(nodes)), "a node talks to one other at a time"
    others = [{a + b - node for pairs in ways for a, b in pairs if node in (a, b)} for node in range(num_nodes)]
    assert [len(found) for found in others] == partners


def test_a_problem_of_one_machine_leaves_it_out_and_one_of_all_leaves_out_none():
    full = problem("no room", check="output folder")
    assert unfit_nodes(NAMES, merge([(name, [full] if name == "node 2" else []) for name in NAMES])) == ["node 2"]
    assert unfit_nodes(NAMES, merge([(name, [full]) for name in NAMES])) == []


def test_spares_replace_unfit_hosts_and_without_them_the_run_is_smaller_and_legal():
    hosts = [f"n{number}" for number in range(6)]
    data = DataConfig(global_batch_size=2048)
    choice = choose_hosts(hosts, [1], wanted=4, ranks_per_node=8, data=data)
    assert (choice.hosts, choice.spare, choice.unfit) == (("n0", "n2", "n3", "n4"), ("n5",), ("n1",))
    assert choice.world_size == 32
    smaller = choose_hosts(hosts[:4], [1], wanted=4, ranks_per_node=8, data=data)
    assert smaller.hosts == ("n0", "n2"), "2,048 samples cannot be divided among 24 ranks"
    assert smaller.world_size == 16
    groups = DataConfig(global_batch_size=24, group_size=4, mixing=Mixing.groups)
    assert choose_hosts(hosts, [], wanted=6, ranks_per_node=2, data=groups).world_size == 6, "whole groups"
    with pytest.raises(MachineError, match=r"data\.global_batch_size"):
        choose_hosts(["a", "b"], [0, 1], wanted=2, ranks_per_node=8, data=data)


def test_xid_errors_of_the_machine_are_told_from_those_of_programs():
    found = check_xids(LOG)
    assert found.level is Level.problem
    assert "0000:86:00 (Xid 79" in found.what
    assert check_xids("".join(LOG.splitlines(keepends=True)[:2])).level is Level.ok
    assert check_xids("NVRM: Xid (PCI:0000:3b:00): 63, row remapping").level is Level.warning
    assert check_xids("").level is Level.ok
    assert check_xids(None).level is Level.ok


@pytest.mark.parametrize(("patience", "seconds"), [(4.0, 60.0), (120.0, 240.0)])
def test_ranks_have_time_to_find_each_other_however_little_patience_they_have(monkeypatch, tmp_path, patience, seconds):
    rank_of_three(monkeypatch, 0)

    def join(device: str, timeout: float) -> None:
        raise TimeoutError(f"{device}, {timeout} s")

    monkeypatch.setattr(registry.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(registry.dist, "initialize_dist", join)
    with pytest.raises(TimeoutError, match=f"cpu, {seconds} s"):
        registry.diagnose(
            load_config("tests/tools/toy.yaml", ["data.global_batch_size=6", f"output_folder={tmp_path}"]), patience
        )


@pytest.mark.world_size(2)
def test_a_rank_that_was_stopped_is_named_and_a_smaller_job_proposed(server, tmp_path):
    hosts, found = tmp_path / "hosts", tmp_path / "found.json"
    command = [
        str(ROOT / "tests/unit/operations/checks/stopping_doctor.py"),
        str(ROOT / "scripts/doctor.py"),
        "tests/tools/toy.yaml",
    ]
    command += [f"output_folder={tmp_path}/run", "--timeout", "4", "--hosts", str(hosts), "--json", str(found)]
    job = server.start(2, command)
    job.wait_for(lambda: "NoAnswerError: " in job.output)
    os.kill(job.pids[1], signal.SIGKILL)
    assert job.finish().codes == [2, -signal.SIGKILL], job.output[-3000:]
    (verdict,) = json.loads(found.read_text())
    assert verdict["where"] == "node 1"
    assert "these ranks have not answered for 4 s: 1 on " in verdict["what"]
    assert "1 ranks on " in job.output
    assert len(hosts.read_text().split()) == 1


def test_a_rank_that_has_come_is_not_named_though_one_before_it_has_used_up_the_time(monkeypatch):
    store = rank_of_three(monkeypatch, 0)
    store.set("doctor/here/2", "")
    with pytest.raises(NoAnswerError, match=r"for 4 s: 1 on n1\.") as caught:
        await_ranks("here", 4.0)
    assert caught.value.nodes == [1]


def test_rank_0_is_named_when_it_does_not_say_who_is_silent(monkeypatch):
    rank_of_three(monkeypatch, 1)
    with pytest.raises(NoAnswerError, match=r"for 8 s: 0 on n0\.") as caught:
        await_ranks("here", 4.0)
    assert caught.value.nodes == [0]


@pytest.fixture
def slow_switch() -> Iterator[str]:
    """Name of a switch that joins four hosts, of which the third sends slowly."""
    try:
        switch = Network(f"w{os.getpid()}", 4)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs root and network namespaces (apt-get install iproute2): {error}")
    try:
        for number in range(4):  # So slow that it matters little which of them share a core.
            switch.slow_down(number, "20mbit" if number == 2 else "100mbit")
    except (OSError, subprocess.CalledProcessError) as error:
        switch.remove()
        pytest.skip(f"the kernel limits no rates (sch_tbf): {error}")
    yield switch.name
    switch.remove()


@pytest.mark.world_size(4)
def test_the_node_with_the_slow_cable_is_named_and_left_out(server, slow_switch, tmp_path):
    hosts, found = tmp_path / "hosts", tmp_path / "found.json"
    command = [
        str(ROOT / "tests/unit/operations/checks/linked_doctor.py"),
        slow_switch,
        str(ROOT / "scripts/doctor.py"),
    ]
    command += ["tests/tools/toy.yaml", f"output_folder={tmp_path}/run", "--hosts", str(hosts), "--json", str(found)]
    server.command(4, command)
    verdicts = {verdict["check"]: verdict for verdict in json.loads(found.read_text())}
    network = verdicts["network of nodes"]
    assert (network["level"], network["where"]) == ("warning", "node 2")
    assert "n2 has " in network["what"]
    assert "n2" not in hosts.read_text().split()
    assert "the sum is right" in verdicts["all-reduce"]["what"]


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_node_whose_disk_is_full_is_named(small_disk, tmp_path):
    written = [_write_speed(tmp_path / "usual"), _write_speed(small_disk)]
    assert written[0] > 0
    nodes = [replace(node, written=written[node.name == "node 3"]) for node in NODES]
    assert blamed(nodes) == ["node 3"]
