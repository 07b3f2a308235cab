import json

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest

from diffusion.config.loading import from_dict
from diffusion.errors import ConfigurationError, DataError
from diffusion.preparation.config import PrepareConfig
from diffusion.preparation.metadata import open_metadata
from diffusion.preparation.select import kept_rows, mix, read_selection, select
from tests.tools.metadata_parts import image, scan_of, write_part


def configuration(**values) -> PrepareConfig:
    return from_dict(PrepareConfig, {"sources": ["s"], "out": "o", **values}, "test")


def rejected(out, generation=0) -> dict[tuple[int, int], tuple[str, str | None]]:
    rows = pq.read_table(out / "selection" / f"{generation}-rejected.parquet").to_pylist()
    return {(row["part"], row["row"]): (row["reason"], row["duplicate_of"]) for row in rows}


def kept(out, generation=0) -> list[dict]:
    return pq.read_table(out / "selection" / f"{generation}-kept.parquet").to_pylist()


def test_first_light(tmp_path):
    write_part(tmp_path, 0, [image(i) for i in range(10)] + [image(10, width=100), image(11, reason="unreadable", width=None, height=None)])
    write_part(tmp_path, 1, [image(20 + i, metadata={"a/b": i, "t": "x"}) for i in range(5)] + [image(0, key="s/copy", xxh128=image(0)["xxh128"], phash=image(0)["phash"])], )
    selection = select(str(tmp_path), configuration(duplicates={}, where="coalesce(\"a/b\", 3) >= 2 and coalesce(t,'x') = 'x'"), scan_of(0, 0))
    print(selection, rejected(tmp_path))
    assert selection.kept == 13
