"""Ray, started for the time of one piece of work."""

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

from diffusion.errors import ConfigurationError, MachineError

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
"""Starts of a cluster on this machine: Ray gives its parts 30 s, which a busy machine may not."""


@contextlib.contextmanager
def ray_session(num_cpus: int) -> Iterator[Any]:
    """Use Ray: the cluster of `RAY_ADDRESS` or one that was started already, otherwise one on this machine.

    Args:
        num_cpus: of the cluster on this machine.

    Yields:
        The module `ray`, with its exceptions.

    Raises:
        ConfigurationError: Ray is not installed.
        MachineError: It cannot be started or reached.
    """
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise ConfigurationError("Ray is not installed; pip install -e '.[ray]'") from error
    ours = not ray.is_initialized()
    if ours:
        _start(ray, None if "RAY_ADDRESS" in os.environ else num_cpus)
    try:
        yield ray
    finally:
        if ours:
            ray.shutdown()


def _start(ray: Any, num_cpus: int | None) -> None:
    for left in reversed(range(_ATTEMPTS if num_cpus is not None else 1)):
        try:
            ray.init(num_cpus=num_cpus, log_to_driver=False, include_dashboard=False, logging_level=logging.WARNING)
        except Exception as error:  # Ray raises a bare Exception for a part that does not come up.
            ray.shutdown()
            reason = str(error).strip().split("\n")[0].rstrip(".")
            if not left:
                place = "on this machine" if num_cpus is not None else f"at RAY_ADDRESS={os.environ['RAY_ADDRESS']}"
                raise MachineError(
                    f"Ray cannot be used {place}: {reason}. Free CPU time and memory, or choose the engine `processes`"
                ) from error
            logger.warning("Ray did not start (%s); it is tried again", reason)
        else:
            return
