import contextlib
import errno
import filecmp
import json
import multiprocessing
import os
import signal

import pytest

from diffusion.datasets.manifest import PreparedManifest
from diffusion.datasets.mds import read_index
from diffusion.errors import DataError, MachineError
from diffusion.preparation import output_folder
from diffusion.preparation import prepare as module
from diffusion.preparation.prepare import prepare
from diffusion.preparation.spill import Spill
from tests.picture_files import tree, write_folder


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


def killed(moment, source, out):
    """Prepare, and end by SIGKILL at a moment."""
    die = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    if moment == "decoding":
        count = iter(range(10**6))
        add = Spill.add
        Spill.add = lambda self, *rest: die() if next(count) == 20 else add(self, *rest)
    elif moment == "writing":
        writer = module.write_mds

        @contextlib.contextmanager
        def write_some(*arguments, **options):
            with writer(*arguments, **options) as mds:
                write, count = mds.write, iter(range(10**6))
                mds.write = lambda one: die() if next(count) == 8 else write(one)
                yield mds

        module.write_mds = write_some
    else:
        PreparedManifest.write = die
    prepare([source], out, edges=[16, 34], num_workers=1, shard_bytes=8000)


@pytest.mark.parametrize("moment", ["decoding", "writing", "manifest"])
def test_killed_in_the_middle(tmp_path, moment):
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

    options = {"edges": [16, 34], "num_workers": 1, "shard_bytes": 8000}
    manifest = prepare([source], out, **options)
    assert manifest.kept == 40
    prepare([source], tmp_path / "undisturbed", **options)
    comparison = filecmp.dircmp(out, tmp_path / "undisturbed")
    assert (comparison.left_only, comparison.right_only) == ([], [])
    assert tree(out) == tree(tmp_path / "undisturbed")


@pytest.mark.parametrize("moment", ["spill", "shard", "manifest"])
def test_disk_full(tmp_path, monkeypatch, moment):
    write_folder(tmp_path / "set", 10)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    target = {"spill": (Spill, "add"), "shard": (module, "write_mds"), "manifest": (PreparedManifest, "write")}[moment]
    monkeypatch.setattr(*target, full)
    with pytest.raises(MachineError, match=r"cannot write to .*No space left on device; .* GiB are free"):
        prepare([tmp_path / "set"], tmp_path / "out", edges=[16], num_workers=1)
    assert not (tmp_path / "out").exists()


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
