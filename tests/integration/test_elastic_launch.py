"""Pre-emption, restarts and lost hosts under the launchers, in real processes."""

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest
from composer import Callback, Logger, State

from diffusion.callbacks.preemption import SaveOnPreemption
from diffusion.checkpointing.find import resolve_checkpoint
from diffusion.checkpointing.layout import batch_of
from diffusion.formats.run_folder import TRAIN_LOSS, read_metrics, series
from tests.tools.forking import free_port
from tests.tools.hosts import Agent, Agents, Network
from tests.tools.runs import assert_same_steps, disturb_host, losses, starts, traced
from tests.tools.training_runs import Run, TrainingServer
from tests.tools.waiting import wait_until

pytestmark = pytest.mark.slow

NUM_STEPS = 8
ENDLESS = 100000
"""Steps of runs that are ended by a signal, however late it comes."""

DIST_TIMEOUT = 25
GRACE = 240
"""Seconds after `trainer.dist_timeout` in which a job must have ended."""

LAST_CALL = 20
"""Seconds that the first host waits for the second at a rendezvous before it begins alone."""

KEEP_ALIVE = (2, 5)
"""seconds between two heartbeats of an agent, and how many may be missing: other tests keep the cores busy."""


@pytest.fixture(scope="module")
def network() -> Iterator[Network | None]:
    """The hosts' network; None where this machine cannot have any."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        yield None
        return
    network = Network(f"d{os.getpid()}", 4)
    try:
        yield network
    finally:
        network.remove()


@pytest.fixture(scope="module")
def agents(network: Network | None, server: TrainingServer) -> Iterator[Agents]:
    """What starts agents, on the hosts where there are any."""
    agents = Agents(server, network.hosts if network else {})
    yield agents
    agents.close()


class AwaitSignal(Callback):
    """Wait on the second host for a signal in step 3 of the first start: the steps that are left may be over sooner."""

    def batch_start(self, state: State, logger: Logger) -> None:
        is_first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if state.timestamp.batch.value == 3 and os.environ["HOST"] == "second" and is_first_start:
            (saver,) = [callback for callback in state.callbacks if isinstance(callback, SaveOnPreemption)]
            while not saver._received:
                time.sleep(0.05)


def recipe(folder: Path, *callbacks: str, steps: int = NUM_STEPS, dist_timeout: int = 60) -> Run:
    overrides = traced(folder, *callbacks, dist_timeout=dist_timeout)
    return "tests/tools/toy.yaml", [*overrides, f"trainer.max_duration={steps}ba"]


def alone(num_ranks: int) -> list[str]:
    """Arguments of torchrun for one host, whose ranks are started again."""
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-id=job", "--local-addr=127.0.0.1"]
    return [f"--nproc-per-node={num_ranks}", "--nnodes=1:1", "--max-restarts=1", *rendezvous]


def elastic(host: str, port: int, network: Network | None, nodes: str = "1:2") -> list[str]:
    """Arguments of torchrun for one of several hosts, of which some suffice; the first keeps the rendezvous."""
    alive = f"keep_alive_interval={KEEP_ALIVE[0]},keep_alive_max_attempt={KEEP_ALIVE[1]}"
    settings = f"last_call_timeout={LAST_CALL},{alive},is_host={int(host == 'first')}"
    address = [f"--local-addr={network.addresses[host]}"] if network else []
    endpoint = f"{network.addresses['first'] if network else '127.0.0.1'}:{port}"
    return [
        *(
            f"--nnodes={nodes}",
            "--max-restarts=3",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={endpoint}",
            "--rdzv-id=job",
        ),
        *(f"--rdzv-conf={settings}", *address),
    ]


def fixed(host: str, port: int, network: Network | None) -> list[str]:
    """Arguments of torchrun for one of two hosts that need each other."""
    address = network.addresses["first"] if network else "127.0.0.1"
    return ["--nnodes=2", f"--node-rank={int(host == 'second')}", f"--master-addr={address}", f"--master-port={port}"]


@pytest.fixture(scope="module")
def undisturbed(agents: Agents, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed")
    agent = agents.start("first", alone(1), [recipe(run)])
    assert agent.wait(300) == 0, agent.output
    assert starts(run) == [1]
    assert len(losses(run)) == NUM_STEPS
    return run


@pytest.mark.world_size(2)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_torchrun_starts_ranks_again_and_no_step_is_lost_or_doubled(agents, undisturbed, tmp_path, number):
    agent = agents.start("first", alone(2), [recipe(tmp_path, disturb_host("rank", "first", number))])
    assert agent.wait(300) == 0, agent.output
    assert starts(tmp_path) == [2, 2]
    assert agent.output.count(f"{number.name} after step 5: saved") == (number != signal.SIGKILL)
    assert_same_steps(tmp_path, undisturbed)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_torchrun_alone_saves_the_run(agents, tmp_path, number):
    """SIGTERM is passed on to the ranks; SIGUSR1 ends torchrun, and they notice that it is gone."""
    run = recipe(tmp_path, disturb_host("agent", "first", number), steps=ENDLESS)
    agent = agents.start("first", alone(2), [run])
    assert agent.wait(300) != 0
    wait_until(lambda: not agent.ranks, "ranks go on")
    assert_saved(tmp_path)


@pytest.mark.world_size(2)
def test_a_host_whose_agent_is_killed_is_left_behind(agents, network, undisturbed, tmp_path):
    """Its ranks notice that the agent is gone, and say so to all; so not even a step is done twice."""
    await_signal = "{path: tests.integration.test_elastic_launch.AwaitSignal}"
    both = start_both(agents, elastic, network, tmp_path, disturb_host("agent", "second"), await_signal)
    assert both["second"].wait(300) == -signal.SIGKILL, both["second"].output
    assert both["first"].wait(300) == 0, both["first"].output
    assert starts(tmp_path) == [2, 1]
    assert_same_steps(tmp_path, undisturbed)


@pytest.mark.world_size(2)
def test_a_lost_host_ends_the_others_and_both_continue(agents, network, undisturbed, tmp_path):
    both = start_both(agents, fixed, network, tmp_path, disturb_host("all", "second"))
    assert both["second"].wait(300) == -signal.SIGKILL, both["second"].output
    assert both["first"].wait(60 + GRACE) != 0
    assert_continues(agents, network, undisturbed, tmp_path)


@pytest.mark.world_size(2)
def test_hosts_that_are_cut_off_from_each_other_end_and_both_continue(agents, network, undisturbed, tmp_path):
    skip_without(network)
    both = start_both(agents, fixed, network, tmp_path, disturb_host("cable", "second"), dist_timeout=DIST_TIMEOUT)
    cut = wait_for_cut(network, both)
    assert both["first"].wait(DIST_TIMEOUT + GRACE) != 0
    assert both["second"].wait(DIST_TIMEOUT + GRACE) != 0
    assert time.monotonic() - cut < DIST_TIMEOUT + GRACE
    network.plug_in()
    assert_continues(agents, network, undisturbed, tmp_path)


@pytest.mark.world_size(2)
def test_of_hosts_that_are_cut_off_from_each_other_one_goes_on(agents, network, undisturbed, tmp_path):
    skip_without(network)
    both = start_both(agents, elastic, network, tmp_path, disturb_host("cable", "second"), dist_timeout=DIST_TIMEOUT)
    cut = wait_for_cut(network, both)
    wait_until(lambda: not both["second"].ranks, "the ranks that were cut off go on")
    assert time.monotonic() - cut < DIST_TIMEOUT + GRACE
    assert both["first"].wait(300) == 0, both["first"].output
    assert both["second"].wait(300) != 0
    network.plug_in()
    assert starts(tmp_path) == [2, 1]
    assert_same_steps(tmp_path, undisturbed)


@pytest.mark.world_size(4)
def test_of_four_hosts_three_go_on_and_all_draws_are_those_of_one_process(agents, network, tmp_path):
    """The batch of 12 divides among four and three ranks."""
    skip_without(network)
    alone_run, run, batch = tmp_path / "alone", tmp_path / "four", "data.global_batch_size=12"
    yaml, overrides = recipe(alone_run)
    reference = agents.start("first", alone(1), [(yaml, [*overrides, batch])])

    yaml, overrides = recipe(run, disturb_host("all", "third"))
    port, meet = free_port(), tmp_path / "meet"
    meet.mkdir()
    torchrun = {host: elastic(host, port, network, "3:4") for host in network.hosts}
    started = agents.start_together(torchrun, [(yaml, [*overrides, batch])], meet)
    for host, agent in started.items():
        assert agent.wait(300) == (-signal.SIGKILL if host == "third" else 0), agent.output
    assert starts(run) == [4, 3]
    assert reference.wait(300) == 0, reference.output
    assert_same_steps(run, alone_run)


def skip_without(network: Network | None) -> None:
    if network is None:
        pytest.skip("needs network namespaces: root and iproute2")


def start_both(
    agents: Agents, arguments, network: Network | None, folder: Path, *callbacks: str, dist_timeout: int = 60
) -> Mapping[str, Agent]:
    """Start the run of a folder on both hosts at the same time."""
    port, meet = free_port(), Path(tempfile.mkdtemp(dir=folder, prefix="meet-"))
    torchrun = {host: arguments(host, port, network) for host in ("first", "second")}
    return agents.start_together(torchrun, [recipe(folder, *callbacks, dist_timeout=dist_timeout)], meet)


def assert_continues(agents: Agents, network: Network | None, undisturbed: Path, run: Path) -> None:
    """The same command on both hosts continues."""
    for host, agent in start_both(agents, fixed, network, run).items():
        assert agent.wait(300) == 0, f"{host}: {agent.output}"
    assert starts(run) == [2, 2]
    assert_same_steps(run, undisturbed)


def wait_for_cut(network: Network, both: Mapping[str, Agent]) -> float:
    """Return the time at which the cable was pulled."""

    def is_cut_or_over() -> bool:
        return not network.is_plugged_in() or all(agent.has_ended() for agent in both.values())

    wait_until(is_cut_or_over, "the run does not begin", 300)
    assert not network.is_plugged_in(), "\n".join(f"{host} has ended:\n{both[host].output}" for host in both)
    return time.monotonic()


def assert_saved(run: Path) -> None:
    """A run has ended by SIGTERM, and the metrics of all steps before its last checkpoint are there."""
    marker = json.loads((run / "preempted.json").read_text())
    assert marker["signal"] == "SIGTERM"
    assert marker["checkpoint"] == str(resolve_checkpoint(str(run)))
    steps, _ = series(read_metrics(run / "metrics.jsonl"), TRAIN_LOSS)
    assert steps == list(range(batch_of(resolve_checkpoint(str(run)))))


@pytest.mark.world_size(2)
def test_a_signal_to_the_composer_launcher_alone_saves_the_run(server, tmp_path):
    """It ends at once, and its ranks notice that it is gone."""
    run, reached = tmp_path / "run", tmp_path / "reached"
    announce = f"plugins.callbacks=[{{path: tests.tools.toys.Announce, arguments: {{step: 3, path: {reached}}}}}]"
    overrides = [f"output_folder={run}", "samples.prompts=[]", announce, f"trainer.max_duration={ENDLESS}ba"]
    command = ["tests/tools/forked_launcher.py", "composer", "-n", "2", "run.py", "tests/tools/toy.yaml", *overrides]
    job = server.start(0, command, MASTER_PORT=str(free_port()))
    try:
        job.wait_for(reached.exists)
        below = descendants(job.pids[0])
        assert len(below) >= 2
        os.kill(job.pids[0], signal.SIGTERM)
        assert job.finish().codes != [0]
        wait_until(lambda: not alive(below), "processes go on")
    finally:
        job.kill()
    assert_saved(run)


def descendants(process: int) -> list[int]:
    """Process ids below a process."""
    return [child.pid for child in psutil.Process(process).children(recursive=True)]


def alive(processes: list[int]) -> list[int]:
    """Those that have not ended."""
    return [number for number in processes if psutil.pid_exists(number) and not is_zombie(number)]


def is_zombie(process: int) -> bool:
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
