"""Objects of the user's own in a run: an error of a wrong one names its key, and errors of its code are not hidden."""

import pytest
from composer import Algorithm, Callback
from composer.loggers import LoggerDestination
from torch.utils.data import IterableDataset

from diffusion.config.fields import Plugin
from diffusion.config.loading import load_config
from diffusion.config.schema import Config
from diffusion.config.training import PluginsConfig
from diffusion.errors import ConfigurationError
from diffusion.plugins import IndexedDataset, build_plugin, check_plugins
from diffusion.train import build_train_data
from tests.tools.toys import ToyLatents

HERE = "tests.integration.test_run_plugins"
NUMBER = 5


class Own(Callback):
    def __init__(self, *, width: int = 1) -> None:
        self.width = width


class Faulty(Callback):
    def __init__(self) -> None:
        len(NUMBER)  # pyright: ignore[reportArgumentType]


class Endless:
    def __getitem__(self, index: int) -> int:
        return index


def five() -> int:
    return NUMBER


def test_what_is_asked_for_is_made():
    built = build_plugin(Plugin(path=f"{HERE}.Own", arguments={"width": 3}), "plugins.callbacks.0", Callback)
    assert isinstance(built, Own)
    assert built.width == 3
    data = build_plugin(Plugin(path="tests.tools.toys.ToyLatents"), "plugins.train_dataset", IndexedDataset)
    assert len(data) == 64


@pytest.mark.parametrize(
    ("path", "kind", "message"),
    [
        (
            "composer.callbacks.LRMonitor",
            Algorithm,
            "makes an object of type LRMonitor, but must make a composer.core.",
        ),
        ("composer.callbacks.LRMonitor", LoggerDestination, "composer.loggers.logger_destination.LoggerDestination"),
        (f"{HERE}.five", Callback, "makes an object of type int, but must make a composer.core.callback.Callback"),
        (f"{HERE}.Endless", IndexedDataset, "but must make a diffusion.plugins.IndexedDataset"),
    ],
)
def test_an_object_of_the_wrong_kind_is_told(path, kind, message):
    with pytest.raises(ConfigurationError) as caught:
        build_plugin(Plugin(path=path), "plugins.some.0", kind)
    assert f"plugins.some.0.path={path} " in str(caught.value)
    assert message in str(caught.value)


def test_an_error_within_the_users_code_keeps_its_traceback():
    with pytest.raises(TypeError, match="has no len"):
        build_plugin(Plugin(path=f"{HERE}.Faulty"), "plugins.callbacks.0", Callback)


def test_a_missing_import_within_the_users_module_is_not_taken_for_a_wrong_path(tmp_path, monkeypatch):
    (tmp_path / "own_module_of_a_test.py").write_text("import absent_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="absent_library"):
        check_plugins(Config(plugins=PluginsConfig(callbacks=[Plugin(path="own_module_of_a_test.Name")])))


def test_all_paths_and_arguments_are_checked_without_building():
    plugins = PluginsConfig(
        callbacks=[Plugin(path=f"{HERE}.Faulty"), Plugin(path="nope.B"), Plugin(path="Name"), Plugin(path=".a.B")],
        loggers=[Plugin(path=f"{HERE}.five", arguments={"absent": 1, "api_key": "abc"})],
        algorithms=[Plugin(path=f"{HERE}.own"), Plugin(path=f"{HERE}.NUMBER"), Plugin(path=f"{HERE}.absent.Name")],
        train_dataset=Plugin(path="tests.tools.toys.ToyLatent"),
    )
    with pytest.raises(ConfigurationError) as caught:
        check_plugins(Config(plugins=plugins))
    lines = str(caught.value).splitlines()
    assert lines[0] == "8 problems:"
    for line, message in zip(
        lines[1:],
        [
            "plugins.callbacks.1.path=nope.B: No module named 'nope'. Give package.module.Name, as it is imported in ",
            "plugins.callbacks.2.path=Name is not an import path: give package.module.Name",
            "plugins.callbacks.3.path=.a.B is not an import path: give package.module.Name",
            "plugins.loggers.0.arguments={'absent': 1, 'api_key': '***'}: got an unexpected keyword argument 'absent'. "
            f"{HERE}.five takes () -> int: give these",
            f"plugins.algorithms.0.path={HERE}.own: {HERE} has no own: did you mean Own?",
            f"plugins.algorithms.1.path={HERE}.NUMBER cannot be called: give a class or a function",
            f"plugins.algorithms.2.path={HERE}.absent.Name: No module named '{HERE}.absent'",
            "plugins.train_dataset.path=tests.tools.toys.ToyLatent: tests.tools.toys has no ToyLatent: "
            "did you mean ToyLatents?",
        ],
        strict=True,
    ):
        assert line.startswith(f"  - {message}")


class Streamed(IterableDataset):
    def __len__(self) -> int:
        return 64

    def __iter__(self):
        return iter(ToyLatents())


def test_a_data_set_without_numbers_is_refused():
    config = load_config("tests/tools/toy.yaml", [f"plugins.train_dataset.path={HERE}.Streamed"])
    with pytest.raises(ConfigurationError, match=r"plugins\.train_dataset .*Streamed.* has no __getitem__"):
        build_train_data(config)
