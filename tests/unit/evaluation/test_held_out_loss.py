"""The losses on held-out data by timestep and by stream."""

import pytest
import torch

from diffusion.config.model import Architecture, ModelConfig, ObjectiveConfig, PredictionType
from diffusion.datasets.batch import BatchKey
from diffusion.models import build_model
from diffusion.models.metrics import timestep_bins
from diffusion.randomness import sample_address


@pytest.fixture(scope="module")
def model():
    config = ModelConfig(architecture=Architecture.tiny, unet={"block_out_channels": [16, 32], "norm_num_groups": 4})
    objective = ObjectiveConfig(prediction_type=PredictionType.v_prediction)
    return build_model(config, objective, resolution=32, seed=17).eval()


def held_out_batch(num: int) -> dict:
    generator = torch.Generator().manual_seed(1)
    stream = torch.arange(num) % 2
    return {
        BatchKey.LATENT_MEAN: torch.randn(num, 4, 8, 8, generator=generator).half(),
        BatchKey.LATENT_LOGVAR: torch.full((num, 4, 8, 8), -8.0).half(),
        BatchKey.TOKEN_IDS: torch.randint(1, 500, (num, 24), generator=generator),
        BatchKey.SAMPLE: sample_address(stream, torch.arange(num) // 2),
        BatchKey.STREAM: stream,
        BatchKey.IS_COUNTED: torch.arange(num) < num - 1,
    }


def test_bins_cut_the_timesteps_into_ten():
    bins = timestep_bins(1000)
    assert [len(part) for part in bins] == [100] * 10
    assert sorted(t for part in timestep_bins(7) for t in part) == list(range(7))


def losses(model, batch, size: int) -> dict[str, float]:
    metrics = model.get_metrics()
    with torch.no_grad():
        for start in range(0, len(batch[BatchKey.SAMPLE]), size):
            part = {key: value[start : start + size] for key, value in batch.items()}
            outputs = model.eval_forward(part)
            for metric in metrics.values():
                model.update_metric(part, outputs, metric)
    return {name: metric.compute().item() for name, metric in metrics.items()}


def test_losses_by_timestep_are_means_of_the_samples_in_each_bin(model):
    batch = held_out_batch(23)
    model.set_validation_data(["low", "high"], batch[BatchKey.SAMPLE][:22])
    found = losses(model, batch, 23)
    with torch.no_grad():
        outputs = model.eval_forward(batch)
    error = (outputs.prediction - outputs.target).square().mean(dim=(1, 2, 3))[:22]
    timesteps = outputs.timesteps[:22]
    expected = {"loss": error.mean().item()}
    expected |= {f"loss/{name}": error[i::2].mean().item() for i, name in enumerate(("low", "high"))}
    for part in timestep_bins(1000):
        chosen = (timesteps >= part.start) & (timesteps < part.stop)
        if chosen.any():
            expected[f"loss/timesteps/{part.start}-{part.stop - 1}"] = error[chosen].mean().item()
    assert found == pytest.approx(expected, rel=1e-5)
    assert 5 <= sum("timesteps" in name for name in found) <= 10
    assert losses(model, batch, 4) == pytest.approx(expected, rel=1e-5)
