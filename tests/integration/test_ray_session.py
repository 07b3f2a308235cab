"""Starts of Ray that fail, as on a machine where its parts take longer to come up than it waits."""

import logging

import pytest

from diffusion.errors import MachineError
from diffusion.preparation.ray_session import ray_session

ray = pytest.importorskip("ray", reason="needs Ray: pip install -e '.[ray]'")


class Cluster:
    """In the place of a cluster that comes up at the last of so many starts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_starts: int) -> None:
        self.num_starts, self.starts, self.shutdowns = num_starts, [], 0
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        monkeypatch.setattr(ray, "init", self._start)
        monkeypatch.setattr(ray, "shutdown", self._end)

    def _start(self, num_cpus: int | None, **options) -> None:
        self.starts.append(num_cpus)
        if len(self.starts) < self.num_starts:
            raise Exception("The current node timed out during startup.\nMore lines")

    def _end(self) -> None:
        self.shutdowns += 1


def test_ray_that_is_late_is_started_again(monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    cluster = Cluster(monkeypatch, 3)
    with ray_session(4) as module:
        assert module is ray
        assert (cluster.starts, cluster.shutdowns) == ([4, 4, 4], 2)
    assert cluster.shutdowns == 3
    assert caplog.text.count("Ray did not start (The current node timed out during startup)") == 2


def test_ray_that_does_not_start_is_one_message(monkeypatch):
    cluster = Cluster(monkeypatch, 9)
    with pytest.raises(MachineError, match=r"^Ray cannot be used on this machine: The current node .* startup\. Free"):
        ray_session(4).__enter__()
    assert len(cluster.starts) == 3
    monkeypatch.setenv("RAY_ADDRESS", "far:6379")
    with pytest.raises(MachineError, match="Ray cannot be used at RAY_ADDRESS=far:6379"):
        ray_session(4).__enter__()
    assert cluster.starts[3:] == [None]
