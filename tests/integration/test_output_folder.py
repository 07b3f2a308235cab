import errno
import filecmp
import json
import multiprocessing
import os
import signal
import socket

import pytest

from diffusion.datasets.manifest import PreparedManifest
from diffusion.datasets.mds import read_index
from diffusion.errors import DataError, MachineError
from diffusion.preparation import output_folder
from diffusion.preparation.partitions import merge_shards
from diffusion.preparation.partitions.output import PartitionWriter
from tests.tools.preparing import prepare
from tests.tools.image_files import tree, write_folder


def looks_whole(out):
    return (out / "manifest.json").exists()


def test_finished_output_is_left_alone(tmp_path, caplog):
    write_folder(tmp_path / "set", 6)
    out = tmp_path / "out"
    options = {"edges": [16], "num_workers": 1}
    first = prepare([tmp_path / "set"], out, **options)
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    caplog.set_level("INFO")
    assert prepare([tmp_path / "set"], out, **options) == first
    assert "finished already; nothing was done" in caplog.text
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == times
    with pytest.raises(DataError, match=r"prepared with other settings .*--overwrite"):
        prepare([tmp_path / "set"], out, edges=[16], seed=5, num_workers=1)
    write_folder(tmp_path / "other", 3)
    with pytest.raises(DataError, match="from other sources"):
        prepare([tmp_path / "other"], out, **options)
    assert prepare([tmp_path / "other"], out, overwrite=True, **options).kept == 3
    assert read_index(out / "train" / "16-up").num_samples == 3


def test_foreign_files_are_never_removed(tmp_path):
    write_folder(tmp_path / "set", 2)
    (tmp_path / "out" / "train").mkdir(parents=True)
    (tmp_path / "out" / "train" / "thesis.doc").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(DataError, match=r"holds other files .'train'.; choose an empty folder"):
            prepare([tmp_path / "set"], tmp_path / "out", edges=[16], num_workers=1, overwrite=overwrite)
    (tmp_path / "out" / "manifest.json").write_text('{"kind": "encoded"}')
    with pytest.raises(DataError, match=r"holds another data set .kind 'encoded'"):
        prepare([tmp_path / "set"], tmp_path / "out", edges=[16], num_workers=1, overwrite=True)
    assert (tmp_path / "out" / "train" / "thesis.doc").read_text() == "precious"


def after(number, action, function):
    """Do something else from a call on."""
    count = iter(range(10**6))
    return lambda *args, **kwargs: action() if next(count) == number else function(*args, **kwargs)


def killed(moment, source, out):
    """Prepare, and end by SIGKILL at a moment."""
    die = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    if moment == "decoding":
        PartitionWriter.keep = after(20, die, PartitionWriter.keep)
    elif moment == "writing":
        merge_shards.write_shard = after(3, die, merge_shards.write_shard)
    elif moment == "facts":
        merge_shards.write_table = after(3, die, merge_shards.write_table)
    else:
        PreparedManifest.write = lambda *_: die()
    prepare([source], out, **OPTIONS)


OPTIONS = {"edges": [16, 34], "num_workers": 1, "shard_bytes": 8000, "partition_size": 6}


@pytest.mark.parametrize("moment", ["decoding", "writing", "facts", "manifest"])
def test_killed_in_the_middle(tmp_path, moment, monkeypatch):
    source, out = tmp_path / "set", tmp_path / "out"
    write_folder(source, 40)
    process = multiprocessing.get_context("fork").Process(target=killed, args=(moment, source, out))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not looks_whole(out)
    with pytest.raises(DataError, match=r"not a data set: there is no manifest.json"):
        PreparedManifest.read(out)
    indexes = {str(path.relative_to(out)) for path in out.rglob("index.json")}
    wanted = {"manifest": {"train/16-34/index.json", "train/34-up/index.json"}}.get(moment, set())
    assert indexes == wanted
    assert any(out.rglob("*.partial"))

    kept, written = [], []
    keep, write = PartitionWriter.keep, merge_shards.write_shard
    monkeypatch.setattr(PartitionWriter, "keep", lambda *a, **k: (kept.append(1), keep(*a, **k)))
    monkeypatch.setattr(merge_shards, "write_shard", lambda *a, **k: (written.append(1), write(*a, **k))[1])
    manifest = prepare([source], out, **OPTIONS)
    assert manifest.kept == 40
    assert len(kept) == (40 - 18 if moment == "decoding" else 0), "finished partitions are not read again"
    num_shards = sum(entry.num_shards for entry in manifest.splits["train"].values())
    assert len(written) == num_shards - {"decoding": 0, "writing": 3}.get(moment, num_shards)
    prepare([source], tmp_path / "undisturbed", **OPTIONS)
    comparison = filecmp.dircmp(out, tmp_path / "undisturbed")
    assert (comparison.left_only, comparison.right_only) == ([], [])
    assert tree(out) == tree(tmp_path / "undisturbed")


def test_interrupted_and_started_with_other_settings(tmp_path):
    source, out = tmp_path / "set", tmp_path / "out"
    write_folder(source, 40)
    process = multiprocessing.get_context("fork").Process(target=killed, args=("writing", source, out))
    process.start()
    process.join()
    other = {**OPTIONS, "seed": 5}
    prepare([source], out, **other)
    prepare([source], tmp_path / "undisturbed", **other)
    assert tree(out) == tree(tmp_path / "undisturbed")


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("moment", ["first partition", "partition", "shard", "manifest"])
def test_disk_full(tmp_path, moment):
    write_folder(tmp_path / "set", 10)
    options = {"edges": [16], "num_workers": 1, "partition_size": 4}
    with pytest.MonkeyPatch.context() as patch:
        if "partition" in moment:
            number = 0 if moment == "first partition" else 5
            patch.setattr(PartitionWriter, "keep", after(number, full, PartitionWriter.keep))
        else:
            place = {"shard": (merge_shards, "write_shard"), "manifest": (PreparedManifest, "write")}[moment]
            patch.setattr(*place, full)
        with pytest.raises(MachineError, match=r"cannot write to .*No space left on device; .* GiB are free"):
            prepare([tmp_path / "set"], tmp_path / "out", **options)
    assert not looks_whole(tmp_path / "out")
    assert (tmp_path / "out").exists() == (moment != "first partition"), "what is finished is kept"
    prepare([tmp_path / "set"], tmp_path / "out", **options)
    prepare([tmp_path / "set"], tmp_path / "undisturbed", **options)
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


def test_output_is_claimed(tmp_path):
    write_folder(tmp_path / "set", 2)
    with (
        output_folder.claim(tmp_path / "out", "prepared"),
        pytest.raises(MachineError, match="another process is writing"),
    ):
        prepare([tmp_path / "set"], tmp_path / "out", edges=[16], num_workers=1)
    (tmp_path / "file").write_text("x")
    with pytest.raises(MachineError, match=r"cannot write to .*Not a directory"):
        prepare([tmp_path / "set"], tmp_path / "file" / "out", edges=[16], num_workers=1)


def test_a_forked_process_that_lives_longer_does_not_hold_the_claim(tmp_path):
    here, there = socket.socketpair()
    with output_folder.claim(tmp_path / "out", "prepared"):
        child = os.fork()
        if child == 0:
            there.send(b"begun")
            there.recv(1)
            os._exit(0)
        here.recv(16)
    try:
        with output_folder.claim(tmp_path / "out", "prepared") as work:
            assert work.is_dir()
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "it lives longer"
    finally:
        here.send(b"x")
        os.waitpid(child, 0)
        here.close()
        there.close()


def test_damaged_manifest(tmp_path):
    write_folder(tmp_path / "set", 1)
    prepare([tmp_path / "set"], tmp_path / "out", edges=[16], num_workers=1)
    path = tmp_path / "out" / "manifest.json"
    content = json.loads(path.read_text())
    for change, message in (
        ({"kind": "encoded"}, "is not prepared data: kind in manifest.json is 'encoded'"),
        ({"version": 99}, "has version 99, this package reads 1"),
        ({"settings": {}}, "is damaged"),
        ({"splits": None}, "is damaged"),
    ):
        path.write_text(json.dumps({**content, **change}))
        with pytest.raises(DataError, match=message):
            PreparedManifest.read(tmp_path / "out")
