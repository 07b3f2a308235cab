"""What can be removed of runs that are not at work: old checkpoints, caches of finished runs, dead shared memory."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from diffusion.checkpointing.find import is_complete
from diffusion.checkpointing.layout import list_checkpoints, remove_checkpoint, superseded
from diffusion.checkpointing.resume import FINISHED
from diffusion.config.checks import num_batches
from diffusion.config.quantities import parse_time
from diffusion.config.schema import Config
from diffusion.config.stores import is_store
from diffusion.datasets.cache import move_unused_cache
from diffusion.datasets.streams import StreamLocation, locate_streams
from diffusion.errors import MachineError
from diffusion.operations.checks.opening import sections
from diffusion.operations.checks.readings import SHARED_MEMORY, find_leftovers
from diffusion.operations.runs import is_live, read_supervision
from diffusion.storage import is_url

REMOVED = ".removed"
"""What a cache is renamed to before it is removed, so that no job finds half of it."""


@dataclass(frozen=True, kw_only=True)
class Removable:
    """Something that nobody needs any more."""

    path: Path
    why: str
    num_bytes: int
    remove: Callable[[], None]


def find_removable(run: Path, config: Config, newest: int | None) -> Iterator[Removable]:
    """What can be removed of one run; nothing of one that is at work.

    Args:
        run: the run folder.
        config: its configuration.
        newest: so many whole checkpoints stay, and those of `trainer.keep_every`; None: `trainer.keep_checkpoints`.
    """
    if is_live(run, config):
        return
    yield from _checkpoints(run, config, newest)
    if (run / FINISHED).is_file():
        yield from _caches(run, config)


def _checkpoints(run: Path, config: Config, newest: int | None) -> Iterator[Removable]:
    settings = config.trainer
    newest = settings.keep_checkpoints if newest is None else newest
    place = settings.checkpoint_folder
    if newest < 1 or (place is not None and is_store(place)):
        return
    every = None
    if settings.keep_every is not None:
        time = parse_time(settings.keep_every, "trainer.keep_every")
        every = time.in_batches(num_batches=num_batches(config), global_batch_size=config.data.global_batch_size)
    folder = _absolute(run, Path(place).expanduser()) if place is not None else run / "checkpoints"
    present = list_checkpoints(folder) if folder is not None else []
    for path in superseded(present, newest=newest, every=every, is_whole=is_complete):
        why = f"checkpoint, {newest} newer whole ones stay"
        yield Removable(path=path, why=why, num_bytes=_size(path), remove=lambda path=path: remove_checkpoint(path))


def _caches(run: Path, config: Config) -> Iterator[Removable]:
    for _, section in sections(config):
        for location in locate_streams(section.remote, section.local, section.streams or []):
            cache = _cache(run, location)
            if cache is None:
                continue
            rest, why = _renamed(cache), "cache of a finished run"
            if rest.is_dir():
                yield Removable(path=rest, why=why, num_bytes=_size(rest), remove=lambda rest=rest: shutil.rmtree(rest))
            if cache.is_dir():
                yield Removable(
                    path=cache, why=why, num_bytes=_size(cache), remove=lambda cache=cache: _remove_cache(cache)
                )


def _cache(run: Path, location: StreamLocation) -> Path | None:
    """The folder that a run has filled from a remote; None if it may be the original."""
    cache = _absolute(run, location.local)
    if location.remote is None or (not is_url(location.remote) and _absolute(run, location.remote) in (None, cache)):
        return None
    return cache


def _absolute(run: Path, place: Path | str) -> Path | None:
    """A place in a run's configuration; None if it is relative, and nobody has noted where the run was started."""
    supervision = read_supervision(run)
    path = Path(supervision.folder, place) if supervision is not None else Path(place)
    return path.resolve() if path.is_absolute() else None


def find_dead_memory() -> list[Removable]:
    """Shared memory of this user that no process has open."""
    return [
        Removable(
            path=SHARED_MEMORY / leftover.name,
            why="shared memory of a process that has ended",
            num_bytes=leftover.num_bytes,
            remove=lambda name=leftover.name: _remove(SHARED_MEMORY / name),
        )
        for leftover in find_leftovers()
    ]


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _remove_cache(cache: Path) -> None:
    away = _renamed(cache)
    if not move_unused_cache(cache, away):
        raise MachineError(f"{cache} is in use by a running job, and stays")
    shutil.rmtree(away)


def _renamed(cache: Path) -> Path:
    return cache.with_name(cache.name + REMOVED)


def _size(path: Path) -> int:
    if not path.is_dir():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def remove_all(removables: Sequence[Removable]) -> list[str]:
    """Remove them; return what could not be removed, and why."""
    failures = []
    for removable in removables:
        try:
            removable.remove()
        except (OSError, MachineError) as error:
            failures.append(f"{removable.path}: {error}")
    return failures
