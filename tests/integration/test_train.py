import json
from pathlib import Path

import pytest

from diffusion.checkpointing.find import resolve_checkpoint
from diffusion.checkpointing.read import read_config_values
from diffusion.config.model import Weights
from diffusion.formats.run_folder import read_metrics, series
from diffusion.loading import load_model
from tests.tools.runs import difference, losses, weights_of

TOY = "tests/tools/toy.yaml"
PROMPTS = ["a red circle", "a blue star", "a green square"]
SAMPLED = f"samples.prompts=[{', '.join(PROMPTS)}]"


@pytest.fixture(scope="module")
def runs(server, tmp_path_factory) -> dict[str, Path]:
    """The toy run, uninterrupted and interrupted, on one and on two ranks, sharded and not."""
    root = tmp_path_factory.mktemp("runs")
    names = ("fsdp-1", "fsdp-1-2", "fsdp-2-1", "ddp-1", "ddp-2-1", "stratified-1", "stratified-2")
    folder = {name: root / name for name in names}

    def run(name: str, *overrides: str) -> tuple[str, list[str]]:
        parallelism = "ddp" if name.startswith("ddp") else "fsdp"
        own = [f"output_folder={folder[name]}", f"trainer.parallelism={parallelism}", "trainer.save_interval=100ba"]
        return TOY, [*own, *overrides]

    short, micro = "trainer.max_duration=4ba", "trainer.device_train_microbatch_size=3"
    stratified = ("objective.stratified_timesteps=true", short, "algorithms.ema=null")
    server.train(
        1,
        [
            run("fsdp-1", SAMPLED),
            run("fsdp-1-2", short),
            run("ddp-1"),
            run("stratified-1", *stratified),
        ],
    )
    server.train(
        2,
        [
            run("fsdp-2-1", short),
            run("ddp-2-1", short),
            run("fsdp-1-2", micro),
            run("stratified-2", *stratified, micro),
        ],
    )
    server.train(1, [run("fsdp-2-1"), run("ddp-2-1", micro)])
    return folder


@pytest.mark.world_size(2)
def test_stratified_timesteps_do_not_depend_on_ranks_and_microbatches(runs):
    found = losses(runs["stratified-1"])
    assert losses(runs["stratified-2"]) == pytest.approx(found, rel=1e-5)
    assert found[0] != losses(runs["fsdp-1"])[0], "other timesteps"


def test_writes_what_people_look_at(runs):
    run = runs["fsdp-1"]
    for name in ("config.yaml", "metrics.jsonl", "samples/step-000004.png", "samples/step-000008.png"):
        assert (run / name).stat().st_size > 0, name
    assert len(losses(run)) == 8
    rows = read_metrics(run / "metrics.jsonl")
    assert series(rows, "lr-AdamW/group0")[1][:4] == pytest.approx([0.0, 5e-4, 1e-3, 1e-3])


def test_sample_grids_come_at_intervals_in_every_unit(server, tmp_path):
    steps = {"2ba": [2, 4, 5], "12sp": [2, 3, 5], "2ep": [4, 5], "0.6dur": [3, 5]}
    short = ["trainer.parallelism=ddp", "trainer.max_duration=5ba", "algorithms.ema=null", "trainer.save_interval=1dur"]
    of_two_batches = "plugins.train_dataset.arguments={num_samples: 16}"
    runs = [(SAMPLED, f"samples.interval={time}", f"output_folder={tmp_path / time}") for time in steps]
    server.train(1, [(TOY, [*run, *short, of_two_batches]) for run in runs])
    for time, expected in steps.items():
        found = sorted(path.name for path in (tmp_path / time / "samples").iterdir())
        assert found == [f"step-{step:06d}.png" for step in expected], time


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["fsdp-1-2", "fsdp-2-1", "ddp-1", "ddp-2-1"])
def test_losses_and_weights_do_not_depend_on_ranks_microbatches_or_interruptions(runs, name):
    assert losses(runs[name]) == pytest.approx(losses(runs["fsdp-1"]), rel=1e-5)
    for weights in Weights:
        expected = weights_of(runs["fsdp-1"], weights)
        found = weights_of(runs[name], weights)
        assert difference(expected, found) < 1e-5


def test_a_checkpoint_says_what_it_was_trained_as(runs):
    for name in ("fsdp-1", "ddp-1"):
        values = read_config_values(resolve_checkpoint(str(runs[name])))
        assert values["objective"]["prediction_type"] == "v_prediction"


def test_a_loaded_model_generates_what_the_run_sampled(runs):
    import numpy as np
    from PIL import Image

    from diffusion.models.sampling import image_grid

    model = load_model(runs["fsdp-1"], weights="ema")
    images = model.generate(PROMPTS, seed=0, num_inference_steps=2, progress=False)
    expected = np.asarray(Image.open(runs["fsdp-1"] / "samples" / "step-000008.png"), dtype=int)
    found = np.asarray(image_grid(images, 3), dtype=int)
    assert np.abs(found - expected).max() <= 1


def test_phase_2_starts_from_phase_1(server, runs, tmp_path):
    run = tmp_path / "phase2"
    options = [f"output_folder={run}", "trainer.max_duration=1ba", "optimizer.lr=0", "algorithms.ema=null"]
    options += [
        "schedule.warmup=1ba",
        f"init_from.checkpoint={runs['fsdp-1']}",
        "init_from.weights=ema",
    ]
    output = server.train(1, [(TOY, options)]).output
    expected = weights_of(runs["fsdp-1"], Weights.ema)
    assert difference(weights_of(run), expected) == 0.0
    assert "Traceback" not in output
    config = (run / "config.yaml").read_text()
    assert json.dumps(str(runs["fsdp-1"])).strip('"') in config
