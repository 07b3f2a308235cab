"""Retention of checkpoints, and names in a store."""

from pathlib import Path

import pytest

from diffusion import storage
from diffusion.checkpointing.layout import superseded
from diffusion.checkpointing.remote import RemoteCheckpoints
from diffusion.errors import DataError


def numbered(*steps: int) -> list[Path]:
    return [Path(f"ep0-ba{step}") for step in steps]


@pytest.mark.parametrize(
    ("steps", "newest", "every", "removed"),
    [
        ((2, 4, 6, 8), 2, None, (2, 4)),
        ((2, 4, 6, 8), 2, 4, (2,)),
        ((10, 20, 30, 40, 47, 50), 1, 20, (10, 30, 47)),
        ((3, 6, 9, 12, 15, 18, 21), 1, 10, (3, 6, 9, 15, 18)),
        ((12, 15, 18, 21, 24), 1, 10, (15, 18)),
        ((2, 4), 2, None, ()),
        ((2,), 1, None, ()),
    ],
)
def test_the_newest_and_every_mth_stay(steps, newest, every, removed):
    found = superseded(numbered(*steps), newest=newest, every=every, is_whole=lambda path: True)
    assert found == numbered(*removed)


def test_which_stay_does_not_depend_on_when_the_others_went():
    present: list[Path] = []
    for step in range(3, 200, 3):
        present.append(Path(f"ep0-ba{step}"))
        gone = superseded(present, newest=2, every=25, is_whole=lambda path: True)
        present = [path for path in present if path not in gone]
    assert present == numbered(27, 51, 75, 102, 126, 150, 177, 195, 198)


def test_damaged_ones_do_not_count_and_the_only_good_one_stays():
    damaged = set(numbered(6, 8))
    found = superseded(numbered(2, 4, 6, 8), newest=1, every=None, is_whole=lambda path: path not in damaged)
    assert found == numbered(2)
    assert superseded(numbered(2, 4, 6, 8), newest=1, every=None, is_whole=lambda path: False) == []


def test_a_name_in_a_store_that_leads_out_of_the_folder_is_rejected(monkeypatch):
    files = {
        "ep0-ba4/../../../evil": storage.StoredFile(uri="s3://bucket/run/ep0-ba4/../../../evil", size=1, version="1")
    }
    monkeypatch.setattr(storage, "list_files", lambda *_: files)
    with pytest.raises(DataError, match="evil"):
        RemoteCheckpoints("s3://bucket/run", timeout=1.0).present()
