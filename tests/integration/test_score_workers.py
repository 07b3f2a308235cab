"""Scores by several processes and by Ray: the same bytes, each worker on the GPU that it was given."""

import pytest

from diffusion.config.loading import from_dict
from diffusion.errors import MachineError
from diffusion.preparation import engine
from diffusion.preparation import score as module
from diffusion.preparation.config import Engine, PrepareConfig, RayConfig
from diffusion.preparation.engine import Workers
from diffusion.preparation.score import score
from tests.tools.image_files import tree
from tests.tools.scored_data import write_scan

pytestmark = pytest.mark.slow

HERE = "tests.tools.scored_data"


def scores(folder, workers: Workers, num_gpus: float = 0.0) -> dict[str, bytes]:
    """Write captions, numbers and the GPUs that workers see; return the files."""
    data = write_scan(folder)
    scorers = [{"path": f"{HERE}.Redness", "column": "redness", "batch_size": 2},
               {"path": f"{HERE}.VisibleGpus", "column": "gpus", "num_gpus": num_gpus}]  # fmt: skip
    values = {"sources": ["a"], "out": str(data.out), "captioner": {"path": f"{HERE}.Captioner"}, "scorers": scorers}
    score(from_dict(PrepareConfig, values, "test"), data.scan, workers=workers)
    return tree(data.out / "scores")


def gpus_of(files: dict[str, bytes]) -> set[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts = [pq.read_table(pa.BufferReader(files[f"gpus/{part:06}.parquet"])) for part in range(2)]
    return {value for part in parts for value in part["gpus"].to_pylist() if value}


def test_workers_do_not_matter_and_without_gpus_of_their_own_see_none(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    one = scores(tmp_path / "one", Workers(number=1))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert scores(tmp_path / "two", Workers(number=2)) == one
    assert gpus_of(one) == {"none"}


def test_processes_take_the_gpus_in_turn(tmp_path, monkeypatch):
    for place in (module, engine):
        monkeypatch.setattr(place, "visible_gpus", lambda: ["5", "7"])
    assert gpus_of(scores(tmp_path, Workers(number=16), num_gpus=1)) == {"5", "7"}


def test_processes_without_a_gpu_end(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(MachineError, match=r"scorers\.1\.num_gpus"):
        scores(tmp_path, Workers(number=2), num_gpus=0.5)


def test_ray_places_scorers_on_gpus(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray", reason="needs Ray: pip install -e '.[ray]'")
    from ray.cluster_utils import Cluster

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80 * 2**20})
    try:
        cluster.add_node(num_cpus=2, num_gpus=2, object_store_memory=80 * 2**20)
        workers = Workers(engine=Engine.ray, ray=RayConfig(address=cluster.address, concurrency=2))
        files = scores(tmp_path / "ray", workers, num_gpus=1)
        assert gpus_of(files) <= {"0", "1"}
        one = scores(tmp_path / "one", Workers())
        assert [name for name in one if not name.startswith("gpus/") and one[name] != files[name]] == []
    finally:
        ray.shutdown()
        cluster.shutdown()
