"""launchers/slurm.sbatch on a real SLURM of one node, which is started for it."""

import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.forking import free_port
from tests.tools.hosts import wait_until
from tests.tools.training_runs import ROOT, environment

pytestmark = pytest.mark.slow

PROGRAMS = ("slurmctld", "slurmd", "sbatch")

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=15
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SchedulerParameters=sched_interval=1,bf_interval=1
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A SLURM of one node; gives the variables with which its commands find it."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and SLURM (apt-get install slurmctld slurmd slurm-client): no {', '.join(missing)}")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    host, ports = socket.gethostname().partition(".")[0], [free_port(), free_port()]
    names = {"host": host, "user": "root", "folder": folder, "ports": ports}
    (folder / "slurm.conf").write_text(CONFIGURATION.format(**names))
    variables = environment() | {"SLURM_CONF": str(folder / "slurm.conf")}
    daemons = []
    try:
        for name in ("slurmctld", "slurmd"):
            with (folder / f"{name}.log").open("w") as log:
                command = [name, "-D", "-f", variables["SLURM_CONF"]]
                daemons.append(subprocess.Popen(command, env=variables, stdout=log, stderr=log))
        wait_until(lambda: "idle" in answer(variables, "sinfo", "--noheader"), "SLURM does not start", 60)
        yield variables
    finally:
        answer(variables, "scancel", "--user=root")
        for daemon in daemons:
            daemon.terminate()
            daemon.wait(30)


def answer(variables: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True).stdout


def submit(variables: dict[str, str], log: Path, *arguments: str) -> str:
    """Queue launchers/slurm.sbatch for two ranks on one node; return the number of the job."""
    options = ["--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1", "--gpus-per-node=0", f"--output={log}"]
    said = answer(variables, "sbatch", "--export=ALL", *options, "launchers/slurm.sbatch", *arguments)
    assert said.startswith("Submitted batch job"), said
    return said.split()[-1]


def job(variables: dict[str, str], number: str) -> str:
    """What SLURM knows of a job."""
    return answer(variables, "scontrol", "show", "job", number)


def wait_for(variables: dict[str, str], number: str, log: Path, timeout: float = 400) -> str:
    """What SLURM knows of a job when it has ended."""
    ended = re.compile("JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT)")
    wait_until(lambda: ended.search(job(variables, number)), f"the job goes on; see {log}", timeout)
    return job(variables, number)


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
    number = submit(cluster | {"PYTHON": stand_in, "CODE": str(code)}, log, "a.yaml", "b=[{c: 1}, 2]")
    known = wait_for(cluster, number, log, 120)
    text = log.read_text()
    assert f"JobState={state}" in known, text
    assert f"Restarts={restarts}" in known
    for rank in range(2):
        assert text.count(f"rank {rank} {rank} 0 of 2 2: run.py a.yaml b=[{{c: 1}}, 2], restart 0") == starts - restarts
        assert text.count(f"rank {rank} {rank} 0 of 2 2: run.py a.yaml b=[{{c: 1}}, 2], restart 1") == restarts


@pytest.mark.world_size(2)
def test_a_run_that_gets_a_signal_is_saved_queued_again_and_continued(server, cluster, tmp_path):
    """SIGUSR1 comes in step 3, as before a time limit."""
    from diffusion.callbacks.metrics_file import TRAIN_LOSS, read_metrics, series

    run, log = tmp_path / "run", tmp_path / "log.txt"
    request = "plugins.callbacks=[{path: tests.tools.toys.SignalAt, arguments: {step: 3, number: 10, rank: 1}}]"
    overrides = [f"output_folder={run}", "samples.prompts=[]", request]
    python = str(server.programs(tmp_path / "bin") / "python")
    number = submit(cluster | {"PYTHON": python}, log, "tests/tools/toy.yaml", *overrides)
    known = wait_for(cluster, number, log)
    text = log.read_text()
    assert "JobState=COMPLETED" in known, text
    assert "Restarts=1" in known
    assert text.count("SIGUSR1 after step 5: saved") == 1, text
    assert "Traceback" not in text
    starts = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
    assert [(row["step"], row["world_size"]) for row in starts if row["event"] == "start"] == [(0, 2), (5, 2)]
    assert series(read_metrics(run / "metrics.jsonl"), TRAIN_LOSS)[0] == list(range(8))
