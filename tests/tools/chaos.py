"""Let a supervised run of the tiny recipe suffer faults at random times, and compare it with an undisturbed run.

    python -m tests.tools.chaos [key=value ...] [--faults 20] [--kinds KIND ...] [--seed 0] [--out runs/chaos]

Ranks and whole jobs are killed, terminated and frozen, disks filled, checkpoints truncated and changed, batches made
NaN. Where `s3rver` is installed, the store of the data is killed and frozen, and its shards are damaged, while a job
starts with an empty cache. Afterwards the run must have reached its end by itself, with the same draws, losses and
weights. Exit code 1 if not.
"""

import contextlib
import functools
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from composer import Callback, Logger, State
from composer.utils import dist

from diffusion.checkpointing.layout import list_checkpoints
from diffusion.datasets.batch import BatchKey
from diffusion.errors import ConfigurationError
from diffusion.launch import CommandParser, run_command
from diffusion.operations.events import read_events
from diffusion.operations.heartbeats import HeartbeatRecord, read_heartbeats
from diffusion.operations.processes import is_alive, kill, tree
from diffusion.reports.tables import markdown_table
from tests.tools.forking import ForkingServer, launcher
from tests.tools.runs import flip_bit, starts
from tests.tools.s3_server import S3Server, find_s3rver, upload
from verification.runs import (
    ROOT,
    Recipe,
    VerificationError,
    compare,
    format_table,
    make_data,
    plugin,
    read_outcome,
)
from verification.ways import RunSpec

log = logging.getLogger(__name__)

NUM_RANKS = 2
GAP = 10
"""Steps between two faults, at most."""

TIMEOUT = 900.0
"""Seconds within which a run must recover from a fault."""

FILE_LIMIT = 1_000_000
"""Bytes of a file on the disk that is made full: logs fit, checkpoints of the tiny recipe do not."""

OUTAGE = 5.0
"""Seconds for which the store stays out of order."""

SETTINGS = (
    "model.network={block_out_channels: [16, 32], norm_num_groups: 4, attention_head_dim: [2, 2]}",
    "data.resolution=32",
    "data.global_batch_size=16",
    "data.validate_hash=xxh64",
    "data.download_attempts=2",
    "data.download_timeout=3",
    "validation=null",
    "samples.prompts=[]",
    "schedule.warmup=10ba",
    "trainer.save_interval=5ba",
    "trainer.progress_bar=false",
    "algorithms.ema={start: 0.3dur, decays: [0.9]}",
    "operations.supervision={hang_floor: 15, pause_timeout: 300, first_pause: 0.5, longest_pause: 10}",
    "operations.supervision.check_timeout=null",
)

# Callbacks of the disturbed run


class PoisonBatch(Callback):
    """Makes the latents of the last rank's batch NaN when a file appears, which is removed."""

    def __init__(self, request: str) -> None:
        self.request = Path(request)

    def after_dataloader(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == dist.get_world_size() - 1 and self.request.exists():
            self.request.unlink()
            mean = state.batch[BatchKey.LATENT_MEAN]
            state.batch[BatchKey.LATENT_MEAN] = torch.full_like(mean, torch.nan)


class HoldAt(Callback):
    """Keeps the last rank, for which the others wait, at a step until one of some files exists."""

    def __init__(self, step: int, releases: Sequence[str]) -> None:
        self.step, self.releases = step, [Path(each) for each in releases]

    def before_dataloader(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == dist.get_world_size() - 1:
            while state.timestamp.batch.value == self.step and not any(each.exists() for each in self.releases):
                time.sleep(0.05)


# Faults


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A run that faults are done to."""

    run: Path
    """The run folder."""

    poison: Path
    """The request of `PoisonBatch`."""

    cache: Path
    """`data.local` of a run whose data comes from a store."""

    store: S3Server | None

    def heartbeats(self) -> list[HeartbeatRecord]:
        """Last heartbeats of the ranks."""
        return read_heartbeats(self.run / "heartbeats")

    def step(self) -> int:
        """Steps that the run has done, as its last start sees it; -1 before its first one."""
        return min((one.step if one.num_done else -1 for one in self.heartbeats()), default=-1)

    def ends(self) -> list[dict[str, Any]]:
        """The supervisor's events of each end of the job."""
        return [event for event in read_events(self.run) if event["event"] == "ended"]

    def starts(self) -> list[int]:
        """The first step of each start of the training."""
        return starts(self.run, "step")

    def kill_job(self) -> None:
        """End the launcher and all ranks at once, as when the machine loses power."""
        kill(self.job())

    def job(self) -> list[psutil.Process]:
        """Processes of the launcher and all ranks."""
        started = [event["processes"] for event in read_events(self.run) if event["event"] == "started"]
        return tree([*started[-1], *(heartbeat.pid for heartbeat in self.heartbeats())])

    def damage_checkpoint(self, damage: Callable[[Path], None]) -> None:
        """Freeze the job, damage the largest file of the newest checkpoint, and end the job."""
        job = self.job()
        for process in job:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        checkpoints = list_checkpoints(self.run / "checkpoints")
        files = [path for path in checkpoints[-1].rglob("*") if path.is_file()] if checkpoints else []
        if files:
            damage(max(files, key=lambda path: path.stat().st_size))
        kill(job)

    def replace_node(self, begin: Callable[[S3Server], None], end: Callable[[S3Server], None]) -> None:
        """Start the job with an empty cache while the store is out of order.

        The store recovers a while after the job has failed because of it, or waits for batches.
        """
        store, num_ends = self.store, len(self.ends()) + 1
        assert store is not None
        self.kill_job()
        for file in [path for path in self.cache.rglob("*") if path.is_file()]:
            file.unlink(missing_ok=True)
        begin(store)

        def restore() -> None:
            while len(self.ends()) <= num_ends and not any(
                one.step >= 0 and is_alive(one) for one in self.heartbeats()
            ):
                time.sleep(0.1)
            time.sleep(OUTAGE)
            end(store)

        threading.Thread(target=restore, daemon=True).start()


def flip_shards(store: S3Server) -> None:
    """Change a bit of each shard, or change it back."""
    for file in store.path("s3://chaos").rglob("*.mds*_object"):
        flip_bit(file)


FAULTS: Mapping[str, Callable[[Scene, psutil.Process], object]] = {
    "kill_rank": lambda scene, rank: rank.kill(),
    "kill_job": lambda scene, rank: scene.kill_job(),
    "terminate": lambda scene, rank: rank.terminate(),
    "freeze": lambda scene, rank: rank.suspend(),
    "fill_disk": lambda scene, rank: rank.rlimit(psutil.RLIMIT_FSIZE, (FILE_LIMIT, psutil.RLIM_INFINITY)),
    "poison": lambda scene, rank: scene.poison.touch(),
    "truncate_checkpoint": lambda scene, rank: scene.damage_checkpoint(
        lambda file: os.truncate(file, file.stat().st_size // 2)
    ),
    "flip_bit": lambda scene, rank: scene.damage_checkpoint(flip_bit),
    "kill_store": lambda scene, rank: scene.replace_node(S3Server.kill, S3Server.start),
    "delay_downloads": lambda scene, rank: scene.replace_node(S3Server.freeze, S3Server.thaw),
    "corrupt_downloads": lambda scene, rank: scene.replace_node(flip_shards, flip_shards),
}
"""By name; each is given a scene and the rank that is hit."""

STORE_FAULTS = ("kill_store", "delay_downloads", "corrupt_downloads")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A planned fault: its kind, the earliest step, seconds after that step, and the rank that is hit."""

    kind: str
    step: int
    delay: float
    rank: int


def plan(kinds: Sequence[str], num_faults: int, seed: int) -> list[Fault]:
    """Draw faults: each kind about equally often, in random order, at random times."""
    chance = random.Random(f"chaos {seed}")
    drawn: list[str] = []
    while len(drawn) < num_faults:
        drawn += chance.sample(list(kinds), min(len(kinds), num_faults - len(drawn)))
    chance.shuffle(drawn)
    faults, step = [], 0
    for kind in drawn:
        step += chance.randint(GAP - GAP // 2, GAP)
        faults.append(Fault(kind=kind, step=step, delay=chance.random() / 2, rank=chance.randrange(NUM_RANKS)))
    return faults


class Injector:
    """Injects faults into a run while it is supervised.

    Args:
        scene: The run.
        is_over: Whether the supervisor has ended.
    """

    def __init__(self, scene: Scene, is_over: Callable[[], bool]) -> None:
        self.scene, self.is_over = scene, is_over
        self.furthest = 0

    def inject(self, fault: Fault) -> list[str]:
        """Inject a fault and wait until the run has recovered; return the cells of its row.

        Raises:
            VerificationError: The run ended before, or does not recover.
        """
        scene, furthest = self.scene, max(fault.step, self.furthest)
        self._wait(lambda: scene.step() >= furthest, f"step {furthest}, for {fault.kind}")
        time.sleep(fault.delay)
        num_starts, num_ends, began = len(scene.starts()), len(scene.ends()), time.monotonic()
        log.info("%s at step %d", fault.kind, scene.step())
        heartbeats = scene.heartbeats()
        FAULTS[fault.kind](scene, psutil.Process(heartbeats[fault.rank % len(heartbeats)].pid))
        self._wait(lambda: len(scene.starts()) > num_starts, f"another start after {fault.kind}")
        hit = scene.ends()[num_ends]
        self.furthest = max(self.furthest, hit["step"])
        self._wait(lambda: scene.step() >= self.furthest, f"step {self.furthest} after {fault.kind}")
        repeated, seconds = max(0, hit["step"] - scene.starts()[num_starts]), time.monotonic() - began
        row = [fault.kind, str(hit["step"]), str(repeated), f"{seconds:.0f}", hit["reason"].partition(". ")[0][:90]]
        log.info("recovered: %s", ", ".join(row))
        return row

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            if self.is_over() or time.monotonic() > deadline:
                reason = "the job has ended" if self.is_over() else f"{TIMEOUT:g} s have passed"
                raise VerificationError(f"{self.scene.run}: {reason} before {what}")
            time.sleep(0.05)


# The command


def main() -> None:
    """Make data, run undisturbed, run disturbed, compare."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("overrides", nargs="*", help="key=value, for both runs")
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help="which; docs/operations.md describes them")
    parser.add_argument("--seed", type=int, default=0, help="of kinds and times")
    parser.add_argument("--server", type=Path, help="socket of a process that forks ranks; by default one is started")
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"), help="replaced if it exists")
    arguments = parser.parse_args()
    possible = [kind for kind in FAULTS if find_s3rver() or kind not in STORE_FAULTS]
    if unknown := set(arguments.kinds or ()) - set(possible):
        raise ConfigurationError(f"--kinds {' '.join(unknown)}: on this machine there are {', '.join(possible)}")
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    log.setLevel(logging.INFO)
    out: Path = arguments.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    data = make_data(out / "data", 32)
    faults = plan(arguments.kinds or possible, arguments.faults, arguments.seed)
    with contextlib.ExitStack() as stack:
        address = arguments.server
        if address is None:
            server = ForkingServer(environment={**os.environ, "PYTHONWARNINGS": "ignore"})
            stack.callback(server.close)
            server.await_start()
            address = server.address
        recipe = Recipe(
            yaml=ROOT / "yamls/tiny/phase1.yaml",
            overrides=(*SETTINGS, f"model.vae={data / 'vae'}", *arguments.overrides),
            num_steps=faults[-1].step + 2 * GAP,
            root=out,
            launcher=functools.partial(launcher, address),
        )
        compare_runs(recipe, faults, data)


def compare_runs(recipe: Recipe, faults: Sequence[Fault], data: Path) -> None:
    """Run undisturbed and disturbed, and print the faults and the comparison; SystemExit if the runs differ."""
    spec, out = RunSpec(world_size=NUM_RANKS, workers=1, buckets="several"), recipe.root
    folders, settings = [f"data.local={data / 'latents/train'}"], {**os.environ, "PYTHONWARNINGS": "ignore"}
    with (out / "undisturbed.txt").open("wb") as file:
        command = recipe.command(spec, out / "undisturbed", NUM_RANKS, folders)
        subprocess.run(command, stdout=file, stderr=file, env=settings, check=True)
    store, s3rver = None, find_s3rver()
    if s3rver is not None:
        store = S3Server(out / "store", s3rver)
        store.start("chaos")
        os.environ.update(store.environment)
        upload(data / "latents", "s3://chaos")
        folders = ["data.remote=s3://chaos/train", f"data.local={out / 'cache'}"]
        settings |= store.environment
    scene = Scene(run=out / "disturbed", poison=out / "poison", cache=out / "cache", store=store)
    poison = plugin("tests.tools.chaos.PoisonBatch", request=f"'{scene.poison}'")
    release, last = out / "release", faults[-1].step + GAP
    hold = plugin("tests.tools.chaos.HoldAt", step=last, releases=f"['{release}', '{scene.poison}']")
    command = [sys.executable, str(ROOT / "scripts/supervise.py"), "--"]
    command += recipe.command(spec, scene.run, NUM_RANKS, folders, poison, hold)
    with (out / "log.txt").open("wb") as file:
        supervisor = subprocess.Popen(command, stdout=file, stderr=file, env=settings)
    try:
        injector = Injector(scene, lambda: supervisor.poll() is not None)
        rows = [injector.inject(fault) for fault in faults]
        release.touch()
        code = supervisor.wait(600)
    finally:
        if supervisor.poll() is None:
            supervisor.terminate()
            supervisor.wait(120)
        if store is not None:
            store.kill()
    rows.append([f"{len(rows)} faults", "", *(str(sum(int(row[i]) for row in rows)) for i in (2, 3)), ""])
    print(markdown_table(["fault", "at step", "steps repeated", "seconds lost", "how the job ended"], rows))
    if code:
        raise SystemExit(f"the supervisor ended with exit code {code}: see {out / 'log.txt'}")
    reference = read_outcome(recipe, spec, out / "undisturbed")
    comparison = compare(read_outcome(recipe, spec, scene.run), reference)
    print(format_table([comparison]))
    if not comparison.is_equal or comparison.loss or comparison.weights or comparison.average:
        raise SystemExit("the disturbed run differs from the undisturbed one")
    print(f"{len(faults)} faults: draws, losses and weights of all {recipe.num_steps} steps are equal to the bit")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
