"""Where a run goes on when it is started again."""

import logging
from pathlib import Path

from composer.utils import dist

from diffusion.checkpoints import check_checkpoint, find_newest, remove_half_written
from diffusion.config.schema import Config
from diffusion.config.training import Parallelism
from diffusion.errors import ConfigurationError, DataError, MachineError
from diffusion.launch import agree

log = logging.getLogger(__name__)


def find_resumption(config: Config, checkpoints: Path) -> str | None:
    """The newest checkpoint of a run that is whole and runs no code when it is loaded; None for a new run.

    Rank 0 decides; the first rank of each other node looks at the same checkpoint again. To be called by all ranks.

    Args:
        config: the configuration of the run.
        checkpoints: its `checkpoints` folder.

    Raises:
        ConfigurationError: the checkpoint was written with another parallelism.
        DataError: it would run code, or all checkpoints are damaged.
        MachineError: what was left half-written cannot be removed.
    """
    found: list[str | None] = [agree(lambda: _find(config, checkpoints) if dist.get_global_rank() == 0 else None)]
    dist.broadcast_object_list(found)
    if (path := found[0]) is None:
        return None
    agree(lambda: check_checkpoint(Path(path)) if _is_first_of_another_node() else None)
    if dist.get_global_rank() == 0:
        log.info("continuing from %s", path)
    return path


def _is_first_of_another_node() -> bool:
    return dist.get_local_rank() == 0 and dist.get_global_rank() != 0


def _find(config: Config, checkpoints: Path) -> str | None:
    try:
        remove_half_written(checkpoints)
    except OSError as error:
        raise MachineError(f"{error.filename} cannot be removed: {error.strerror}. Remove it") from error
    if not config.trainer.autoresume:
        return None
    newest = find_newest(checkpoints, check_checkpoint)
    if newest is None:
        if checkpoints.is_dir() and any(checkpoints.glob("ep*-ba*")):
            raise DataError(
                f"no checkpoint in {checkpoints} is whole, and the run would begin anew. Remove them if that is meant, "
                "or put a good one back"
            )
        return None
    if newest.is_dir() != (config.trainer.parallelism == Parallelism.fsdp):
        raise ConfigurationError(
            f"trainer.parallelism={config.trainer.parallelism.value} cannot continue {newest}, which "
            f"{'fsdp' if newest.is_dir() else 'ddp'} wrote: set it back, or choose another run_name"
        )
    return str(newest)
