"""Which checkpoint is used: damaged ones are not, and ones that try to run code are rejected."""

import builtins
import contextlib
import errno
import io
import math
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_state

from diffusion import storage
from diffusion.checkpointing.find import (
    DAMAGED,
    LocalCheckpoints,
    check_checkpoint,
    find_checkpoints,
    find_damage,
    newest_that_passes,
    resolve_checkpoint,
)
from diffusion.checkpointing.layout import (
    CHECKSUM_KIND,
    CHECKSUMS,
    batch_of,
    list_checkpoints,
    remove_checkpoint,
)
from diffusion.checkpointing.read import (
    StoredState,
    UnsafeCheckpointError,
    check_bytes,
    check_safe,
    read_checksums,
    read_metadata,
    read_weights,
)
from diffusion.checkpointing.resume import checkpoint_storage, find_resumption
from diffusion.config.loading import load
from diffusion.config.model import Weights
from diffusion.config.schema import Config
from diffusion.errors import ConfigurationError, DataError, MachineError
from diffusion.files import hash_file, write_json
from diffusion.formats.run_folder import TRAIN_LOSS, read_metrics, series
from diffusion.loading import load_model
from diffusion.operations.pruning import find_superseded
from tests.tools.malicious_checkpoints import ATTACKS, evil_entry, evil_file, evil_optimizer_entry, evil_tensor
from tests.tools.runs import flip_bit

COMMON = ["trainer.max_duration=4ba", "samples.prompts=[]"]
FORMS = ("fsdp", "ddp")


def options(run: Path, form: str, *more: str) -> tuple[str, list[str]]:
    return "tests/tools/toy.yaml", [f"output_folder={run}", f"trainer.parallelism={form}", *COMMON, *more]


@pytest.fixture(scope="module")
def trained(server, tmp_path_factory) -> dict[str, Path]:
    """A run of four steps with checkpoints at 2 and 4, sharded and not."""
    root = tmp_path_factory.mktemp("trained")
    server.train(1, [options(root / form, form) for form in FORMS])
    return {form: root / form for form in FORMS}


@pytest.fixture(params=FORMS)
def run(request, trained, tmp_path) -> tuple[str, Path]:
    """A copy of the run, to be damaged."""
    shutil.copytree(trained[request.param], tmp_path / "run")
    return request.param, tmp_path / "run"


# Damage


def data_file(checkpoint: Path) -> Path:
    return checkpoint / "__0_0.distcp" if checkpoint.is_dir() else checkpoint


def truncate(checkpoint: Path) -> None:
    path = data_file(checkpoint)
    os.truncate(path, path.stat().st_size - 1000)


def remove_shards(checkpoint: Path) -> None:
    data_file(checkpoint).unlink()
    if checkpoint.suffix:
        checkpoint.touch()


def zero_in_the_middle(checkpoint: Path) -> None:
    """As a file looks whose blocks were not on disk when the power went."""
    path = data_file(checkpoint)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 4)
        file.write(bytes(size // 2))


def flip_a_bit(checkpoint: Path) -> None:
    """In the middle of the largest tensor."""
    flip_bit(data_file(checkpoint))


def flip_a_bit_of_the_index(checkpoint: Path) -> None:
    """In the number of an offset, so that it is still an index."""
    if not checkpoint.is_dir():
        flip_a_bit(checkpoint)
        return
    metadata = FileSystemReader(checkpoint).read_metadata()
    next(iter(metadata.storage_data.values())).offset ^= 1
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def cut_the_index(checkpoint: Path) -> None:
    path = checkpoint / ".metadata" if checkpoint.is_dir() else checkpoint
    os.truncate(path, path.stat().st_size // 2)


def leave_half_written(checkpoint: Path) -> None:
    if checkpoint.is_dir():
        (checkpoint / ".metadata").rename(checkpoint / ".metadata.tmp")
    else:
        os.truncate(checkpoint, 10_000)


CHEAP = [truncate, remove_shards, cut_the_index, leave_half_written]
"""Damage that is seen without reading everything."""


DAMAGES = [*CHEAP, zero_in_the_middle, flip_a_bit, flip_a_bit_of_the_index]


@pytest.mark.parametrize(
    ("run", "damage"),
    [*(("fsdp", damage) for damage in DAMAGES), ("ddp", truncate), ("ddp", remove_shards), ("ddp", flip_a_bit)],
    indirect=["run"],
)
def test_of_a_damaged_checkpoint_the_one_before_is_taken(run, damage, caplog):
    _, folder = run
    before, newest = list_checkpoints(folder / "checkpoints")
    assert (batch_of(before), batch_of(newest)) == (2, 4)
    check_checkpoint(newest)
    damage(newest)
    with pytest.raises(DataError, match=newest.name):
        check_checkpoint(newest)
    assert newest_that_passes([before, newest], check_checkpoint) == before
    assert f"skipping checkpoint {newest}" in caplog.text
    if damage in CHEAP:
        assert find_checkpoints(folder / "checkpoints") == [before]
        assert resolve_checkpoint(str(folder)) == before
        with pytest.raises((ConfigurationError, DataError)):
            load_model(newest)


def failing_opens(monkeypatch, folder: Path, num_failures: float, error: int = errno.ESTALE) -> dict[str, int]:
    """Let each file in a folder fail so many times when it is opened; return how often each was opened."""
    opened: dict[str, int] = {}

    def failing(method):
        def call(path, *arguments, **options):
            if isinstance(path, str | Path) and folder in Path(path).parents:
                number = opened[Path(path).name] = opened.get(Path(path).name, 0) + 1
                if number <= num_failures:
                    raise OSError(error, os.strerror(error))
            return method(path, *arguments, **options)

        return call

    for owner, name in ((Path, "stat"), (io, "open"), (builtins, "open")):
        monkeypatch.setattr(owner, name, failing(getattr(owner, name)))
    monkeypatch.setattr(storage, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(storage, "LONGEST_PAUSE", 0.0)
    monkeypatch.setattr(storage.random, "random", lambda: 1e-3)
    return opened


def read_all(checkpoint: Path) -> dict:
    return StoredState(checkpoint).read_below("state.model.")


@pytest.mark.parametrize("run", FORMS, indirect=True)
def test_a_file_system_that_fails_once_damages_no_checkpoint(run, monkeypatch):
    checkpoints = list_checkpoints(run[1] / "checkpoints")
    newest, content = checkpoints[-1], read_all(checkpoints[-1])
    for use in (lambda: newest_that_passes(checkpoints, check_checkpoint), lambda: read_all(newest)):
        with monkeypatch.context() as patch:
            opened = failing_opens(patch, newest if newest.is_dir() else newest.parent, num_failures=1)
            found = use()
        assert max(opened.values()) > 1
        assert found == newest or all(torch.equal(found[key], content[key]) for key in content)


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES])
@pytest.mark.parametrize("run", FORMS, indirect=True)
def test_a_file_system_that_goes_on_failing_ends_the_start_and_records_no_damage(run, monkeypatch, error):
    checkpoints = list_checkpoints(run[1] / "checkpoints")
    newest = checkpoints[-1]
    readers = [find_damage, check_checkpoint, check_bytes, check_safe, read_all]
    readers.append(lambda one: newest_that_passes(checkpoints, check_checkpoint))
    for read in readers:
        with monkeypatch.context() as patch:
            opened = failing_opens(patch, newest if newest.is_dir() else newest.parent, math.inf, error)
            with pytest.raises(MachineError, match=os.strerror(error)):
                read(newest)
        assert max(opened.values()) <= 8, "attempts"
    config = load(Config, *options(run[1], run[0]))
    shards = newest if newest.is_dir() else newest.parent
    with monkeypatch.context() as patch:
        failing_opens(patch, shards, math.inf, error)
        with pytest.raises(MachineError):
            find_resumption(config, checkpoint_storage(config, run[1]))
    assert not (run[1] / "checkpoints" / DAMAGED).exists()


def test_a_flipped_bit_is_noticed_before_anything_is_loaded(trained, tmp_path):
    checkpoint = tmp_path / "ep0-ba4"
    shutil.copytree(resolve_checkpoint(str(trained["fsdp"])), checkpoint)
    assert set(read_checksums(checkpoint)) == {".metadata", "__0_0.distcp"}
    flip_a_bit(checkpoint)
    read_weights(checkpoint, Weights.raw, is_checked=True)  # Nothing else would notice.
    for read in (lambda: read_weights(checkpoint, Weights.raw), lambda: load_model(checkpoint)):
        with pytest.raises(DataError, match=r"__0_0\.distcp does not have its checksum"):
            read()


@pytest.mark.parametrize(
    "content", [None, b"", b"{", b"[]", b'{"__0_0.distcp": 1}', b'{".metadata": {"xxh64": "0"}}', b"{}"]
)
def test_damaged_checksums_are_damage(trained, tmp_path, content):
    checkpoint = tmp_path / "ep0-ba4"
    shutil.copytree(resolve_checkpoint(str(trained["fsdp"])), checkpoint)
    (checkpoint / CHECKSUMS).unlink()
    if content is not None:
        (checkpoint / CHECKSUMS).write_bytes(content)
    with pytest.raises(DataError, match=CHECKSUMS):
        check_checkpoint(checkpoint)


@pytest.mark.world_size(2)
def test_nodes_that_find_different_checkpoints_to_start_from_end(server, trained, tmp_path):
    for node in "01":
        shutil.copytree(trained["ddp"], tmp_path / node)
    before, newest = list_checkpoints(tmp_path / "1" / "checkpoints")
    remove_checkpoint(newest)
    yaml, overrides = options(tmp_path / "run", "ddp", f"init_from.checkpoint={tmp_path}/{{node}}")
    job = server.start(2, ["tests/tools/ranks_as_nodes.py", "1", yaml, *overrides]).finish()
    assert job.codes == [2, 2], job.output[-3000:]
    assert f"the nodes find different checkpoints in {tmp_path}/0: {before.name}, {newest.name}" in job.output


def test_a_run_continues_from_the_one_before_and_removes_what_is_half_written(server, trained, tmp_path):
    starts = {}
    for form, damage in [("fsdp", flip_a_bit), ("ddp", zero_in_the_middle), ("fsdp", leave_half_written)]:
        run = tmp_path / f"{form}-{damage.__name__}"
        shutil.copytree(trained[form], run)
        damage(list_checkpoints(run / "checkpoints")[-1])
        (run / "checkpoints" / "ep9-ba99").mkdir()
        starts[run] = options(run, form, "trainer.max_duration=5ba", "trainer.save_interval=100ba")
    job = server.train(1, list(starts.values()))
    for run in starts:
        assert f"skipping checkpoint {run / 'checkpoints' / 'ep0-ba4'}" in job.output or (
            f"removing {run / 'checkpoints' / 'ep0-ba4'}," in job.output
        )
        assert not (run / "checkpoints" / "ep9-ba99").exists()
        rows = read_metrics(run / "metrics.jsonl")
        assert series(rows, TRAIN_LOSS)[0] == list(range(5))
        assert batch_of(resolve_checkpoint(str(run))) == 5
    more = ["trainer.max_duration=6ba", "trainer.keep_checkpoints=3"]
    server.train(1, [(yaml, [*overrides, *more]) for yaml, overrides in starts.values()])
    for run in starts:
        kept = [path for path in find_checkpoints(run / "checkpoints") if path.name.removesuffix(".pt") != "ep0-ba4"]
        assert [batch_of(path) for path in kept] == [2, 5, 6], "the damage that the start before has found is known"
        assert find_superseded(run, load(Config, run / "config.yaml"), num_kept=3) == []


def resume(run: Path, form: str, *more: str) -> str | None:
    """Find the checkpoint to continue from, as a start does."""
    config = load(Config, *options(run, form, *more))
    return find_resumption(config, checkpoint_storage(config, run))


def test_where_none_is_whole_the_run_does_not_begin_anew(run):
    form, folder = run
    for checkpoint in list_checkpoints(folder / "checkpoints"):
        zero_in_the_middle(checkpoint)
    with pytest.raises(DataError, match=f"all checkpoints in {folder / 'checkpoints'} are damaged"):
        resume(folder, form)


def test_the_newest_complete_checkpoint_is_taken(trained, tmp_path):
    checkpoints = tmp_path / "checkpoints"
    for batch in (10, 2, 9):
        shutil.copytree(resolve_checkpoint(str(trained["fsdp"])), checkpoints / f"ep0-ba{batch}")
    (checkpoints / "ep0-ba11").mkdir()
    (checkpoints / "ep0-ba12.pt").write_bytes(b"PK\x03\x04 half of an archive")
    assert resolve_checkpoint(str(tmp_path)).name == "ep0-ba10"
    LocalCheckpoints(checkpoints).remove_half_written()
    names = {path.name for path in checkpoints.iterdir()}
    assert names == {"ep0-ba2", "ep0-ba9", "ep0-ba10", "ep0-ba12.pt"}, "a damaged file may be the only one"
    for folder, run in ((checkpoints, tmp_path), (tmp_path, tmp_path)):
        (tmp_path / "config.yaml").write_text(f"trainer: {{checkpoint_folder: {folder}}}")
        if folder == checkpoints:
            assert resolve_checkpoint(str(run)).name == "ep0-ba10"
        else:
            with pytest.raises(ConfigurationError, match="no complete checkpoint"):
                resolve_checkpoint(str(run))


def test_a_run_that_does_not_resume_begins_beside_no_other(trained):
    with pytest.raises(ConfigurationError, match=r"autoresume=false.*ep0-ba"):
        resume(trained["ddp"], "ddp", "trainer.autoresume=false")


# Checkpoints that try to run code


def test_the_attacks_work_on_readers_that_do_not_look(trained, tmp_path):
    for form, attack in ATTACKS:
        if attack is evil_tensor:
            continue
        proof, checkpoint = tmp_path / f"proof-{attack.__name__}", tmp_path / attack.__name__ / "ep0-ba4"
        newest = list_checkpoints(trained[form] / "checkpoints")[-1]
        checkpoint.parent.mkdir()
        if form == "ddp":
            shutil.copy(newest, checkpoint)
            attack(checkpoint, proof)
            torch.load(checkpoint, weights_only=False)
        else:
            shutil.copytree(newest, checkpoint)
            attack(checkpoint, proof)
            read_carelessly(checkpoint)
        assert proof.exists(), attack


def read_carelessly(checkpoint: Path) -> None:
    """As torch and Composer do without this package."""
    reader = FileSystemReader(checkpoint)
    with contextlib.suppress(AttributeError):
        names = [
            name for name, entry in reader.read_metadata().state_dict_metadata.items() if not hasattr(entry, "size")
        ]
        load_state(dict.fromkeys(names), storage_reader=reader, planner=DefaultLoadPlanner(False, False), no_dist=True)


@pytest.mark.parametrize(("form", "attack"), ATTACKS)
def test_a_malicious_checkpoint_is_refused_and_runs_nothing(server, trained, tmp_path, form, attack):
    run, proof = tmp_path / "run", tmp_path / "proof"
    shutil.copytree(trained[form], run)
    newest = list_checkpoints(run / "checkpoints")[-1]
    attack(newest, proof)
    if newest.is_dir():
        (newest / CHECKSUMS).unlink()
        sums = {file.name: {CHECKSUM_KIND: hash_file(file, CHECKSUM_KIND)} for file in newest.iterdir()}
        write_json(newest / CHECKSUMS, sums)  # As whoever attacks would do.

    refused: list[str] = []
    for read in (
        lambda: load_model(newest),
        lambda: load_model(run),
        lambda: read_weights(newest, Weights.raw),
        lambda: read_weights(newest, Weights.ema),
    ):
        try:
            read()
        except DataError as error:
            refused.append(str(error))
    needed = {evil_entry: 2, evil_optimizer_entry: 0, evil_tensor: 3}.get(attack, 4)
    assert len(refused) >= needed, refused
    assert not proof.exists()

    if attack not in (evil_tensor, evil_file):
        with pytest.raises(UnsafeCheckpointError):
            resume(run, form, "trainer.max_duration=6ba")
        assert not proof.exists()
        return
    job = server.run(1, [options(run, form, "trainer.max_duration=6ba")])
    assert job.codes == [2], job.output[-3000:]
    assert job.output.count("CheckpointError: ") + job.output.count("DataError: ") == 1, job.output[-3000:]
    assert "Traceback" not in job.output
    assert "Nothing was loaded" in job.output or "cannot be loaded" in job.output
    job = server.run(1, [options(tmp_path / "other", form, f"init_from.checkpoint={newest}")])
    assert job.codes == [2], job.output[-3000:]
    assert not proof.exists()


@pytest.mark.parametrize("place", ["../ep0-ba2/__0_0.distcp", "/etc/passwd", "..", ""])
def test_an_index_names_files_of_its_own_folder_only(trained, tmp_path, place):
    checkpoint = tmp_path / "ep0-ba4"
    shutil.copytree(resolve_checkpoint(str(trained["fsdp"])), checkpoint)
    metadata = FileSystemReader(checkpoint).read_metadata()
    next(iter(metadata.storage_data.values())).relative_path = place
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnsafeCheckpointError, match="outside of its folder"):
        read_metadata(checkpoint)
    with pytest.raises(UnsafeCheckpointError, match="outside of its folder"):
        load_model(checkpoint)


@pytest.mark.parametrize(
    "opcodes",
    [
        b"cbuiltins\neval\n(V1\ntR.",
        b"cposix\nsystem\n(Vtrue\ntR.",
        b"\x80\x04\x8c\x05torch\x94\x8c\x08hub.load\x94\x93.",
        b"ctorch.distributed.checkpoint.metadata\nMetadata.__init__.__globals__\n.",
        b"ctorch.distributed.checkpoint.filesystem\nFileSystem\n)R.",
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}V__setstate__\nctorch\nSize\nstb.",
        b"P1\n.",
        b"\x82\x01.",
        b"",
        b"not a pickle",
    ],
)
def test_an_index_can_only_be_an_index(tmp_path, opcodes):
    (tmp_path / ".metadata").write_bytes(opcodes)
    with pytest.raises(DataError, match="is not the index of a checkpoint"):
        read_metadata(tmp_path)


def test_an_intact_file_of_another_pickle_protocol_is_not_called_damaged(tmp_path):
    torch.save({"state": {}}, tmp_path / "ep0-ba4.pt", pickle_protocol=4)
    with pytest.raises(DataError) as raised:
        check_checkpoint(tmp_path / "ep0-ba4.pt")
    assert "does not read" in str(raised.value) and "damaged" not in str(raised.value)
