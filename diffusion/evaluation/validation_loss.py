"""Validation loss of any weights on any number of ranks, and its dependence on the captions."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from diffusion.config.model import Posterior, PredictionType
from diffusion.config.schema import Config
from diffusion.datasets.batch import BatchKey, num_samples
from diffusion.datasets.loader import ValidationDataset, validation_dataset, validation_loader
from diffusion.distributed import agree, is_first_rank, rank, world_size
from diffusion.errors import ConfigurationError
from diffusion.evaluation.generate import CheckpointGenerator, EvaluatedModel, Generator, WeightsError
from diffusion.evaluation.protocol import VALIDATION_LOSS, VERSION, Number
from diffusion.loading import load_config_of
from diffusion.models.latent_diffusion import Batch, LatentDiffusion, squared_error
from diffusion.models.metrics import validation_means

CAPTION_KEYS = frozenset({BatchKey.TOKEN_IDS, BatchKey.TEXT_EMBEDDING, BatchKey.POOLED_TEXT_EMBEDDING})
"""Entries of a batch that depend on its captions."""


def validation_losses(evaluated: EvaluatedModel, generator: Generator) -> dict[str, Number]:
    """Compute the mean squared error of a checkpoint on the run's validation data; collective.

    Data, noise and timesteps of each sample are those of the run's own validation. This machine must reach the data.

    Returns:
        `validation_loss`, and below it the means by stream and by tenths of the timesteps, on the first rank; an empty
        dictionary on others. The values do not depend on the number of ranks.

    Raises:
        ConfigurationError: the model is no checkpoint of a run with validation data.
        DataError: the data is missing or damaged.
        WeightsError: a loss is not finite.
    """
    if not isinstance(generator, CheckpointGenerator):
        raise ConfigurationError(
            f"protocol.validation_loss: {evaluated.path} is no checkpoint, and has no validation data"
        )
    model = generator.model
    config = agree(lambda: load_config_of(Path(evaluated.path)))
    dataset = agree(lambda: open_validation_data(config, model))
    bins = model.occupied_timestep_bins(torch.from_numpy(dataset.addresses()))
    metrics: Any = validation_means("loss", dataset.stream_names_with_samples, bins)
    assert config.validation is not None
    loader = validation_loader(dataset, config.validation, config.data, rank=rank(), num_ranks=world_size())

    @torch.no_grad()
    def measure() -> None:
        for batch in tqdm(loader, desc="validation loss", disable=not is_first_rank(), leave=False):
            outputs = model.eval_forward({key: value.to(generator.device) for key, value in batch.items()})
            error = squared_error(outputs).cpu()
            if not error.isfinite().all():
                raise WeightsError(f"{evaluated.path}: a validation loss is not finite; its weights are of no use")
            for metric in metrics.values():
                metric.update(error, batch, outputs.draws.timesteps.cpu())

    agree(measure)
    values = {name: metric.compute().item() for name, metric in metrics.items()}
    protocol = {
        "version": VERSION,
        "estimator": "mean squared error at fixed noise and timesteps, not weighted",
        "samples": len(dataset),
        "streams": list(dataset.stream_names),
        "data": dataset.identity(),
        "seed": model.seed,
        "objective": model.objective.prediction_type.value,
        "zero_terminal_snr": model.objective.zero_terminal_snr,
        "resolution": config.data.resolution,
        "vae": generator.vae_identity,
    }
    if config.objective.prediction_type is PredictionType.flow:
        protocol["flow"] = asdict(config.objective.flow)  # The density of the timesteps.
    if config.objective.posterior is not Posterior.sample:
        protocol["posterior"] = config.objective.posterior.value
    if not is_first_rank():
        return {}
    return {
        name.replace("loss", VALIDATION_LOSS, 1): Number(value=value, protocol=protocol)
        for name, value in values.items()
    }


def open_validation_data(config: Config, model: LatentDiffusion) -> ValidationDataset:
    """Open the validation data of a run; a ConfigurationError if it has none."""
    if config.validation is None:
        raise ConfigurationError("the run has no validation data (validation)")
    config.data.num_workers = 0
    return validation_dataset(
        config.validation,
        config.data,
        tokenize=model.tokenize,
        with_logvar=config.objective.posterior == Posterior.sample,
        score_names=config.model.score_names,
    )


@torch.no_grad()
def measure_caption_use(
    model: LatentDiffusion, batches: Iterable[Batch], seeds: Sequence[int]
) -> dict[str, list[float]]:
    """Measure the validation loss with true captions, and with captions shifted by half the set.

    Noise and timesteps of a sample are the same for both, and depend on the seed. The batches, of the validation
    loader, have images of one size each.

    Returns:
        Losses with `true` captions, and with the `shuffled` ones of other samples, one of each per seed.

    Raises:
        ConfigurationError: there is one sample only.
    """
    own = list(batches)
    if sum(map(num_samples, own)) < 2:
        raise ConfigurationError("validation: captions of 1 sample cannot be shuffled: give data of 2 or more")
    training_seed, was_training = model.seed, model.network.training
    model.network.eval()
    try:
        losses: dict[str, list[float]] = {"true": [], "shuffled": []}
        for name, captioned in (("true", own), ("shuffled", with_shifted_captions(own))):
            for seed in seeds:
                model.seed = seed
                losses[name].append(_mean_loss(model, captioned))
    finally:
        model.seed = training_seed
        model.network.train(was_training)
    return losses


def with_shifted_captions(batches: Sequence[Batch]) -> list[Batch]:
    """Copies of batches with captions shifted by half the set."""
    sizes = [num_samples(batch) for batch in batches]
    others: list[Batch] = [dict(batch) for batch in batches]
    for key in CAPTION_KEYS & batches[0].keys():
        moved = torch.cat([batch[key] for batch in batches]).roll(sum(sizes) // 2, dims=0)
        for batch, part in zip(others, moved.split(sizes), strict=True):
            batch[key] = part
    return others


def _mean_loss(model: LatentDiffusion, batches: Sequence[Batch]) -> float:
    device = next(model.network.parameters()).device
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        outputs = model.eval_forward({key: value.to(device) for key, value in batch.items()})
        total += squared_error(outputs).double().sum().cpu()
    return (total / sum(map(num_samples, batches))).item()
