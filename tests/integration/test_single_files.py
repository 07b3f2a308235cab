"""One file in the layouts of other programs, and uploads, on runs of real processes."""

import runpy
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from diffusers import StableDiffusionPipeline
from huggingface_hub import HfApi
from PIL import Image

import diffusion.export
from diffusion.cli import train_command
from diffusion.config.loading import load_config
from diffusion.errors import ConfigurationError, MachineError
from diffusion.export import ExportLayout, export, push_to_hub
from diffusion.formats.marks import SOURCE_TYPE
from diffusion.loading import Trained, load_model
from diffusion.models.architectures import TINY, build_vae
from diffusion.models.latents import latent_space
from scripts.doctor import check_initial_weights
from tests.tools.forking import free_port
from tests.tools.hub_server import TOKEN, Hub, hub
from tests.tools.image_marks import read_mark
from tests.tools.pipelines import images_of_model, images_of_pipeline, read_pipeline
from tests.tools.runs import weights_of

pytestmark = pytest.mark.slow

__all__ = ["hub"]

TOY = "tests/tools/toy.yaml"
SHORT = ["trainer.max_duration=2ba", "algorithms.ema=null", "samples.prompts=[]"]
STILL = ["optimizer.lr=0", "trainer.max_duration=1ba", "schedule.warmup=1ba", "algorithms.ema=null"]
STILL += ["samples.prompts=[]"]
LORA = ["model.lora={rank: 4, alpha: 8.0}", "optimizer.lr=0.2", "trainer.max_duration=4ba"]


@pytest.fixture(scope="module")
def runs(server, tmp_path_factory) -> dict[str, Path]:
    """A run whose VAE has statistics per channel, LoRA on top of it, and the run exported in both layouts."""
    root = tmp_path_factory.mktemp("runs")
    places = {name: root / name for name in ("base", "lora", "folder", "model.safetensors")}
    torch.manual_seed(1)
    vae = build_vae(TINY)
    latent_space(vae).set_statistics(torch.tensor([0.3, -1.2, 0.1, 2.0]), torch.tensor([0.5, 1.7, 0.9, 3.0]))
    vae.save_pretrained(root / "vae", safe_serialization=True)
    common = [f"model.vae={root}/vae", *SHORT]
    server.train(1, [(TOY, [f"output_folder={places['base']}", *common])])
    start = [f"init_from.checkpoint={places['base']}", *LORA]
    server.train(1, [(TOY, [f"output_folder={places['lora']}", *common, *start])])
    export(str(places["base"]), places["folder"])
    export(str(places["base"]), places["model.safetensors"], layout=ExportLayout.ldm)
    return places


@pytest.fixture
def export_script(monkeypatch):
    """Run scripts/export.py with arguments; its exit code."""

    def run(*arguments: str | Path) -> int:
        monkeypatch.setattr(sys, "argv", ["export.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path("scripts/export.py", run_name="__main__")
        return ended.value.code

    return run


def test_diffusers_reads_the_model_from_the_file(runs):
    file, config = str(runs["model.safetensors"]), str(runs["folder"])
    found = StableDiffusionPipeline.from_single_file(file, config=config, local_files_only=True)
    assert (images_of_pipeline(found) - images_of_model(load_model(runs["base"]))).abs().max() < 1e-4


def test_a_run_starts_from_the_file(runs, server, tmp_path):
    run = tmp_path / "run"
    start = f"init_from.checkpoint={runs['model.safetensors']}"
    server.train(1, [(TOY, [f"output_folder={run}", start, *STILL])])
    ours, theirs = (weights_of(one) for one in (run, runs["base"]))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)

    start = f"init_from.checkpoint={tmp_path}/model.ckpt"
    job = server.run(1, [(TOY, [f"output_folder={tmp_path / 'other'}", start])])
    assert job.codes == [2]
    assert "init_from.checkpoint: " in job.output and "pickle" in job.output and "Traceback" not in job.output


def test_lora_in_kohya_s_layout_gives_the_same_images(runs, export_script, tmp_path):
    expected = images_of_model(load_model(runs["lora"]))
    pipeline = read_pipeline(runs["folder"])
    assert (images_of_pipeline(pipeline) - expected).abs().max() > 1e-2, "LoRA has changed something"
    assert export_script(runs["lora"], tmp_path / "lora.safetensors", "--layout", "kohya") == 0
    pipeline.load_lora_weights(tmp_path, weight_name="lora.safetensors")
    assert (images_of_pipeline(pipeline) - expected).abs().max() < 1e-4


def test_what_a_layout_is_not_for_is_refused(runs, tmp_path, monkeypatch):
    file = tmp_path / "out.safetensors"
    for layout in (ExportLayout.ldm, ExportLayout.kohya):
        with pytest.raises(ConfigurationError, match="is one file"):
            export(str(runs["base"]), tmp_path / "out", layout=layout)
    with pytest.raises(ConfigurationError, match=r"without model\.lora"):
        export(str(runs["base"]), file, layout=ExportLayout.kohya)
    with pytest.raises(ConfigurationError, match="LoRA alone"):
        export(str(runs["lora"]), file, layout=ExportLayout.ldm, lora_only=True)
    changes = {
        "model.architecture=tiny_transformer": "a transformer",
        "model.text_adapter={layers: 1}": "a text adapter",
    }
    for change, part in changes.items():
        other = Trained(path=tmp_path, config=load_config(TOY, [change]), weights={})
        monkeypatch.setattr(diffusion.export, "read_trained", lambda *_, trained=other, **__: trained)
        with pytest.raises(ConfigurationError, match=part):
            export("elsewhere", file, layout=ExportLayout.ldm)
    assert list(tmp_path.iterdir()) == []


def test_the_example_of_the_card_marks_images(runs, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    example = (runs["folder"] / "README.md").read_text().partition("## Mark of the images")[2].split("```")[1]
    exec(example.removeprefix("python"), {"image": Image.new("RGB", (8, 8))})
    model = load_model(runs["base"])
    mark = {"DigitalSourceType": SOURCE_TYPE, "AISystemUsed": model.name, "AISystemVersionUsed": model.mark.version}
    assert [read_mark(f"image.{kind}") for kind in ("png", "jpg")] == [mark] * 2


# Uploads


def test_an_upload_holds_the_bytes_of_the_export(runs, hub, export_script, monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    push = ["--push-to-hub", "someone/drawings"]
    assert export_script(runs["base"], tmp_path / "out", "--license", "mit", *push) == 0
    files = {str(path.relative_to(tmp_path / "out")): path for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert hub.files["someone/drawings"] == {name: path.read_bytes() for name, path in files.items()}
    assert hub.is_private["someone/drawings"]
    assert 'from_pretrained("someone/drawings")' in files["README.md"].read_text()

    one = tmp_path / "model.safetensors"
    assert export_script(runs["base"], one, "--layout", "ldm", *push) == 0
    assert hub.files["someone/drawings"].keys() == files.keys() | {one.name}
    assert hub.files["someone/drawings"][one.name] == one.read_bytes()
    output = "".join(capfd.readouterr())
    assert f"{hub.url}/someone/drawings/commit/" in output and TOKEN not in output and "planted" not in output


def test_an_interrupted_upload_is_continued_without_another_export(monkeypatch, tmp_path):
    def upload_folder(*_: object, **__: object) -> None:
        raise ConnectionError("reset by peer")

    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    with pytest.raises(MachineError, match=rf"hf upload someone/drawings '{tmp_path}/a folder'"):
        (tmp_path / "a folder").mkdir()
        push_to_hub(tmp_path / "a folder", "someone/drawings")


@pytest.mark.parametrize("problem", ["token", "name", "network"])
def test_what_the_hub_rejects_is_one_message_before_the_work(
    runs, hub: Hub, export_script, monkeypatch, tmp_path, capfd, problem
):
    wrong = "hf_" + "b" * 34
    monkeypatch.setenv("HF_TOKEN", wrong if problem == "token" else TOKEN)
    if problem == "network":
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://me:planted@127.0.0.1:{free_port()}")
    name = "some one/x/y" if problem == "name" else "someone/drawings"
    assert export_script(runs["base"], tmp_path / "out", "--push-to-hub", name) == 2
    output = "".join(capfd.readouterr())
    assert {"token": "HF_TOKEN", "name": "some one/x/y", "network": "does not answer"}[problem] in output
    assert "Traceback" not in output and wrong not in output and TOKEN not in output and "planted" not in output
    assert list(tmp_path.iterdir()) == [] and hub.files == {}


@pytest.mark.parametrize("name", ["base", "folder", "model.safetensors"])
def test_weights_of_another_objective_are_an_error_unless_that_is_intended(runs, server, tmp_path, name):
    start = [f"init_from.checkpoint={runs[name]}", f"output_folder={tmp_path / 'run'}", *STILL]
    epsilon, zero = "objective.prediction_type=epsilon", "objective.zero_terminal_snr=true"
    config = load_config(TOY, [*start, epsilon])
    message = (
        "prediction_type is epsilon, but v_prediction for these weights. Set objective.prediction_type=v_prediction"
    )
    (finding,) = check_initial_weights(config)
    assert message in finding.what
    with pytest.raises(ConfigurationError, match=message):
        train_command([TOY, *start, epsilon, "--dry-run"], say=print)
    with pytest.raises(ConfigurationError, match="zero_terminal_snr is true, but false"):
        train_command([TOY, *start, zero, "--dry-run"], say=print)
    if name != "model.safetensors":
        return
    job = server.run(1, [(TOY, [*start, epsilon])])
    assert job.codes == [2]
    assert message in job.output
    assert "Traceback" not in job.output
    server.train(1, [(TOY, [*start, epsilon, "init_from.new_objective=true"])])
