"""Encoding on several real processes, killed and continued on another number of them."""

import importlib.util
import random
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from diffusion.config.model import Architecture, ModelConfig
from diffusion.errors import ConfigurationError
from diffusion.models import FrozenParts, load_frozen_parts
from diffusion.preparation.config import Engine, RayConfig
from diffusion.preparation.encoding import encode as module
from diffusion.preparation.encoding.encode import encode
from diffusion.preparation.encoding.models import EncodingModels
from diffusion.preparation.engine import Workers
from tests.tools.image_files import noise
from tests.tools.training_runs import TrainingServer
from tests.tools.written_data import append_prepared, prepared_sample
from tests.unit.preparation.test_encode import digests

pytestmark = pytest.mark.slow

OPTIONS = ["--architecture", "tiny", "--device", "cpu", "--workers", "1", "--batch-size", "4", "--text-embeddings",
           "--resolution", "32", "64"]  # fmt: skip
RAY = ["--engine", "ray", "--processes", "2"]
PROCESSES = [
    (0, []),
    (2, []),
    (0, ["--processes", "2"]),
    *([(0, RAY)] if importlib.util.find_spec("ray") else []),
    (4, []),
]
"""Ranks, or 0 for a plain process, and options, of one start after the other."""

NUM_IMAGES = 150


@pytest.fixture(scope="module")
def parts() -> FrozenParts:
    return load_frozen_parts(ModelConfig(architecture=Architecture.tiny))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dozen shards of some batches each."""
    root = tmp_path_factory.mktemp("prepared")
    images = [noise(69, 64 + i % 5, i) for i in range(NUM_IMAGES)]
    samples = [prepared_sample("source", i, data=image) for i, image in enumerate(images)]
    append_prepared(root / "out/train/64-up", samples, per_shard=13)
    return root / "out"


@pytest.fixture(scope="module")
def undisturbed(prepared: Path, parts: FrozenParts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Encoded by one process, this one, with as many threads as it has."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    encode(prepared, out, models=EncodingModels.of(parts, text_embeddings=True), resolutions=[32, 64], batch_size=4)
    return out


def arguments(prepared: Path, out: Path) -> list[str]:
    return [str(prepared), str(out), *OPTIONS]


def num_finished(out: Path) -> int:
    """Shards that are finished."""
    return len(list(out.glob("*/work.partial/shards/*.json")))


def test_killed_and_continued_by_other_processes(
    server: TrainingServer, prepared: Path, undisturbed: Path, tmp_path: Path, kills: int
) -> None:
    out, chance = tmp_path / "out", random.Random(kills)
    most = max(len(list(undisturbed.rglob("*.mds"))) // (2 * kills), 1)
    for number in range(kills):
        wanted = num_finished(out) + chance.randint(1, most)
        num_ranks, options = PROCESSES[number % len(PROCESSES)]
        job = server.start(num_ranks, ["scripts/encode.py", *arguments(prepared, out), *options])
        job.wait_for(lambda wanted=wanted: num_finished(out) >= wanted)
        job.kill()
    server.command(2, ["scripts/encode.py", *arguments(prepared, out)])
    assert digests(out) == digests(undisturbed)


def test_two_processes_tell_a_mistake_once(server: TrainingServer, prepared: Path, tmp_path: Path) -> None:
    broken = tmp_path / "prepared"
    shutil.copytree(prepared, broken)
    shard = sorted(broken.glob("train/*/*.mds"))[3]
    shard.write_bytes(shard.read_bytes()[:-1])
    job = server.start(2, ["scripts/encode.py", *arguments(broken, tmp_path / "out")]).finish()
    assert job.codes == [2, 2], job.output
    assert job.output.count("DataError") == 1, job.output
    assert f"{shard.name} has" in job.output


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A YAML whose weights, as in phase1.yaml, are still to be named."""
    path = tmp_path / "recipe.yaml"
    path.write_text("model:\n  architecture: tiny\n  pretrained: ???\n")
    return path


def test_the_model_of_a_recipe_whose_weights_are_named_here(
    server: TrainingServer, prepared: Path, parts: FrozenParts, undisturbed: Path, recipe: Path, tmp_path: Path
) -> None:
    for part in ("vae", "text_encoder"):
        getattr(parts, part).save_pretrained(tmp_path / "weights" / part)
    options = ["--config", str(recipe), "--pretrained", str(tmp_path / "weights"), *OPTIONS[2:]]
    server.command(0, ["scripts/encode.py", str(prepared), str(tmp_path / "out"), *options])
    expected = {place: digest for place, digest in digests(undisturbed).items() if place.endswith(".mds")}
    assert expected.items() <= digests(tmp_path / "out").items()
    assert expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "recipe.yaml: model.pretrained is missing: add --pretrained FOLDER"),
        (["--architecture", "tiny"], "--config says what the model is: leave --architecture out, or --config"),
        (["--pretrained", "nothing/here"], "nothing/here"),
    ],
)
def test_a_recipe_that_does_not_say_the_model(
    options: list[str], message: str, prepared: Path, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["encode.py", str(prepared), str(tmp_path / "out"), "--config", str(recipe), *options]
    monkeypatch.setattr(sys, "argv", [*command, "--resolution", "32", "--device", "cpu"])
    with pytest.raises(ConfigurationError, match=message):
        runpy.run_path("scripts/encode.py")["main"]()


def test_by_processes_of_this_machine(
    server: TrainingServer, prepared: Path, undisturbed: Path, tmp_path: Path
) -> None:
    server.command(0, ["scripts/encode.py", *arguments(prepared, tmp_path / "out"), "--processes", "2"])
    assert digests(tmp_path / "out") == digests(undisturbed)


def test_on_ray_the_processes_are_actors(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def stop(*arguments: Any, **options: Any) -> None:
        given.update(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "encode", stop)
    monkeypatch.setattr(sys, "argv", ["encode.py", *arguments(prepared, tmp_path / "out"), *RAY])
    with pytest.raises(KeyboardInterrupt):
        runpy.run_path("scripts/encode.py")["main"]()
    assert given["workers"] == Workers(engine=Engine.ray, number=2, ray=RayConfig(concurrency=2))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for options in (RAY, ["--processes", "2"]):
        monkeypatch.setattr(sys, "argv", ["encode.py", *arguments(prepared, tmp_path / "out"), *options])
        with pytest.raises(ConfigurationError, match="--processes and --engine ray start processes"):
            runpy.run_path("scripts/encode.py")["main"]()
