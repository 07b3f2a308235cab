"""Tasks, shards and scores by Ray Data on a cluster of several nodes on this machine, and starts of Ray that fail."""

import atexit
import functools
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from diffusion.errors import ConfigurationError, DataError, MachineError
from diffusion.preparation import engine
from diffusion.preparation.config import Engine, RayConfig
from diffusion.preparation.encoding import shards
from diffusion.preparation.encoding.encode import encode
from diffusion.preparation.encoding.models import Encoder
from diffusion.preparation.engine import Workers, cluster_has_gpus, run
from tests.integration.test_score_workers import gpus_of, scores
from tests.tools.written_data import append_prepared, prepared_sample
from tests.unit.preparation.test_encode import digests
from tests.unit.preparation.test_encode_outputs import MODELS

ray = pytest.importorskip("ray", reason="needs Ray: uv pip install -e '.[ray]'")

pytestmark = pytest.mark.slow

MEMORY: dict[str, Any] = {"object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def cluster():
    """A head without CPUs, and a node of two CPUs and two GPUs that do not exist."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_BACKEND_LOG_LEVEL", "fatal")
        wait = functools.partialmethod(Cluster._wait_for_node, timeout=300)
        patch.setattr(Cluster, "_wait_for_node", wait)
        at_exit: list[Callable[..., Any]] = []
        register = atexit.register
        patch.setattr(atexit, "register", lambda function, *args: at_exit.append(function) or register(function, *args))
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **MEMORY})
        cluster.add_node(num_cpus=2, num_gpus=2, **MEMORY)
        yield cluster
        ray.shutdown()
        cluster.shutdown()
        for function in at_exit:  # Python 3.13 drops them in a fork, where the end of Ray's objects is a crash.
            atexit.unregister(function)


def workers_of(cluster, **options) -> Workers:
    return Workers(engine=Engine.ray, ray=RayConfig(address=cluster.address, **options))


def test_node_that_is_killed_in_the_middle(cluster, tmp_path):
    """Each actor has a GPU of its own; what the lost node had under way is done by the other."""
    node = cluster.add_node(num_cpus=2, num_gpus=2, **MEMORY)
    done, actors = tmp_path / "done", tmp_path / "actors"
    done.mkdir()
    actors.mkdir()

    def make():
        place, gpu = ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]
        (actors / f"{place}-{os.getpid()}").write_text(gpu)

        def num_fewest():
            """Actors of the node with fewer of them."""
            counts = Counter(path.name.partition("-")[0] for path in actors.iterdir())
            return min(counts.values()) if len(counts) == 2 else 0

        def work(task):
            deadline = time.monotonic() + 300  # Else one actor may have done all tasks before another starts.
            while num_fewest() < 2 and time.monotonic() < deadline:
                time.sleep(0.1)
            time.sleep(0.2)
            with (done / f"{task}").open("a") as file:
                file.write(".")
            return task, place

        return work

    num_tasks, results = 80, []
    for result in run(workers_of(cluster), make, range(num_tasks), num_gpus=1):
        results.append(result)
        if node is not None and len({place for _, place in results}) == 2:
            cluster.remove_node(node, allow_graceful=False)
            node = None
    assert node is None
    assert sorted(task for task, _ in results) == list(range(num_tasks))
    assert sorted(int(path.name) for path in done.iterdir()) == list(range(num_tasks))
    for place in {place for _, place in results}:
        assert {path.read_text() for path in actors.glob(f"{place}-*")} == {"0", "1"}


def test_encoding_on_gpus(cluster, tmp_path):
    append_prepared(tmp_path / "prepared/train/32-64", [prepared_sample("source", i) for i in range(24)], per_shard=3)
    options: dict[str, Any] = {"models": MODELS, "resolutions": [32], "batch_size": 2}

    def load():
        class CpuEncoder(Encoder):
            """In the place of an encoder on a GPU, which this machine does not have."""

            def __init__(self, models, device, precision):
                assert device == "cuda"
                super().__init__(models, "cpu", precision)

        shards.Encoder = CpuEncoder  # pyright: ignore[reportAttributeAccessIssue]
        return MODELS

    workers = workers_of(cluster, concurrency=1)
    encode(tmp_path / "prepared", tmp_path / "ray", workers=workers, load=load, device="cuda", **options)
    encode(tmp_path / "prepared", tmp_path / "here", **options)
    assert digests(tmp_path / "ray") == digests(tmp_path / "here")


def test_scorers_on_gpus(cluster, tmp_path):
    on_gpus = scores(tmp_path / "ray", workers_of(cluster, concurrency=1), num_gpus=1)
    here = scores(tmp_path / "here", Workers())
    assert gpus_of(on_gpus) in ({"0"}, {"1"})
    assert [name for name in here if not name.startswith("gpus/") and here[name] != on_gpus[name]] == []


@pytest.mark.parametrize(
    ("num_gpus", "remote_args", "message"),
    [
        (3, {}, "1 CPU, 3 GPU .*2 CPU, 2 GPU"),
        (0, {"num_cpus": 5}, "5 CPU .*2 CPU"),
        (0, {"memory": 2**60}, "memory"),
        (0, {"resources": {"disk": 1}}, r"1 disk \(most on a node: .*0 disk"),
    ],
)
def test_what_the_cluster_lacks_is_one_message_at_once(cluster, num_gpus, remote_args, message):
    began = time.monotonic()
    with pytest.raises(MachineError, match=message):
        list(run(workers_of(cluster, remote_args=remote_args), lambda: len, ["a"], num_gpus=num_gpus))
    assert time.monotonic() - began < 120
    assert cluster_has_gpus(workers_of(cluster))


def test_a_cluster_that_can_grow_is_waited_for(monkeypatch, caplog):
    node = {"Alive": True, "Resources": {"CPU": 2.0}, "Labels": {"ray.io/node-group": "small"}}
    monkeypatch.setattr(ray, "nodes", lambda: [node])
    engine._check_room(ray, {"num_cpus": 3, "num_gpus": 0})
    assert "waiting for the cluster" in caplog.text


def test_errors_come_as_themselves_and_the_cluster_is_used_again(cluster):
    def make():
        def work(task):
            if task == 3:
                raise DataError("shelf/3.tar: damaged")
            return task + 1

        return work

    with pytest.raises(DataError, match=r"shelf/3\.tar"):
        list(run(workers_of(cluster), make, range(3, 6)))
    with pytest.raises(TypeError):
        list(run(workers_of(cluster), make, [""]))
    with pytest.raises(ConfigurationError, match=r"ray\.remote_args"):
        list(run(workers_of(cluster, remote_args={"num_cpu": 1}), make, ["x"]))
    assert list(run(workers_of(cluster, concurrency=2), make, [])) == []
    asked = workers_of(cluster, concurrency=1, remote_args={"num_cpus": 2, "memory": 2**20})

    def environment():
        return lambda task: (os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"])

    ((_, gpus),) = set(run(asked, environment, range(20)))
    assert gpus == ""


def test_actor_that_dies_of_the_same_task_again_and_again_is_one_message(cluster, monkeypatch):
    monkeypatch.setattr(engine, "_RAY_RETRIES", 1)

    def make():
        return lambda task: os._exit(1) if task == 2 else task

    with pytest.raises(MachineError):
        list(run(workers_of(cluster, concurrency=1), make, range(4)))


def test_tasks_beyond_the_number_of_blocks_come_in_groups(cluster, monkeypatch):
    monkeypatch.setattr(engine, "_RAY_BLOCKS", 7)

    def make():
        return lambda task: task

    assert sorted(run(workers_of(cluster), make, range(100))) == list(range(100))


class Starts:
    """In the place of a cluster that comes up at the last of so many starts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_starts: int) -> None:
        self.num_starts, self.starts, self.shutdowns = num_starts, [], 0
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        monkeypatch.setattr(ray, "init", self._start)
        monkeypatch.setattr(ray, "shutdown", self._end)

    def _start(self, num_cpus: int | None = None, address: str | None = None, **options) -> None:
        self.starts.append(num_cpus or address)
        if len(self.starts) < self.num_starts:
            raise Exception("The current node timed out during startup.\nMore lines")

    def _end(self) -> None:
        self.shutdowns += 1


def test_ray_that_is_late_is_started_again(monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    cluster = Starts(monkeypatch, 3)
    engine._connected(Workers(engine=Engine.ray, number=4))
    assert (cluster.starts, cluster.shutdowns) == ([4, 4, 4], 2)
    assert len([record for record in caplog.records if record.name == engine.__name__]) == 2


def test_ray_that_does_not_start_is_one_message(monkeypatch):
    cluster = Starts(monkeypatch, 9)
    with pytest.raises(MachineError, match="timed out"):
        engine._connected(Workers(engine=Engine.ray, number=4))
    assert len(cluster.starts) == 3
    monkeypatch.setenv("RAY_ADDRESS", "far:6379")
    with pytest.raises(MachineError, match="far:6379"):
        engine._connected(Workers(engine=Engine.ray))
    near = RayConfig(address="near:6379")
    with pytest.raises(MachineError, match="near:6379"):
        engine._connected(Workers(engine=Engine.ray, ray=near))
    assert cluster.starts[3:] == ["far:6379", "near:6379"]
