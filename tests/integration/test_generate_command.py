"""scripts/generate.py: its files, and errors before the model is loaded."""

import hashlib
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from diffusion.config.frozen import FrozenPaths
from diffusion.errors import ConfigurationError, DataError, MachineError
from diffusion.evaluation.prompts import open_images
from diffusion.formats.marks import SOURCE_TYPE
from diffusion.launch import choose_device
from diffusion.models import LatentDiffusion, tiny
from tests.tools.chat_server import MODEL, chat_server
from tests.tools.image_marks import read_mark
from tests.tools.training_runs import ROOT


@pytest.fixture(scope="module")
def model() -> LatentDiffusion:
    return tiny()


@pytest.fixture
def command(model, tmp_path, monkeypatch):
    """Runs the command with a model that needs no checkpoint; the folder is `tmp_path / "out"` unless given."""

    def run(*options: str, is_loaded: bool = True, out: Path = tmp_path / "out") -> None:
        def load_model(place: str, *, weights: str, paths: FrozenPaths) -> LatentDiffusion:
            assert is_loaded, "loaded before the error"
            return model

        prompts = [] if "--prompts-file" in options or "--prompts" in options else ["--prompts", "a red circle"]
        monkeypatch.setattr("diffusion.loading.load_model", load_model)
        monkeypatch.setattr(
            sys, "argv", ["generate.py", str(ROOT), "--out", str(out), "--device", "cpu", *prompts, *options]
        )
        runpy.run_path(str(ROOT / "scripts" / "generate.py"))["main"]()

    return run


def test_images_and_their_listing_are_written(command, model, tmp_path):
    (tmp_path / "prompts.txt").write_text("a red circle\n\n  a blue star \n")
    options = ["--images-per-prompt", "2", "--steps", "1", "--seed", "7", "--columns", "3", "--width", "40"]
    command("--prompts-file", str(tmp_path / "prompts.txt"), *options)
    rows = [json.loads(line) for line in (tmp_path / "out" / "metadata.jsonl").read_text().splitlines()]
    prompts = ["a red circle", "a red circle", "a blue star", "a blue star"]
    assert rows == [{"file_name": f"{i:05d}.png", "prompt": prompts[i], "seed": 7 + i} for i in range(4)]
    assert {Image.open(tmp_path / "out" / row["file_name"]).size for row in rows} == {(40, 32)}
    assert Image.open(tmp_path / "out" / "grid.png").size == (3 * 42 + 2, 2 * 34 + 2)
    mark = {"DigitalSourceType": SOURCE_TYPE, "AISystemUsed": "diffusion", "AISystemVersionUsed": model.mark.version}
    assert [read_mark(tmp_path / "out" / name) for name in ("00000.png", "grid.png")] == [mark] * 2


def test_prompts_are_rewritten_and_the_originals_listed(command, model, tmp_path, monkeypatch):
    used: list[str] = []

    def generate(prompts: list[str], *arguments, **options) -> list[Image.Image]:
        used.extend(prompts)
        return [Image.new("RGB", (8, 8))] * len(prompts)

    monkeypatch.setattr(model, "generate", generate)
    refused = {hashlib.sha1(b"a villain").hexdigest()}
    with chat_server(lambda prompt, number: "refuse" if prompt in refused else "echo") as server:
        options = ["--rewrite", server.url, "--rewrite-model", MODEL, "--images-per-prompt", "2"]
        command("--prompts", "a dog", "a villain", *options)
    assert used == ["Rewritten: a dog"] * 2 + ["a villain"] * 2
    rows = [json.loads(line) for line in (tmp_path / "out" / "metadata.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["a dog"] * 2 + ["a villain"] * 2
    assert [row["rewritten_prompt"] for row in rows] == used
    assert len(server.requests) == 2


def test_nothing_is_rewritten_for_what_cannot_be_generated(command, tmp_path):
    with chat_server(lambda prompt, number: "echo") as server:
        with pytest.raises(AssertionError, match="loaded before the error"):
            command("--rewrite", server.url, "--rewrite-model", MODEL, is_loaded=False)
        with pytest.raises(ConfigurationError, match="has no model x"):
            command("--rewrite", server.url, "--rewrite-model", "x", is_loaded=False)
        for option, value in (("--steps", "1001"), ("--height", "33"), ("--sampler", "heun"), ("--score", "taste=1")):
            with pytest.raises(ConfigurationError, match=value.partition("=")[0]):
                command("--rewrite", server.url, "--rewrite-model", MODEL, option, value)
    assert server.requests == []


def test_each_batch_is_written_at_once_and_the_listing_last(command, model, tmp_path, monkeypatch, capsys):
    out, batches = tmp_path / "out", []

    def generate(prompts: list[str], *arguments, **options) -> list[Image.Image]:
        batches.append(sorted(path.name for path in out.iterdir()))
        if len(batches) % 2 == 0:
            with pytest.raises(DataError, match="interrupted"):
                open_images(out)
        return [Image.new("RGB", (8, 8))] * len(prompts)

    monkeypatch.setattr(model, "generate", generate)
    command("--images-per-prompt", "3", "--batch-size", "2")
    images = [f"{i:05d}.png" for i in range(3)]
    assert [image.path.name for image in open_images(out)] == images
    command("--images-per-prompt", "3", "--batch-size", "2")
    whole = [*images, "grid.png", "metadata.jsonl"]
    assert batches == [[], [*images[:2], "metadata.jsonl"], whole, whole]
    listing = (out / "metadata.jsonl").rename(tmp_path / "metadata.jsonl")
    assert [image.path.name for image in open_images(out)] == images
    listing.rename(out / "metadata.jsonl")
    assert capsys.readouterr().err == ""
    command("--images-per-prompt", "2")
    assert "holds 1 other images (00002.png" in capsys.readouterr().err


@pytest.mark.parametrize("listing", [None, '{"file_name": "a.png", "text": "mine"}\n', "no JSON\n"])
def test_images_and_listings_of_someone_else_stay(command, tmp_path, listing):
    files = {"00000.png": "an image"} if listing is None else {"metadata.jsonl": listing}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigurationError, match=f"has {next(iter(files))} of someone else"):
        command(is_loaded=False, out=tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


def test_the_prompts_may_not_be_those_of_the_listing_that_is_replaced(command, tmp_path):
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "00000.png", "prompt": "a dog", "seed": 1}\n')
    with pytest.raises(ConfigurationError, match="would be overwritten"):
        command("--prompts-file", str(tmp_path / "metadata.jsonl"), is_loaded=False, out=tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompts", " ", ""], "--prompts "),
        (["--prompts-file", "/no/where"], "--prompts-file: .*/no/where"),
        (["--prompts-file", "/dev/null"], "--prompts-file: .*/dev/null"),
        (["--rewrite", "http://127.0.0.1:1/v1"], "--rewrite needs --rewrite-model"),
        (["--rewrite", "http://me:pass@127.0.0.1:1/v1", "--rewrite-model", "x"], r"--rewrite: .*http://\*\*\*@127"),
        (["--steps", "0"], "--steps: 0"),
        (["--width", "-32"], "--width: -32"),
        (["--seed", "-1"], "--seed: -1"),
        (["--seed", str(2**32)], f"--seed {2**32}"),
        (["--rewrite-model", "x"], "--rewrite-model needs --rewrite"),
        (["--rewrite-instructions", "x"], "--rewrite-instructions needs --rewrite"),
        (["--prompts", "a caf\udce9"], "--prompts: .* is no UTF-8"),
        (["--negative-prompt", "a caf\udce9"], "--negative-prompt: .* is no UTF-8"),
        (["--columns", "0"], "--columns: 0"),
    ],
)
def test_errors_are_reported_before_the_model_is_loaded(options, message, command, tmp_path):
    with pytest.raises(ConfigurationError, match=message):
        command(*options, is_loaded=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--height", "30"], "30 x 32"),
        (["--steps", "1001"], "1001"),
    ],
)
def test_invalid_options_of_the_model_are_errors(options, message, command):
    with pytest.raises(ConfigurationError, match=message):
        command(*options)


def test_an_unwritable_folder_is_reported_before_the_model_is_loaded(command, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (Path("/proc/zzz"), tmp_path / "file"):
        with pytest.raises(MachineError, match=f"--out {out}"):
            command(is_loaded=False, out=out)


def test_a_full_disk_is_reported(command, monkeypatch):
    def save(self, *arguments, **options) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", save)
    with pytest.raises(MachineError, match="No space left on device"):
        command("--steps", "1")


def test_devices():
    assert choose_device("cpu") == "cpu"
    assert choose_device(None) == ("cuda" if torch.cuda.is_available() else "cpu")
    for missing in ("mps", "cuda:77", "meta", "foo"):
        with pytest.raises(MachineError, match=f"--device {missing}"):
            choose_device(missing)
