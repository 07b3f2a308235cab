"""Scores by several processes and by Ray, and of a store: the same bytes, each worker on the GPU that it was given."""

import pytest

from diffusion.config.loading import from_dict
from diffusion.errors import MachineError
from diffusion.preparation import engine
from diffusion.preparation import score as module
from diffusion.preparation.config import PrepareConfig
from diffusion.preparation.engine import Workers
from diffusion.preparation.report import write_report
from diffusion.preparation.scan import scan_sources
from diffusion.preparation.score import score
from diffusion.preparation.select import select
from diffusion.storage import list_files, read
from tests.tools.image_files import noise, sample, tree, write_folder, write_tar
from tests.tools.s3_server import s3_process, s3_server
from tests.tools.scored_data import write_scan

__all__ = ["s3_process", "s3_server"]

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


@pytest.mark.s3
def test_scores_and_report_in_a_store_are_those_of_a_folder(tmp_path, s3_server):
    write_folder(tmp_path / "shelf", 7)
    write_tar(
        tmp_path / "some.tar", [member for i in range(5) for member in sample(f"{i}", noise(40, 40, i), b"of a tar")]
    )
    (tmp_path / "shelf" / "0003.txt").unlink()
    (tmp_path / "shelf" / "copy.png").write_bytes((tmp_path / "shelf" / "0005.png").read_bytes())
    (tmp_path / "shelf" / "copy.txt").write_text("a copy")

    def prepared(out: str) -> str:
        values = {"sources": [str(tmp_path / "shelf"), str(tmp_path / "some.tar")], "out": out, "partition_size": 4,
                  "buckets": {"edges": [32]}, "duplicates": {}, "captioner": {"path": f"{HERE}.Captioner"},
                  "scorers": [{"path": f"{HERE}.Redness", "column": "redness"}],
                  "filters": {"min_caption_characters": 2}}  # fmt: skip
        config = from_dict(PrepareConfig, values, "test")
        scan = scan_sources(config, workers=Workers())
        score(config, scan, workers=Workers())
        select(out, config, scan)
        report = write_report(out, scan)
        assert (report["kept"]["images"], report["reasons"]) == (12, {"duplicate": 1})
        return out

    there, here = prepared(f"s3://tests/{tmp_path.name}/out"), prepared(str(tmp_path / "out"))
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("data:image/jpeg") == 12 + 1 + 2, "kept images, the duplicate, the pair"
    names = ["scores.json", "report.json", *(f"scores/{name}" for name in list_files(f"{there}/scores"))]
    assert len(names) == 2 + 2 * 3
    assert [name for name in names if read(f"{there}/{name}") != read(f"{here}/{name}")] == []
    assert read(f"{there}/report.html").decode() == page
