"""Let a supervised run of the tiny recipe suffer faults at random times, and compare it with an undisturbed run.

Ranks and whole jobs are killed, terminated and frozen, disks filled, checkpoints cut and changed, batches made NaN;
and, where `s3rver` is there, the store that the data comes from is killed, frozen, and its shards are damaged while a
job starts with an empty cache. Afterwards the run must have reached its end by itself, with the same draws, losses and
weights. Exit code 1 if not.
"""

import argparse
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diffusion import storage
from diffusion.errors import ConfigurationError
from diffusion.launch import CommandParser, run_command

if TYPE_CHECKING:
    from verification.forking import Launcher

ROOT = Path(__file__).resolve().parent.parent
NUM_RANKS = 2
GAP = 10
"""Steps between two faults, at most."""

SETTINGS = (
    "model.unet={block_out_channels: [16, 32], norm_num_groups: 4, attention_head_dim: [2, 2]}",
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


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("overrides", nargs="*", help="key=value, for both runs")
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help="which; docs/operations.md says what each is")
    parser.add_argument("--seed", type=int, default=0, help="of kinds and times")
    parser.add_argument(
        "--composer", action="store_true", help="start ranks as usual, instead of forking them, which is quicker"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"), help="replaced if it exists")
    return parser.parse_args()


def main() -> None:
    """Make data, run undisturbed, run disturbed, compare."""
    arguments = parse_arguments()
    from verification.faults import FAULTS, STORE_FAULTS
    from verification.forking import launchers
    from verification.store import find_s3rver

    possible = [kind for kind in FAULTS if find_s3rver() or kind not in STORE_FAULTS]
    if unknown := set(arguments.kinds or ()) - set(possible):
        raise ConfigurationError(f"--kinds {' '.join(unknown)}: on this machine there are {', '.join(possible)}")
    with launchers(composer=arguments.composer) as launcher:
        overcome(arguments, arguments.kinds or possible, launcher)


def overcome(arguments: argparse.Namespace, kinds: Sequence[str], launcher: "Launcher") -> None:
    """Make data, run undisturbed, run disturbed, compare."""
    from verification.chaos import Chaos, format_overcome, plan
    from verification.compare import compare, format_table
    from verification.data import make_data
    from verification.faults import Scene
    from verification.plan import RunSpec
    from verification.runner import Recipe, overrides_of, plugin, read_outcome, trace_plugin
    from verification.store import S3Server, find_s3rver

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("verification").setLevel(logging.INFO)
    s3rver = find_s3rver()
    out: Path = arguments.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    data = make_data(out / "data", 32)
    faults = plan(
        kinds,
        arguments.faults,
        num_ranks=NUM_RANKS,
        seed=arguments.seed,
        gap=GAP,
    )
    recipe = Recipe(
        yaml=ROOT / "yamls/tiny/phase1.yaml",
        overrides=(*SETTINGS, f"model.vae={data / 'vae'}", *arguments.overrides),
        num_steps=faults[-1].step + 2 * GAP,
        root=out,
        program=ROOT / "run.py",
    )
    spec = RunSpec(world_size=NUM_RANKS, workers=1, buckets="several")
    program = [*launcher(NUM_RANKS), str(recipe.program), str(recipe.yaml)]

    def overrides(folder: Path, places: Sequence[str], *plugins: str) -> list[str]:
        own = overrides_of(recipe, spec, [*places, f"output_folder={folder}"])
        return [*own, f"plugins.callbacks=[{', '.join([trace_plugin(folder), *plugins])}]"]

    whole = out / "undisturbed"
    places = [f"data.local={data / 'latents/train'}"]
    with (out / "undisturbed.txt").open("wb") as log:
        subprocess.run([*program, *overrides(whole, places)], stdout=log, stderr=log, env=quiet(), check=True)
    reference = read_outcome(recipe, spec, whole)

    folder = out / "disturbed"
    store = None
    if s3rver is not None:
        store = S3Server(out / "store", s3rver)
        store.start("chaos")
        os.environ.update(store.environment)
        upload(data / "latents", "chaos")
        places = ["data.remote=s3://chaos/train", f"data.local={out / 'cache'}"]
    scene = Scene(
        run=folder,
        poison=out / "poison",
        store=store,
        data=store and store.path("s3://chaos"),
        cache=out / "cache",
    )
    poison = plugin("disturbance.PoisonBatch", request=f"'{scene.poison}'")
    release = out / "release"
    hold = plugin("disturbance.HoldAt", step=faults[-1].step + GAP, releases=f"['{release}', '{scene.poison}']")
    supervise = [sys.executable, str(ROOT / "scripts/supervise.py"), "--"]
    with (out / "log.txt").open("wb") as log:
        command = [*supervise, *program, *overrides(folder, places, poison, hold)]
        supervisor = subprocess.Popen(command, stdout=log, stderr=log, env=quiet())
    try:
        rows = Chaos(scene, lambda: supervisor.poll() is not None).run(faults)
        release.touch()
        code = supervisor.wait(600)
    finally:
        if supervisor.poll() is None:
            supervisor.terminate()
            supervisor.wait(120)
        if store is not None:
            store.kill()
    print(f"{format_overcome(rows)}\n")
    if code:
        print(f"the supervisor ended with exit code {code}: see {out / 'log.txt'}")
        raise SystemExit(1)
    comparison = compare(read_outcome(recipe, spec, folder), reference)
    print(format_table([comparison]))
    if not comparison.is_equal or comparison.loss or comparison.weights or comparison.average:
        print("the disturbed run differs from the undisturbed one")
        raise SystemExit(1)
    print(f"{len(rows)} faults: draws, losses and weights of all {recipe.num_steps} steps are equal to the bit")


def quiet() -> dict[str, str]:
    """The environment of the processes."""
    threads = str(max(1, (os.cpu_count() or 1) // NUM_RANKS))
    return {"OMP_NUM_THREADS": threads, **os.environ, "PYTHONWARNINGS": "ignore"}


def upload(folder: Path, bucket: str) -> None:
    """Copy a folder to a bucket of the server that the environment names."""
    for path in folder.rglob("*"):
        if path.is_file():
            storage.upload(path, f"s3://{bucket}/{path.relative_to(folder).as_posix()}")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
