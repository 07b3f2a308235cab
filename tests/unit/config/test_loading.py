import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from diffusion.config.data import Representation
from diffusion.config.documentation import key_doc, schema_keys
from diffusion.config.loading import field_docs, from_dict, load, load_config, missing_keys, to_dict, to_yaml
from diffusion.config.model import PredictionType
from diffusion.config.quantities import Time, parse_size, parse_time
from diffusion.config.schema import Config
from diffusion.config.training import EMAConfig, OptimizerConfig
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
    overrides += ["objective.prediction_type=v_prediction", "model.unet.block_out_channels=[32, 64]"]
    overrides += ["algorithms.ema.start=0.5dur", "optimizer.betas.1=0.95", "model.unet.block_out_channels.0=48"]
    config = load_config(write(COMPLETE), overrides)
    assert config.optimizer == OptimizerConfig(lr=2e-4, betas=[0.9, 0.95])
    assert [stream.proportion for stream in config.data.streams] == [0.5, 1.0]
    assert config.output_folder == "runs/first"
    assert config.objective.prediction_type is PredictionType.v_prediction
    assert config.data.representation is Representation.images
    assert config.model.unet == {"block_out_channels": [48, 64]}
    assert config.algorithms.ema == EMAConfig(start="0.5dur")
    assert (config.seed, config.group, config.data.num_canonical_nodes) == (3, None, 128)


def test_text_is_kept_as_written(write):
    config = load_config(write(COMPLETE), ["run_name=1e3", "group=2024-01-01", "model.vae=on"])
    assert (config.run_name, config.group, config.model.vae) == ("1e3", "2024-01-01", "on")


def test_what_only_looks_like_a_date_or_an_octal_number_is_text(write):
    config = load_config(write(COMPLETE), ["run_name=2025-31-12", "group=010", "model.vae=1:30"])
    assert (config.run_name, config.group, config.model.vae) == ("2025-31-12", "010", "1:30")
    assert load_config(write(to_yaml(config), "resolved.yaml")) == config


def test_numbers(write):
    texts = ["0", "-7", "+1_000", "0x1f", "1e3", "1.", ".5", "-.5e-2", "1_0.5", ".inf", "010", "1:30", "0o7", "1e"]
    config = load_config(write(COMPLETE), [f"model.unet.values=[{', '.join(texts)}]"])
    expected = [0, -7, 1000, 31, 1000.0, 1.0, 0.5, -0.005, 10.5, float("inf"), "010", "1:30", "0o7", "1e"]
    assert config.model.unet["values"] == expected
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


def test_extends_in_a_circle_or_nowhere(write):
    write("extends: run.yaml\n", "other.yaml")
    path = write("extends: other.yaml\n")
    assert "extends itself: run.yaml -> other.yaml -> run.yaml" in failure(path)
    assert f"gone.yaml (named in {path}, line 2) does not exist." in failure(write("seed: 1\nextends: gone.yaml\n"))
    assert "must be the path of one YAML file" in failure(write("extends: [a.yaml]\n"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("lr: 3", "Unknown key lr ({file}, line 14): did you mean optimizer.lr?"),
        ("optimizr: {}", "Unknown key optimizr ({file}, line 14): did you mean optimizer?"),
        (
            "model: {preconditioned: 1}",
            "Unknown key model.preconditioned ({file}, line 14). The keys of model are arch",
        ),
        ("learningrate: 1", "Unknown key learningrate ({file}, line 14). The keys at the top are run_name, group"),
        ("batch_size: 1", "did you mean data.global_batch_size or validation.device_batch_size?"),
        ("Extends: a.yaml", "Unknown key Extends ({file}, line 14): did you mean extends?"),
        ("OPTIMIZER: {LR: 1}", "Unknown key OPTIMIZER ({file}, line 14): did you mean optimizer?"),
        ("max_durations: 1", "Unknown key max_durations ({file}, line 14): did you mean trainer.max_duration?"),
        ("schedule.warmup: 1ba", "in a YAML file write `warmup:` indented below `schedule:`."),
        ("seed: many", "seed is 'many' ({file}, line 14), but must be an integer."),
        ("seed: 1.5", "seed is '1.5' ({file}, line 14), but must be an integer."),
        ("seed: true", "seed is 'true' ({file}, line 14), but must be an integer."),
        ("model: null", "model is null ({file}, line 14), but must be a group of keys (architecture, pretrained"),
        ("samples: {prompts: a cat}", "samples.prompts is 'a cat' ({file}, line 14), but must be a list"),
        (
            "task: autoencode",
            "task is 'autoencode' ({file}, line 14), but must be one of diffusion, autoencoder. "
            "Did you mean autoencoder?",
        ),
        ("plan: {num_gpus: x}", "plan.num_gpus is 'x' ({file}, line 14), but must be an integer, or null."),
        ("group: ${nothing}", "group is '${{nothing}}' ({file}, line 14), which cannot be resolved: Interpolation key"),
        ("group: ${oc.env:NOT_SET_HERE}", "Environment variable 'NOT_SET_HERE' not found"),
        ("group: ${group}", "which cannot be resolved"),
        ("group: ${group", "which cannot be resolved"),
        ("run_name: again", "{file}, line 14, column 1, is not well-formed YAML: the key 'run_name' comes twice."),
        ("a: [1", "{file}, line 15, column 1, is not well-formed YAML: "),
        ("model: {vae: ???}", "(between braces, write '???' in quotes)"),
        ("seed: !!int hello", "{file}, line 14, column 7, is not well-formed YAML: 'hello' cannot be read as int."),
        ("seed: !!bool maybe", "'maybe' cannot be read as bool."),
        ("group: !!timestamp soon", "'soon' cannot be read as timestamp."),
        (f"seed: {'9' * 5000}", "line 14, column 7, is not well-formed YAML: '9999"),
        ("seed: 010", "seed is '010' ({file}, line 14), but must be an integer."),
        ("seed: 1:30", "seed is '1:30' ({file}, line 14), but must be an integer."),
        ("schedule: {final: 1:30.5}", "schedule.final is '1:30.5' ({file}, line 14), but must be a number."),
        ("group: a\x92b", "{file}, line 14, is not well-formed YAML: the character U+0092 cannot stand there; take it"),
        ("group: &a [*a]", "{file} is not well-formed YAML: it is nested too deeply, or refers to itself"),
        (f"group: {'[' * 3000}{']' * 3000}", "it is nested too deeply"),
    ],
)
def test_mistakes_in_the_file(write, line, message):
    path = write(f"{COMPLETE}{line}\n")
    assert message.format(file=path) in failure(path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lr=3", "Unknown key lr (command line): did you mean optimizer.lr?"),
        ("data.streams.0.proportions=1", "did you mean data.streams.0.proportion?"),
        ("data.batch_size=1", "Unknown key data.batch_size (command line): did you mean data.global_batch_size?"),
        ("OPTIMIZER.LR=1", "Unknown key OPTIMIZER (command line): did you mean optimizer?"),
        ("optimizer.LR=1", "Unknown key optimizer.LR (command line): did you mean optimizer.lr?"),
        (
            "algorithms.ema.power.snapshot=1ba",
            "did you mean algorithms.ema.power.snapshot_interval or algorithms.ema.power.snapshot_precision?",
        ),
        ("extends=a.yaml", "Unknown key extends (command line): `extends` is for YAML files."),
        ("trainer.precision=BF16", "Did you mean amp_bf16?"),
        ("trainer.precision=FP32", "Did you mean fp32?"),
        (
            "plugins.callbacks.0.path=a.B",
            "plugins.callbacks.0.path (command line) addresses an element of plugins.callbacks, which has none yet: "
            "give the whole list, plugins.callbacks=[...], or write it in the YAML file.",
        ),
        ("optimizer.lr=fast", "optimizer.lr is 'fast' (command line), but must be a number."),
        ("optimizer.lr", "'optimizer.lr' (command line) is not of the form key.sub=value."),
        ("optimizer.lr=", "'optimizer.lr=' (command line) has no value: write optimizer.lr=null"),
        ("seed=[1", "The value of 'seed=[1' (command line) is not YAML"),
        ("group=a\x92b", "(command line) is not YAML: the character U+0092 cannot stand there"),
        ("group=\udcff", "(command line) is not YAML: the character U+DCFF cannot stand there"),
        ("seed.low=1", "seed.low (command line): seed is 17 (default) and has no keys below it."),
        ("data.streams.2.name=c", "data.streams is a list of 2, whose elements are addressed data.streams.0 to"),
        ("validation.streams.0.name=c", "Write"),
    ],
)
def test_mistakes_on_the_command_line(write, override, message):
    overrides = ["validation.streams=null", override] if override.startswith("validation") else [override]
    text = failure(write(COMPLETE), *overrides)
    assert message in text or (override.startswith("validation") and "which has none yet: give the whole list" in text)


def test_a_list_is_not_to_be_written_of_nothing(write):
    text = failure(write(COMPLETE), "data.streams=null")
    assert text.startswith("data.streams is null (command line), but must be a list, each element ")
    assert "Write" not in text
    assert failure(write(COMPLETE), "data.streams=a").endswith(" Write [a].")


def test_all_mistakes_at_once(write):
    text = failure(write(COMPLETE), "seed=x", "lr=1")
    assert text.startswith("The configuration has 2 mistakes:\n  - ")
    assert "seed is 'x'" in text
    assert "did you mean optimizer.lr?" in text


def test_missing_file_directory_and_list(write, tmp_path):
    assert failure(tmp_path / "no.yaml") == f"The configuration file {tmp_path / 'no.yaml'} does not exist."
    assert "cannot be read" in failure(tmp_path)
    assert "must hold keys and values" in failure(write("- a\n"))


def test_missing_values_are_told_together_with_their_meanings(write):
    path = write("data: {local: '???'}\ntrainer: {max_duration: 1ba}\n")
    text = failure(path, "algorithms.ema.decays=[0.9]")
    assert text.startswith(f"6 values are missing in {path}: run_name (Name of the run; the same name continues it); ")
    assert "algorithms.ema.start (When they are allocated as copies of the weights" in text
    assert "output_folder" not in text
    assert "algorithms.ema (Moving averages of the weights; null: none)" in failure(path, "algorithms.ema=???")
    assert text.endswith("Write them there or on the command line, as in run_name=VALUE.")
    with pytest.raises(ConfigurationError, match=r"1 value is missing in .*: data.local \(Root.*Write it there"):
        load_config(write(COMPLETE), ["data.local=???"])


def test_missing_values_may_be_allowed(write):
    config = load_config(write(COMPLETE), ["data.local=???"], may_miss=lambda key: key == "data.local")
    assert list(missing_keys(config)) == ["data.local"]


def test_streams_are_not_missing_where_a_plugin_is_the_data(write):
    text = "run_name: r\ndata: {resolution: 8, global_batch_size: 1}\ntrainer: {max_duration: 1ba}\n"
    assert missing_keys(load(Config, write(text), ["plugins.train_dataset.path=a.B"])) == {}


def test_every_key_has_a_meaning():
    keys = schema_keys(Config)
    assert {"data.streams.0.name", "algorithms.ema.start", "plugins.callbacks.0.arguments"} <= keys.keys()
    assert [key for key in keys if not key_doc(Config, key)] == []
    assert field_docs(OptimizerConfig)["weight_decay"] == "Decoupled weight decay."
    assert list(field_docs(Config)) == [field.name for field in dataclasses.fields(Config)]


def test_loading_does_not_import_torch():
    code = "import sys, diffusion.config.loading, diffusion.config.checks, diffusion.cli; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_times():
    assert parse_time("550000ba", "k") == Time(550000, "ba")
    assert parse_time("0.94dur", "k").in_batches(num_batches=850000, global_batch_size=1) == pytest.approx(799000)
    assert parse_time("4096sp", "k").in_batches(num_batches=10, global_batch_size=2048) == 2
    assert parse_time("1ep", "k").in_batches(num_batches=10, global_batch_size=1) is None
    for text, message in [
        ("10", r"k is '10', which is not a time: write a number and a unit: ba \(batches\)"),
        ("ten ba", "which is not a time"),
        ("1.5ba", "k is '1.5ba': write a whole number of batches"),
        ("1.5dur", "lies between 0dur and 1dur"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            parse_time(text, "k")


def test_sizes():
    assert [parse_size(text, "k") for text in ("1kb", "1.5 GB", "7b", "12")] == [1024, 3 * 2**29, 7, 12]
    with pytest.raises(ConfigurationError, match="k is 'much', which is not a size"):
        parse_size("much", "k")
