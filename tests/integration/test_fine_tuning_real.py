"""The commands of docs/fine_tuning.md's "Shown on emoji" as they stand there, with --data: fewer images and steps."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import StableDiffusionPipeline

from diffusion.export import export
from diffusion.formats.run_folder import read_metrics, series
from diffusion.models.sampling import initial_latents
from tests.tools.preparing import prepare
from tests.tools.training_runs import ROOT, SMALL_UNET, TrainingServer

pytestmark = pytest.mark.slow

SMALLER = [
    SMALL_UNET,
    "data.global_batch_size=16",
    "data.num_workers=0",
    "validation.num_samples=64",
    "schedule.warmup=5ba",
    "trainer.max_duration=30ba",
    "trainer.eval_interval=10ba",
    "trainer.save_interval=1dur",
    "trainer.progress_bar=false",
]


def documented(place: Path) -> list[list[str]]:
    """Words of the documented commands, with `runs/` elsewhere."""
    text = (ROOT / "docs" / "fine_tuning.md").read_text(encoding="utf-8").split("## An example on emoji")[1]
    [block] = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    said = "".join(f'{name}() {{ echo "${{@@Q}}"; }}\n' for name in ("python", "composer"))
    done = subprocess.run(["bash", "-euc", said + block], capture_output=True, text=True, check=True)
    return [shlex.split(line.replace("runs/", f"{place}/")) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def place(data_folder: Path, server: TrainingServer, shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands take up: a VAE and a model of drawn shapes, and prepared emoji of all three layouts."""
    place, emoji = tmp_path_factory.mktemp("fine-tuning"), data_folder / "emoji"
    (place / "folder_512").mkdir()
    for image in sorted((emoji / "folder_512").glob("*.png"))[:30]:
        for file in (image, image.with_suffix(".txt")):
            shutil.copy(file, place / "folder_512")
    sources = [place / "folder_512", emoji / "webdataset_128" / "00000.tar", emoji / "parquet_72.parquet"]
    prepare(sources, place / "emoji" / "prepared", edges=[64, 128, 512], validation_fraction=0.2, num_workers=1)
    shutil.copytree(shapes / "vae", place / "shapes" / "autoencoder" / "vae")
    data = [f"data.local={shapes}/latents-32/train", f"validation.local={shapes}/latents-32/validation"]
    base = [f"output_folder={place}/shapes/phase1", f"model.vae={shapes}/vae", "samples.prompts=[]", *data]
    server.train(1, [("yamls/tiny/phase1.yaml", [*base, *SMALLER])])
    return place


@pytest.mark.emoji
def test_fine_tuning_on_real_images(place, server):
    encode, lora, full = documented(place)
    server.command(1, [*encode, "--workers", "0"])
    for command in (lora, full):
        server.command(1, [*command, *SMALLER])
        run = next(word.removeprefix("output_folder=") for word in command if word.startswith("output_folder="))
        _, losses = series(read_metrics(Path(run) / "metrics.jsonl"), "metrics/validation/loss")
        assert len(losses) == 3
        assert losses == sorted(set(losses), reverse=True), f"{run}: the validation loss falls"

    export(str(place / "shapes" / "phase1"), place / "base")
    export(str(place / "emoji" / "lora"), place / "adapter", lora_only=True)
    pipeline: Any = StableDiffusionPipeline.from_pretrained(place / "base")
    pipeline.set_progress_bar_config(disable=True)
    options = {"latents": initial_latents([1], (4, 8, 8), torch.device("cpu")), "num_inference_steps": 3}
    plain = pipeline("a grinning face", output_type="pt", **options).images
    pipeline.load_lora_weights(place / "adapter", weight_name="pytorch_lora_weights.safetensors")
    tuned = pipeline("a grinning face", output_type="pt", **options).images
    assert (tuned - plain).abs().max() > 1e-3, "the adapter has changed something"
