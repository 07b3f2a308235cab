import subprocess
import sys
from pathlib import Path

import pytest

from diffusion.config.data import Representation
from diffusion.config.fields import Time, parse_size, parse_time
from diffusion.config.loading import from_dict, load, load_config, missing_keys, to_dict, to_yaml
from diffusion.config.model import PredictionType
from diffusion.config.schema import Config
from diffusion.config.training import EMAConfig, OptimizerConfig, SamplesConfig
from diffusion.errors import ConfigurationError

COMPLETE = """\
run_name: first
optimizer:
  lr: 2e-4
  betas: [0.9, 0.99]
data:
  local: /data
  streams:
    - name: a
    - name: b
  resolution: 256
  global_batch_size: 8
trainer:
  max_duration: 10ba
"""


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def failure(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_gives_dataclasses_with_defaults_overrides_and_interpolations(write):
    overrides = ["data.streams.0.proportion=0.5", "data.streams[1].proportion=1", "seed=3", "group=null"]
    overrides += ["objective.prediction_type=v_prediction", "model.network.block_out_channels=[32, 64]"]
    overrides += ["algorithms.ema.start=0.5dur", "optimizer.betas.1=0.95", "model.network.block_out_channels.0=48"]
    config = load_config(write(COMPLETE), overrides)
    assert config.optimizer == OptimizerConfig(lr=2e-4, betas=[0.9, 0.95])
    assert [stream.proportion for stream in config.data.streams] == [0.5, 1.0]
    assert config.output_folder == "runs/first"
    assert config.objective.prediction_type is PredictionType.v_prediction
    assert config.data.representation is Representation.images
    assert config.model.network == {"block_out_channels": [48, 64]}
    assert config.algorithms.ema == EMAConfig(start="0.5dur")
    assert (config.seed, config.group, config.data.num_canonical_nodes) == (3, None, 128)


def test_text_is_kept_as_written(write):
    config = load_config(
        write(COMPLETE), ["run_name=1e3", "group=2024-01-01", "model.vae=on", "samples.prompts=[no, 7]"]
    )
    assert (config.run_name, config.group, config.model.vae) == ("1e3", "2024-01-01", "on")
    assert (config.output_folder, config.samples.prompts) == ("runs/1e3", ["no", "7"])
    together = "overrides={run_name: 1e3, group: 2024-01-01, model.vae: on, samples.prompts: [no, 7]}"
    assert load_config(write(COMPLETE), [together]) == config


def test_what_only_looks_like_a_date_or_an_octal_number_is_text(write):
    config = load_config(write(COMPLETE), ["run_name=2025-31-12", "group=010", "model.vae=1:30"])
    assert (config.run_name, config.group, config.model.vae) == ("2025-31-12", "010", "1:30")
    assert load_config(write(to_yaml(config), "resolved.yaml")) == config


def test_numbers(write):
    texts = ["0", "-7", "+1_000", "0x1f", "1e3", "1.", ".5", "-.5e-2", "1_0.5", ".inf", "010", "1:30", "0o7", "1e"]
    config = load_config(write(COMPLETE), [f"model.network.values=[{', '.join(texts)}]"])
    expected = [0, -7, 1000, 31, 1000.0, 1.0, 0.5, -0.005, 10.5, float("inf"), "010", "1:30", "0o7", "1e"]
    assert config.model.network["values"] == expected
    assert load_config(write(to_yaml(config), "resolved.yaml")) == config


def test_yaml_round_trip(write, monkeypatch):
    monkeypatch.setenv("FOLDER", "/somewhere")
    overrides = [
        "data.local=${oc.env:FOLDER}",
        "run_name=1e3",
        "samples.prompts=['a: b', \"it's\"]",
        "optimizer.lr=3e-7",
    ]
    config = load_config(write(COMPLETE), overrides)
    assert config.data.local == "/somewhere"
    assert load_config(write(to_yaml(config), "resolved.yaml")) == config
    assert from_dict(Config, to_dict(config), "checkpoint") == config


def test_extends_merges_dictionaries_and_replaces_lists(write, tmp_path):
    write(COMPLETE, "base.yaml")
    (tmp_path / "sub").mkdir()
    write("extends: ../base.yaml\noptimizer: {lr: 1.0}\n", "sub/middle.yaml")
    config = load_config(write("extends: sub/middle.yaml\nrun_name: second\ndata: {streams: [{name: c}]}\n"))
    assert (config.run_name, config.optimizer.lr, config.optimizer.betas) == ("second", 1.0, [0.9, 0.99])
    assert [stream.name for stream in config.data.streams] == ["c"]
    assert config.data.local == "/data"


def test_an_empty_group_clears_and_another_merges(write):
    scores = f"{COMPLETE}samples: {{scores: {{aesthetic: 7}}}}\n"
    path = write(scores + "model: {network: {a: 1}}\nplugins: {callbacks: [{path: a.B, arguments: {c: 1}}]}\n")
    config = load_config(path, ["samples.scores={}", "model.network={}", "plugins.callbacks.0.arguments={}"])
    assert (config.samples.scores, config.model.network, config.plugins.callbacks[0].arguments) == ({}, {}, {})
    assert load_config(path, ["samples.scores={other: 1}"]).samples.scores == {"aesthetic": 7, "other": 1}
    assert load_config(path, ["samples={}"]).samples == SamplesConfig()
    assert "data.streams is a group of keys" in failure(path, "data.streams={}")


def test_extends_in_a_circle_or_nowhere(write):
    write("extends: run.yaml\n", "other.yaml")
    path = write("extends: other.yaml\n")
    assert "run.yaml -> other.yaml -> run.yaml" in failure(path)
    assert f"gone.yaml (named in {path}, line 2)" in failure(write("seed: 1\nextends: gone.yaml\n"))
    assert f"`extends` ({path}, line 1)" in failure(write("extends: [a.yaml]\n"))


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("lr: 3", ["lr ({file}, line 14)", "optimizer.lr?"]),
        ("optimizr: {}", ["optimizr ({file}, line 14)", "optimizer?"]),
        ("model: {ziggurat: 1}", ["model.ziggurat ({file}, line 14)", "architecture"]),
        ("batch_size: 1", ["data.global_batch_size", "validation.device_batch_size"]),
        ("Extends: a.yaml", ["Extends ({file}, line 14)", "extends?"]),
        ("OPTIMIZER: {LR: 1}", ["OPTIMIZER ({file}, line 14)", "optimizer?"]),
        ("max_durations: 1", ["max_durations ({file}, line 14)", "did you mean trainer.max_duration"]),
        ("schedule.warmup: 1ba", ["schedule.warmup ({file}, line 14)", "`warmup:`", "`schedule:`"]),
        ("data: {streams: [{name: a}, {nme: b}]}", ["data.streams.1.nme ({file}, line 14)", "data.streams.1.name?"]),
        ("plugins:\n  callbacks:\n    - path: a.B\n    - arguments: 3", ["plugins.callbacks.1.arguments", "line 17"]),
        ("seed: many", ["seed is 'many' ({file}, line 14)", "an integer"]),
        ("seed: 1.5", ["seed is '1.5' ({file}, line 14)", "an integer"]),
        ("seed: true", ["seed is 'true' ({file}, line 14)", "an integer"]),
        ("seed: 010", ["seed is '010' ({file}, line 14)", "an integer"]),
        ("seed: '3'", ["seed is '3' ({file}, line 14)", "an integer"]),
        ("loggers: {file: 2}", ["loggers.file is '2' ({file}, line 14)", "true or false"]),
        ("schedule: {final: 1:30.5}", ["schedule.final is '1:30.5' ({file}, line 14)", "a number"]),
        ("model: null", ["model is null ({file}, line 14)", "a group of keys (architecture, pretrained"]),
        ("model: [a]", ["model is a list ({file}, line 14)", "a group of keys"]),
        ("group: {a: 1}", ["group is a group of keys ({file}, line 14)", "text"]),
        ("seed: []", ["seed is a list ({file}, line 14)", "an integer"]),
        ("samples: {prompts: a cat}", ["samples.prompts is 'a cat' ({file}, line 14)", "a list"]),
        ("task: autoencode", ["task is 'autoencode' ({file}, line 14)", "diffusion, autoencoder", "mean autoencoder?"]),
        ("plan: {num_gpus: x}", ["plan.num_gpus is 'x' ({file}, line 14)", "an integer, or null"]),
        ("group: ${nothing}", ["group is '${{nothing}}' ({file}, line 14)", "cannot be resolved", "nothing"]),
        ("plan: {num_gpus: '${run_name}'}", ["plan.num_gpus is '${{run_name}}' ({file}, line 14)"]),
        ("group: ${oc.env:NOT_SET_HERE}", ["group", "NOT_SET_HERE"]),
        ("group: ${group}", ["group is '${{group}}' ({file}, line 14)"]),
        ("group: ${group", ["group is '${{group' ({file}, line 14)"]),
        ("run_name: again", ["{file}, line 14, column 1", "'run_name'"]),
        ("a: [1", ["{file}, line 15, column 1"]),
        ("model: {vae: ???}", ["write '???' in quotes"]),
        (f"seed: {'9' * 5000}", ["{file}"]),
        ("group: a\x92b", ["{file}", "0092"]),
        ("model: {network: {a: &a [*a]}}", ["{file}", "refers to itself"]),
        (f"group: {'[' * 3000}{']' * 3000}", ["{file}", "nested too deeply"]),
    ],
)
def test_mistakes_in_the_file(write, line, parts):
    text = COMPLETE
    if line.startswith("data:"):  # The key must come once.
        text = "run_name: r\n" * 1 + "trainer: {max_duration: 1ba}\n" + "#\n" * 11
    path = write(f"{text}{line}\n")
    message = failure(path)
    assert [part for part in parts if part.format(file=path) not in message] == [], message


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("lr=3", ["lr (command line)", "optimizer.lr?"]),
        ("data.streams.0.proportions=1", ["data.streams.0.proportion?"]),
        ("data.batch_size=1", ["data.batch_size (command line)", "data.global_batch_size"]),
        ("OPTIMIZER.LR=1", ["OPTIMIZER (command line)", "optimizer?"]),
        ("algorithms.ema.power.snapshots_interval=1ba", ["algorithms.ema.power.snapshot_interval"]),
        ("extends=a.yaml", ["extends (command line)", "a YAML file"]),
        ("plugins=???", ["plugins (User-defined"]),
        ("data.streams.²=3", ["data.streams.² (command line)", "elements 0 to 1"]),
        (f"optimizer.lr={'9' * 400}", ["optimizer.lr is '999", "a number"]),
        ("trainer.precision=BF16", ["trainer.precision is 'BF16' (command line)", "amp_bf16"]),
        ("plugins.callbacks.0.path=a.B", ["plugins.callbacks.0 (command line)", "plugins.callbacks=[...]"]),
        ("validation.streams.0.name=c", ["validation.streams is", "(command line)", "validation.streams=[...]"]),
        ("data.streams.2.name=c", ["data.streams.2 (command line)", "elements 0 to 1"]),
        ("data.streams.a.name=c", ["data.streams.a (command line)", "elements 0 to 1"]),
        ("optimizer.lr=fast", ["optimizer.lr is 'fast' (command line)", "a number"]),
        ("optimizer.lr", ["'optimizer.lr' (command line)"]),
        ("optimizer.lr=", ["'optimizer.lr=' (command line)", "optimizer.lr=null"]),
        ("seed=[1", ["'seed=[1' (command line)"]),
        ("group=a\x92b", ["(command line)", "0092"]),
        ("seed.low=1", ["seed is a group of keys (command line)", "an integer"]),
        ("data.streams=null", ["data.streams is null (command line)", "a list"]),
        ("overrides=[a]", ["overrides=[a]"]),
        ("overrides={optimizer.lr: fast}", ["optimizer.lr is 'fast' (command line)"]),
    ],
)
def test_mistakes_on_the_command_line(write, override, parts):
    overrides = ["validation.streams=null", override] if override.startswith("validation") else [override]
    message = failure(write(COMPLETE), *overrides)
    assert [part for part in parts if part not in message] == [], message


def test_all_mistakes_at_once(write):
    text = failure(write(COMPLETE), "seed=x", "lr=1")
    assert "2 problems" in text and "seed is 'x'" in text and "optimizer.lr?" in text
    assert failure(write(COMPLETE), "seed=${nothing}").startswith("seed is '${nothing}' (command line), which cannot")


def test_an_error_names_the_file_that_the_value_comes_from(write):
    base = write(COMPLETE.replace("lr: 2e-4", "lr: fast"), "base.yaml")
    assert f"optimizer.lr is 'fast' ({base}, line 3)" in failure(write("extends: base.yaml\nseed: 1\n"))


def test_missing_file_directory_and_list(write, tmp_path):
    assert str(tmp_path / "no.yaml") in failure(tmp_path / "no.yaml")
    assert str(tmp_path) in failure(tmp_path)
    assert "run.yaml" in failure(write("- a\n"))


def test_missing_values_are_reported_together_with_their_meanings(write):
    path = write("data: {local: '???'}\ntrainer: {max_duration: 1ba}\n")
    text = failure(path, "algorithms.ema.decays=[0.9]")
    keys = [
        "run_name",
        "data.local",
        "data.streams",
        "data.resolution",
        "data.global_batch_size",
        "algorithms.ema.start",
    ]
    assert list(missing_keys(load(Config, path, ["algorithms.ema.decays=[0.9]"]))) == keys
    assert str(path) in text and "run_name (Name of the run; the same name continues it)" in text
    assert [key for key in keys if f"{key} (" not in text] == []
    assert "output_folder" not in text
    assert "algorithms.ema (" in failure(path, "algorithms.ema=???")
    assert "data.local (" in failure(write(COMPLETE), "data.local=???")


def test_a_file_may_make_a_value_missing_again(write):
    write(COMPLETE, "base.yaml")
    assert "data.local (" in failure(write("extends: base.yaml\ndata: {local: '???'}\n"))


def test_missing_values_may_be_allowed(write):
    config = load_config(write(COMPLETE), ["data.local=???"], may_lack=lambda key: key == "data.local")
    assert list(missing_keys(config)) == ["data.local"]
    assert load(Config, write(COMPLETE), ["run_name=???"]).output_folder == "runs/${run_name}"


def test_streams_are_not_missing_if_a_plugin_replaces_them(write):
    text = "run_name: r\ndata: {resolution: 8, global_batch_size: 1}\ntrainer: {max_duration: 1ba}\n"
    assert missing_keys(load(Config, write(text), ["plugins.train_dataset.path=a.B"])) == {}


MODULES = {
    "config.checks cli formats.run_folder operations.runs operations.costs operations.supervisor operations.inventory "
    "reports.run_page sweeps preparation.prepare preparation.takedown datasets.bad_images datasets.provenance": {
        *("torch", "composer", "streaming")
    },
    "checkpointing.find checkpointing.read": {"diffusers", "transformers", "composer", "streaming"},
}
"""Modules that only read files, and what they do not import."""


@pytest.mark.parametrize(("modules", "slow"), MODULES.items())
def test_what_only_reads_files_imports_nothing_slow(modules, slow):
    imports = ", ".join(["apps.preference.server", *(f"diffusion.{module}" for module in modules.split())])
    code = f"import sys, {imports}; print({slow} & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_times():
    assert parse_time("550000ba", "k") == Time(550000, "ba")
    assert parse_time("0.94dur", "k").in_steps(num_steps=850000, global_batch_size=1) == pytest.approx(799000)
    assert parse_time("4096sp", "k").in_steps(num_steps=10, global_batch_size=2048) == 2
    assert parse_time("1ep", "k").in_steps(num_steps=10, global_batch_size=1) is None
    steps = [parse_time(f"{n / 100:g}dur", "k").in_steps(num_steps=100, global_batch_size=1) for n in range(101)]
    assert steps == list(range(101))
    for text in ("10", "ten ba", "1.5ba", "1.5dur"):
        with pytest.raises(ConfigurationError, match=f"k is '{text}'"):
            parse_time(text, "k")


def test_sizes():
    assert [parse_size(text, "k") for text in ("1kb", "1.5 GB", "7b", "12")] == [1024, 3 * 2**29, 7, 12]
    for text in ("much", f"{'9' * 400}gb"):
        with pytest.raises(ConfigurationError, match=f"k is '{text}'"):
            parse_size(text, "k")


def test_interpolations_fit_the_type_of_their_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKERS", "3")
    path = tmp_path / "run.yaml"
    path.write_text("run_name: ${seed}\nseed: ${oc.env:WORKERS}\ndata: {num_workers: '${oc.env:WORKERS}'}\n")
    config = load(Config, path, ["group=${data.num_workers}", "optimizer.lr=${oc.env:WORKERS}"])
    assert (config.run_name, config.seed, config.data.num_workers) == ("3", 3, 3)
    assert (config.group, config.optimizer.lr) == ("3", 3.0)
    monkeypatch.setenv("WORKERS", "`x")
    assert "optimizer.lr is" in failure(path, "seed=1", "data.num_workers=1", "optimizer.lr=${oc.env:WORKERS}")


def test_products_of_other_keys(write):
    scaled = ["model.network.width=${times:32,${model.scale}}", "trainer.max_duration=${times:10,${seed},2}ba"]
    config = load_config(write(COMPLETE), [*scaled, "model.scale=3", "seed=5"])
    assert (config.model.network["width"], config.trainer.max_duration) == (96, "100ba")
    with pytest.raises(ConfigurationError, match=r"trainer\.max_duration.*cannot be resolved"):
        load_config(write(COMPLETE), ["trainer.max_duration=${times:10,many}ba"])


@pytest.mark.parametrize("value", ["!!bool maybe", "!!int ''", "!!timestamp x"])
def test_a_tag_that_does_not_fit_is_an_error_of_the_configuration(tmp_path: Path, value: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"seed: {value}\n")
    with pytest.raises(ConfigurationError, match=r"run\.yaml.*well-formed"):
        load(Config, path, [])
