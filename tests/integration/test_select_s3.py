"""A selection of a data set in an object store is that of the same data set in a folder."""

import io

import pyarrow.parquet as pq
import pytest

from diffusion import storage
from diffusion.config.loading import from_dict
from diffusion.preparation.config import PrepareConfig
from diffusion.preparation.explain import explain
from diffusion.preparation.metadata import open_metadata
from diffusion.preparation.select import read_selection, select
from tests.tools.metadata_parts import image, scan_of, write_part
from tests.tools.s3_server import s3_process, s3_server  # noqa: F401

pytestmark = pytest.mark.slow


def test_a_selection_in_a_store_is_that_of_a_folder(tmp_path, s3_server):  # noqa: F811
    out = "s3://tests/selected"
    for part in range(5):
        rows = [image(100 * part + i, metadata={"n": i, "language": "en" if i % 7 else "fr"}) for i in range(30)]
        rows.append(image(9000 + part, xxh128=rows[9]["xxh128"], phash=rows[9]["phash"]))
        write_part(tmp_path, part, rows, quality=[*(float(i % 5) for i in range(30)), 2.0])
    for path in tmp_path.rglob("*.parquet"):
        storage.write(f"{out}/{path.relative_to(tmp_path)}", path.read_bytes())
    config = from_dict(
        PrepareConfig,
        {"sources": ["s"], "out": out, "filters": {"languages": ["en"], "missing": "keep"}, "duplicates": {},
         "where": "quality > 0 and coalesce(n, 5) > 4", "validation_fraction": 0.2},
        "test",
    )  # fmt: skip
    scan = scan_of(0, 0, 0, 1, 1)
    there, here = select(out, config, scan), select(str(tmp_path), config, scan)
    assert there == here
    assert there == select(out, config, scan) == read_selection(out, 1)
    assert read_selection(out, 0) == read_selection(str(tmp_path), 0)
    for generation in range(2):
        for kind in ("kept", "rejected"):
            name = f"selection/{generation}-{kind}.parquet"
            stored = pq.read_table(io.BytesIO(storage.read(f"{out}/{name}")))
            assert stored.num_rows > 5
            assert stored.equals(pq.read_table(tmp_path / name))
        assert {"duplicate", "language", "where"} <= {*read_selection(out, generation).examples}
    assert explain(out, config, scan) == explain(str(tmp_path), config, scan)
    with open_metadata(out, scan, columns=["n"]) as connection:
        assert connection.execute("SELECT count(*), max(n) FROM images").fetchall() == [(155, 29.0)]
