import runpy
from pathlib import Path

import pytest
import yaml

from diffusion.config.loading import load_config, to_public_yaml
from diffusion.errors import ConfigurationError
from diffusion.sweeps import choose_values, make_points, read_sweep

SHIPPED = sorted(Path("yamls/sweeps").glob("*.yaml"))
DATA = ["data.local=data/train", "validation.local=data/validation"]
COMMAND = "command: ['${interpreter}', '${program}', tests/tools/toy.yaml, '${args_no_hyphens}']\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(text + COMMAND)
    return path


def points(path: Path, *overrides: str, seed: int = 17):
    return make_points(read_sweep(path), Path("runs/sweep"), interpreter=["python"], overrides=overrides, seed=seed)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_wandb_takes_what_is_shipped_and_passes_on_the_same(path):
    from wandb.apis.public.sweeps import _validate_config_and_fill_distribution
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args, load_sweep_config

    theirs = load_sweep_config(str(path))
    assert theirs is not None
    filled = _validate_config_and_fill_distribution(theirs)
    assert filled["parameters"].keys() == read_sweep(path)["parameters"].keys()
    ours = points(path, *DATA)
    for point in ours:
        given = create_sweep_command_args({"args": {key: {"value": value} for key, value in point.values.items()}})
        yaml_file = next(word for word in theirs["command"] if word.endswith(".yaml"))
        own = [word for word in point.command if word.startswith(("run_name=", "group=", "output_folder="))][-3:]
        fixed = [word for word in theirs["command"] if "=" in word]
        assert load_config(yaml_file, [*fixed, *given["args_no_hyphens"], *DATA, *own]) == load_config(
            yaml_file, [word for word in point.command if "=" in word]
        )
    by_wandb = [
        load_config(
            yaml_file, [*fixed, *(f"{key}={value}" for key, value in point.values.items()), *DATA]
        ).output_folder
        for point in ours
    ]
    assert len(set(by_wandb)) == len(ours), "wandb's agent would train two points in one folder"


def test_a_list_varies_keys_together(tmp_path):
    path = write(
        tmp_path,
        "parameters: {overrides: {values: [{seed: 1, optimizer.lr: 1.0e-4}, {seed: 2, algorithms.ema: null}]}}\n",
    )
    first, second = [load_config("tests/tools/toy.yaml", [w for w in p.command if "=" in w]) for p in points(path)]
    assert (first.seed, first.optimizer.lr, second.seed, second.algorithms.ema) == (1, 1e-4, 2, None)


def test_random_points_depend_on_seed_and_number_only():
    parameters = {
        "a": {"distribution": "log_uniform_values", "min": 1e-4, "max": 1e-2},
        "b": {"min": 2, "max": 4},
        "c": {"min": 0.0, "max": 100.0},
        "d": {"values": ["x", "y"]},
    }
    drawn = choose_values({"method": "random", "run_cap": 2000, "parameters": parameters}, 1)
    column = {key: [values[key] for values in drawn] for key in parameters}
    assert sum(value < 1e-3 for value in column["a"]) / 2000 == pytest.approx(0.5, abs=0.05)
    assert min(column["a"]) >= 1e-4 and max(column["a"]) <= 1e-2
    assert set(column["b"]) == {2, 3, 4} and {type(value) for value in column["b"]} == {int}
    assert sum(column["c"]) / 2000 == pytest.approx(50, abs=3)
    assert column["d"].count("x") / 2000 == pytest.approx(0.5, abs=0.05)
    fewer = {"method": "random", "run_cap": 5, "parameters": {"b": parameters["b"]}}
    assert [values["b"] for values in choose_values(fewer, 1)] == column["b"][:5]
    assert [values["b"] for values in choose_values(fewer, 2)] != column["b"][:5]


def test_a_point_has_the_same_name_wherever_it_comes(tmp_path):
    few = points(write(tmp_path, "parameters: {seed: {values: [1, 2]}}\n"))
    many = points(write(tmp_path, "parameters: {seed: {values: [3, 2, 1]}}\n"))
    other = points(write(tmp_path, "parameters: {seed: {values: [1, 2]}}\n"), "optimizer.lr=1e-4")
    assert {point.name for point in few} < {point.name for point in many}
    assert not {point.name for point in few} & {point.name for point in other}


def test_a_point_that_another_version_began_is_continued(tmp_path):
    path = write(tmp_path, "parameters: {seed: {values: [1, 2]}}\n")
    overrides = ["trainer.checkpoint_folder=checkpoints/${run_name}", "data.remote=https://me:secret@host/data"]

    def names() -> list[str]:
        found = make_points(read_sweep(path), tmp_path / "s", interpreter=["python"], overrides=overrides, seed=17)
        return [point.name for point in found]

    first, second = names()
    own = ["seed=1", "run_name=s-before", "group=s", f"output_folder={tmp_path}/s/before"]
    config = load_config("tests/tools/toy.yaml", [*overrides, *own])
    config.trainer.checkpoint_folder = str(Path("checkpoints/s-before").absolute())
    for folder, names_then in (("before", ["before", second]), (first, [first, second])):
        (tmp_path / "s" / folder).mkdir(parents=True)
        (tmp_path / "s" / folder / "config.yaml").write_text(to_public_yaml(config).replace("  log_late: false\n", ""))
        assert names() == names_then


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("method: bayes\nparameters: {seed: {values: [1]}}\n", "bayes"),
        ("parameters: {seed: {values: [1, 1]}}\n", "same run"),
        ("parameters: {seed: {min: 1, max: 3}}\n", "parameters.seed"),
        ("method: random\nparameters: {seed: {min: 1, max: 3}}\n", "run_cap"),
        ("method: random\nrun_cap: 2\nparameters: {seed: {min: 3, max: 1}}\n", "parameters.seed"),
        ("parameters: {optimizer.lrr: {values: [1]}}\n", "optimizer.lr"),
        ("parameters: {seed: {vales: [1]}}\n", "parameters.seed"),
        ("parameters: {overrides: {values: [3]}}\n", "overrides="),
        ("metric: loss\nparameters: {seed: {values: [1]}}\n", "metric"),
        ("metric: {goal: maximise}\nparameters: {seed: {values: [1]}}\n", "maximise"),
        ("metric: {gaol: maximize}\nparameters: {seed: {values: [1]}}\n", "metric.goal"),
        ("metric: {name: loss, targets: 0.1}\nparameters: {seed: {values: [1]}}\n", "metric.target"),
        ("parameters: {seed: {values: [1]}}\nparamters: {optimizer.lr: {values: [1]}}\n", "parameters"),
        ("parameters: {seed: [1, 2]}\n", "parameters.seed"),
        ("method: random\nrun_cap: 2.5\nparameters: {seed: {min: 1, max: 3}}\n", "run_cap"),
        ("method: random\nrun_cap: 0\nparameters: {seed: {min: 1, max: 3}}\n", "run_cap"),
        ("method: random\nrun_cap: 2\nparameters: {seed: {min: a, max: 3}}\n", "parameters.seed"),
        ("name: 5\nparameters: {seed: {values: [1]}}\n", "name"),
        ("program: null\nparameters: {seed: {values: [1]}}\n", "program"),
        ("metric: {name: [a]}\nparameters: {seed: {values: [1]}}\n", "metric.name"),
        ("parameters: 5\n", "parameters"),
        ("method: random\nrun_cap: 2\nparameters: {seed: {values: [1, 2], probabilities: [0, 1]}}\n", "probabilities"),
        ("method: random\nrun_cap: 2\nparameters: {seed: {values: [1, 2], distribution: normal}}\n", "distribution"),
        ("run_cap: 1\nparameters: {seed: {values: [1, 2]}}\n", "run_cap is 1"),
        ("parameters: {optimizer.lr: {values: [-1]}}\n", "optimizer.lr"),
        ("parameters: {model.lora: {values: [null, {rank: 4}]}}\n", "init_from.checkpoint"),
        ("parameters: {trainer.max_duration: {values: [8ba, 1ba]}}\n", "schedule.warmup"),
    ],
)
def test_mistakes_are_found_before_anything_runs(tmp_path, text, key):
    with pytest.raises(ConfigurationError, match=key):
        points(write(tmp_path, text))


def test_points_have_checkpoints_of_their_own(tmp_path):
    path = write(tmp_path, "parameters: {seed: {values: [1, 2]}}\n")
    with pytest.raises(ConfigurationError, match=r"trainer\.checkpoint_folder /x"):
        points(path, "trainer.checkpoint_folder=/x")
    assert len(points(path, "trainer.checkpoint_folder=/x/${run_name}")) == 2


def test_a_random_point_that_repeats_another_is_skipped(tmp_path, caplog):
    path = write(tmp_path, "method: random\nrun_cap: 20\nparameters: {seed: {values: [1, 2]}}\n")
    assert sorted(point.values["seed"] for point in points(path)) == [1, 2]
    assert "18 of 20" in caplog.text


def test_a_command_must_pass_the_parameters_on(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump({"parameters": {"seed": {"values": [1]}}, "command": ["run.py"]}))
    with pytest.raises(ConfigurationError, match="args_no_hyphens"):
        read_sweep(path)
    for wrong in ("[--verbose]", "{--jobs: 2}"):
        path.write_text("parameters: {seed: {values: [1]}}\n" + COMMAND.replace("'${program}'", wrong))
        with pytest.raises(ConfigurationError, match="--"):
            read_sweep(path)


def test_a_launcher_whose_quotes_are_open_is_an_error(tmp_path, monkeypatch):
    main = runpy.run_path("scripts/sweep.py")["main"]
    monkeypatch.setattr("sys.argv", ["sweep.py", str(tmp_path / "sweep.yaml"), "--launcher", '"srun'])
    with pytest.raises(ConfigurationError, match="--launcher"):
        main()


def test_names_and_values_arrive_as_they_are(tmp_path):
    path = write(tmp_path, "parameters: {samples.prompts: {values: [['a 🎉 # party'], ['b: c']]}}\n")
    folder = tmp_path / "try #3: [x] 🎉"
    found = make_points(read_sweep(path), folder, interpreter=["python"], overrides=[], seed=17)
    configs = [load_config("tests/tools/toy.yaml", [w for w in point.command if "=" in w]) for point in found]
    assert [config.samples.prompts for config in configs] == [["a 🎉 # party"], ["b: c"]]
    assert [Path(config.output_folder) for config in configs] == [point.folder for point in found]
    assert {config.group for config in configs} == {folder.name}
