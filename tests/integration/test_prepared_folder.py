"""The folder of a preparation: left alone when finished, killed at each stage and continued, full disks, writers."""

import errno
import json
import multiprocessing
import os
import shutil
import signal

import pyarrow.parquet as pq
import pytest

from diffusion import storage
from diffusion.errors import DataError, MachineError
from diffusion.formats.data_set import PreparedManifest
from diffusion.formats.shards import read_index
from diffusion.preparation import scan
from diffusion.preparation.metadata import MetadataDatabase
from tests.tools.image_files import tree, write_folder
from tests.tools.preparing import prepare

pytestmark = pytest.mark.slow

OPTIONS = {"edges": [16, 34], "shard_bytes": 8000, "window_bytes": 9000, "partition_size": 3}
"""With 40 images: 14 windows in two write tasks."""


def test_finished_output_is_left_alone(tmp_path, caplog):
    write_folder(tmp_path / "set", 6)
    out = tmp_path / "out"
    first = prepare([tmp_path / "set"], out, edges=[16], report=True)
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    caplog.set_level("INFO")
    assert prepare([tmp_path / "set"], out, edges=[16], report=True) == first
    assert "is finished" in caplog.text
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == times
    before = tree(out)
    with pytest.raises(DataError, match=r"seed: 17, not 5.*--overwrite"):
        prepare([tmp_path / "set"], out, edges=[16], seed=5)
    write_folder(tmp_path / "other", 3)
    with pytest.raises(DataError, match=r"other sources.*--overwrite"):
        prepare([tmp_path / "other"], out, edges=[16])
    assert tree(out) == before
    assert prepare([tmp_path / "other"], out, overwrite=True, edges=[16]).kept == 3
    assert read_index(out / "train" / "16-up").num_samples == 3
    prepare([tmp_path / "other"], tmp_path / "fresh", edges=[16])
    assert tree(out) == tree(tmp_path / "fresh")


@pytest.mark.parametrize("overwrite", [False, True])
def test_files_that_were_put_beside_the_data_stay(tmp_path, overwrite):
    write_folder(tmp_path / "set", 4)
    out = tmp_path / "out"
    prepare([tmp_path / "set"], out, edges=[16])
    (out / "README.md").write_text("notes")
    (out / "notes").mkdir()
    (out / "notes" / "one.txt").write_text("notes")
    write_folder(tmp_path / "set", 4, start=10)
    prepare([tmp_path / "set"], out, edges=[16], overwrite=overwrite)
    assert (out / "README.md").read_text() == (out / "notes" / "one.txt").read_text() == "notes"


# Kills

MOMENTS = {
    "partitions": ("scan.json", 0),
    "scan": ("metadata/", 5),
    "selected rows": ("-rejected.parquet", 0),
    "selection": ("selection/0.json", 0),
    "shard": (".mds", 3),
    "second task": ("shard.00001", 2),
    "positions": ("positions/00000", 0),
    "index": ("index.json", 1),
    "manifest": ("manifest.json", 0),
}
"""Part of the name of a file, and how many such have been written before."""


def kill_before(moment, function, place):
    """Wrap what writes files, whose names are the argument at a place: SIGKILL before a certain one."""
    (name, number), count = moment, iter(range(10**6))

    def killing(*arguments, **options):
        if name in str(arguments[place]) and next(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    return killing


def killed(moment, source, out, options):
    """Prepare in a process that ends by SIGKILL at a moment."""

    def work():
        storage.write = kill_before(moment, storage.write, 0)
        MetadataDatabase.write = kill_before(moment, MetadataDatabase.write, 2)
        prepare([source], out, **options)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def counted(patch):
    """Names of files as they are written, and numbers of decoded images."""
    written, decoded = [], []
    write, decode = storage.write, scan.decode_reduced
    patch.setattr(storage, "write", lambda uri, *rest: (written.append(uri), write(uri, *rest))[1])
    patch.setattr(scan, "decode_reduced", lambda *rest: (decoded.append(1), decode(*rest))[1])
    return written, decoded


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Forty images."""
    folder = tmp_path_factory.mktemp("source") / "set"
    write_folder(folder, 40)
    return folder


@pytest.fixture(scope="module")
def finished(source, tmp_path_factory):
    """Folder of a preparation that was not killed."""
    out = tmp_path_factory.mktemp("finished") / "out"
    prepare([source], out, **OPTIONS)
    return out


@pytest.fixture(scope="module")
def undisturbed(finished):
    """Files of it."""
    return tree(finished)


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_and_continued(source, undisturbed, tmp_path, moment, monkeypatch):
    out = tmp_path / "out"
    killed(MOMENTS[moment], source, out, OPTIONS)
    with pytest.raises(DataError, match=r"manifest\.json"):
        PreparedManifest.read(out)
    there = {name for name in tree(out) if name.startswith(("metadata/", "positions/0"))}
    tasks = {name[10:15] for name in there if name.startswith("positions/")}
    there |= {name for name in tree(out) if name.split(".")[1] in tasks}  # Shards of finished tasks.
    written, decoded = counted(monkeypatch)
    assert prepare([source], out, **OPTIONS).kept == 40
    again = {uri.removeprefix(f"{out}/") for uri in written}
    assert not again & there, "nothing that is finished is written twice"
    assert len(decoded) == (40 if moment == "partitions" else 25 if moment == "scan" else 0)
    assert tree(out) == undisturbed


def test_killed_and_started_with_other_settings(source, tmp_path):
    out, other = tmp_path / "out", {**OPTIONS, "seed": 5}
    killed(MOMENTS["second task"], source, out, OPTIONS)
    prepare([source], out, **other)
    prepare([source], tmp_path / "fresh", **other)
    assert tree(out) == tree(tmp_path / "fresh")


OVERWRITES = {
    "another seed": {**OPTIONS, "seed": 5},
    "another cut": {**OPTIONS, "partition_size": 4},
    "another filter": {**OPTIONS, "where": "width < 39"},
}


@pytest.mark.parametrize(
    ("change", "moment"),
    [("another seed", "shard"), ("another cut", "manifest"), ("another filter", "deleted")],
)
def test_killed_in_the_middle_of_an_overwrite(source, finished, tmp_path, change, moment):
    """Continued with --overwrite or without: nothing finished is in the way."""
    out, options = shutil.copytree(finished, tmp_path / "out"), OVERWRITES[change]
    if moment == "deleted":

        def work():
            delete = storage.delete

            def some(uris):
                uris = list(uris)
                delete(uris[: len(uris) // 2])
                if len(uris) > 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                delete(uris)

            storage.delete = some
            prepare([source], out, overwrite=True, **options)

        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    else:
        killed(MOMENTS[moment], source, out, {**options, "overwrite": True})
    assert not (out / "manifest.json").exists()
    prepare([source], out, overwrite=change == "another cut", **options)
    prepare([source], tmp_path / "fresh", **options)
    assert tree(out) == tree(tmp_path / "fresh")


# Disks and writers


@pytest.mark.parametrize("moment", ["kept", "shard.00001"])
def test_disk_full(source, undisturbed, tmp_path, moment, monkeypatch):
    out = tmp_path / "out"

    def full(function, name):
        def writing(path, *rest):
            if name in str(path):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(path, *rest)

        return writing

    with monkeypatch.context() as patch:
        patch.setattr(type(tmp_path), "write_bytes", full(type(tmp_path).write_bytes, moment))
        if moment == "kept":
            patch.setattr(pq.ParquetWriter, "write_batch", lambda *_, **__: full(print, "")(""))
        with pytest.raises(MachineError, match="No space left on device"):
            prepare([source], out, **OPTIONS)
    assert not (out / "manifest.json").exists()
    prepare([source], out, **OPTIONS)
    assert tree(out) == undisturbed


# Manifests of another kind


def test_damaged_manifest(tmp_path):
    write_folder(tmp_path / "set", 1)
    prepare([tmp_path / "set"], tmp_path / "out", edges=[16])
    path = tmp_path / "out" / "manifest.json"
    content = json.loads(path.read_text())
    for change in (
        {"kind": "encoded"},
        {"version": 1},
        {"version": 99},
        {"settings": None},
        {"splits": {"train": {"a": {}}}},
    ):
        path.write_text(json.dumps({**content, **change}))
        with pytest.raises(DataError, match=r"manifest\.json"):
            PreparedManifest.read(tmp_path / "out")
        with pytest.raises(DataError):
            prepare([tmp_path / "set"], tmp_path / "out", edges=[16])
