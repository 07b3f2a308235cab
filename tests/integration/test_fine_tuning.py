"""Export, import, fine-tuning and LoRA, on runs of real processes."""

import hashlib
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from diffusers import StableDiffusionPipeline
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from safetensors import safe_open
from torch import Tensor

import diffusion.export
from diffusion.checkpointing.find import find_checkpoints
from diffusion.checkpointing.read import StoredState, read_weights
from diffusion.config.loading import load_config
from diffusion.config.model import Weights
from diffusion.errors import ConfigurationError, MachineError
from diffusion.evaluation.protocol import Number, Result
from diffusion.export import Licences, export
from diffusion.loading import load_model, read_trained
from diffusion.models.architectures import TINY, build_vae
from diffusion.models.latents import latent_space
from diffusion.planning.plan import plan_run
from tests.tools.pipelines import images_of_model, images_of_pipeline, read_pipeline
from tests.tools.runs import difference, losses, newest, weights_of
from tests.tools.training_runs import Run

pytestmark = pytest.mark.slow

TOY = "tests/tools/toy.yaml"
LORA = ["model.lora={rank: 4, alpha: 8.0}", "optimizer.lr=0.2", "trainer.max_duration=4ba", "algorithms.ema.start=1ba"]
STILL = ["optimizer.lr=0", "trainer.max_duration=1ba", "schedule.warmup=1ba", "algorithms.ema=null"]
STILL += ["samples.prompts=[]"]


def is_lora(name: str) -> bool:
    return ".lora_" in name


@pytest.fixture(scope="module")
def vae(tmp_path_factory) -> Path:
    """A VAE with statistics per channel, as those that are trained here."""
    folder = tmp_path_factory.mktemp("autoencoder") / "vae"
    torch.manual_seed(1)
    vae = build_vae(TINY)
    latent_space(vae).set_statistics(torch.tensor([0.3, -1.2, 0.1, 2.0]), torch.tensor([0.5, 1.7, 0.9, 3.0]))
    vae.save_pretrained(folder, safe_serialization=True)
    return folder


@pytest.fixture(scope="module")
def runs(server, vae, tmp_path_factory) -> dict[str, Path]:
    """A run, and LoRA on top of it: on one rank and on two, sharded and not, interrupted."""
    root = tmp_path_factory.mktemp("runs")
    folders = {name: root / name for name in ("base", "base-ddp", "lora-fsdp-1", "lora-fsdp-2", "lora-ddp-2")}

    def run(name: str, *overrides: str) -> Run:
        parallelism = "ddp" if "ddp" in name else "fsdp"
        common = [f"output_folder={folders[name]}", f"trainer.parallelism={parallelism}", f"model.vae={vae}"]
        return TOY, [*common, "samples.prompts=[]", *overrides]

    short = ["trainer.max_duration=4ba", "algorithms.ema.start=2ba"]
    server.train(1, [run("base", *short), run("base-ddp", *short)])
    lora = [f"init_from={{checkpoint: {folders['base']}, weights: ema}}", *LORA]
    half = [*lora, "trainer.max_duration=2ba"]
    server.train(2, [run("lora-fsdp-2", *half), run("lora-ddp-2", *lora)])
    server.train(1, [run("lora-fsdp-2", *lora), run("lora-fsdp-1", *lora)])
    return folders


@pytest.fixture(scope="module")
def folder(runs) -> Path:
    """The base's average, exported."""
    out = runs["base"].parent / "exported"
    export(str(runs["base"]), out, weights="ema")
    return out


# Export and import


def test_an_exported_run_gives_the_images_of_generate(runs, folder, tmp_path):
    expected = images_of_model(load_model(runs["base"], weights="ema"))
    assert (images_of_pipeline(read_pipeline(folder)) - expected).abs().max() < 1e-4
    assert (images_of_model(load_model(runs["base"])) - expected).abs().max() > 1e-3, "the average is something else"
    export(str(runs["base-ddp"]), tmp_path / "from a file", weights="ema")
    found = UNet2DConditionModel.from_pretrained(tmp_path / "from a file" / "unet").state_dict()
    assert difference(found, read_trained(runs["base-ddp"], weights="ema").part("unet")) == 0
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} == {".json", ".txt", ".safetensors", ".md"}


def test_from_checkpoint_to_pipeline_to_checkpoint_nothing_changes(runs, folder, server, tmp_path):
    pipeline = StableDiffusionPipeline.from_pretrained(folder)
    pipeline.save_pretrained(tmp_path / "saved")
    run = tmp_path / "run"
    start = [f"init_from.checkpoint={tmp_path / 'saved'}", f"model.pretrained={tmp_path / 'saved'}"]
    server.train(1, [(TOY, [f"output_folder={run}", *start, *STILL])])
    assert difference(weights_of(run), weights_of(runs["base"], "ema")) == 0
    model = load_model(run)
    for part in ("vae", "text_encoder"):
        assert difference(getattr(model, part).state_dict(), getattr(pipeline, part).state_dict()) == 0

    other = [f"output_folder={tmp_path / 'other'}", *start, "model.network.norm_num_groups=8"]
    job = server.run(1, [(TOY, other)])
    assert job.codes == [2]
    assert "norm_num_groups is 4 there and 8 here" in job.output and "Traceback" not in job.output


def test_one_file_has_the_weights_and_says_what_they_are(runs, folder, tmp_path):
    file = tmp_path / "model.safetensors"
    export(str(runs["base"]), file, weights="ema", licences=Licences(model="mit", data="CC0"))
    unet = UNet2DConditionModel.from_single_file(str(file), config=str(folder / "unet"), local_files_only=True)
    assert difference(unet.state_dict(), read_trained(runs["base"], weights="ema").part("unet")) == 0
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    assert (metadata["title"], metadata["checkpoint"], metadata["license"]) == ("toy", "ep0-ba4", "mit")
    assert "prediction_type: v_prediction" in metadata["config"]


def test_the_card_says_what_it_is_and_how_good(runs, tmp_path):
    run = shutil.copytree(runs["base"], tmp_path / "base")
    protocol = {"metric": "fid", "sampling": {"num_inference_steps": 20}}
    for step, value in (("ep0-ba2", 99.5), ("ep0-ba4", 12.25)):
        result = Result(name=f"{step}-raw", path=f"elsewhere/base/checkpoints/{step}", weights="raw")
        result.identity = load_model(run).mark.version
        result.numbers["fid"] = Number(value=value, protocol=protocol)
        result.write(run / "evaluation")
    export(str(run), tmp_path / "out", licences=Licences(model="apache-2.0", data="own drawings"))
    card = (tmp_path / "out" / "README.md").read_text()
    header = yaml.safe_load(card.split("---\n")[1])
    assert (header["license"], header["library_name"]) == ("apache-2.0", "diffusers")
    for text in ("- data: own drawings", "the training weights after 4 steps of 8 images", "num_inference_steps"):
        assert text in card, text
    assert "12.25" in card and "99.5" not in card, "the numbers are those of the checkpoint"


def test_what_cannot_be_exported_is_said_and_leaves_nothing(runs, tmp_path, monkeypatch):
    with pytest.raises(ConfigurationError, match="exists"):
        export(str(runs["base"]), tmp_path)
    with pytest.raises(ConfigurationError, match=r"trained without model\.lora"):
        export(str(runs["base"]), tmp_path / "out", lora_only=True)

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(diffusion.export, "write_pipeline", fail)
    with pytest.raises(MachineError, match="No space left on device"):
        export(str(runs["base"]), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# LoRA


@pytest.mark.world_size(2)
def test_lora_does_not_depend_on_ranks_parallelism_or_interruptions(runs):
    expected = losses(runs["lora-fsdp-1"])
    assert len(expected) == 4
    for name in ("lora-fsdp-2", "lora-ddp-2"):
        assert losses(runs[name]) == pytest.approx(expected, rel=1e-5)
        for weights in Weights:
            found = weights_of(runs[name], weights)
            assert difference(found, weights_of(runs["lora-fsdp-1"], weights)) < 1e-5


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["lora-fsdp-2", "lora-ddp-2"])
def test_the_weights_that_lora_is_put_on_stay_as_they_are(runs, name):
    def hashed(tensors: dict[str, Tensor]) -> dict[str, str]:
        return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}

    base = hashed(weights_of(runs["base"], "ema"))
    first, last = (read_weights(path, "raw") for path in find_checkpoints(runs[name] / "checkpoints")[-2:])
    for weights in (first, last, weights_of(runs[name], "ema")):
        kept = {key.replace(".base_layer", ""): tensor for key, tensor in weights.items() if not is_lora(key)}
        assert hashed(kept) == base
    moved = {key for key in first if not torch.equal(first[key], last[key])}
    assert moved == {key for key in first if is_lora(key)}
    average = weights_of(runs[name], "ema")
    assert all(not torch.equal(average[key], last[key]) for key in moved)


def test_a_checkpoint_of_lora_holds_moments_of_lora_only(runs):
    checkpoint = newest(runs["lora-fsdp-1"])
    state = StoredState(checkpoint).read_below("")
    moments = {re.sub(r".*\.(unet\..*)\.exp_avg$", r"\1", key) for key in state if key.endswith(".exp_avg")}
    assert moments == {name for name in read_weights(checkpoint, "raw") if is_lora(name)}


@pytest.mark.parametrize("name", ["base", "base-ddp", "lora-fsdp-1", "lora-ddp-2"])
def test_a_checkpoint_is_as_large_as_was_planned(runs, name):
    tensors = [
        entry
        for entry in StoredState(newest(runs[name])).read_below("").values()
        if isinstance(entry, Tensor) and entry.ndim and entry.is_floating_point()
    ]
    found = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert found == plan_run(load_config(str(runs[name] / "config.yaml"), [])).checkpoints.largest_bytes


@pytest.mark.parametrize("weights", ["raw", "ema"])
def test_lora_gives_the_same_images_in_diffusers(runs, folder, tmp_path, weights):
    run = runs["lora-fsdp-1"]
    expected = images_of_model(load_model(run, weights=weights))
    base = images_of_pipeline(read_pipeline(folder))
    assert (expected - base).abs().max() > 1e-2, "LoRA has changed something"

    export(str(run), tmp_path / "lora", weights=weights, lora_only=True)
    assert {path.name for path in (tmp_path / "lora").iterdir()} == {"README.md", "pytorch_lora_weights.safetensors"}
    pipeline = read_pipeline(folder)
    pipeline.load_lora_weights(tmp_path / "lora", weight_name="pytorch_lora_weights.safetensors")
    assert (images_of_pipeline(pipeline) - expected).abs().max() < 1e-4

    export(str(run), tmp_path / "merged", weights=weights)
    merged = read_pipeline(tmp_path / "merged")
    assert not any(is_lora(name) for name in merged.unet.state_dict())
    assert (images_of_pipeline(merged) - expected).abs().max() < 1e-4


def test_a_run_starts_from_a_run_with_lora(runs, server, tmp_path):
    run = tmp_path / "run"
    server.train(1, [(TOY, [f"output_folder={run}", f"init_from.checkpoint={runs['lora-fsdp-1']}", *STILL])])
    assert difference(weights_of(run), load_model(runs["lora-fsdp-1"]).state_dict()) == 0


def test_a_new_part_is_refused_under_lora_which_would_not_train_it(runs, server, tmp_path):
    start = [f"init_from.checkpoint={runs['base']}", "model.lora.rank=2", "model.text_adapter={layers: 1}"]
    job = server.run(1, [(TOY, [f"output_folder={tmp_path / 'run'}", *start])])
    assert job.codes == [2]
    assert "has no weights for model.text_adapter" in job.output
    assert "Traceback" not in job.output


def test_weights_of_other_shapes_are_refused(runs, server, tmp_path):
    start = [f"init_from.checkpoint={runs['base']}", "model.network.block_out_channels=[32]"]
    job = server.run(1, [(TOY, [f"output_folder={tmp_path / 'run'}", *start])])
    assert job.codes == [2]
    assert "init_from.checkpoint: " in job.output
    assert "Traceback" not in job.output
