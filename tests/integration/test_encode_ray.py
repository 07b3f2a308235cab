"""Encoding on a cluster of several Ray nodes of this machine, one of which is killed in the middle."""

import threading
import time
from pathlib import Path

import pytest

from diffusion.preparation.config import Engine, RayConfig
from diffusion.preparation.encoding import shards
from diffusion.preparation.encoding.encode import encode
from diffusion.preparation.encoding.models import Encoder
from diffusion.preparation.engine import Workers
from tests.tools.written_data import append_prepared, prepared_sample
from tests.unit.preparation.test_encode import digests
from tests.unit.preparation.test_encode_outputs import MODELS

ray = pytest.importorskip("ray", reason="needs Ray: pip install -e '.[ray]'")

pytestmark = pytest.mark.slow

MEMORY = {"object_store_memory": 80 * 2**20}


def test_node_that_is_killed_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the lost node had under way is encoded by the other."""
    from ray.cluster_utils import Cluster

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_BACKEND_LOG_LEVEL", "fatal")
    prepared, out, seen = tmp_path / "prepared", tmp_path / "out", tmp_path / "seen"
    samples = [prepared_sample("source", i) for i in range(72)]
    append_prepared(prepared / "train/32-64", samples, per_shard=3)
    seen.mkdir()

    def load():
        class CpuEncoder(Encoder):
            """In the place of an encoder on a GPU, which this machine does not have."""

            def __init__(self, models, device, precision):
                assert device == "cuda"
                (seen / ray.get_runtime_context().get_node_id()).touch()
                time.sleep(0.3)
                super().__init__(models, "cpu", precision)

        shards.Encoder = CpuEncoder  # pyright: ignore[reportAttributeAccessIssue]
        return MODELS

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **MEMORY})
    nodes = [cluster.add_node(num_cpus=1, num_gpus=1, **MEMORY) for _ in range(2)]
    finished = threading.Event()

    def kill_a_node() -> None:
        while len(list(seen.iterdir())) < 2:
            if finished.wait(0.05):
                return
        cluster.remove_node(nodes[1], allow_graceful=False)

    killer = threading.Thread(target=kill_a_node)
    killer.start()
    options = {"models": MODELS, "resolutions": [32], "batch_size": 2}
    try:
        workers = Workers(engine=Engine.ray, ray=RayConfig(address=cluster.address))
        encode(prepared, out, workers=workers, load=load, device="cuda", **options)
    finally:
        finished.set()
        killer.join()
        ray.shutdown()
        cluster.shutdown()
    encode(prepared, tmp_path / "here", **options)
    assert digests(out) == digests(tmp_path / "here")
    assert len(list(seen.iterdir())) == 2
