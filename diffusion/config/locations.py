"""Keys whose values may differ between machines: locations of data and weights, and a machine's own settings."""

import re

from omegaconf import MISSING

from diffusion.config.fields import CHECK, LocationLimits
from diffusion.config.keys import find_field
from diffusion.config.loading import leaves, missing_keys, to_dict
from diffusion.config.schema import Config

_OF_A_MACHINE = re.compile(
    r"output_folder|operations\.heartbeat_folder|data\.(num_workers|prefetch_factor|predownload|cache_limit|download_.*)"
    r"|(data|validation)\.streams\.\d+\.(endpoint_url|profile)|loggers\.prometheus(\..*)?"
)
"""Keys that may differ between machines, beside locations: the results do not depend on them."""


def is_location(key: str) -> bool:
    """Return whether a key is the location of data or weights, which a dry run does not need."""
    field, _ = find_field(Config, key)
    return field is not None and isinstance(field.metadata.get(CHECK), LocationLimits)


def missing_locations(config: Config) -> dict[str, str]:
    """Locations that are still `???`, and their meanings."""
    return {key: doc for key, doc in missing_keys(config).items() if is_location(key)}


def weight_locations(config: Config) -> dict[str, str]:
    """Locations of the weights that a run reads at its start, by key; also hub names."""
    named = {key: value for key, value in leaves(to_dict(config)) if is_location(key) and value not in (None, MISSING)}
    return {key: value for key, value in named.items() if not key.startswith(("data.", "validation."))}


def common_settings(config: Config) -> dict[str, str]:
    """Return the values that all ranks have in common, as text by key: all but what may be a machine's own."""
    return {
        key: repr(value)
        for key, value in leaves(to_dict(config))
        if not is_location(key) and not _OF_A_MACHINE.fullmatch(key)
    }
