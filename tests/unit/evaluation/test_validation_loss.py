"""Validation losses by timestep and stream, and with captions of other samples."""

import pytest
import torch

from diffusion.composer_models import LatentDiffusionTraining
from diffusion.config.model import Architecture, ModelConfig, ObjectiveConfig, PredictionType
from diffusion.datasets.batch import BatchKey
from diffusion.datasets.sample_order import sample_address
from diffusion.errors import ConfigurationError
from diffusion.evaluation.validation_loss import measure_caption_use, with_shifted_captions
from diffusion.models.build import build_parts
from diffusion.models.latent_diffusion import timestep_bins
from diffusion.models.metrics import ValidationMean


@pytest.fixture(scope="module")
def trained():
    """A model that has learned eight latents by their captions."""
    config = ModelConfig(
        architecture=Architecture.tiny,
        network={"block_out_channels": [16, 32], "norm_num_groups": 4, "attention_head_dim": [2, 2]},
    )
    objective = ObjectiveConfig(prediction_type=PredictionType.v_prediction)
    model = LatentDiffusionTraining(**build_parts(config, objective, resolution=32, seed=17))
    batch = data(32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(60):
        batch[BatchKey.STEP] = torch.full((32,), step)
        loss = model.loss(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def data(num: int) -> dict:
    generator = torch.Generator().manual_seed(0)
    kinds = torch.randn(8, 4, 1, 1, generator=generator).expand(8, 4, 8, 8)
    token_ids = torch.zeros(num, 24, dtype=torch.int64)
    token_ids[:, 1] = 100 + torch.arange(num) % 8
    order = torch.randperm(num, generator=generator)
    return {
        BatchKey.LATENT_MEAN: kinds[torch.arange(num) % 8][order].half(),
        BatchKey.LATENT_LOGVAR: torch.full((num, 4, 8, 8), -8.0)[order].half(),
        BatchKey.TOKEN_IDS: token_ids[order],
        BatchKey.SAMPLE: order,
    }


def test_a_model_that_uses_captions_loses_more_without_them(trained):
    use = measure_caption_use(trained, [data(64)], seeds=range(3))
    gains = [shuffled - true for true, shuffled in zip(use["true"], use["shuffled"], strict=True)]
    assert len(gains) == 3
    assert min(gains) > 0.05
    assert min(gains) > max(gains) - min(gains)
    assert trained.seed == 17


def test_losses_are_repeatable_and_do_not_depend_on_the_batches(trained):
    whole = data(64)
    parts = [{key: value[i : i + 20] for key, value in whole.items()} for i in range(0, 64, 20)]
    one, other = measure_caption_use(trained, [whole], seeds=[0]), measure_caption_use(trained, parts, seeds=[0])
    for captions in ("true", "shuffled"):
        assert other[captions] == pytest.approx(one[captions], rel=1e-6)


def test_equal_captions_make_no_difference(trained):
    same = data(64)
    same[BatchKey.TOKEN_IDS] = same[BatchKey.TOKEN_IDS][:1].expand(64, 24)
    use = measure_caption_use(trained, [same], seeds=range(2))
    assert use["true"] == use["shuffled"]


def test_validation_data_may_have_several_sizes(trained):
    whole = data(64)
    first, second = ({key: value[part] for key, value in whole.items()} for part in (slice(0, 40), slice(40, 64)))
    wide = {key: second[key].repeat(1, 1, 1, 2) for key in (BatchKey.LATENT_MEAN, BatchKey.LATENT_LOGVAR)}
    use = measure_caption_use(trained, [first, second | wide], seeds=[0])
    assert use["shuffled"][0] - use["true"][0] > 0.05
    alone = [measure_caption_use(trained, [part], seeds=[0])["true"][0] for part in (first, second | wide)]
    assert use["true"][0] == pytest.approx((40 * alone[0] + 24 * alone[1]) / 64, rel=1e-6)


def test_captions_of_one_sample_cannot_be_shuffled(trained):
    with pytest.raises(ConfigurationError, match="2 or more"):
        measure_caption_use(trained, [data(1)], seeds=[0])


def test_captions_that_are_stored_as_embeddings_are_exchanged_too():
    parts = [
        {BatchKey.SAMPLE: numbers, BatchKey.TEXT_EMBEDDING: numbers[:, None, None].half().expand(-1, 24, 8)}
        for numbers in (torch.arange(3), torch.arange(3, 8))
    ]
    others = with_shifted_captions(parts)
    assert torch.cat([other[BatchKey.SAMPLE] for other in others]).tolist() == list(range(8))
    found = torch.cat([other[BatchKey.TEXT_EMBEDDING] for other in others])
    assert found[:, 0, 0].tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    assert found.shape == (8, 24, 8)


def validation_batch(num: int) -> dict:
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


def test_losses_by_timestep_are_means_of_the_samples_in_each_bin(trained):
    batch = validation_batch(23)
    trained.set_validation_data(["low", "high"], batch[BatchKey.SAMPLE][:22])
    found = losses(trained, batch, 23)
    with torch.no_grad():
        outputs = trained.eval_forward(batch)
    error = (outputs.prediction - outputs.target).square().mean(dim=(1, 2, 3))[:22]
    timesteps = outputs.draws.timesteps[:22]
    expected = {"loss": error.mean().item()}
    expected |= {f"loss/{name}": error[i::2].mean().item() for i, name in enumerate(("low", "high"))}
    for part in timestep_bins(1000):
        chosen = (timesteps >= part.start) & (timesteps < part.stop)
        if chosen.any():
            expected[f"loss/timesteps/{part.start}-{part.stop - 1}"] = error[chosen].mean().item()
    assert found == pytest.approx(expected, rel=1e-5)
    assert 5 <= sum("timesteps" in name for name in found) <= 10
    assert losses(trained, batch, 4) == pytest.approx(expected, rel=1e-5)


def test_a_loss_that_is_not_finite_makes_the_mean_so():
    mean = ValidationMean()
    mean.update(torch.tensor([1.0, torch.nan]), {BatchKey.IS_COUNTED: torch.tensor([True, False])})
    assert mean.compute() == 1
    mean.update(torch.tensor([torch.nan]), {})
    assert mean.compute().isnan()


def test_means_of_many_values_are_exact():
    mean = ValidationMean()
    for value in (2.0**24, 1.0):
        mean.update(torch.tensor([value]), {})
    assert mean.compute().item() == (2**24 + 1) / 2
