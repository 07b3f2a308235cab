"""The validation loss of a run's checkpoints by `evaluate.py` is that of the run, on one rank and on two."""

import sys

import pytest
import torch

from diffusion.checkpointing.find import resolve_checkpoint
from diffusion.evaluation.config import SamplingConfig
from diffusion.evaluation.generate import CheckpointGenerator, WeightsError, checkpoint_models, load_generator
from diffusion.evaluation.validation_loss import validation_losses
from diffusion.formats.run_folder import read_metrics
from scripts import caption_use
from tests.tools.evaluation_toys import evaluate_on, numbers

EVALUATE = [
    "protocol.metrics=[]",
    "protocol.prompts=null",
    "protocol.reference=null",
    "protocol.validation_loss=true",
    "weights=[raw, ema]",
]


@pytest.fixture(scope="module")
def outputs(server, shapes, tmp_path_factory):
    """Run folder, and output folders by the number of ranks."""
    root = tmp_path_factory.mktemp("validation-loss")
    data = shapes / "latents-32"
    overrides = [
        f"output_folder={root / 'run'}",
        "plugins.train_dataset=null",
        f"data.local={data / 'train'}",
        "data.streams=[{name: 32-64}, {name: 64-up}]",
        "data.num_canonical_nodes=8",
        "data.shuffle_block_size=64",
        f"model.vae={shapes / 'vae'}",
        f"validation={{local: {data / 'validation'}, num_samples: 21, device_batch_size: 4}}",
        "trainer.max_duration=4ba",
        "trainer.eval_interval=4ba",
        "samples.prompts=[]",
        "algorithms.ema.evaluate=false",
    ]
    server.train(1, [("tests/tools/toy.yaml", overrides)])
    for ranks in (1, 2):
        evaluate_on(server, ranks, [*EVALUATE, f"model={root / 'run'}", f"output_folder={root / f'on-{ranks}'}"])
    return root / "run", {ranks: numbers(root / f"on-{ranks}") for ranks in (1, 2)}


@pytest.mark.world_size(2)
def test_losses_are_those_of_the_run_on_each_number_of_ranks(outputs):
    run, found = outputs
    (row,) = [row for row in read_metrics(run / "metrics.jsonl") if "metrics/validation/loss" in row]
    prefix = "metrics/validation/loss"
    expected = {
        name.replace(prefix, "validation_loss"): value for name, value in row.items() if name.startswith(prefix)
    }
    assert {"validation_loss", "validation_loss/32-64", "validation_loss/64-up"} < set(expected)
    assert sum("timesteps" in name for name in expected) >= 5
    for ranks in (1, 2):
        assert found[ranks]["ep0-ba4-raw"] == pytest.approx(expected, rel=1e-5)
    assert found[2]["ep0-ba4-ema"] == pytest.approx(found[1]["ep0-ba4-ema"], rel=1e-6)
    assert found[1]["ep0-ba4-ema"]["validation_loss"] != found[1]["ep0-ba4-raw"]["validation_loss"]


def test_caption_use_is_a_table_with_a_row_for_each_seed(outputs, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["caption_use.py", str(outputs[0]), "--seeds", "2", "--device", "cpu"])
    caption_use.main()
    _, head, *rows, gain = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["seed", "true", "shuffled"]
    assert [row[0] for row in rows] == ["0", "1"]
    gains = [float(shuffled) - float(true) for _, true, shuffled in rows]
    assert float(gain[3]) == pytest.approx(sum(gains) / 2, abs=2e-5)


def test_losses_and_images_that_are_not_finite_are_an_error(outputs):
    """The weights are finite; images would be black, and have a FID."""
    [model] = checkpoint_models(resolve_checkpoint(str(outputs[0])), ["raw"])
    generator = load_generator(model, torch.device("cpu"))
    assert isinstance(generator, CheckpointGenerator)
    for parameter in generator.model.network.parameters():
        parameter.data *= 1e30
    with pytest.raises(WeightsError, match="not finite"):
        validation_losses(model, generator)
    side = generator.resolution // generator.vae_factor
    noise = torch.ones(1, generator.num_channels, side, side)
    with pytest.raises(WeightsError, match="not finite"):
        generator.generate(["a"], noise, SamplingConfig(num_inference_steps=2), 1.0)
