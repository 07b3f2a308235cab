"""Encoding on several real processes, killed and continued on another number of them, and on a real Ray."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from diffusion.config.model import Architecture, ModelConfig
from diffusion.datasets.mds import read_shards
from diffusion.models import FrozenParts, load_frozen_parts
from diffusion.preparation.encoding.encode import encode
from diffusion.preparation.encoding.models import EncodingModels
from diffusion.preparation.encoding.ranks import RayWorkers
from diffusion.preparation.prepare import prepare
from tests.picture_files import write_folder
from tests.preparation.test_encode import digests
from tests.training_runs import BIN, ROOT, environment, launch

LIMIT = 600.0
"""Seconds after which a run that should have ended is a failure."""

OPTIONS = ["--architecture", "tiny", "--device", "cpu", "--workers", "1", "--batch-size", "4", "--text-embeddings",
           "--resolution", "32", "64"]  # fmt: skip
NUM_PICTURES = 150


@pytest.fixture(scope="module")
def parts() -> FrozenParts:
    return load_frozen_parts(ModelConfig(architecture=Architecture.tiny))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dozen shards of about as many pictures."""
    root = tmp_path_factory.mktemp("prepared")
    write_folder(root / "source", NUM_PICTURES, side=64)
    prepare([root / "source"], root / "out", edges=[64], shard_bytes=200_000, num_workers=1)
    counts = [shard["samples"] for shard in read_shards(root / "out/train/64-up")]
    assert len(counts) > 8
    assert max(counts) > 8, "a shard is several batches"
    return root / "out"


@pytest.fixture(scope="module")
def undisturbed(prepared: Path, parts: FrozenParts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Encoded by one process, with the one thread that the ranks of a launcher have."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    models = EncodingModels.of(parts, text_embeddings=True)
    encode(prepared, out, models=models, resolutions=[32, 64], batch_size=4)
    yield out
    torch.set_num_threads(num_threads)


def command(prepared: Path, out: Path) -> list[str]:
    return ["scripts/encode.py", str(prepared), str(out), *OPTIONS]


def kill_after_progress(program: list[str], out: Path, wanted: int) -> bool:
    """Start a command, kill all its processes when so many shards are marked; return whether it was running."""
    process = subprocess.Popen(
        program, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + LIMIT
    while process.poll() is None and time.monotonic() < deadline:
        if len(list(out.glob("*/work.partial/shards/*.json"))) >= wanted:
            break
        signal.sigtimedwait([], 0.002)
    running = process.poll() is None
    for child in descendants(process.pid):
        os.kill(child, signal.SIGKILL)
    process.wait(LIMIT)
    return running


def descendants(process: int) -> list[int]:
    """A process and all that it started, the ranks of a launcher in sessions of their own among them."""
    import psutil

    try:
        found = psutil.Process(process)
        return [process, *(child.pid for child in found.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def test_killed_and_continued_on_another_number_of_processes(
    prepared: Path, undisturbed: Path, tmp_path: Path, kills: int
) -> None:
    out, chance = tmp_path / "out", random.Random(kills)
    killed = 0
    for i in range(max(1, kills - 1)):
        program = [str(BIN / "composer"), "-n", "2"] if i % 2 else [sys.executable]
        there = len(list(out.glob("*/work.partial/shards/*.json")))
        killed += kill_after_progress([*program, *command(prepared, out)], out, there + chance.randint(1, 6))
    assert killed >= 1
    done = launch(2, command(prepared, out), timeout=LIMIT)
    assert done.returncode == 0, done.stdout[-4000:]
    assert digests(out) == digests(undisturbed)


@pytest.mark.thorough
def test_two_processes_tell_a_mistake_once(prepared: Path, tmp_path: Path) -> None:
    broken = tmp_path / "prepared"
    shutil.copytree(prepared, broken)
    shard = sorted(broken.glob("train/*/*.mds"))[3]
    shard.write_bytes(shard.read_bytes()[:-1])
    done = launch(2, command(broken, tmp_path / "out"), timeout=LIMIT)
    assert done.returncode == 2, done.stdout[-4000:]
    assert done.stdout.count("DataError") == 1, done.stdout
    assert f"{shard.name} has" in done.stdout


@pytest.mark.thorough
def test_on_ray(prepared: Path, undisturbed: Path, parts: FrozenParts, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install 'diffusion[ray]'")
    load = partial(EncodingModels.of, parts, text_embeddings=True)
    options = {"models": load(), "resolutions": [32, 64], "batch_size": 4}
    encode(prepared, tmp_path / "out", ray=RayWorkers(number=2, load=load), **options)
    assert digests(tmp_path / "out") == digests(undisturbed)
