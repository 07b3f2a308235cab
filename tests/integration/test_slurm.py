"""launchers/slurm.sbatch on a real SLURM of one node, and of four in network namespaces, which is started for it."""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffusion.operations import processes
from tests.tools.forking import free_port
from tests.tools.hosts import Network
from tests.tools.runs import assert_same_steps, disturb_host, losses, signal_at, starts, traced
from tests.tools.training_runs import ROOT, environment
from tests.tools.waiting import wait_until

pytestmark = pytest.mark.slow

TOY = "tests/tools/toy.yaml"
PROGRAMS = ("slurmctld", "slurmd", "sbatch")

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}({controller})
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={port}
SlurmdTimeout=20
FirstJobId=1250
MessageTimeout=60
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=15
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/steps-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SchedulerParameters=sched_interval=1,bf_interval=1
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """A SLURM on this machine.

    Args:
        folder: for its configuration, state and logs.
        addresses: of the nodes, by name; the first keeps the controller.
        network: of the nodes; None is this machine's own.
        num_cpus: of a node.
    """

    def __init__(self, folder: Path, addresses: dict[str, str], network: Network | None, num_cpus: int) -> None:
        self.network, self.first = network, next(iter(addresses))
        host = socket.gethostname().partition(".")[0]
        nodes = [
            f"NodeName={name} NodeHostname={host} NodeAddr={address} Port={free_port()} CPUs={num_cpus} State=UNKNOWN"
            for name, address in addresses.items()
        ]
        names = {"host": host, "controller": addresses[self.first], "user": "root", "folder": folder}
        configuration = folder / "slurm.conf"
        configuration.write_text(CONFIGURATION.format(**names, port=free_port(), nodes="\n".join(nodes)))
        self.names = folder / "hosts"
        self.names.write_text("".join(f"{address} {name}\n" for name, address in addresses.items()))
        (folder / "state").mkdir()
        self.variables = environment() | {"SLURM_CONF": str(configuration)}
        self._folder, self._nodes = folder, tuple(addresses)
        self._daemons: list[subprocess.Popen] = []

    def start(self) -> None:
        """Start the daemons, and wait until the nodes are idle."""
        for node, *daemon in ((self.first, "slurmctld"), *((node, "slurmd", "-N", node) for node in self._nodes)):
            with (self._folder / f"{daemon[0]}-{node}.log").open("w") as log:
                command = [*self._on(node), *daemon, "-D"]
                self._daemons.append(subprocess.Popen(command, env=self.variables, stdout=log, stderr=log))
        states = ("sinfo", "--noheader", "--format=%D %t")
        wait_until(lambda: self.answer(*states).split() == [str(len(self._nodes)), "idle"], "SLURM does not start")

    def _on(self, node: str) -> list[str]:
        """Beginning of a command that runs on a node, where the nodes are known by name."""
        if self.network is None:
            return []
        enter = ["nsenter", f"--net=/run/netns/{self.network.hosts[node]}", "unshare", "--mount"]
        return [*enter, "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(self.names)]

    def answer(self, *command: str, **variables: str) -> str:
        """What a command of SLURM prints on the first node."""
        options = {"env": self.variables | variables, "cwd": ROOT, "capture_output": True, "text": True}
        return subprocess.run([*self._on(self.first), *command], **options).stdout

    def submit(self, log: Path, arguments: list[str], *, nodes: str = "1", ranks: int = 2, **variables: str) -> str:
        """Queue launchers/slurm.sbatch for so many ranks on each node; return the number of the job."""
        options = [f"--nodes={nodes}", f"--ntasks-per-node={ranks}", "--cpus-per-task=1", "--gpus-per-node=0"]
        command = ["sbatch", "--export=ALL", *options, f"--output={log}", "launchers/slurm.sbatch", *arguments]
        said = self.answer(*command, **variables)
        assert said.startswith("Submitted batch job"), said
        return said.split()[-1]

    def job(self, number: str) -> str:
        """What SLURM knows of a job."""
        return self.answer("scontrol", "show", "job", number)

    def wait_for(self, number: str, log: Path, timeout: float = 600) -> str:
        """What SLURM knows of a job when it has ended."""
        ended = re.compile("JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT)")
        wait_until(lambda: ended.search(self.job(number)), f"the job goes on; see {log}", timeout)
        return self.job(number)

    def close(self) -> None:
        """End it, and its jobs."""
        self.answer("scancel", "--user=root")
        for daemon in self._daemons:
            daemon.terminate()
            daemon.wait(300)
        for namespace in self.network.hosts.values() if self.network else ():  # Steps of a node that is cut off remain.
            left = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout
            processes.kill(processes.tree([int(number) for number in left.split()]))


def skip_without(*programs: str) -> None:
    missing = [name for name in programs if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and SLURM (apt-get install slurmctld slurmd slurm-client): no {', '.join(missing)}")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A SLURM of one node."""
    skip_without(*PROGRAMS)
    host = socket.gethostname().partition(".")[0]
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), {host: "127.0.0.1"}, None, num_cpus=2)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def four_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A SLURM of four nodes, each in a network namespace of its own."""
    skip_without(*PROGRAMS, "ip", "nsenter")
    network = Network(f"n{os.getpid()}", 4)
    folder = tmp_path_factory.mktemp("slurm")  # Not `tmp_path`, too long for the path of a socket.
    cluster = Cluster(folder, network.addresses, network, num_cpus=1)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
        network.remove()


STAND_IN = """#!/bin/bash
echo "rank $RANK $LOCAL_RANK $NODE_RANK of $WORLD_SIZE $LOCAL_WORLD_SIZE: $@, restart ${SLURM_RESTART_COUNT:-0}"
[ -n "$MASTER_ADDR" ] && [ -n "$MASTER_PORT" ] || exit 3
[ "$RANK" = 0 ] || sleep 1
[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || exit $CODE
"""
"""In the place of Python: prints its arguments, and ends with an exit code when the job was not queued again."""


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    path = tmp_path / "stand-in"
    path.write_text(STAND_IN)
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("code", "state", "restarts", "starts"), [(75, "COMPLETED", 1, 2), (2, "FAILED", 0, 1), (9, "FAILED", 0, 3)]
)
def test_exit_codes_decide_what_follows(cluster, stand_in, tmp_path, code, state, restarts, starts):
    """75: queued again, though one rank ends before the other; 2: the end; others: three attempts."""
    log = tmp_path / "log.txt"
    number = cluster.submit(log, ["a.yaml", "b=[{c: 1}, 2]"], PYTHON=stand_in, CODE=str(code))
    known = cluster.wait_for(number, log)
    text = log.read_text()
    assert f"JobState={state}" in known, text
    assert f"Restarts={restarts}" in known
    for rank in range(2):
        assert text.count(f"rank {rank} {rank} 0 of 2 2: run.py a.yaml b=[{{c: 1}}, 2], restart 0") == starts - restarts
        assert text.count(f"rank {rank} {rank} 0 of 2 2: run.py a.yaml b=[{{c: 1}}, 2], restart 1") == restarts


@pytest.mark.world_size(2)
def test_a_run_that_gets_a_signal_is_saved_queued_again_and_continued(server, cluster, tmp_path):
    """SIGUSR1 comes in step 3, as before a time limit."""
    run, log = tmp_path / "run", tmp_path / "log.txt"
    overrides = [f"output_folder={run}", "samples.prompts=[]", signal_at(3, 10, rank=1)]
    python = str(server.programs(tmp_path / "bin") / "python")
    number = cluster.submit(log, [TOY, *overrides], PYTHON=python)
    known = cluster.wait_for(number, log)
    text = log.read_text()
    assert "JobState=COMPLETED" in known, text
    assert "Restarts=1" in known
    assert text.count("SIGUSR1 after step 5: saved") == 1, text
    assert "Traceback" not in text
    assert (starts(run, "step"), starts(run)) == ([0, 5], [2, 2])
    assert len(losses(run)) == 8


RANK = """#!/bin/bash
MASTER_ADDR=$(getent hosts "$MASTER_ADDR" | cut --delimiter=" " --fields=1)
export MASTER_ADDR HOST="$SLURMD_NODENAME" TORCHELASTIC_RESTART_COUNT=0
exec {launch} 0 tests/tools/hosts.py "$(ip netns identify)" "$@"
"""
"""In the place of Python: a rank, forked from a process that has imported what it needs, in the node's network."""


@pytest.mark.world_size(4)
def test_of_four_nodes_one_is_lost_and_the_job_continues_on_two(server, four_nodes, tmp_path):
    """SLURM queues it again, for four nodes, and the user asks for two, which divide the batch of 8 as four do.

    Draws are those of one process.
    """
    alone, run, log, python = (tmp_path / name for name in ("alone", "four", "log.txt", "python"))
    server.train(1, [(TOY, traced(alone, dist_timeout=20))])
    python.write_text(RANK.format(launch=" ".join(server.launcher(0)[:-1])))
    python.chmod(0o755)
    overrides = traced(run, disturb_host("cable", "third"), dist_timeout=20)
    number = four_nodes.submit(log, [TOY, *overrides], nodes="4", ranks=1, PYTHON=str(python))
    down = ("sinfo", "--noheader", "--states=down", "--format=%N")
    wait_until(lambda: "third" in four_nodes.answer(*down), f"the node is not lost; see {log}", 300)
    wait_until(lambda: "JobState=PENDING" in four_nodes.job(number), f"the job is not queued again; see {log}", 300)
    smaller = ("NumNodes=2-2", "NumTasks=2", "NumCPUs=2")
    four_nodes.answer("scontrol", "update", f"JobId={number}", *smaller)
    known = four_nodes.wait_for(number, log)
    assert "JobState=COMPLETED" in known, log.read_text()
    assert starts(run) == [4, 2]
    assert_same_steps(run, alone)
