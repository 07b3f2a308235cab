"""Files that are whole or absent, and locks between processes."""

import errno
import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from diffusion.errors import DataError
from diffusion.files import atomic_path, lock, open_lock, read_json, unique_partial, write_atomically, write_json


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "a.txt"
    write_atomically(path, "old")
    with atomic_path(path) as partial:
        partial.write_text("ne")
        assert path.read_text() == "old"
        partial.write_text("new")
    assert path.read_text() == "new"
    write_atomically(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert names(tmp_path) == ["a.txt"]


def test_nothing_is_left_of_a_failure(tmp_path):
    write_atomically(tmp_path / "a", "old")
    for is_folder in (False, True):
        with pytest.raises(KeyboardInterrupt), atomic_path(tmp_path / "a") as partial:
            if is_folder:
                partial.mkdir()
            (partial / "b" if is_folder else partial).write_text("new")
            raise KeyboardInterrupt
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_a_folder_appears_when_it_is_whole_and_replaces_none(tmp_path):
    folder = tmp_path / "deep" / "folder"
    folder.parent.mkdir()
    with atomic_path(folder) as partial:
        (partial / "sub").mkdir(parents=True)
        (partial / "sub" / "a").write_text("1")
        assert not folder.exists()
    assert (folder / "sub" / "a").read_text() == "1"
    with pytest.raises(OSError), atomic_path(folder) as partial:
        partial.mkdir()
        (partial / "b").write_text("2")
    with atomic_path(folder, exist_ok=False, partial=unique_partial(folder)) as partial:
        partial.mkdir()
        (partial / "b").write_text("2")
    assert names(folder) == ["sub"]
    assert names(folder.parent) == ["folder"]


def test_what_a_killed_process_left_is_removed(tmp_path):
    (tmp_path / ".a.partial").mkdir()
    (tmp_path / ".a.partial" / "b").write_text("half")
    with atomic_path(tmp_path / "a") as partial:
        partial.mkdir()
        (partial / "c").write_text("whole")
    assert names(tmp_path / "a") == ["c"]


def test_a_killed_writer_leaves_the_file_of_before(tmp_path):
    code = (
        "import sys, time, pathlib; from diffusion.files import atomic_path\n"
        "with atomic_path(pathlib.Path(sys.argv[1])) as partial:\n"
        "    partial.write_text('half'); print(flush=True); time.sleep(600)"
    )
    path = tmp_path / "a"
    path.write_text("before")
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    assert path.read_text() == "before"
    write_atomically(path, "after")
    assert names(tmp_path) == ["a"]


def test_content_is_on_the_disk_before_the_name(tmp_path, monkeypatch):
    events = []
    sync, replace = os.fsync, Path.replace
    monkeypatch.setattr(
        os, "fsync", lambda file: events.append(str(Path(f"/proc/self/fd/{file}").readlink())) or sync(file)
    )
    monkeypatch.setattr(Path, "replace", lambda path, to: events.append("rename") or replace(path, to))
    write_atomically(tmp_path / "a", "content")
    assert events == [str(tmp_path / ".a.partial"), "rename", str(tmp_path)]
    events.clear()
    with atomic_path(tmp_path / "b") as partial:
        partial.mkdir()
        (partial / "c").write_text("1")
    assert events == [str(partial / "c"), str(partial), "rename", str(tmp_path)]
    events.clear()
    with atomic_path(tmp_path / "d", durable=False) as partial:
        partial.write_text("cache")
    assert events == ["rename"]


@pytest.mark.parametrize(
    ("number", "of_folders"), [(errno.EINVAL, True), (errno.ENOTSUP, True), (errno.EIO, True), (errno.EINVAL, False)]
)
def test_a_file_system_without_sync_of_folders_is_written_to(tmp_path, monkeypatch, number, of_folders):
    sync = os.fsync

    def fail(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode) is of_folders:
            raise OSError(number, os.strerror(number))
        sync(file)

    monkeypatch.setattr(os, "fsync", fail)
    is_fatal = number == errno.EIO or not of_folders
    with pytest.raises(OSError, match=os.strerror(number)) if is_fatal else nullcontext():
        write_atomically(tmp_path / "a", "content")
    assert is_fatal or names(tmp_path) == ["a"]


def test_json(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": [1, "é", None]})
    for bad in ({"a": object()}, {"a": float("nan")}):
        with pytest.raises((TypeError, ValueError)):
            write_json(path, bad)
    assert read_json(path) == {"a": [1, "é", None]}
    assert list(tmp_path.iterdir()) == [path]
    for content in (b"{", b"\xff", b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.json"):
            read_json(path)
    with pytest.raises(DataError, match=r"absent\.json"):
        read_json(tmp_path / "absent.json")


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_lock_is_exclusive_or_shared(tmp_path, is_folder):
    path = tmp_path if is_folder else tmp_path / "lock"
    with lock(path, timeout=0):
        for shared in (False, True):
            with pytest.raises(TimeoutError), lock(path, shared=shared, timeout=0.1):
                pass
    with lock(path, shared=True), lock(path, shared=True, timeout=0), pytest.raises(TimeoutError):
        open_lock(path, timeout=0)
    os.close(open_lock(path, timeout=0))


def test_a_killed_process_releases_its_lock(tmp_path):
    code = (
        "import sys, time, pathlib; from diffusion.files import lock\n"
        "with lock(pathlib.Path(sys.argv[1])): print(flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "a")], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(TimeoutError), lock(tmp_path / "a", timeout=0):
            pass
        process.kill()
        with lock(tmp_path / "a", timeout=300):
            pass


def test_a_forked_child_holds_a_lock_only_where_its_descriptor_is_meant_for_it(tmp_path):
    def fork() -> int:
        child = os.fork()
        if child == 0:
            time.sleep(600)
            os._exit(0)
        return child

    inherited = open_lock(tmp_path / "inherited")
    with lock(tmp_path / "own"):
        child = fork()
    try:
        os.close(inherited)
        deadline = time.monotonic() + 300
        with lock(tmp_path / "own", timeout=300):
            assert time.monotonic() < deadline
        with pytest.raises(TimeoutError):
            open_lock(tmp_path / "inherited", timeout=0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    os.close(open_lock(tmp_path / "inherited", timeout=300))
