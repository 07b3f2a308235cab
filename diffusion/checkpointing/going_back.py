"""Giving up checkpoints that are not to be continued, because a later loss was no number or too high."""

import logging
from pathlib import Path

from composer.utils import dist

from diffusion.checkpointing.reading import batch_of, list_checkpoints, remove_checkpoint
from diffusion.checkpointing.resumption import CheckpointPlaces
from diffusion.checkpointing.rollbacks import Rollback, mark_done, read_pending
from diffusion.distributed import agree
from diffusion.errors import MachineError

log = logging.getLogger(__name__)


def go_back(places: CheckpointPlaces, *, keeps_all: bool) -> None:
    """Carry out the rollback that an earlier start has ordered, if any. To be called by all ranks.

    Args:
        places: where the checkpoints of the run are.
        keeps_all: no checkpoint has ever been removed, so that without one before the limit the run begins anew. Else
            the oldest one stays, though it is after the limit.

    Raises:
        MachineError: a checkpoint cannot be removed.
    """
    pending: list[Rollback | None] = [read_pending(places.run) if dist.get_global_rank() == 0 else None]
    dist.broadcast_object_list(pending)
    if (rollback := pending[0]) is None:
        return
    agree(lambda: _remove_local(places, rollback.limit, keeps_all))
    agree(
        lambda: _remove_remote(places, rollback.limit, keeps_all) if dist.get_global_rank() == 0 else None,
        takes_long=True,
    )
    if dist.get_global_rank() == 0:
        mark_done(places.run, rollback)


def _remove_local(places: CheckpointPlaces, limit: int, keeps_all: bool) -> None:
    """Rank 0, and where checkpoints are uploaded from each node, the first rank of each."""
    if dist.get_global_rank() != 0 and (places.remote is None or dist.get_local_rank() != 0):
        return
    present = list_checkpoints(places.folder)
    try:
        for path in _after(present, limit, keeps_all or places.remote is not None):
            log.warning("removing %s, which was saved too shortly before a wrong loss or after it", path)
            remove_checkpoint(path)
    except OSError as error:
        raise MachineError(f"{error.filename} cannot be removed: {error.strerror}. Remove it") from error


def _remove_remote(places: CheckpointPlaces, limit: int, keeps_all: bool) -> None:
    if places.remote is None:
        return
    present = {Path(found.name): found for found in places.remote.present()}
    for name in _after(list(present), limit, keeps_all):
        log.warning("removing %s, which was saved too shortly before a wrong loss or after it", name)
        places.remote.remove(present[name])


def _after(checkpoints: list[Path], limit: int, keeps_all: bool) -> list[Path]:
    """Those of more steps than the limit; newest first, so that an interruption leaves none after a gap."""
    given_up = [path for path in checkpoints if batch_of(path) > limit]
    if len(given_up) == len(checkpoints) and not keeps_all:
        given_up = given_up[1:]
    return given_up[::-1]
