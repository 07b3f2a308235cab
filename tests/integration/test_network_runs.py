"""Runs of a text adapter, of a transformer and of conditioning on scores: ranks, FSDP2, averages, LoRA, exports."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from diffusion.config.loading import load_config
from diffusion.config.model import Weights
from diffusion.errors import ConfigurationError
from diffusion.export import export
from diffusion.loading import load_model
from diffusion.models.sampling import initial_latents
from diffusion.planning.plan import plan_run
from tests.tools.pipelines import PROMPTS, images_of_model, images_of_pipeline, read_pipeline
from tests.tools.runs import difference, losses, weights_of
from tests.tools.training_runs import SMALL_TRANSFORMER, Run

pytestmark = pytest.mark.slow

TOY = Path("tests/tools/toy.yaml")
KINDS = {
    "adapter": ["model.text_adapter={layers: 2}"],
    "scores": ["model.score_conditioning={columns: [{name: number, mean: 4, std: 2}]}"],
    "transformer": [SMALL_TRANSFORMER, "objective.prediction_type=flow"],
}
PARTS = {"adapter": {"unet", "text_adapter"}, "scores": {"unet", "score_embedding"}, "transformer": {"transformer"}}
ASKED = {"scores": {"number": 6.0}}
LORA = {
    "adapter": "model.lora={rank: 2, alpha: 4.0}",
    "scores": "model.lora={rank: 2, alpha: 4.0}",
    "transformer": "model.lora={rank: 2, alpha: 4.0, targets: [img_qkv_proj, txt_kv_proj, to_out.0]}",
}
# With a smaller eps, AdamW makes updates of the rounding in gradients that are nearly 0.
COMMON = ["trainer.save_interval=100ba", "optimizer.lr=0.02", "optimizer.eps=1e-5", "algorithms.ema.start=2ba"]
HALF, WHOLE = "trainer.max_duration=3ba", "trainer.max_duration=6ba"
RECOMPUTED = "trainer.activation_checkpointing=true"


@pytest.fixture(scope="module", params=sorted(KINDS))
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def runs(server, tmp_path_factory) -> dict[tuple[str, str], Path]:
    """Whole on one rank, sharded over two and continued on one, and LoRA from the first."""
    root = tmp_path_factory.mktemp("networks")
    ways = ("ddp-1", "fsdp-2", "resized", "lora-fsdp-2", "lora-ddp-1")
    folders = {(kind, way): root / f"{kind}-{way}" for kind in KINDS for way in ways}

    toy = yaml.safe_load(TOY.read_text())
    toy["model"] = {"architecture": "tiny_transformer"}
    (root / "transformer.yaml").write_text(yaml.safe_dump(toy))

    def run(kind: str, way: str, *more: str) -> Run:
        if "lora" in way:
            more = (LORA[kind], f"init_from={{checkpoint: {folders[kind, 'ddp-1']}, weights: ema}}", *more)
        parallelism = "ddp" if "ddp" in way else "fsdp"
        options = [f"output_folder={folders[kind, way]}", f"trainer.parallelism={parallelism}"]
        file = root / "transformer.yaml" if kind == "transformer" else TOY
        return str(file), [*options, *KINDS[kind], *COMMON, *more]

    server.train(1, [run(kind, "ddp-1", WHOLE) for kind in KINDS])
    sharded = [run(kind, way, length) for kind in KINDS for way, length in (("resized", HALF), ("lora-fsdp-2", WHOLE))]
    server.train(2, [*sharded, *(run(kind, "fsdp-2", WHOLE, RECOMPUTED) for kind in KINDS)])
    server.train(1, [run(kind, way, WHOLE) for kind in KINDS for way in ("resized", "lora-ddp-1")])
    return folders


@pytest.mark.world_size(2)
@pytest.mark.parametrize("lora", ["", "lora-"])
def test_neither_ranks_nor_shards_nor_recomputation_matter(runs, kind, lora):
    expected = runs[kind, f"{lora}ddp-1"]
    assert len(losses(expected)) == 6
    for way in ("lora-fsdp-2",) if lora else ("fsdp-2", "resized"):
        assert losses(runs[kind, way]) == pytest.approx(losses(expected), rel=1e-5)
        for weights in Weights:
            assert difference(weights_of(runs[kind, way], weights), weights_of(expected, weights)) < 1e-5


def test_all_of_it_is_trained_averaged_and_planned(runs, kind):
    run = runs[kind, "ddp-1"]
    raw, average = weights_of(run), weights_of(run, "ema")
    model = load_model(run)
    assert raw.keys() == average.keys() == model.state_dict().keys()
    expected = {name.partition(".")[0] for name in raw}
    assert expected == PARTS[kind]
    for part in expected:
        assert any((raw[name] - average[name]).abs().max() > 1e-4 for name in raw if name.startswith(part))
    plan = plan_run(load_config(str(run / "config.yaml")))
    assert plan.num_parameters == sum(tensor.numel() for tensor in raw.values())


def test_lora_leaves_the_weights_as_they_are(runs, kind):
    before, after = weights_of(runs[kind, "ddp-1"], "ema"), weights_of(runs[kind, "lora-ddp-1"])
    kept = {name.replace(".base_layer", ""): tensor for name, tensor in after.items() if ".lora_" not in name}
    assert difference(kept, before) == 0
    assert len(kept) < len(after)


@pytest.mark.parametrize(("way", "weights"), [("ddp-1", "ema"), ("lora-fsdp-2", "raw")])
def test_the_pipeline_of_diffusers_gives_the_images_of_generate(runs, kind, way, weights, tmp_path):
    latents = initial_latents([1, 2], (4, 8, 8), torch.device("cpu"))
    asked = ASKED.get(kind)
    expected = images_of_model(load_model(runs[kind, way], weights=weights), latents=latents, scores=asked)
    export(str(runs[kind, way]), tmp_path / "exported", weights=weights, scores=asked)
    pipeline = read_pipeline(tmp_path / "exported")  # PRX's takes one prompt at a time: it has one mask for all.
    images = [images_of_pipeline(pipeline, PROMPTS[i], latents=latents[i : i + 1]) for i in range(2)]
    assert (torch.cat(images) - expected).abs().max() < 1e-4
    card = (tmp_path / "exported" / "README.md").read_text()
    example = card.split("```python\n")[1].split("```")[0].replace("FOLDER", str(tmp_path / "exported"))
    found: dict[str, Any] = {}
    exec(example.replace("guidance_scale", "num_inference_steps=2, guidance_scale"), found)
    assert found["image"].size == (32, 32)


def test_loras_of_a_transformer_are_merged_only(runs, tmp_path):
    with pytest.raises(ConfigurationError, match="loads no LoRA"):
        export(str(runs["transformer", "lora-ddp-1"]), tmp_path / "lora", lora_only=True)


def test_the_layers_of_a_transformer_are_named(server, runs, tmp_path):
    first = runs["transformer", "ddp-1"]
    wrong = ["model.lora={rank: 2}", f"init_from.checkpoint={first}", f"output_folder={tmp_path}"]
    job = server.run(1, [(str(first.parent / "transformer.yaml"), [*KINDS["transformer"], *COMMON, *wrong])])
    assert job.codes == [2]
    assert "no layer of the network is called 'to_q'. Give names such as img_qkv_proj" in job.output
