"""Two starts of one run: which of them goes on, and what the other says."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from boto3.session import Session
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer

from diffusion import storage
from diffusion.checkpointing.find import find_checkpoints
from diffusion.checkpointing.layout import batch_of
from diffusion.errors import MachineError
from diffusion.formats.run_folder import LEASE
from diffusion.operations import lease, timeouts
from diffusion.operations.lease import Applicant, active_holder, leased
from tests.integration.test_distributed import on_ranks
from tests.tools.s3_server import s3_process, s3_server
from tests.tools.training_runs import Job, Run

__all__ = ["s3_process", "s3_server"]

pytestmark = pytest.mark.slow


def endless(run: Path) -> Run:
    return "tests/tools/toy.yaml", [
        f"output_folder={run}",
        "trainer.max_duration=100000ba",
        "trainer.save_interval=2ba",
        "samples.prompts=[]",
    ]


def begun(server, run: Path, num_ranks: int = 1) -> Job:
    """A start that has written a checkpoint and goes on."""
    step = newest_step(run)
    job = server.start_training(num_ranks, [endless(run)])
    job.wait_for(lambda: newest_step(run) > step)
    return job


def newest_step(run: Path) -> int:
    return max((batch_of(path) for path in find_checkpoints(run / "checkpoints")), default=-1)


def test_a_second_start_is_refused_and_a_killed_one_is_followed_at_once(server, tmp_path):
    run = tmp_path / "run"
    first = begun(server, run)
    second = server.run(1, [endless(run)])
    assert second.codes == [2]
    assert f"process {first.pids[0]} on {socket.gethostname()}" in second.output
    assert first.poll() is None
    step = newest_step(run)
    first.wait_for(lambda: newest_step(run) > step)
    first.kill()
    follower = begun(server, run)
    os.kill(follower.pids[0], signal.SIGTERM)
    assert follower.finish().codes == [75]
    assert "waiting for" not in follower.output
    assert not (run / LEASE).exists()


@pytest.mark.world_size(2)
def test_all_ranks_end_when_another_start_has_taken_the_run_over(server, tmp_path):
    run = tmp_path / "run"
    job = begun(server, run, num_ranks=2)
    time.sleep(1.5 * timeouts.RENEWAL)  # Both ranks have seen their own.
    taken = json.loads((run / LEASE).read_text()) | {"host": "elsewhere", "token": "another"}
    (run / "new").write_text(json.dumps(taken))
    (run / "new").replace(run / LEASE)
    codes = job.finish(timeout=300).codes
    assert 2 in codes
    assert all(codes)
    assert json.loads((run / LEASE).read_text()) == taken, "it stays the other start's"


@pytest.mark.s3
@pytest.mark.parametrize("place", ["folder", "store"])
def test_a_second_start_with_the_same_checkpoints_and_another_run_folder_is_refused(server, s3_server, tmp_path, place):
    location = "s3://tests/leased" if place == "store" else str(tmp_path / "checkpoints")
    script, options = endless(tmp_path / "first")
    shared = [f"trainer.checkpoint_folder={location}"]
    first = server.start_training(1, [(script, options + shared)])
    first.wait_for(lambda: any(name.startswith("ep0") for name in storage.list_files(location)))
    second = server.run(1, [(script, [*options, f"output_folder={tmp_path / 'second'}", *shared])])
    assert second.codes == [2]
    assert f"process {first.pids[0]} on {socket.gethostname()}" in second.output
    assert first.poll() is None
    os.kill(first.pids[0], signal.SIGTERM)
    assert first.finish().codes == [75]
    assert LEASE not in storage.list_files(location)


@pytest.fixture
def moto_bucket(monkeypatch) -> Iterator[str]:
    """Bucket of a server that knows conditional requests, as s3rver does not."""
    put, one_at_a_time = S3Response.put_object, threading.Lock()

    def put_object(response: S3Response):  # Moto compares and writes in two steps, in a thread for each request.
        with one_at_a_time:
            return put(response)

    monkeypatch.setattr(S3Response, "put_object", put_object)
    server = ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("S3_ENDPOINT_URL", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    client = Session().client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1")
    client.create_bucket(Bucket=(name := f"leases-{time.time_ns()}"))
    yield f"s3://{name}"
    server.stop()


@pytest.fixture(params=["file", "object"])
def location(request, tmp_path) -> Path | str:
    if request.param == "file":
        return tmp_path / LEASE
    return f"{request.getfixturevalue('moto_bucket')}/{LEASE}"


def elsewhere(monkeypatch) -> None:
    """Let the next leases be those of another container, whose processes cannot be looked up."""
    monkeypatch.setattr(lease, "_NAMESPACE", "elsewhere")


def test_one_of_several_at_the_same_moment_acquires_a_lease(location):
    with ThreadPoolExecutor(8) as threads:
        leases = list(threads.map(lambda _: Applicant(location).acquire(), range(8)))
    (own,) = filter(None, leases)
    own.renew()
    assert Applicant(location).acquire() is None
    own.release()
    assert Applicant(location).acquire() is not None


def test_the_holder_of_a_lease_is_active_until_a_while_after_its_last_renewal(location, monkeypatch):
    assert active_holder(location) is None
    own = Applicant(location).acquire()
    assert own is not None
    elsewhere(monkeypatch)
    assert active_holder(location) == own.holder
    monkeypatch.setattr(timeouts, "LEASE", -10.0)
    assert active_holder(location) is None


def test_a_lease_that_is_not_renewed_passes_to_one_other_and_its_holder_notices(location, monkeypatch):
    monkeypatch.setattr(timeouts, "LEASE", 2.0)
    first = Applicant(location).acquire()
    assert first is not None
    elsewhere(monkeypatch)
    others = [Applicant(location) for _ in range(4)]
    assert [other.acquire() for other in others] == [None] * 4
    first.renew()
    assert [other.acquire() for other in others] == [None] * 4
    time.sleep(2.1)
    with ThreadPoolExecutor(4) as threads:
        leases = list(threads.map(Applicant.acquire, others))
    (second,) = filter(None, leases)
    with pytest.raises(MachineError, match="has taken over the lease"):
        first.renew()
    first.release()
    second.renew()


def held_elsewhere(folder: Path, count: int) -> None:
    holder = {"host": "elsewhere", "namespace": "", "pid": 7, "time": 0.0, "token": "other", "count": count}
    (folder / "new").write_text(json.dumps(holder))
    (folder / "new").replace(folder / LEASE)


def test_a_step_of_the_clock_takes_no_lease_from_a_living_process(tmp_path):
    path = tmp_path / LEASE
    assert Applicant(path).acquire() is not None
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"time": content["time"] - 1e6}))  # The clock has gone forward since.
    assert Applicant(path).acquire() is None
    assert active_holder(path) is not None
    path.write_text(json.dumps(content | {"start": "another boot 1"}))
    assert active_holder(path) is None


def test_a_process_may_have_a_name_that_is_no_text_and_a_record_more_fields(tmp_path):
    """The kernel cuts names in the middle of a character."""
    comm = Path("/proc/self/comm")
    before = comm.read_bytes()
    comm.write_bytes("x-обучение".encode()[:15])
    try:
        with leased(tmp_path):
            written = json.loads((tmp_path / LEASE).read_bytes())
            (tmp_path / LEASE).write_text(json.dumps(written | {"of_a_later_version": 1}))
            found = active_holder(tmp_path / LEASE)
            assert found is not None and found.pid == os.getpid()
    finally:
        comm.write_bytes(before)


def test_a_lease_of_another_host_is_taken_over_when_it_has_run_out(tmp_path, monkeypatch):
    monkeypatch.setattr(timeouts, "LEASE", 2.0)
    held_elsewhere(tmp_path, 1)
    began = time.monotonic()
    with leased(tmp_path):
        assert time.monotonic() - began > 2
        assert json.loads((tmp_path / LEASE).read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("name", "is_found"), [("one", True), ("of-{}", False)])
def test_hosts_that_do_not_share_the_folder_of_checkpoints_end(tmp_path, monkeypatch, name, is_found):
    monkeypatch.setattr(timeouts, "VISIBLE", 1.0)

    def step(rank: int) -> str:
        with leased(tmp_path / name.format(rank), is_shared=False), leased(tmp_path / name.format(rank) / "kept"):
            return "trains"

    for result in on_ranks(tmp_path, step):
        if is_found:
            assert result == "trains"
        else:
            assert result[0] is MachineError
            assert f"{tmp_path}/of-1/kept: the hosts do not share it" in result[1]


def test_a_lease_of_another_host_that_is_renewed_is_respected(tmp_path):
    held_elsewhere(tmp_path, 1)
    is_over = threading.Event()

    def renew() -> None:
        count = 1
        while not is_over.wait(2):
            count += 1
            held_elsewhere(tmp_path, count)

    renewal = threading.Thread(target=renew)
    renewal.start()
    try:
        with pytest.raises(MachineError, match="process 7 on elsewhere"), leased(tmp_path):
            pass
    finally:
        is_over.set()
        renewal.join()
    assert json.loads((tmp_path / LEASE).read_text())["token"] == "other"
