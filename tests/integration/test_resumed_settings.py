"""Every key of a run on resumption: refused, kept as in the checkpoint, or new in everything that is built from it."""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from copy import deepcopy
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from composer import Algorithm, Callback, Event, Logger, State, Time, Trainer
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from diffusion import train as training
from diffusion.checkpointing.resume import check_changes, checkpoint_storage, find_resumption, with_kept_settings
from diffusion.checkpointing.roll_back import roll_back
from diffusion.config.fields import CHECK
from diffusion.config.keys import element_type, field_types, find_field, schema_keys, split_optional
from diffusion.config.loading import from_dict, load_config, to_dict, to_public_yaml
from diffusion.config.resumption import Effect, effect_of
from diffusion.config.schema import Config, Task
from diffusion.errors import ConfigurationError
from diffusion.formats.run_folder import STARTS, Rollback, read_config, read_request, request_rollback
from diffusion.operations.heartbeats import heartbeat_folder

TASKS = {Task.diffusion: "tests/tools/toy.yaml", Task.autoencoder: "yamls/tiny/autoencoder.yaml"}

FULL = [
    "init_from={checkpoint: a}",
    "model.text_adapter={}",
    "model.token_routing={}",
    "model.score_conditioning={columns: [{name: a}]}",
    "model.alignment={path: a}",
    "model.lora={}",
    "model.ingredients=[{path: a}]",
    "autoencoder.equivariance={}",
    "validation={local: a, streams: [{name: a}]}",
    "data={local: a, streams: [{name: a}]}",
    "algorithms.ema={start: 3ba, power: {snapshot_interval: 2ba}}",
    "loggers={wandb: {}, prometheus: {port: 0}}",
    "operations.supervision.prometheus={port: 0}",
    "plugins={callbacks: [{path: a}], loggers: [{path: a}], algorithms: [{path: a}], train_dataset: {path: a}}",
]
"""Every section."""


@pytest.fixture(autouse=True, scope="module")
def leftover_process_group() -> Iterator[None]:
    """Destroy the process group of the Trainers: in later tests, commands that find one would end the process."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def changed(key: str, value: Any) -> Any:
    """Another legal value of a key."""
    field, _ = find_field(Config, key)
    assert field is not None
    section: Any = Config
    for part in key.split(".")[:-1]:
        section = split_optional(section if part == "0" else field_types(section)[part])[0]
        section = element_type(section) if isinstance(section, type(list[int])) else section
    kind, _ = split_optional(field_types(section)[field.name])
    check: Any = field.metadata.get(CHECK)
    if kind is bool:
        return not value
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(member.value for member in kind if member.value != value)
    if kind in (int, float):
        numbers = [kind(one) for one in (*([] if value is None else [value + 1, value / 2, value - 1]), 1, 0.5)]
        return next(one for one in numbers if one != value and not (check and check.problem(one, key)))
    if kind is str:
        return "7ba"
    return {list[str]: ["other"], list[int]: [64, 64], list[float]: [0.2, 0.1]}.get(kind, {"other": 1.0})


def get(values: Any, key: str) -> Any:
    for part in filter(None, key.split(".")):
        values = values[int(part) if part.isdigit() else part]
    return values


def put(values: Any, key: str, value: Any) -> None:
    section, _, name = key.rpartition(".")
    get(values, section)[name] = value


def leaves() -> list[str]:
    """List the keys of a run that are no sections."""
    keys = schema_keys(Config)
    sections = {key.rpartition(".")[0].removesuffix(".0") for key in keys}
    return [key for key in keys if key not in sections]


def refused_keys(before: Any, now: Any, folder: Path, *callbacks: str) -> set[str]:
    """Return the keys that the resumption from a checkpoint with another configuration names as refused."""
    try:
        check(before, now, folder, *callbacks)
    except ConfigurationError as error:
        return set(re.findall(r"(?:settings: |; )([a-z0-9_.]+) \(was", str(error)))
    return set()


def check(before: Any, now: Any, folder: Path, *callbacks: str) -> None:
    """Compare a configuration with that of a checkpoint, which has the state of some callbacks."""
    states = {"RunRecord": {"config": to_public_yaml(from_dict(Config, before, "before"))}}
    states |= {name: {"labels": "decay-0.9"} for name in callbacks}
    torch.save({"state": {"callbacks": states}}, folder / "ep0-ba1.pt")
    check_changes(from_dict(Config, now, "now"), folder / "ep0-ba1.pt", "it")


def test_ranks_on_a_cpu_compute_with_one_thread(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    training.start_ranks(load_config(TASKS[Task.diffusion], FULL[8:9]))
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)


@pytest.mark.parametrize("task", Task)
def test_every_key_has_an_effect_and_those_that_are_refused_are_named(task, tmp_path):
    before = to_dict(load_config(TASKS[task], FULL))
    refused = {Effect.refused, Effect.same_averages, Effect.same_order}
    now, expected = deepcopy(before), set()
    for key in leaves():
        if key == "task":  # With it, other keys count.
            continue
        value = get(now, key)
        put(now, key, changed(key, value))
        compared = key.partition(".0.")[0]  # Lists are compared as a whole.
        effect = effect_of(compared, task)
        if effect in refused or (effect is Effect.same_weights and value is None):
            expected.add(compared)
    assert refused_keys(before, now, tmp_path, "LateStartEMA") == expected
    averages = {key for key in expected if effect_of(key) is Effect.same_averages}
    assert refused_keys(before, now, tmp_path) == expected - averages
    kept = to_dict(with_kept_settings(from_dict(Config, now, "now"), tmp_path / "ep0-ba1.pt"))
    for key in leaves():
        assert get(kept, key) == get(before if effect_of(key) is Effect.kept else now, key), key
    assert "task" in refused_keys(before, {**before, "task": changed("task", task.value)}, tmp_path)


def test_averages_are_not_switched_off_once_they_have_begun(tmp_path):
    """Switched on again, they would count from another step, beside those stored before."""
    on, off = (to_dict(load_config(TASKS[Task.diffusion], given)) for given in ([], ["algorithms.ema=null"]))
    assert refused_keys(on, off, tmp_path, "LateStartEMA") == {"algorithms.ema"}
    assert refused_keys(on, off, tmp_path) == refused_keys(off, on, tmp_path) == set()


def test_the_step_at_which_averages_began_stays_when_a_run_grows(tmp_path):
    before, moved, same = (
        to_dict(load_config(TASKS[Task.diffusion], [f"algorithms.ema.start={start}", f"trainer.max_duration={length}"]))
        for start, length in [("0.5dur", "8ba"), ("0.5dur", "16ba"), ("4ba", "16ba")]
    )
    assert refused_keys(before, moved, tmp_path, "LateStartEMA") == {"algorithms.ema.start"}
    assert refused_keys(before, same, tmp_path, "LateStartEMA") == refused_keys(before, moved, tmp_path) == set()


def test_averages_do_not_begin_late(tmp_path):
    """Checkpoint ep0-ba1.pt without averages: a start at step 1 has passed."""
    off, now, later = (
        to_dict(load_config(TASKS[Task.diffusion], [f"algorithms.ema={ema}"]))
        for ema in ("null", "{start: 1ba}", "{start: 2ba}")
    )
    with pytest.raises(ConfigurationError, match="start=2ba or later"):
        check(off, now, tmp_path)
    check(off, later, tmp_path)
    check(off, {**now, "trainer": {**now["trainer"], "max_duration": "1ba"}}, tmp_path)  # It ends here.


@pytest.mark.parametrize("folders", [("null", "new"), ("old", "null"), ("old", "new")])
def test_a_run_does_not_begin_anew_where_its_checkpoints_are_looked_for_elsewhere(folders, tmp_path):
    before, now = (f"trainer.checkpoint_folder={one if one == 'null' else tmp_path / one}" for one in folders)
    config, run = load_config(TASKS[Task.diffusion], [before]), tmp_path / "run"
    training.record_config(run, config)
    folder = checkpoint_storage(config, run).folder
    folder.mkdir()
    (run / STARTS).touch()
    (folder / "ep0-ba1.pt").touch()
    config = load_config(TASKS[Task.diffusion], [now])
    with pytest.raises(ConfigurationError, match=f"{folder} does, and the run would begin anew"):
        find_resumption(config, checkpoint_storage(config, run))


def test_a_rollback_waits_for_a_start_that_finds_the_checkpoints(tmp_path):
    config = load_config(TASKS[Task.diffusion], [f"trainer.checkpoint_folder={tmp_path}/elsewhere"])
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "ep0-ba9.pt").touch()
    request_rollback(tmp_path, Rollback(step=8, loss="nan", limit=7, time=1.0))
    with pytest.raises(ConfigurationError, match="checkpoints does, and the run would begin anew"):
        roll_back(config, checkpoint_storage(config, tmp_path))
    assert read_request(tmp_path) is not None
    config.trainer.checkpoint_folder = None
    roll_back(config, checkpoint_storage(config, tmp_path))
    assert read_request(tmp_path) is None


def test_relative_folders_are_those_of_the_working_directory_of_each_start(tmp_path, monkeypatch):
    given = ["trainer.checkpoint_folder=kept", "operations.heartbeat_folder=beats"]
    config, run = load_config(TASKS[Task.diffusion], given), tmp_path / "run"
    for name in "ab":
        (tmp_path / name / "kept").mkdir(parents=True)
    (tmp_path / "a/kept/ep0-ba1.pt").touch()
    monkeypatch.chdir(tmp_path / "a")
    training.record_config(run, training.with_absolute_paths(config))
    (run / STARTS).touch()
    monkeypatch.chdir(tmp_path / "b")
    assert heartbeat_folder(read_config(run), run).parent == tmp_path / "a/beats"
    now = training.with_absolute_paths(config)
    with pytest.raises(ConfigurationError, match=f"{tmp_path}/a/kept does, and the run would begin anew"):
        find_resumption(now, checkpoint_storage(now, run))


def test_a_location_that_never_held_checkpoints_is_not_looked_at(tmp_path):
    """The start that recorded it failed, maybe because of it."""
    training.record_config(tmp_path, load_config(TASKS[Task.diffusion], ["trainer.checkpoint_folder=s3://none/runs"]))
    config = load_config(TASKS[Task.diffusion], [])
    assert find_resumption(config, checkpoint_storage(config, tmp_path)) is None


# What is built


def snapshot(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """List the plain values in an object of this package, of Composer or of an optimizer by their paths."""
    if value is None or isinstance(value, str | bool | int | float | Enum | Path | Time):
        yield path, value
        return
    if id(value) in seen or isinstance(value, Tensor):
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        content = dict(value)
    elif isinstance(value, list | tuple | set | frozenset):
        content = dict(enumerate(sorted(value) if isinstance(value, set | frozenset) else value))
    elif isinstance(value, torch.optim.Optimizer):
        content = {"param_groups": [{**group, "params": None} for group in value.param_groups]}
    elif isinstance(value, LRScheduler) or type(value).__module__.startswith(("diffusion.", "composer.")):
        content = {key: one for key, one in getattr(value, "__dict__", {}).items() if not _is_of_module(value, key)}
    else:
        return
    for key, child in content.items():
        yield from snapshot(child, f"{path}.{key}", seen)


def _is_of_module(value: Any, key: str) -> bool:
    return isinstance(value, nn.Module) and key in ("_parameters", "_buffers", "_modules", "logger")


PROGRESS = re.compile(
    r".*(\.timestamp\..*|\._loaded\..*|\.averages\..*|\.dataset_state.*|\.load_path|\.identities.*"
    r"|\._rng_state.*|\._since|\._last|\._changed|\._confirmed_at|\.holder\..*|\._begin\..*|\.last_epoch|\._last_lr\..*|\._step_count|\.lr"
    r"|\._descriptor)"
)
"""Values that say how far a run is, and numbers of open files."""


class Alibi(Algorithm):
    """Named as an algorithm of Composer, which evaluates the text that a checkpoint has of that one."""

    def __init__(self, number: float) -> None:
        self.number = number

    def match(self, event: Event, state: State) -> bool:
        return False

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        raise AssertionError

    def state_dict(self) -> dict[str, Any]:
        return {"repr": "__name__, __import__('os').environ.update(EVALUATED='1')"}


MACHINE = (
    r"task|seed|run_name|output_folder|(init_from|autoencoder|data|validation|plugins|plan)\..*|loggers\.(wandb|prometheus)\..*"
    r"|trainer\.(device|precision|collectives|num_replicas|reduce_precision|checkpoint_folder|autoresume|max_duration|keep_checkpoints)"
    r"|trainer\.reshard_after_forward|samples\.scores|performance\.(attention|compilation|cuda_graphs)|operations\.(heartbeat_folder|max_dollars|supervision\..*)"
)
"""Keys that need data, a GPU, several ranks or services, that are set below, or that the task does not use."""


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_what_is_built_has_the_settings_of_this_start(kind, tmp_path, monkeypatch):
    run, base = tmp_path / "run", tmp_path / "base"
    common = ["trainer.device=cpu", f"trainer.parallelism={kind}", "samples.prompts=[]"]
    common += [f"optimizer.name={'muon' if kind == 'fsdp' else 'adamw'}"]
    plugin = "{path: tests.integration.test_resumed_settings.Alibi, arguments: {number: %d}}"
    common += ["operations.guard.skip_steps=[50]"]
    before = [*common, "trainer.max_duration=4ba", f"plugins.algorithms=[{plugin % 1}]", f"output_folder={run}"]
    training.train(load_config(TASKS[Task.diffusion], before))
    shutil.move(run, base)

    values = to_dict(load_config(TASKS[Task.diffusion], before))
    for key in leaves():
        is_new = effect_of(key, Task.diffusion) is Effect.takes_effect and not re.fullmatch(MACHINE, key)
        if is_new and get(values, key.rpartition(".")[0]) is not None:
            put(values, key, changed(key, get(values, key)))
    put(values, "trainer.max_duration", "9ba")
    put(values, "plugins.algorithms.0.arguments.number", 2)
    config = from_dict(Config, values, "now")
    built: list[dict[str, Any]] = []
    # As on a GPU, where a scaler is on; that of the checkpoint was off.
    monkeypatch.setattr("composer.trainer.trainer.GradScaler", lambda: GradScaler("cpu"))

    def record(trainer: Trainer, *_: Any) -> None:
        built.append(dict(snapshot(trainer, "trainer", set())))
        trainer.close()

    monkeypatch.setattr(training, "fit", record)
    for is_resumed in (True, False):
        if is_resumed:
            shutil.copytree(base, run)
        training.train(config)
        shutil.rmtree(run)
    resumed, new = built
    differing = {key for key in resumed.keys() | new.keys() if resumed.get(key, "-") != new.get(key, "-")}
    assert [key for key in sorted(differing) if not PROGRESS.fullmatch(key)] == []
    assert "EVALUATED" not in os.environ


class RunRecord(Callback):
    """Named as a callback of this package, whose state no resumption can do without."""


@pytest.mark.parametrize(
    ("kind", "name", "arguments", "number"),
    [("callbacks", "RunRecord", "{}", 1), ("algorithms", "Alibi", "{number: 1}", 2)],
)
def test_no_two_objects_share_a_state_in_checkpoints(kind, name, arguments, number, tmp_path):
    plugins = ", ".join([f"{{path: {__name__}.{name}, arguments: {arguments}}}"] * number)
    common = ["trainer.device=cpu", "algorithms.ema=null", f"output_folder={tmp_path}", f"plugins.{kind}=[{plugins}]"]
    with pytest.raises(ConfigurationError, match=f"one state by the name {name}"):
        training.train(load_config(TASKS[Task.diffusion], common))
