"""Hosts on one machine, and agents of torchrun on them.

The hosts are network namespaces with cables to a switch. As a program this file is an agent that forks its ranks, which
makes a start quicker. Everything else about it is torchrun's own: arguments, rendezvous, restarts, and each host's
agent as the parent of the ranks there. Its argument is a request in JSON, or a namespace before torchrun's arguments.
Without those it is a rank.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.tools.training_runs import Job, Run, TrainingServer, train_runs
from tests.tools.waiting import wait_until

NAMES = ("first", "second", "third", "fourth")
"""Of the hosts."""

TCP_RETRIES = 6
"""How often the hosts send unconfirmed data again: for some 25 seconds, instead of 15 minutes."""

_NEW_NETWORK = 0x40000000
"""CLONE_NEWNET of linux/sched.h."""


class Network:
    """Network namespaces as hosts, numbered from 0, each with a cable to a switch.

    Args:
        name: A unique beginning of the namespaces' names.
        num_hosts: Number of hosts.

    Raises:
        subprocess.CalledProcessError: The kernel does not allow it.
    """

    def __init__(self, name: str, num_hosts: int = 2) -> None:
        self.name, self.num_hosts = name, num_hosts
        self.hosts = {host: self.namespace(name, number) for number, host in enumerate(NAMES[:num_hosts])}
        self.addresses = {host: self.address(number) for number, host in enumerate(self.hosts)}
        _ip("netns", "add", name)
        _ip("-n", name, "link", "add", "switch", "type", "bridge")
        _ip("-n", name, "link", "set", "switch", "up")
        for number in range(num_hosts):
            host = self.namespace(name, number)
            _ip("netns", "add", host)
            _ip("link", "add", "eth0", "netns", host, "type", "veth", "peer", "name", f"port{number}", "netns", name)
            _ip("-n", name, "link", "set", f"port{number}", "master", "switch", "up")
            _ip("-n", host, "address", "add", f"{self.address(number)}/24", "dev", "eth0")
            _ip("-n", host, "link", "set", "lo", "up")
            _ip("-n", host, "link", "set", "eth0", "up")
            _ip("netns", "exec", host, "sh", "-c", f"echo {TCP_RETRIES} > /proc/sys/net/ipv4/tcp_retries2")

    @staticmethod
    def namespace(name: str, number: int) -> str:
        """Of a host."""
        return f"{name}-{number}"

    @staticmethod
    def address(number: int) -> str:
        """Of a host."""
        return f"10.77.0.{number + 1}"

    def slow_down(self, number: int, rate: str) -> None:
        """Let a host send no faster than at a rate, such as `100mbit`; what it misses while it waits for a core it may
        catch up, up to 256 KB."""
        limit = ["tbf", "rate", rate, "burst", "2mbit", "latency", "50ms"]
        command = ["tc", "-n", self.namespace(self.name, number), "qdisc", "add", "dev", "eth0", "root", *limit]
        subprocess.run(command, check=True, capture_output=True)

    def plug_in(self, host: str = "second") -> None:
        """Join a host again."""
        _ip("-n", self.hosts[host], "link", "set", "eth0", "up")

    def unplug(self, host: str = "second") -> None:
        """Cut a host off."""
        _ip("-n", self.hosts[host], "link", "set", "eth0", "down")

    def is_plugged_in(self, host: str = "second") -> bool:
        """Whether a host is joined."""
        return "LOWER_UP" in _ip("-n", self.hosts[host], "link", "show", "eth0")

    def remove(self) -> None:
        """Remove the namespaces."""
        for namespace in (self.name, *(self.namespace(self.name, number) for number in range(self.num_hosts))):
            subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


class Agents:
    """Starts agents of torchrun, forked by a server, in the network namespace of their host, if it has one."""

    def __init__(self, server: TrainingServer, namespaces: dict[str, str] | None = None) -> None:
        self._server, self._namespaces = server, namespaces or {}
        self._agents: list[Agent] = []

    def start(
        self, host: str, torchrun: Sequence[str], runs: Sequence[Run], meet: str = "", num_hosts: int = 1
    ) -> "Agent":
        """Start an agent, with arguments of torchrun, whose ranks train the configurations one after the other.

        With a folder `meet`, it begins when `num_hosts` agents have come there.
        """
        request = {"namespace": self._namespaces.get(host), "torchrun": torchrun, "runs": runs}
        request |= {"meet": meet, "num_hosts": num_hosts}
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "HOST": host}
        self._agents.append(Agent(self._server.start(0, ["tests/tools/hosts.py", json.dumps(request)], **variables)))
        return self._agents[-1]

    def start_together(
        self, torchrun: Mapping[str, Sequence[str]], runs: Sequence[Run], meet: Path
    ) -> "dict[str, Agent]":
        """Start the agents of all hosts, which begin together when they have met in an empty folder."""
        return {
            host: self.start(host, arguments, runs, str(meet), len(torchrun)) for host, arguments in torchrun.items()
        }

    def close(self) -> None:
        """End the agents that are left."""
        for agent in self._agents:
            agent.kill()


class Agent:
    """An agent of torchrun that was started."""

    def __init__(self, job: Job) -> None:
        self._job = job
        (self.process,) = job.pids

    def has_ended(self) -> bool:
        """Whether it has ended."""
        return self._job.poll() is not None

    def wait(self, timeout: float) -> int:
        """Return its exit code when it has ended, negative for a signal."""
        return self._job.finish(timeout).codes[0]

    def kill(self) -> None:
        """End it, and its ranks."""
        self._job.kill()

    @property
    def ranks(self) -> list[int]:
        """Processes that it or its ranks have started, and that have not ended."""
        return [
            process.pid
            for process in psutil.process_iter(["status"])
            if process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != self.process and self._has(process.pid)
        ]

    def _has(self, process: int) -> bool:
        try:
            return os.getsid(process) == self.process
        except ProcessLookupError:
            return False

    @property
    def output(self) -> str:
        """What the agent and its ranks have printed."""
        return self._job.output


def enter(namespace: str) -> None:
    """Use the network of a namespace from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:  # noqa: PTH123
        if libc.setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"


def _torchrun(arguments: list[str], runs: list[Run]) -> None:
    """Do what torchrun does with its arguments, but with a function for a program."""
    from torch.distributed import run
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from torch.distributed.launcher.api import elastic_launch

    # It asks for the names of its methods by `inspect.stack`, which looks through all modules: here 6,000 that came
    # with the fork, for up to a second each time where other tests keep the cores busy. A host then comes too late.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    config, _, _ = run.config_from_args(run.parse_args([*arguments, "program"]))
    config.start_method = "fork"
    elastic_launch(config, _rank)(runs)


def _rank(runs: list[Run]) -> None:
    import torch

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # The agent's handlers come along with a fork.
    # A fork's first call replaces torch's pool of threads; two threads that are first at once find none, and abort.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if code := train_runs(runs):
        sys.exit(code)


def _meet(folder: Path, num_hosts: int) -> None:
    """Wait until the agents of all hosts are here: who comes to a rendezvous much earlier begins alone."""
    (folder / os.environ["HOST"]).touch()
    wait_until(lambda: len(list(folder.iterdir())) == num_hosts, "another host's agent has not come")


def _as_torchrun(namespace: str, arguments: list[str]) -> dict[str, Any]:
    """The request for a host, in which torchrun would get these arguments."""
    program = arguments.index("run.py")
    yaml, *overrides = arguments[program + 1 :]
    return {"namespace": namespace, "torchrun": arguments[:program], "runs": [(yaml, overrides)], "meet": ""}


if __name__ == "__main__":
    request = json.loads(sys.argv[1]) if len(sys.argv) == 2 else _as_torchrun(sys.argv[1], sys.argv[2:])
    if request["namespace"]:
        enter(request["namespace"])
    if request["meet"]:
        _meet(Path(request["meet"]), request["num_hosts"])
    if request["torchrun"]:
        _torchrun(request["torchrun"], request["runs"])
    else:
        _rank(request["runs"])
