"""What a run reads: its training data and held-out data, checked against its model."""

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

import torch
from composer import Evaluator
from composer.core import DataSpec
from composer.models import ComposerModel
from composer.utils import dist
from torch import Tensor
from torch.utils.data import DataLoader

from diffusion.config.data import ImageSize, Representation, Shuffling, image_sizes
from diffusion.config.model import Posterior
from diffusion.config.schema import Config
from diffusion.datasets.batch import BatchKey, num_samples, split_batch
from diffusion.datasets.encoded import EncodedManifest, check_encoded, read_encoded_manifest
from diffusion.datasets.loader import (
    check_training_streams,
    check_validation_streams,
    held_out_streams,
    train_loader,
    validation_dataset,
    validation_loader,
)
from diffusion.datasets.locations import StreamLocation, locate_streams
from diffusion.errors import ConfigurationError, DataError
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.pretrained import module_identity, tokenizer_identity
from diffusion.models.tokenizers import build_tokenizer, tokenize
from diffusion.plugins import build_plugin

NUM_STATISTICS_IMAGES = 2048
"""Images of the training set over which a VAE's latent statistics are measured."""


@runtime_checkable
class IndexedDataset(Protocol):
    """What takes the place of the streams: a torch dataset with a length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


def _tokenize(config: Config) -> Callable[[list[str]], Any]:
    tokenizer = build_tokenizer(config.model.architecture)
    return lambda captions: tokenize(tokenizer, captions)


def check_streams(config: Config) -> None:
    """Refuse data that is not there, or not what the configuration says, as far as that is known without the model.

    Raises:
        DataError: what is missing or differs, and what to do.
    """
    with_logvar = config.objective.posterior == Posterior.sample
    if config.plugins.train_dataset is None:
        check_training_streams(config.data, with_logvar=with_logvar)
    if config.validation is not None:
        check_validation_streams(config.validation, config.data, with_logvar=with_logvar)
    for _ in _encoded_streams(config):
        pass


def check_identity(config: Config, model: LatentDiffusion) -> None:
    """Refuse latents of another VAE or tokenizer."""
    if not _reads_encoded(config):
        return
    vae, tokenizer = module_identity(model.vae), tokenizer_identity(model.tokenizer)
    text_encoder = module_identity(model.text_encoder) if config.data.text_embeddings else None
    for location, size, manifest in _encoded_streams(config):
        check_encoded(
            manifest,
            where=location.source,
            size=size,
            needs_logvar=config.objective.posterior == Posterior.sample,
            vae_identity=vae,
            tokenizer_identity=tokenizer,
            text_encoder_identity=text_encoder,
        )


def _reads_encoded(config: Config) -> bool:
    return config.data.representation == Representation.latents and config.plugins.train_dataset is None


def _encoded_streams(config: Config) -> Iterator[tuple[StreamLocation, ImageSize, EncodedManifest]]:
    """Streams of latents, for training and held out, with their sizes and manifests.

    Raises:
        DataError: one has no manifest, or that of something else.
    """
    if not _reads_encoded(config):
        return
    roots = [(config.data.remote, config.data.local, config.data.streams)]
    if config.validation is not None:
        streams = held_out_streams(config.validation, config.data)
        roots.append((config.validation.remote, config.validation.local, streams))
    for remote, local, streams in roots:
        sizes = image_sizes(streams, config.data.resolution)
        for location, size in zip(locate_streams(remote, local, streams), sizes, strict=True):
            manifest = read_encoded_manifest(location.source, location.store)
            if manifest is None:
                raise DataError(f"{location.source} has no manifest.json beside it: encode it with scripts/encode.py")
            yield location, size, manifest


def build_train_data(config: Config) -> DataSpec:
    """Open the training data of this rank.

    Raises:
        UserError: the data is missing, damaged or not what the configuration says.
    """
    rank_batch_size = config.data.global_batch_size // dist.get_world_size()
    if config.plugins.train_dataset is not None:
        dataset: Any = build_plugin(config.plugins.train_dataset, "plugins.train_dataset", IndexedDataset)
        if len(dataset) < config.data.global_batch_size:
            raise ConfigurationError(
                f"plugins.train_dataset ({config.plugins.train_dataset.path}) holds {len(dataset)} samples, fewer than "
                f"the {config.data.global_batch_size} of a step: give it more, or lower data.global_batch_size"
            )
        shuffle = config.data.shuffle is not Shuffling.none
        sampler = dist.get_sampler(dataset, shuffle=shuffle, drop_last=True, seed=config.seed)
        loader = DataLoader(
            dataset, rank_batch_size, sampler=sampler, num_workers=config.data.num_workers, drop_last=True
        )
        return DataSpec(loader, get_num_samples_in_batch=num_samples)
    loader = train_loader(
        config.data,
        seed=config.seed,
        tokenize=_tokenize(config),
        rank_batch_size=rank_batch_size,
        with_logvar=config.objective.posterior == Posterior.sample,
    )
    return DataSpec(loader, split_batch=split_batch, get_num_samples_in_batch=num_samples)


def build_evaluator(config: Config, model: ComposerModel) -> Evaluator | None:
    """Open this rank's part of the held-out data, and tell the model what it is; None without any.

    Raises:
        UserError: the data is missing, damaged or not what the configuration says.
    """
    if config.validation is None:
        return None
    dataset = validation_dataset(
        config.validation,
        config.data,
        tokenize=_tokenize(config),
        with_logvar=config.objective.posterior == Posterior.sample,
    )
    if isinstance(model, LatentDiffusion):
        model.set_validation_data(dataset.stream_names_with_samples, torch.from_numpy(dataset.addresses()))
    rank, num_ranks = dist.get_global_rank(), dist.get_world_size()
    loader = validation_loader(dataset, config.validation, config.data, rank=rank, num_ranks=num_ranks)
    return Evaluator(
        label="validation",
        dataloader=DataSpec(loader, split_batch=split_batch, get_num_samples_in_batch=num_samples),
        eval_interval=config.trainer.eval_interval,
        device_eval_microbatch_size=config.validation.device_batch_size,
    )


def statistics_images(config: Config) -> Iterator[Tensor]:
    """This rank's share of the first images of the training set, each image on one rank only."""
    from diffusion.config.data import ValidationConfig

    everything = ValidationConfig(
        remote=config.data.remote,
        local=config.data.local,
        streams=config.data.streams,
        num_samples=NUM_STATISTICS_IMAGES,
    )
    dataset = validation_dataset(everything, config.data, tokenize=_tokenize(config))
    indices = range(dist.get_global_rank(), len(dataset), dist.get_world_size())
    size = everything.device_batch_size
    for start in range(0, len(indices), size):
        samples = [torch.as_tensor(dataset[i][BatchKey.IMAGE]) for i in indices[start : start + size]]
        for _, of_one_shape in groupby(samples, key=lambda sample: sample.shape):
            yield torch.stack(list(of_one_shape))
