import json

import pytest

from diffusion.errors import DataError
from diffusion.formats.data_set import (
    MANIFEST,
    BucketEntry,
    Example,
    Generation,
    PreparedManifest,
    RejectedEntry,
    SourceEntry,
)


def manifest(**changes):
    values = {
        "sources": [SourceEntry(name="a", kind="folder", path="/a", seen=3, kept=2)],
        "settings": {"seed": 17, "buckets": {"edges": [256]}, "where": None},
        "columns": {"image": "bytes"},
        "seen": 3,
        "kept": 2,
        "rejected": {"duplicate": RejectedEntry(count=1, examples=[Example(key="a/1.png", detail="of a/0.png")])},
        "splits": {"train": {"256-up": BucketEntry(num_samples=2, num_shards=1, num_bytes=10, sha256="0")}},
        "generations": [Generation(partitions=1, seen=3, kept=2)],
    }
    return PreparedManifest(**(values | changes))


def test_what_is_written_is_read(tmp_path):
    manifest().write(tmp_path)
    assert PreparedManifest.read(tmp_path) == manifest()
    values = json.loads((tmp_path / MANIFEST).read_text())
    assert (values["version"], values["kind"]) == (2, "prepared")


def test_a_folder_without_a_manifest(tmp_path):
    with pytest.raises(DataError, match=MANIFEST):
        PreparedManifest.read(tmp_path)
