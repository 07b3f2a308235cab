"""Slow nodes, silent ranks and ranks that differ are named: on recorded measurements, and in real processes."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import DistStoreError, HashStore  # pyright: ignore[reportPrivateImportUsage]

from diffusion.config.loading import load_config
from diffusion.errors import MachineError
from diffusion.operations.checks import doctor
from diffusion.operations.checks.doctor import NoAnswerError, await_ranks, check_equality, pairings
from diffusion.operations.checks.nodes import NodeSpeed, compare_nodes, unfit_nodes
from diffusion.operations.checks.verdicts import Level, format_table, merge, ok, problem, raise_problems, warning
from tests.tools.hosts import Network
from tests.tools.training_runs import ROOT
from tests.tools.written_data import write_encoded

DOCTOR, NODES_DOCTOR = (str(ROOT / path) for path in ("scripts/doctor.py", "tests/tools/nodes_doctor.py"))
NODE = NodeSpeed(name="node 0", host="n0", num_gpus=8, flops=7e14, copied=3e12, link=2.2e10)
NODES = [
    replace(NODE, name=f"node {number}", host=f"n{number}", flops=7e14 * (1 + 0.02 * (number % 3)))
    for number in range(5)
]
NAMES = [node.name for node in NODES]


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
    for name, value in {"RANK": rank, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(doctor, "_store", lambda: store)
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
        ({"link": 1e9}, "network of nodes"),
        ({"num_gpus": 7}, "GPUs of nodes"),
    ],
)
def test_the_slow_node_is_named(fault, check):
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
    full = problem("output folder", "no room")
    assert unfit_nodes(NAMES, merge([(name, [full] if name == "node 2" else []) for name in NAMES])) == ["node 2"]
    assert unfit_nodes(NAMES, merge([(name, [full]) for name in NAMES])) == []


@pytest.mark.parametrize(("timeout", "seconds"), [(4.0, 60.0), (120.0, 240.0)])
def test_ranks_have_time_to_find_each_other_with_a_short_timeout(monkeypatch, tmp_path, timeout, seconds):
    rank_of_three(monkeypatch, 0)

    def join(device: str, timeout: float) -> None:
        raise TimeoutError(f"{device}, {timeout} s")

    monkeypatch.setattr(doctor, "has_process_group", lambda: False)
    monkeypatch.setattr(doctor.composer_dist, "initialize_dist", join)
    with pytest.raises(TimeoutError, match=f"cpu, {seconds} s"):
        doctor.diagnose(
            load_config("tests/tools/toy.yaml", ["data.global_batch_size=6", f"output_folder={tmp_path}"]), timeout
        )


def test_a_lost_gpu_is_named_before_the_ranks_join(monkeypatch, tmp_path):
    rank_of_three(monkeypatch, 0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(doctor, "computes_bf16", lambda: True)
    overrides = ["trainer.device=gpu", "data.global_batch_size=6", f"output_folder={tmp_path}"]
    with pytest.raises(MachineError, match="3 ranks were started on this machine, which has 2 visible GPUs"):
        doctor.diagnose(load_config("tests/tools/toy.yaml", overrides))


@pytest.mark.world_size(3)
def test_nodes_may_have_different_numbers_of_ranks(server, tmp_path):
    found = tmp_path / "found.json"
    arguments = ["tests/tools/toy.yaml", "data.global_batch_size=6", f"output_folder={tmp_path}/run"]
    server.command(3, [NODES_DOCTOR, "0 0 1", DOCTOR, *arguments, "--json", str(found)])
    verdicts = {verdict["check"]: verdict for verdict in json.loads(found.read_text())}
    assert "2 nodes" in verdicts["network of nodes"]["what"]
    assert {verdict["where"] for verdict in verdicts.values()} <= {"", "node 0", "node 1"}


@pytest.mark.world_size(2)
def test_a_rank_that_was_stopped_is_named(server, tmp_path):
    command = [NODES_DOCTOR, "", DOCTOR, "tests/tools/toy.yaml", f"output_folder={tmp_path}/run"]
    job = server.start(2, [*command, "--timeout", "4"])
    job.wait_for(lambda: "NoAnswerError: " in job.output)
    os.kill(job.pids[1], signal.SIGKILL)
    assert job.finish().codes == [2, -signal.SIGKILL], job.output[-3000:]
    assert f"these ranks have not answered for 4 s: 1 on {socket.gethostname()}" in job.output


def test_a_rank_that_has_come_is_not_named_though_one_before_it_has_used_up_the_time(monkeypatch):
    store = rank_of_three(monkeypatch, 0)
    store.set("doctor/here/2", "")
    with pytest.raises(NoAnswerError, match=r"for 4 s: 1 on n1\."):
        await_ranks("here", 4.0)


def test_rank_0_is_named_when_it_does_not_say_who_is_silent(monkeypatch):
    rank_of_three(monkeypatch, 1)
    with pytest.raises(NoAnswerError, match=r"for 8 s: 0 on n0\."):
        await_ranks("here", 4.0)


@pytest.fixture
def slow_switch() -> Iterator[str]:
    """Name of a switch that joins four hosts, of which the third sends slowly."""
    try:
        switch = Network(f"w{os.getpid()}", 4)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs root and network namespaces (apt-get install iproute2): {error}")
    try:
        for number in range(4):  # So slow that it matters little which of them share a core.
            switch.slow_down(number, "8mbit" if number == 2 else "100mbit")
    except (OSError, subprocess.CalledProcessError) as error:
        switch.remove()
        pytest.skip(f"the kernel limits no rates (sch_tbf): {error}")
    yield switch.name
    switch.remove()


@pytest.mark.world_size(4)
def test_the_node_with_the_slow_cable_is_named(server, slow_switch, tmp_path):
    found = tmp_path / "found.json"
    command = [NODES_DOCTOR, slow_switch, DOCTOR, "tests/tools/toy.yaml", f"output_folder={tmp_path}/run"]
    server.command(4, [*command, "--json", str(found)])
    verdicts = {verdict["check"]: verdict for verdict in json.loads(found.read_text())}
    network = verdicts["network of nodes"]
    assert (network["level"], network["where"]) == ("warning", "node 2")
    assert "n2 has " in network["what"]


def test_ranks_that_differ():
    same = {"versions": "torch 2.7.0", "same data": "1234"}
    assert {verdict.level for verdict in check_equality([same] * 4)} == {Level.ok}
    _, data = check_equality([same, same, same, same | {"same data": "9999"}])
    assert data.level is Level.problem
    assert "1234 on rank 0, 1, 2; 9999 on rank 3" in data.what


def test_verdicts_of_several_machines_as_a_table_and_as_an_error():
    fine, bad, slow = ok("memory", "enough"), problem("disk", "full", "free it"), warning("disk", "slow", "wait")
    merged = merge([("node 0", [fine, slow]), ("node 1", [fine, bad])])
    assert [(verdict.check, verdict.where) for verdict in merged] == [
        ("memory", ""), ("disk", "node 0"), ("disk", "node 1"),
    ]  # fmt: skip
    lines = format_table(merged).splitlines()
    assert lines[0].split() == ["memory", "ok", "enough"]
    assert lines[3].split() == ["disk", "(node", "1)", "problem", "full"]
    assert lines[4].strip() == "-> free it"
    with pytest.raises(MachineError, match=r"^node 1: full: free it$"):
        raise_problems(merged, MachineError)
    raise_problems([fine, slow], MachineError)


@pytest.mark.world_size(2)
def test_two_ranks_that_see_different_data(server, tmp_path):
    for rank, size in enumerate((40, 48)):
        write_encoded(tmp_path / f"rank-{rank}", {"a": size})
    # The data set of each rank is a folder of its own, which the two see under one path.
    program = tmp_path / "doctor.py"
    program.write_text(
        "import os, runpy, sys\n"
        f"os.chdir({str(tmp_path)!r} + '/rank-' + os.environ['RANK'])\n"
        f"sys.argv[0] = {DOCTOR!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    arguments = [
        f"output_folder={tmp_path}/run", "plugins.train_dataset=null", "data.local=train", "data.streams=[{name: a}]",
        "data.num_canonical_nodes=4",
    ]  # fmt: skip
    report = tmp_path / "report.json"
    toy = str(ROOT / "tests/tools/toy.yaml")
    done = server.start(2, [str(program), toy, *arguments, "--json", str(report)]).finish()
    assert any(done.codes), done.output
    verdicts = {verdict["check"]: verdict for verdict in json.loads(report.read_text())}
    assert verdicts["same data"]["level"] == "problem"
    assert "on rank 0" in verdicts["same data"]["what"]
    assert verdicts["versions"]["level"] == verdicts["configuration"]["level"] == "ok"
    assert "Traceback" not in done.output
    assert done.output.count("1 problem") == 1
