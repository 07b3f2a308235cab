"""One writer at a time for a data set: by flock, or by a lease where there is none."""

import errno
import multiprocessing
import os
import signal
import time

import pytest

from diffusion import storage
from diffusion.errors import DataError, MachineError
from diffusion.files import unique_partial
from diffusion.preparation import output
from diffusion.preparation.output import claim
from tests.tools.s3_server import s3_process, s3_server

__all__ = ["s3_process", "s3_server"]

KIND = "prepared"
FORK = multiprocessing.get_context("fork")


@pytest.fixture(params=["locked", "without flock", pytest.param("s3", marks=pytest.mark.s3)])
def out(request, tmp_path, monkeypatch):
    """A folder of each kind."""
    if request.param == "s3":
        request.getfixturevalue("s3_server")
        return f"s3://tests/{tmp_path.name}"
    if request.param == "without flock":
        monkeypatch.setattr(output, "lock", unsupported)
    return str(tmp_path / "out")


def unsupported(*_, **__):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def hold(out, begun):
    with claim(out, KIND):
        begun.set()
        time.sleep(600)


@pytest.fixture
def held(out):
    """Another process that holds it."""
    begun = FORK.Event()
    process = FORK.Process(target=hold, args=(out, begun))
    process.start()
    assert begun.wait(300)
    yield process
    process.kill()
    process.join()


def test_another_process_is_kept_away_until_it_is_killed(out, held):
    with pytest.raises(MachineError), claim(out, KIND):
        pass
    os.kill(held.pid, signal.SIGKILL)
    held.join()
    for _ in range(2):
        with claim(out, KIND):
            pass
    assert not storage.list_files(out)


def test_one_of_many_that_begin_at_the_same_time(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "lock", unsupported)
    winners, start, end, out = FORK.Value("i", 0), FORK.Barrier(6), FORK.Barrier(6), str(tmp_path / "out")

    def compete():
        start.wait(300)
        try:
            with claim(out, KIND):
                with winners.get_lock():
                    winners.value += 1
                end.wait(300)
        except MachineError:
            end.wait(300)

    processes = [FORK.Process(target=compete) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert winners.value == 1, [process.exitcode for process in processes]


def test_only_data_sets_are_written_to(out):
    storage.write(storage.join(out, "train", "thesis.doc"), b"precious")
    with pytest.raises(DataError, match="train"), claim(out, KIND):
        pass
    storage.write_json(storage.join(out, "scan.json"), {})
    with claim(out, KIND):
        pass
    storage.write_json(storage.join(out, "manifest.json"), {"kind": "encoded"})
    with pytest.raises(DataError, match="encoded"), claim(out, KIND):
        pass
    with claim(out, "encoded"):
        pass
    with claim(out):
        pass
    assert storage.read(storage.join(out, "train", "thesis.doc")) == b"precious"


@pytest.mark.parametrize("name", ["packed", "validation", "train/32-up", "scores/redness"])
@pytest.mark.parametrize("mark", ["manifest.json", "scan.json", "work.partial"])
def test_links_lead_to_plain_folders_only(tmp_path, name, mark):
    ours, other, link = tmp_path / "ours", tmp_path / "other", tmp_path / "ours" / name
    storage.write_json(str(ours / "scan.json"), {})
    (other / name).mkdir(parents=True)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(other / name)
    for kind in (KIND, None):
        with claim(str(ours), kind):
            pass
    (other / mark).mkdir()
    for kind in (KIND, None):
        with pytest.raises(DataError, match=f"{link} leads into another data set, {other},"), claim(str(ours), kind):
            pass
    (ours / name).unlink()
    (ours / "own").mkdir()
    (ours / name).symlink_to(ours / "own")
    with claim(str(ours), KIND):
        pass


def test_a_listing_alone_is_no_strange_file(out):
    listing = storage.join(out, "listings", "000000.parquet")
    storage.write(listing, b"x")
    with claim(out, KIND):
        assert storage.exists(listing)


def test_half_written_files_of_a_killed_process_are_removed(tmp_path):
    path = tmp_path / "metadata" / "000000.parquet"
    path.parent.mkdir()
    path.write_bytes(b"whole")
    partial = unique_partial(path)
    partial.write_bytes(b"half")
    (tmp_path / "scan.json").write_text("{}")
    with claim(str(tmp_path), KIND):
        assert path.exists() and not partial.exists()


def test_a_place_that_cannot_be_a_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(MachineError, match="file"), claim(str(tmp_path / "file" / "out")):
        pass


def test_a_forked_process_that_lives_longer_does_not_hold_the_claim(tmp_path):
    begun, ended = FORK.Event(), FORK.Event()
    with claim(str(tmp_path / "out")):
        child = FORK.Process(target=lambda: (begun.set(), ended.wait(600)))
        child.start()
        assert begun.wait(300)
    try:
        with claim(str(tmp_path / "out")):
            assert child.is_alive()
    finally:
        ended.set()
        child.join()
