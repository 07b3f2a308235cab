"""A run's checkpoints know their frozen parts: relative paths, parts that moved, and parts that changed meanwhile."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffusion.checkpointing.find import resolve_checkpoint
from diffusion.checkpointing.read import read_identities
from diffusion.config.frozen import FrozenPaths
from diffusion.errors import ConfigurationError
from diffusion.evaluation.generate import EvaluatedModel, load_generator
from diffusion.export import ExportLayout, export
from diffusion.loading import load_config_of, load_model
from tests.tools.runs import weights_of
from tests.tools.training_runs import ROOT

TOY = "tests/tools/toy.yaml"
SHORT = ["samples.prompts=[]", "algorithms.ema=null", "trainer.device=cpu"]


@pytest.fixture(scope="module")
def trained(server, shapes, tmp_path_factory) -> Path:
    """A folder with a VAE, and a run with each parallelism whose VAE was named by a relative path."""
    root = tmp_path_factory.mktemp("frozen")
    shutil.copytree(shapes / "vae", root / "vae")
    server.train(1, [(TOY, overrides(root, parallelism)) for parallelism in ("ddp", "fsdp")])
    return root


@pytest.fixture
def run(request, trained, tmp_path, monkeypatch) -> Path:
    """One of the runs, seen from another working directory."""
    monkeypatch.chdir(tmp_path)
    return trained / request.param


def overrides(root: Path, parallelism: str, duration: str = "1ba") -> list[str]:
    vae = os.path.relpath(root / "vae", ROOT)
    own = [f"output_folder={root / parallelism}", f"trainer.parallelism={parallelism}", f"model.vae={vae}"]
    return [*own, f"trainer.max_duration={duration}", "schedule.warmup=1ba", *SHORT]


def change_weights(folder: Path) -> None:
    file = folder / "diffusion_pytorch_model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file, {"format": "pt"})


def change_scaling(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"scaling_factor": 0.5}))


def uses(run: Path, out: Path) -> dict[str, Callable[[FrozenPaths | None], Any]]:
    """All that takes a run's VAE after the training."""
    average = run / "averages" / "step-000001-own.safetensors"
    average.parent.mkdir(exist_ok=True)
    save_file(weights_of(run), average)
    model = EvaluatedModel(name="it", path=str(resolve_checkpoint(str(run))), step=1, weights="raw")
    return {
        "model": lambda paths: load_model(run, paths=paths),
        "average": lambda paths: load_model(average, paths=paths),
        "evaluation": lambda paths: load_generator(model, torch.device("cpu"), paths),
        "pipeline": lambda paths: export(str(run), out / "pipeline", paths=paths),
        "file": lambda paths: export(str(run), out / "m.safetensors", layout=ExportLayout.ldm, paths=paths),
    }


@pytest.mark.parametrize("run", ["ddp", "fsdp"], indirect=True)
def test_a_relative_path_is_found_from_other_folders(run):
    checkpoint = resolve_checkpoint(str(run))
    assert load_config_of(checkpoint).model.vae == str(run.parent / "vae")
    assert set(read_identities(checkpoint)) == {"vae", "latent_scaling", "text_encoder", "tokenizer"}
    load_model(run)


@pytest.mark.parametrize(("run", "change"), [("ddp", change_weights), ("fsdp", change_scaling)], indirect=["run"])
def test_changed_parts_are_refused_and_moved_ones_can_be_named(run, tmp_path, change):
    original, moved = run.parent / "vae", tmp_path / "moved"
    shutil.copytree(original, moved)
    try:
        change(original)
        for use in uses(run, tmp_path).values():
            with pytest.raises(ConfigurationError, match=r"trained with other frozen parts.*--vae"):
                use(None)
        shutil.rmtree(original)
        for use in uses(run, tmp_path).values():
            with pytest.raises(ConfigurationError, match=r"--vae.*there is no folder"):
                use(None)
            use(FrozenPaths(vae=str(moved)))
    finally:
        shutil.rmtree(original, ignore_errors=True)
        shutil.copytree(moved, original)


@pytest.mark.world_size(2)
def test_nodes_with_different_parts_end(server, shapes, tmp_path):
    for node in "01":
        shutil.copytree(shapes / "vae", tmp_path / node)
    change_weights(tmp_path / "1")
    own = [*overrides(tmp_path, "ddp"), f"model.vae={tmp_path}/{{node}}"]
    job = server.start(2, ["tests/tools/ranks_as_nodes.py", "1", TOY, *own]).finish()
    assert job.codes == [2, 2], job.output[-3000:]
    assert "this node has another vae than the first one" in job.output


def test_a_run_does_not_resume_with_changed_parts(server, trained):
    kept = {path: path.read_bytes() for path in (trained / "vae").iterdir()}
    change_weights(trained / "vae")
    job = server.run(1, [(TOY, overrides(trained, "fsdp", "2ba"))])
    assert job.codes == [2], job.output
    assert "trained with other frozen parts: vae (" in job.output
    for path, content in kept.items():
        path.write_bytes(content)
    server.train(1, [(TOY, overrides(trained, "fsdp", "2ba"))])
