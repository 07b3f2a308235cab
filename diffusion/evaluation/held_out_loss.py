"""The loss on a run's held-out data, by timestep and by stream: of any weights, and on any number of ranks."""

from typing import Any

import torch
from tqdm.auto import tqdm

from diffusion.checkpointing.reading import resolve_checkpoint
from diffusion.config.model import Posterior
from diffusion.config.schema import Config
from diffusion.datasets.held_out import HeldOutData
from diffusion.datasets.loader import validation_dataset, validation_loader
from diffusion.distributed import agree
from diffusion.errors import ConfigurationError
from diffusion.evaluation.models import CheckpointGenerator, Generator, Subject
from diffusion.evaluation.protocol import VERSION
from diffusion.evaluation.ranks import Ranks
from diffusion.evaluation.results import Number
from diffusion.loading import load_config_of
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.tokenizers import tokenize

NAME = "validation_loss"


def held_out_losses(subject: Subject, generator: Generator, ranks: Ranks) -> dict[str, Number]:
    """Measure the mean squared error at the noise and the timestep that are fixed for each sample.

    They are those of the run's own validation; so is the data, which this machine must reach.

    Args:
        subject: a checkpoint.
        generator: its model.
        ranks: this rank among all.

    Returns:
        `validation_loss`, and below it the means by stream and by tenths of the timesteps; the same on each number of
        ranks. On the first rank; nothing on others.

    Raises:
        ConfigurationError: it is no checkpoint of a run with held-out data.
        DataError: the data is missing or damaged.
    """
    if not isinstance(generator, CheckpointGenerator):
        raise ConfigurationError(
            f"protocol.validation_loss: {subject.place} is no checkpoint, and has no held-out data"
        )
    model = generator.model
    config = agree(lambda: load_config_of(resolve_checkpoint(subject.place)))
    dataset = agree(lambda: _open(config, model))
    model.expect_held_out(dataset.stream_names_with_samples, torch.from_numpy(dataset.addresses()))
    metrics: Any = model.get_metrics()
    assert config.validation is not None
    loader = validation_loader(dataset, config.validation, config.data, rank=ranks.rank, num_ranks=ranks.size)
    with torch.no_grad():
        for batch in tqdm(loader, desc="held-out loss", disable=not ranks.is_first, leave=False):
            on_device = {key: value.to(generator.device) for key, value in batch.items()}
            outputs = model.eval_forward(on_device)
            error = (outputs.prediction.float() - outputs.target).square().mean(dim=(1, 2, 3)).cpu()
            for metric in metrics.values():
                metric.add(error, batch, outputs.timesteps.cpu())
    values = {name: metric.compute().item() for name, metric in metrics.items()}
    protocol = {
        "version": VERSION,
        "estimator": "mean squared error at fixed noise and timesteps, not weighted",
        "samples": len(dataset),
        "streams": list(dataset.stream_names),
        "seed": model.seed,
        "objective": model.objective.prediction_type.value,
        "zero_terminal_snr": model.objective.zero_terminal_snr,
        "resolution": config.data.resolution,
        "vae": generator.vae_identity,
    }
    if not ranks.is_first:
        return {}
    return {name.replace("loss", NAME, 1): Number(value=value, protocol=protocol) for name, value in values.items()}


def _open(config: Config, model: LatentDiffusion) -> HeldOutData:
    if config.validation is None:
        raise ConfigurationError("protocol.validation_loss: the run has no held-out data (validation)")
    config.data.num_workers = 0
    return validation_dataset(
        config.validation,
        config.data,
        tokenize=lambda captions: tokenize(model.tokenizer, captions),
        with_logvar=config.objective.posterior == Posterior.sample,
    )
