"""Objects of the user's own, by import path."""

import importlib
import sys
from pathlib import Path
from typing import Any

from diffusion.config.training import Plugin
from diffusion.errors import ConfigurationError


def build_plugin(plugin: Plugin, key: str) -> Any:
    """Import a class or function and call it. The folder that the command was started in is searched too.

    Args:
        plugin: import path and arguments.
        key: where it stands in the configuration, for messages.

    Raises:
        ConfigurationError: there is no such module or name, or it does not take these arguments.
    """
    module_name, _, name = plugin.path.rpartition(".")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        factory = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"{key}.path={plugin.path}: {error}. Give package.module.Name") from error
    try:
        return factory(**plugin.arguments)
    except TypeError as error:
        raise ConfigurationError(f"{key}.arguments={plugin.arguments}: {plugin.path} was refused: {error}") from error
