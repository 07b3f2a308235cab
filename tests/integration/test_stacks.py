"""The newest and the lowest versions continue and read what the other has written.

As a program, this file generates images from a folder.
"""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.tools.runs import losses
from tests.tools.training_runs import TrainingServer

PREEMPTED = 75
STOP = f"{{path: tests.tools.toys.SignalAt, arguments: {{step: 5, number: {int(signal.SIGTERM)}}}}}"
DIRECTIONS = ["from this to the other", "from the other to this"]


@pytest.fixture(scope="module")
def stacks(server, request, tmp_path_factory) -> Iterator[list[TrainingServer]]:
    """This interpreter's and the other's."""
    python = request.config.getoption("--other-python")
    if not python:
        pytest.skip("needs an interpreter with other versions: make test-lowest, or pytest --other-python PYTHON")
    other = TrainingServer(tmp_path_factory.mktemp("other"), python)
    yield [server, other]
    other.close()


@pytest.fixture(scope="module")
def pretrained(stacks, tmp_path_factory) -> Path:
    """Frozen parts in the diffusers layout: random ones of CLIP depend on the version of transformers."""
    root = tmp_path_factory.mktemp("pretrained")
    stacks[0].train(1, [("tests/tools/toy.yaml", [f"output_folder={root / 'run'}", "samples.prompts=[]"])])
    stacks[0].command(0, ["scripts/export.py", str(root / "run"), str(root / "folder")])
    return root / "folder"


@pytest.fixture(scope="module")
def uninterrupted(stacks, pretrained, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    stacks[0].train(2, [options(run, pretrained)])
    return run


def options(run: Path, pretrained: Path, *more: str) -> tuple[str, list[str]]:
    return "tests/tools/toy.yaml", [
        f"output_folder={run}",
        f"model.pretrained={pretrained}",
        "trainer.parallelism=fsdp",
        "samples.prompts=[]",
        *more,
    ]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_sharded_checkpoint_is_continued(stacks, pretrained, uninterrupted, tmp_path, direction):
    first, second = stacks if direction == DIRECTIONS[0] else reversed(stacks)
    run = tmp_path / "run"
    stopped = first.run(2, [options(run, pretrained, f"plugins.callbacks=[{STOP}]")])
    assert PREEMPTED in stopped.codes, stopped.output[-4000:]
    second.train(1, [options(run, pretrained)])
    np.testing.assert_allclose(losses(run), losses(uninterrupted), rtol=1e-5)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_an_exported_folder_gives_equal_images(stacks, uninterrupted, tmp_path, direction):
    writer = stacks[DIRECTIONS.index(direction)]
    writer.command(0, ["scripts/export.py", str(uninterrupted), str(tmp_path / "folder")])
    for name, reader in zip(("this", "other"), stacks, strict=True):
        reader.command(0, ["tests/integration/test_stacks.py", str(tmp_path / "folder"), str(tmp_path / f"{name}.npy")])
    images = np.load(tmp_path / "this.npy")
    assert images.std() > 0.01
    np.testing.assert_allclose(np.load(tmp_path / "other.npy"), images, atol=1e-4)


def generate(folder: str, out: str) -> None:
    import torch
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(folder, use_safetensors=True, local_files_only=True)
    images = pipeline(
        ["a red circle", "Blue star, 42!"],
        generator=torch.Generator().manual_seed(7),
        num_inference_steps=2,
        output_type="np",
    ).images
    np.save(out, images)


if __name__ == "__main__":
    generate(*sys.argv[1:])
