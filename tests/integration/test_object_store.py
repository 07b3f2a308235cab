"""Checkpoints in an object store: a real server that is killed, damaged data, other numbers of ranks."""

import re
import shutil
import time
from pathlib import Path

import pytest
import torch

from diffusion import storage
from diffusion.checkpointing import remote
from diffusion.checkpointing.find import resolve_checkpoint
from diffusion.checkpointing.layout import batch_of
from diffusion.checkpointing.remote import RemoteCheckpoints
from diffusion.ema.posthoc import fetch_averages, reconstruct
from diffusion.errors import ConfigurationError, DataError, MachineError
from diffusion.formats.run_folder import AVERAGES
from diffusion.loading import load_config_of, load_model
from tests.tools.runs import assert_equal, flip_bit, losses, signal_at, state_of
from tests.tools.s3_server import S3Server, object_file, s3_process, s3_server

__all__ = ["s3_process", "s3_server"]

pytestmark = [pytest.mark.s3, pytest.mark.slow]

NUM_STEPS = 9
COMMON = [f"trainer.max_duration={NUM_STEPS}ba", "samples.prompts=[]", "algorithms.ema.start=4ba"]
FORMS = ("fsdp", "ddp")
TIMEOUT = 120.0
PLACES = ("run", "elsewhere")


@pytest.fixture
def url(request, s3_server, tmp_path, monkeypatch) -> str:
    """A place of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return f"s3://tests/{request.node.name.replace('[', '-').replace(']', '')}"


def options(run: Path, form: str, url: str | None, *more: str) -> tuple[str, list[str]]:
    place = f"trainer.checkpoint_folder={url or 'null'}"
    return "tests/tools/toy.yaml", [f"output_folder={run}", f"trainer.parallelism={form}", place, *COMMON, *more]


@pytest.fixture(scope="module")
def reference(server, tmp_path_factory) -> dict[str, Path]:
    """Uninterrupted runs of two ranks whose checkpoints are in a folder."""
    root = tmp_path_factory.mktemp("reference")
    server.train(2, [options(root / form, form, None) for form in FORMS])
    return {form: root / form for form in FORMS}


def steps(url: str) -> list[int]:
    """The steps of the whole checkpoints of a place."""
    present = RemoteCheckpoints(url, timeout=TIMEOUT).present()
    return [batch_of(Path(found.name)) for found in present if found.is_complete]


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("form", "in_background"), [("fsdp", False), ("ddp", True)])
def test_the_same_checkpoints_as_in_a_folder_and_the_same_ones_stay(
    server, reference, tmp_path, url, monkeypatch, form, in_background
):
    run = tmp_path / "run"
    keep = ["trainer.save_interval=1ba", "trainer.keep_every=4ba", "trainer.keep_checkpoints=2"]
    server.train(2, [options(run, form, url, *keep, f"trainer.async_checkpoints={in_background}")])
    assert steps(url) == [4, 8, 9]
    assert list((run / "uploads").iterdir()) == []
    assert not (run / "checkpoints").exists()
    newest = resolve_checkpoint(str(reference[form] / "checkpoints"))
    assert newest is not None
    assert_equal(state_of(newest), state_of(resolve_checkpoint(url)))
    assert resolve_checkpoint(str(run)) == resolve_checkpoint(url)


@pytest.mark.world_size(2)
def test_a_killed_run_continues_at_another_number_of_ranks(server, reference, tmp_path, url):
    run = tmp_path / "run"
    job = server.run(2, [options(run, "fsdp", url, signal_at(5))])
    assert -9 in job.codes
    assert steps(url) == [2, 4]
    server.train(1, [options(run, "fsdp", url, "trainer.async_checkpoints=true")])
    assert steps(url) == [2, 4, 6, 8, 9]
    assert not list((run / "downloads").glob("*/*"))
    assert losses(run) == pytest.approx(losses(reference["fsdp"]), rel=1e-5)


@pytest.mark.world_size(2)
def test_hosts_without_a_common_run_folder_save_and_continue(server, tmp_path, url):
    yaml, overrides = options(tmp_path / "{node}", "fsdp", url, "algorithms.ema=null")
    for last in (2, 4):
        program = ["tests/tools/ranks_as_nodes.py", "1", yaml, *overrides, f"trainer.max_duration={last}ba"]
        job = server.start(2, program).finish()
        assert not any(job.codes), job.output[-6000:]
    assert steps(url) == [2, 4]
    assert len(losses(tmp_path / "0")) == 4


def test_half_written_and_damaged_ones_are_passed_over(server, s3_server, tmp_path, url):
    run = tmp_path / "run"
    server.train(1, [options(run, "fsdp", url, "trainer.max_duration=8ba")])
    place = s3_server.path(url)
    (place / "ep0-ba8" / ".metadata._S3rver_object").rename(tmp_path / "index")
    for name in (".metadata._S3rver_metadata.json", ".metadata._S3rver_object.md5"):
        (place / "ep0-ba8" / name).unlink()
    shard = object_file(s3_server, f"{url}/ep0-ba6/__0_0.distcp")
    flip_bit(shard)
    assert steps(url) == [2, 4, 6]
    with pytest.raises(DataError, match="does not have its checksum"):
        load_model(f"{url}/ep0-ba6")
    job = server.train(1, [options(run, "fsdp", url)])
    assert f"removing {url}/ep0-ba8, which is incomplete" in job.output
    assert f"skipping checkpoint {url}/ep0-ba6" in job.output
    assert "__0_0.distcp does not have its checksum" in job.output
    assert steps(url) == [2, 4, 6, 8, 9]
    assert storage.read_json(f"{url}/damaged.json") == [], "it is written anew"
    assert len(losses(run)) == NUM_STEPS


def test_models_and_runs_start_from_a_store(server, tmp_path, url, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    server.train(1, [options(first, "fsdp", url, "trainer.max_duration=4ba", "algorithms.ema=null")])
    model = load_model(f"{url}/ep0-ba2")
    assert load_config_of(resolve_checkpoint(url)).run_name == "toy"
    job = server.run(
        1,
        [
            options(
                second,
                "ddp",
                None,
                f"init_from.checkpoint={url}/ep0-ba2",
                "optimizer.lr=0",
                "optimizer.weight_decay=0",
                "algorithms.ema=null",
            )
        ],
    )
    assert job.codes == [0], job.output[-3000:]
    copied = load_model(second)
    for (name, expected), (_, found) in zip(model.unet.named_parameters(), copied.unet.named_parameters(), strict=True):
        assert torch.equal(expected, found), name
    with pytest.raises(ConfigurationError, match="holds no complete checkpoint"):
        resolve_checkpoint(f"{url}/ep0-ba3")

    for found in RemoteCheckpoints(url, timeout=TIMEOUT).present():
        RemoteCheckpoints(url, timeout=TIMEOUT).remove(found)
    other = ["trainer.max_duration=4ba", "algorithms.ema=null", "seed=18"]
    server.train(1, [options(tmp_path / "other", "fsdp", url, *other)])
    replaced = load_model(f"{url}/ep0-ba2")
    differs = [not torch.equal(a, b) for a, b in zip(replaced.unet.parameters(), model.unet.parameters(), strict=True)]
    assert any(differs), "a cached copy was taken for what is in the store now"


# Outages


def kill_at(step: int, s3_server: S3Server, *, between_uploads: bool = False) -> str:
    arguments = f"step: {step}, pid: {s3_server.pid}, between_uploads: {between_uploads}"
    return f"plugins.callbacks=[{{path: tests.tools.s3_server.SignalServerAt, arguments: {{{arguments}}}}}]"


@pytest.mark.world_size(2)
def test_an_outage_loses_no_checkpoint(server, s3_server, reference, tmp_path, url):
    run = tmp_path / "run"
    job = server.start_training(2, [options(run, "fsdp", url, kill_at(3, s3_server))])
    s3_server.await_end()
    job.wait_for(lambda: "trying again" in job.output)
    s3_server.start()
    assert job.finish().codes == [0, 0], job.output[-3000:]
    assert steps(url) == [2, 4, 6, 8, 9]
    assert losses(run) == losses(reference["fsdp"])


@pytest.mark.world_size(2)
def test_a_store_that_is_gone_ends_the_run_and_nothing_is_lost(server, s3_server, reference, tmp_path, url):
    """Checkpoints are written in the background."""
    run = tmp_path / "run"
    more = [kill_at(3, s3_server, between_uploads=True), "trainer.store_timeout=10", "trainer.async_checkpoints=true"]
    job = server.run(2, [options(run, "fsdp", url, *more)])
    s3_server.await_end()
    assert job.codes == [2, 2], job.output[-4000:]
    assert job.output.count("MachineError") == 1, job.output[-4000:]
    assert re.findall(rf"checkpoint {url}/ep0-ba(\d) cannot be written", job.output)[0] == "4"
    assert f"Its files are kept in {run / 'uploads'}/ep0-ba4" in job.output
    assert "Traceback" not in job.output
    shutil.copytree(run / "uploads", tmp_path / "uploads")
    s3_server.start()
    assert steps(url) == [2]
    assert server.run(1, [options(run, "fsdp", url, signal_at(4))]).codes == [-9]
    assert steps(url) == [2, 4]
    server.train(1, [options(run, "fsdp", url)])
    assert losses(run) == pytest.approx(losses(reference["fsdp"]), rel=1e-5)
    storage.delete(f"{url}/{name}" for name in storage.list_files(url) if name.startswith("ep0-ba4"))
    shutil.copytree(tmp_path / "uploads", run / "uploads", dirs_exist_ok=True)
    server.train(1, [options(run, "fsdp", url, "trainer.max_duration=10ba")])
    assert steps(url) == [2, 6, 8, 9, 10], "a node that has missed some starts brings back no old checkpoint"


# Files


def test_a_neighbour_with_a_longer_name_is_not_listed(s3_server, url):
    storage.write(f"{url}-more/ep0-ba1.pt", b"")
    assert steps(url) == []


@pytest.mark.world_size(2)
def test_stored_averages_follow_and_make_the_same_average_elsewhere(server, s3_server, tmp_path, url):
    power = "algorithms.ema.power={relative_widths: [0.1, 0.2], snapshot_interval: 3ba}"
    server.train(2, [options(tmp_path / "run", "fsdp", url, power)])
    fetch_averages(url, tmp_path / "elsewhere")
    here, there = ({path.name: path.read_bytes() for path in (tmp_path / name / AVERAGES).iterdir()} for name in PLACES)
    assert sorted(here) == [f"step-{step:06d}-width-{width}.safetensors" for step in (6, 9) for width in (0.1, 0.2)]
    assert there == here
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "elsewhere" / AVERAGES).iterdir()}
    fetch_averages(url, tmp_path / "elsewhere")
    assert written == {path: path.stat().st_mtime_ns for path in written}
    paths = [reconstruct(tmp_path / name, 0.15)[0] for name in PLACES]
    assert paths[0].read_bytes() == paths[1].read_bytes()


@pytest.mark.world_size(2)
def test_a_store_slower_than_collectives_may_be_stops_neither_steps_nor_a_continued_start(
    server, s3_server, tmp_path, url
):
    run, goes_on, timeout = tmp_path / "run", tmp_path / "goes-on", 12
    settings = [f"trainer.dist_timeout={timeout}", "trainer.async_checkpoints=true", "trainer.save_interval=9ba"]
    power = "algorithms.ema.power={relative_widths: [0.1, 0.2], snapshot_interval: 5ba}"
    freeze = f"{{path: tests.tools.s3_server.SignalServerAt, arguments: {{step: 4, pid: {s3_server.pid}, number: 19}}}}"
    announce = f"{{path: tests.tools.toys.Announce, arguments: {{step: 7, path: {goes_on}}}}}"
    plugins = f"plugins.callbacks=[{freeze}, {announce}]"
    try:
        job = server.start_training(2, [options(run, "fsdp", url, *settings, power, plugins)])
        job.wait_for(goes_on.exists)
        time.sleep(1.5 * timeout)
        s3_server.thaw()
        ended = job.finish()
        assert not any(ended.codes), ended.output[-6000:]
        assert steps(url) == [9]
        stored = {name for name in RemoteCheckpoints(url, timeout=TIMEOUT).files() if name.startswith(AVERAGES)}
        assert stored == {f"{AVERAGES}/step-{step:06d}-width-{w}.safetensors" for step in (5, 9) for w in (0.1, 0.2)}

        beats = run / "heartbeats"
        shutil.rmtree(beats)
        s3_server.freeze()
        job = server.start_training(2, [options(run, "fsdp", url, *settings, power, "trainer.max_duration=10ba")])
        job.wait_for(lambda: len(list(beats.glob("rank-*"))) == 2)
        time.sleep(1.5 * timeout)
        s3_server.thaw()
        ended = job.finish()
        assert not any(ended.codes), ended.output[-6000:]
        assert steps(url) == [9, 10]
    finally:
        s3_server.thaw()


# Mistakes


def test_a_store_that_does_not_answer_is_told_soon_at_the_start(monkeypatch):
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr(remote, "FIRST_CONTACT", 0.2)
    start = time.monotonic()
    with pytest.raises(MachineError, match="s3://bucket/runs"):
        RemoteCheckpoints("s3://bucket/runs", timeout=300).check_access()
    assert time.monotonic() - start < 120


def test_what_is_wrong_with_a_bucket_is_said_at_the_start(server, s3_server, tmp_path, url):
    run = tmp_path / "run"
    job = server.run(1, [options(run, "fsdp", "s3://none/runs")])
    assert job.codes == [2], job.output[-3000:]
    assert "s3://none/runs/lease.json: there is no such bucket" in job.output
    server.train(1, [options(run, "fsdp", None, "trainer.max_duration=2ba", "algorithms.ema=null")])
    job = server.run(1, [options(run, "fsdp", url)])
    assert job.codes == [2], job.output[-3000:]
    assert "the run would begin anew" in job.output
