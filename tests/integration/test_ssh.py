"""launchers/ssh.sh on two and four hosts: network namespaces, each with an ssh server of its own."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from diffusion.operations import processes
from diffusion.operations.checks.verdicts import problem
from diffusion.operations.events import read_events
from tests.tools.hosts import Network
from tests.tools.runs import assert_same_steps, disturb_host, starts, traced
from tests.tools.training_runs import BIN, ROOT, TrainingServer, environment
from tests.tools.waiting import wait_until

pytestmark = pytest.mark.slow

SERVER = """
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
PermitRootLogin prohibit-password
UsePAM no
PidFile none
ClientAliveInterval {interval}
ClientAliveCountMax 2
SetEnv {variables}
"""

OPTIONS = [
    "StrictHostKeyChecking=no",
    "UserKnownHostsFile=/dev/null",
    "LogLevel=ERROR",
    "ServerAliveCountMax=2",
]

STAND_IN = """#!/bin/bash
if [ "$1" = -m ]; then
  cat {folder}/answer-$HOST
  exit
fi
sleep {seconds} &
trap 'echo terminated > {folder}/terminated-$HOST; kill $!; exit 1' TERM
echo "$@" >> {folder}/started-$HOST
wait
[ "$(wc -l < {folder}/started-$HOST)" -gt 1 ] || exit {code}
"""
"""In the place of python: answers the check, says what torchrun was started with, and fails when that happens first."""


PAIR = ("first", "second")

FORKED = """#!/bin/bash
case "$1" in
  launchers/torchrun.py) exec {launch} 0 tests/tools/hosts.py "$NAMESPACE" "${{@:2}}" ;;
  -m) file=${{2//.//}}.py; exec {launch} 0 "$file" "${{@:3}}" ;;
esac
"""
"""In the place of python: torchrun, its ranks and checks are forked from a process that has imported what they need."""


class Hosts:
    """The hosts, and the launcher on the first of them.

    Args:
        network: Joins them.
        folder: for keys, configurations and output.
        programs: where the hosts find torchrun.
        interval: seconds between two looks at a silent connection, which ends after two without an answer; a machine
            that stands still for a while loses it, too.
    """

    def __init__(self, network: Network, folder: Path, programs: Path, interval: int = 30) -> None:
        self.network, self.folder, self.programs, self.interval = network, folder, programs, interval
        self.log = folder / "launcher.txt"
        for key in ("key", "host_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
        Path("/run/sshd").mkdir(exist_ok=True)
        self._processes = [self._serve(host) for host in network.hosts]

    def _serve(self, host: str) -> subprocess.Popen:
        variables = environment() | {"HOST": host, "NAMESPACE": self.network.hosts[host], "BIN": str(self.programs)}
        variables["GLOO_SOCKET_IFNAME"] = "eth0"
        names = ("HOST", "NAMESPACE", "BIN", "GLOO_SOCKET_IFNAME", "PYTHONPATH", "HF_HUB_OFFLINE")
        shown = " ".join(f"{name}={variables[name]}" for name in names)
        configuration = self.folder / f"sshd-{host}"
        configuration.write_text(SERVER.format(folder=self.folder, variables=shown, interval=self.interval))
        command = [*self.on(host), str(shutil.which("sshd")), "-D", "-e", "-f", configuration]
        log = self.folder / f"sshd-{host}.log"
        with log.open("w") as file:
            server = subprocess.Popen(command, stderr=file)
        wait_until(lambda: "Server listening" in log.read_text(), "sshd does not start")
        return server

    def on(self, host: str) -> list[str]:
        """Beginning of a command that runs on a host."""
        return ["ip", "netns", "exec", self.network.hosts[host]]

    def launch(self, *arguments: str) -> subprocess.Popen:
        """Start ssh.sh with arguments."""
        return self.start("launchers/ssh.sh", " ".join(self.network.addresses.values()), *arguments)

    def supervise(self, *overrides: str, options: Sequence[str] = ()) -> subprocess.Popen:
        """Start ssh.sh under a supervisor with options."""
        (self.folder / "hosts").write_text("\n".join(self.network.addresses.values()))
        supervise = [str(BIN / "python"), "scripts/supervise.py", "--hosts", str(self.folder / "hosts")]
        job = ["launchers/ssh.sh", "{hosts}", "tests/tools/toy.yaml", *overrides]
        job += ["operations.supervision.first_pause=0.1", "operations.supervision.check_timeout=600"]
        return self.start(*supervise, *options, "--ranks-per-host=1", "--", *job)

    def start(self, *program: str) -> subprocess.Popen:
        """Start a program on the first host that starts others by ssh."""
        options = [*OPTIONS, f"ServerAliveInterval={self.interval}"]
        ssh = " ".join(["ssh", "-i", str(self.folder / "key"), *(f"-o {option}" for option in options)])
        environ = environment() | {"SSH": ssh, "RANKS_PER_HOST": "1"}
        with self.log.open("w") as log:
            command = [*self.on("first"), *program]
            process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log)
        self._processes.append(process)
        return process

    def running(self, host: str) -> list[str]:
        """Names of the programs on a host that are not ssh's."""
        command = ["ip", "netns", "pids", self.network.hosts[host]]
        numbers = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        names = {process.pid: process.info["name"] for process in psutil.process_iter(["name"])}
        own = ("sshd", "ssh", "ssh.sh")
        return [names[int(number)] for number in numbers if names.get(int(number), "ssh") not in own]

    def close(self) -> None:
        """End everything on the hosts."""
        for process in reversed(self._processes):
            process.terminate()
            process.wait(300)


@pytest.fixture
def make_hosts(tmp_path: Path) -> Iterator:
    missing = [name for name in ("ip", "ssh", "sshd") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(
            f"needs root, namespaces and ssh (apt-get install iproute2 openssh-server): no {', '.join(missing)}"
        )
    made: list[Hosts] = []

    def make(programs: Path, num_hosts: int = 2, **options: int) -> Hosts:
        made.append(Hosts(Network(f"s{os.getpid()}", num_hosts), tmp_path, programs, **options))
        return made[0]

    yield make
    for hosts in made:
        hosts.close()
        hosts.network.remove()


def forked(folder: Path, server: TrainingServer) -> Path:
    """A folder whose python has torchrun, its ranks and checks forked by a server."""
    programs = folder / "bin"
    programs.mkdir()
    launch = " ".join(map(str, server.launcher(0)[:-1]))
    (programs / "python").write_text(FORKED.format(launch=launch))
    (programs / "python").chmod(0o755)
    return programs


def stand_in(folder: Path, *, seconds: int = 0, code: int = 1, unfit: str = "") -> Path:
    """A folder whose python is the stand-in."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "python").write_text(STAND_IN.format(folder=folder, seconds=seconds, code=code))
    (programs / "python").chmod(0o755)
    for host in PAIR:
        verdicts = [asdict(problem("output folder", "no room", "free space"))] if host == unfit else []
        answer = {
            "reading": {"name": host, "host": host, "num_gpus": 0},
            "verdicts": verdicts,
        }
        (folder / f"answer-{host}").write_text(json.dumps(answer))
    return programs


def test_the_run_is_started_on_all_hosts_and_its_exit_code_returned(make_hosts, tmp_path):
    hosts = make_hosts(stand_in(tmp_path))
    for code in (1, 2, 75):
        stand_in(tmp_path, code=code)
        launcher = hosts.launch("tests/tools/toy.yaml", "samples.prompts=[a b, 'c']")
        assert launcher.wait(600) == code, hosts.log.read_text()
        for number, host in enumerate(hosts.network.hosts):
            started = tmp_path / f"started-{host}"
            assert started.read_text().splitlines() == [
                f"launchers/torchrun.py --nnodes=2 --node-rank={number} "
                f"--master-addr={hosts.network.addresses['first']} --master-port=29500 --nproc-per-node=1 "
                "run.py tests/tools/toy.yaml samples.prompts=[a b, 'c']"
            ]
            started.unlink()


def test_without_hosts_nothing_is_started():
    done = subprocess.run(
        ["launchers/ssh.sh", "", "tests/tools/toy.yaml"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
    )
    assert (done.returncode, done.stderr[:8]) == (2, b"no hosts")


def test_a_supervisor_starts_ssh_sh_again_on_the_hosts_that_are_fit(make_hosts, tmp_path):
    hosts = make_hosts(stand_in(tmp_path, unfit="second"))
    supervisor = hosts.supervise(f"output_folder={tmp_path}/run")
    assert supervisor.wait(600) == 0, hosts.log.read_text()
    events = [(event["event"], event.get("host")) for event in read_events(tmp_path / "run")]
    unfit = ("unfit", hosts.network.addresses["second"])
    assert events == [unfit, ("started", None), ("ended", None), unfit, ("started", None), ("finished", None)]
    assert len((tmp_path / "started-first").read_text().splitlines()) == 2
    assert not (tmp_path / "started-second").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGKILL, -9)])
def test_the_hosts_end_when_the_launcher_gets_a_signal_or_is_killed(make_hosts, tmp_path, number, code):
    hosts = make_hosts(stand_in(tmp_path, seconds=300))
    launcher = hosts.launch("tests/tools/toy.yaml")
    wait_until(lambda: all((tmp_path / f"started-{host}").exists() for host in PAIR), "the hosts do not start")
    launcher.send_signal(number)
    assert launcher.wait(300) == code, hosts.log.read_text()
    wait_until(lambda: all((tmp_path / f"terminated-{host}").exists() for host in PAIR), "the hosts are not terminated")
    wait_until(lambda: "python" not in hosts.running("second"), "the hosts go on")


def test_hosts_that_are_connected_to_after_a_signal_end_as_well(tmp_path):
    """The signal comes while the command of the first host is put together."""
    (tmp_path / "ssh").write_text("#!/bin/bash\ncat > /dev/null\nexit 1\n")
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "bash_env").write_text('printf() { builtin printf "$@"; [ "$1" != "%q " ] || kill -TERM $$; }\n')
    variables = {"SSH": str(tmp_path / "ssh"), "BASH_ENV": str(tmp_path / "bash_env")}
    command = ["launchers/ssh.sh", "first second", "tests/tools/toy.yaml"]
    launcher = subprocess.Popen(command, cwd=ROOT, env=environment() | variables, start_new_session=True)
    try:
        assert launcher.wait(300) == 75
    finally:
        processes.kill(processes.tree([launcher.pid]))


@pytest.mark.world_size(4)
def test_of_four_hosts_one_is_cut_off_and_two_go_on(make_hosts, server, tmp_path):
    """The batch of 8 divides among four and two, not among the three that are left. Draws are those of one process.

    The others end within `trainer.dist_timeout`, and the supervisor restarts on those that answer.
    """
    alone, run = tmp_path / "alone", tmp_path / "four"
    server.train(1, [("tests/tools/toy.yaml", traced(alone, dist_timeout=20))])
    hosts = make_hosts(forked(tmp_path, server), num_hosts=4, interval=5)
    overrides = traced(run, disturb_host("cable", "third"), dist_timeout=20)
    assert hosts.supervise(*overrides).wait(850) == 0, hosts.log.read_text()[-6000:]
    assert starts(run) == [4, 2]
    assert_same_steps(run, alone)
    wait_until(lambda: not hosts.running("third"), "the host that was cut off goes on")


@pytest.mark.world_size(2)
def test_a_host_that_comes_back_is_used_from_the_next_checkpoint_on(make_hosts, server, tmp_path):
    from diffusion.formats.run_folder import TRAIN_LOSS, read_metrics, series

    hosts, run = make_hosts(forked(tmp_path, server), interval=5), tmp_path / "run"
    hosts.network.unplug()
    long = ["trainer.max_duration=100000ba", "trainer.save_interval=100000ba", "trainer.eval_interval=100000ba"]
    overrides = [f"output_folder={run}", "samples.prompts=[]", *long]
    supervisor = hosts.supervise(*overrides, options=["--grow-after", "2s"])

    def steps() -> Sequence[float]:
        return series(read_metrics(run / "metrics.jsonl"), TRAIN_LOSS)[0] if starts(run) else []

    wait_until(lambda: len(steps()) > 3, "the run does not start", 600)
    hosts.network.plug_in()
    wait_until(lambda: starts(run) == [1, 2], "the run does not grow", 600)
    num_before = len(steps())
    wait_until(lambda: len(steps()) > num_before + 3, "the run does not go on", 300)
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(300) == 75, hosts.log.read_text()[-6000:]
    assert steps() == list(range(len(steps())))
    assert "growing" in [event["event"] for event in read_events(run)]
