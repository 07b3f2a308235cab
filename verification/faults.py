"""What can go wrong around a run, done on purpose to its processes, checkpoints, batches, disks and store."""

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from diffusion.checkpointing.layout import list_checkpoints
from diffusion.operations.events import read_events
from diffusion.operations.heartbeats import HeartbeatRecord, read_heartbeats
from diffusion.operations.processes import is_alive, kill, tree
from verification.store import S3Server

ROOM_LEFT = 1_000_000
"""Bytes that a file may have on the disk that is made full: logs fit, checkpoints of the tiny recipe do not."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A run that faults are done to."""

    run: Path
    """The run folder."""

    poison: Path
    """The request that `disturbance.PoisonBatch` looks for."""

    store: S3Server | None = None
    """The store that the run's data comes from."""

    data: Path | None = None
    """Where the store keeps that data."""

    cache: Path | None = None
    """Where the run keeps what it has downloaded."""

    outage: float = 5.0
    """Seconds for which the store stays out of order."""

    def heartbeats(self) -> list[HeartbeatRecord]:
        """Last heartbeats of the ranks."""
        return read_heartbeats(self.run / "heartbeats")

    def num_ends(self) -> int:
        """How often the job has ended."""
        return sum(event["event"] == "ended" for event in read_events(self.run))

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank."""
        heartbeats = self.heartbeats()
        return psutil.Process(heartbeats[number % len(heartbeats)].pid)

    def kill_job(self) -> None:
        """End the launcher and all ranks at once, as when the machine loses power."""
        started = [event["processes"] for event in read_events(self.run) if event["event"] == "started"]
        kill(tree([*started[-1], *(heartbeat.pid for heartbeat in self.heartbeats())]))


def _kill_rank(scene: Scene, rank: int) -> None:
    scene.rank(rank).kill()


def _kill_job(scene: Scene, rank: int) -> None:
    scene.kill_job()


def _terminate(scene: Scene, rank: int) -> None:
    scene.rank(rank).terminate()


def _freeze(scene: Scene, rank: int) -> None:
    scene.rank(rank).suspend()


def _fill_disk(scene: Scene, rank: int) -> None:
    """Let every write of a rank fail that makes a file longer than a megabyte."""
    scene.rank(rank).rlimit(psutil.RLIMIT_FSIZE, (ROOM_LEFT, psutil.RLIM_INFINITY))


def _poison(scene: Scene, rank: int) -> None:
    scene.poison.touch()


def _truncate_checkpoint(scene: Scene, rank: int) -> None:
    """Cut the newest checkpoint, and end the job, which then has to do without it."""
    scene.kill_job()
    if (file := _newest_file(scene)) is not None:
        os.truncate(file, file.stat().st_size // 2)


def _flip_bit(scene: Scene, rank: int) -> None:
    """Change a bit in the middle of the newest checkpoint, and end the job."""
    scene.kill_job()
    if (file := _newest_file(scene)) is not None:
        _flip(file)


def _replace_node(scene: Scene, trouble: Callable[[S3Server], None], end: Callable[[S3Server], None]) -> None:
    """Let the job start on a machine with an empty cache while the store is out of order.

    It is so until a while after the job has failed because of it, or has come to wait for batches.
    """
    assert scene.store is not None
    assert scene.cache is not None
    num_ends = scene.num_ends() + 1
    scene.kill_job()
    for file in [path for path in scene.cache.rglob("*") if path.is_file()]:
        file.unlink(missing_ok=True)
    store = scene.store
    trouble(store)

    def restore() -> None:
        pause = threading.Event()
        while scene.num_ends() <= num_ends and not any(one.step >= 0 and is_alive(one) for one in scene.heartbeats()):
            pause.wait(0.1)
        pause.wait(scene.outage)
        end(store)

    threading.Thread(target=restore, daemon=True).start()


def _kill_store(scene: Scene, rank: int) -> None:
    _replace_node(scene, S3Server.kill, S3Server.start)


def _delay_downloads(scene: Scene, rank: int) -> None:
    _replace_node(scene, S3Server.freeze, S3Server.thaw)


def _corrupt_downloads(scene: Scene, rank: int) -> None:
    assert scene.data is not None
    files = [path for path in scene.data.rglob("*.mds*_object") if path.is_file()]
    assert files, f"no shards in {scene.data}"

    def flip_all(store: S3Server) -> None:
        for file in files:
            _flip(file)

    _replace_node(scene, flip_all, flip_all)


FAULTS: Mapping[str, Callable[[Scene, int], None]] = {
    "kill_rank": _kill_rank,
    "kill_job": _kill_job,
    "terminate": _terminate,
    "freeze": _freeze,
    "fill_disk": _fill_disk,
    "poison": _poison,
    "truncate_checkpoint": _truncate_checkpoint,
    "flip_bit": _flip_bit,
    "kill_store": _kill_store,
    "delay_downloads": _delay_downloads,
    "corrupt_downloads": _corrupt_downloads,
}
"""By name; each is given a scene and the rank that is hit."""

STORE_FAULTS = ("kill_store", "delay_downloads", "corrupt_downloads")
"""Those that need a store."""


def _newest_file(scene: Scene) -> Path | None:
    """The largest file of the newest checkpoint."""
    checkpoints = list_checkpoints(scene.run / "checkpoints")
    files = [path for path in checkpoints[-1].rglob("*") if path.is_file()] if checkpoints else []
    return max(files, key=lambda path: path.stat().st_size, default=None)


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
