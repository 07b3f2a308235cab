"""Uploads that an earlier start has left."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffusion.checkpointing.find import write_damaged
from diffusion.checkpointing.resume import _finish_upload


@pytest.mark.parametrize(
    ("stored", "damaged", "uploaded"),
    [
        ({"ep0-ba1.pt": True}, set(), ["ep0-ba2.pt"]),
        ({"ep0-ba3.pt": True}, set(), []),
        ({"ep0-ba1.pt": True, "ep0-ba3.pt": False}, set(), ["ep0-ba2.pt"]),
        ({"ep0-ba1.pt": True, "ep0-ba3.pt": True}, {"ep0-ba3.pt"}, ["ep0-ba2.pt"]),
    ],
)
def test_the_newest_is_uploaded_where_those_that_are_whole_in_the_store_are_older(tmp_path, stored, damaged, uploaded):
    local, store, seen = tmp_path / "uploads", tmp_path / "store", []
    local.mkdir()
    for name in ("ep0-ba1.pt", "ep0-ba2.pt"):
        torch.save({}, local / name)
    write_damaged(str(store), damaged)
    remote: Any = SimpleNamespace(
        uri=str(store),
        present=lambda: [SimpleNamespace(name=name, is_complete=whole) for name, whole in stored.items()],
        find_missing=lambda path: None,
        upload_parts=lambda path: None,
        finish_upload=lambda path: seen.append(Path(path).name),
    )
    _finish_upload(local, remote)
    assert seen == uploaded
    assert list(local.iterdir()) == []
