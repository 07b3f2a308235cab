"""Objects of the user's own, by import path."""

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from diffusion.config.fields import Plugin
from diffusion.config.schema import Config
from diffusion.config.secrets import redact
from diffusion.errors import ConfigurationError, raise_all, similar_names

Built = TypeVar("Built")


@runtime_checkable
class IndexedDataset(Protocol):
    """A torch dataset with a length, in place of the streams (`plugins.train_dataset`)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


def build_plugin(plugin: Plugin, key: str, kind: type[Built] = object) -> Built:
    """Import a class or function and call it.

    The key in the configuration is for messages; the result must have a type, or fit a `runtime_checkable` protocol.

    Raises:
        ConfigurationError: there is no such module or name, it does not take these arguments, or its result has another
            type. Errors within the user's code pass.
    """
    built = import_plugin(plugin, key)(**plugin.arguments)
    if not isinstance(built, kind):
        raise ConfigurationError(
            f"{key}.path={plugin.path} makes an object of type {type(built).__name__}, but must make a "
            f"{kind.__module__}.{kind.__qualname__}. Name another class, or another key for it"
        )
    return built


def build_plugins(plugins: Sequence[Plugin], key: str, kind: type[Built]) -> list[Built]:
    """Build the plug-ins of a list, as `build_plugin` does."""
    return [build_plugin(plugin, f"{key}.{number}", kind) for number, plugin in enumerate(plugins)]


def import_plugin(plugin: Plugin, key: str) -> Callable[..., Any]:
    """Import a class or function, also from the working directory, and compare the arguments with its signature.

    Raises:
        ConfigurationError: there is no such module or name, or it does not take these arguments.
    """
    where = f"{key}.path={plugin.path}"
    module_name, _, name = plugin.path.rpartition(".")
    if not (module_name and all(part.isidentifier() for part in plugin.path.split("."))):
        raise ConfigurationError(f"{where} is not an import path: give package.module.Name")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # An import within the user's module has failed.
        raise ConfigurationError(f"{where}: {error}. Give package.module.Name, as it is imported in {here}") from error
    if not hasattr(module, name):
        meant = similar_names(name, vars(module))
        remedy = f"did you mean {' or '.join(meant)}?" if meant else "give package.module.Name"
        raise ConfigurationError(f"{where}: {module_name} has no {name}: {remedy}")
    factory = getattr(module, name)
    if not callable(factory):
        raise ConfigurationError(f"{where} cannot be called: give a class or a function")
    try:
        signature = inspect.signature(factory)
    except ValueError:  # Some builtins have none.
        return factory
    try:
        signature.bind(**plugin.arguments)
    except TypeError as error:
        raise ConfigurationError(
            f"{key}.arguments={redact(plugin.arguments)}: {error}. {plugin.path} takes {signature}: give these"
        ) from error
    return factory


def check_plugins(config: Config) -> None:
    """Import all plug-ins of a run without building them; a ConfigurationError with all mistakes."""
    plugins, groups = config.plugins, {"model.ingredients": config.model.ingredients}
    groups |= {f"plugins.{group}": getattr(plugins, group) for group in ("callbacks", "loggers", "algorithms")}
    named = {f"{group}.{number}": one for group, several in groups.items() for number, one in enumerate(several)}
    if plugins.train_dataset is not None:
        named["plugins.train_dataset"] = plugins.train_dataset
    problems = []
    for key, plugin in named.items():
        try:
            import_plugin(plugin, key)
        except ConfigurationError as error:
            problems.append(str(error))
    raise_all(ConfigurationError, problems)
