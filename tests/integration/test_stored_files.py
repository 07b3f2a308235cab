"""Files of the last commit on torch 2.7 and transformers 4.57 are read, and its checkpoints continue.

`tests/data/old_stack.tar.xz` holds a prepared and an encoded data set, checkpoints of step 4 of two runs of 8 steps, an
export, and what that stack computed from them; `make.py` in it made the files (at commit 8841cf3).
"""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from diffusion.config.loading import load_config
from diffusion.formats.run_folder import TRAIN_LOSS, read_metrics, series
from diffusion.models.pretrained import load_frozen_parts, module_identity, tokenizer_identity
from tests.tools.training_runs import ROOT


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    with tarfile.open(ROOT / "tests/data/old_stack.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def record(stored) -> dict:
    return json.loads((stored / "record.json").read_text())


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("fsdp", ["data.local={}/encoded/train"]),
        ("ddp", ["data.local={}/prepared/train", "data.representation=images"]),
    ],
)
def test_a_checkpoint_continues_with_equal_losses(server, stored, record, name, data):
    places = [f"output_folder={stored / name}", f"model.pretrained={stored / 'pretrained'}"]
    overrides = [f"trainer.parallelism={name}", *places, *(text.format(stored) for text in data)]
    server.train(1, [(str(stored / "config.yaml"), overrides)])
    steps, losses = series(read_metrics(stored / name / "metrics.jsonl"), TRAIN_LOSS)
    assert steps == [4, 5, 6, 7]
    np.testing.assert_allclose(losses, record["losses"][name][4:], rtol=1e-6)


def test_identities_are_those_of_before(stored, record):
    config = load_config(str(stored / "config.yaml"), [f"model.pretrained={stored / 'pretrained'}", "data.local=."])
    parts = load_frozen_parts(config.model)
    assert record["identities"] == {
        "vae": module_identity(parts.vae),
        "text_encoder": module_identity(parts.text_encoder),
        "tokenizer": tokenizer_identity(parts.tokenizer),
    }


def test_data_that_was_encoded_is_complete(server, stored):
    """Encoding again only names the conversion of colours in the manifest, which was not known before."""
    out = stored / "encoded"
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    models = ["--config", str(stored / "config.yaml"), "--pretrained", str(stored / "pretrained"), "--device", "cpu"]
    server.command(0, ["scripts/encode.py", str(stored / "prepared"), str(out), "--resolution", "32", *models])
    after, manifest = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}, out / "manifest.json"
    assert json.loads(after.pop(manifest)) == json.loads(before.pop(manifest)) | {"convert_to_srgb": False}
    assert after == before


def test_an_export_gives_equal_images(server, stored, tmp_path):
    server.command(0, ["tests/integration/test_stacks.py", str(stored / "export"), str(tmp_path / "images.npy")])
    np.testing.assert_allclose(np.load(tmp_path / "images.npy"), np.load(stored / "images.npy"), atol=1e-5)
