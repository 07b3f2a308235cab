"""Weights and models from checkpoints and diffusers folders, without the Trainer."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CLIPTextModel

from diffusion.checkpointing.find import locate_checkpoint, resolve_checkpoint
from diffusion.checkpointing.read import read_config_values, read_identities, read_weights
from diffusion.checkpointing.remote import RemoteCheckpoints
from diffusion.config.frozen import FrozenPaths
from diffusion.config.loading import from_dict, read_yaml
from diffusion.config.locations import weight_locations
from diffusion.config.model import ModelConfig
from diffusion.config.resumption import is_used
from diffusion.config.schema import Config, Task
from diffusion.distributed import local_rank
from diffusion.ema.posthoc import AVERAGE_SUFFIX
from diffusion.errors import ConfigurationError, DataError, UserError, error_context
from diffusion.formats.run_folder import CONFIG, STARTS
from diffusion.models.architectures import build_network
from diffusion.models.build import build_model, load_weights
from diffusion.models.ingredients import find_ingredients, merged
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.ldm_layout import read_single_file
from diffusion.models.model_folders import check_exists, load_pretrained
from diffusion.models.networks import NETWORKS
from diffusion.models.pretrained import (
    check_config,
    check_identities,
    is_pipeline,
    is_single_file,
    module_identity,
    read_noise_schedule,
    read_pipeline_network,
    read_safetensors,
)
from diffusion.models.prompt_encoder import read_text_adapter
from diffusion.models.sampling import schedule_differences
from diffusion.storage import is_url

log = logging.getLogger(__name__)

OTHER_PATHS = "(other paths: --pretrained, --vae, --text-encoder)"
"""Advice where frozen parts are not at their paths."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Weights of a run, with its configuration.

    Raises:
        DataError: weights are NaN. Images of such a model are black, and have a FID.
    """

    path: Path
    """Checkpoint, or file of averaged weights."""

    config: Config

    weights: dict[str, Tensor]
    """Weights by their names in the model, as they were trained."""

    label: str = ""
    """Name of the weights in the checkpoint: `raw`, `ema` ...; empty for a file."""

    identities: Mapping[str, str] = field(default_factory=dict)
    """Identities of the frozen parts in training, as far as they are known."""

    def __post_init__(self) -> None:
        if wrong := [name for name, value in self.weights.items() if value.isnan().any()]:
            raise DataError(
                f"{self.path}: {len(wrong)} of its weights, such as {wrong[0]}, are NaN: take an earlier one"
            )

    def check_parts(self, found: Mapping[str, str]) -> None:
        """Raise a ConfigurationError if frozen parts, given by their identities, are not those of the training."""
        model = self.config.model
        paths = {"pretrained": model.pretrained, "vae": model.vae, "text encoder": model.text_encoder.path}
        used = ", ".join(f"{name} {path}" for name, path in paths.items() if path) or "random weights"
        remedy = f"The paths are now: {used}. Give those of the same weights {OTHER_PATHS}"
        check_identities(self.identities, found, str(self.path), remedy)

    @property
    def name(self) -> str:
        """Name of the model: run, checkpoint or average, weights."""
        return " ".join(filter(None, (self.config.run_name, self.path.stem, self.label)))

    @property
    def merged(self) -> dict[str, Tensor]:
        """Weights of the model for sampling (`ingredients.merged`)."""
        return merged(self.weights, self.config.model)

    def part(self, name: str) -> dict[str, Tensor]:
        """Weights of a part of the model by their names in it."""
        prefix = f"{name}."
        return {key.removeprefix(prefix): value for key, value in self.weights.items() if key.startswith(prefix)}


def load_config_of(checkpoint: Path) -> Config:
    """Read the configuration of a checkpoint, or that beside a file of averaged weights.

    Raises:
        DataError: the checkpoint is damaged, or was not written by this package.
        ConfigurationError: it was written by a version with other keys, or there is none beside the file.
    """
    if checkpoint.suffix == AVERAGE_SUFFIX:
        return from_dict(Config, read_yaml(file := _config_beside(checkpoint)), str(file))
    return from_dict(Config, read_config_values(checkpoint), str(checkpoint))


def read_trained(path: str | Path, *, weights: str = "raw", paths: FrozenPaths | None = None) -> Trained:
    """Read the weights of a run.

    Args:
        path: a checkpoint, a run folder, or its `checkpoints` folder (for the newest complete one). Or a file of
            averaged weights in a run folder (`RUN/averages/...` or `RUN/reconstructed/...safetensors`).
        weights: "raw" for the training weights, "ema" for their average, or the label of one of several averages:
            `decay-0.999`, `width-0.05`. Ignored for a file.
        paths: other paths of the frozen parts than those of the training; and the user's own ingredients.

    Raises:
        ConfigurationError: there is no checkpoint, or it has ingredients that the user has not named.
        DataError: it is damaged, holds no average, or weights are NaN.
    """
    paths, file = paths or FrozenPaths(), Path(path).expanduser()
    is_average = file.suffix == AVERAGE_SUFFIX
    if is_pipeline(file):
        raise ConfigurationError(
            f"{path} is a model folder: give the run that it was exported from, or load it by a family of "
            f"diffusion.models, such as stable_diffusion_2({str(path)!r}, network={str(path)!r})"
        )
    checkpoint = file if is_average else resolve_checkpoint(str(path))
    config = load_config_of(checkpoint)
    if config.task is not Task.diffusion:
        raise ConfigurationError(f"{path} is a run of {config.task.value}, whose result is exported already: RUN/vae")
    paths.check_ingredients(config.model, str(checkpoint))
    now = replace(config, model=paths.applied(config.model))
    if is_average:
        average, identities = read_safetensors(file), {}
        needs_rest = any(ingredient.freezes_weights for ingredient in find_ingredients(config.model))
        with suppress(*[] if needs_rest else [UserError]):  # The run's checkpoints may be elsewhere.
            checkpoint = resolve_checkpoint(str(_config_beside(file).parent))
            identities = read_identities(checkpoint)
            if needs_rest or config.model.ingredients:  # The average has trained weights only, and no buffers.
                average = read_weights(checkpoint, "raw") | average
        return Trained(path=file, config=now, weights=average, identities=identities)
    return Trained(
        path=checkpoint,
        config=now,
        weights=read_weights(checkpoint, weights),
        label=weights,
        identities=read_identities(checkpoint),
    )


def load_model(path: str | Path, *, weights: str = "raw", paths: FrozenPaths | None = None) -> LatentDiffusion:
    """Build the model of a checkpoint, on the CPU and in eval mode; arguments as for `read_trained`.

    VAE and text encoder come from the paths in the configuration of the checkpoint, or from `paths`. Ingredients that
    serve training only are left out.

    Raises:
        ConfigurationError: there is no checkpoint, or it does not fit; or VAE or text encoder are not those of its
            training.
        DataError: it is damaged, holds no average, or weights are NaN.
    """
    trained = read_trained(path, weights=weights, paths=paths)
    log.info("loading %s weights of %s", trained.label or "averaged", trained.path)
    config = trained.config
    with error_context(f"{trained.path} {OTHER_PATHS}"):
        options: dict[str, Any] = {"resolution": config.data.resolution, "seed": config.seed, "for_training": False}
        model = build_model(config.model, config.objective, **options)
    trained.check_parts(model.identities())
    load_weights(model, used_weights(trained.merged, config.model, model), str(trained.path))
    model.name = trained.name
    return model.eval()


def read_initial(config: Config, model: LatentDiffusion) -> dict[str, Tensor]:
    """Read the initial weights of a model; the checksums of a checkpoint were verified on this node.

    Of the checkpoint's own ingredients, only those that the configuration names as well are imported.

    Raises:
        ConfigurationError: there are none, or they are of another network.
        DataError: they are damaged.
    """
    assert config.init_from is not None
    path = Path(config.init_from.checkpoint).expanduser()
    if is_pipeline(path):
        _compare_text_encoder(path, config.model, model)
        return read_pipeline_network(path, model.network) | read_text_adapter(path)
    if is_single_file(path):
        return read_single_file(path, model.network)
    checkpoint = resolve_checkpoint(config.init_from.checkpoint)
    if identities := read_identities(checkpoint):
        try:
            check_identities(identities, model.identities(), str(checkpoint), "Training continues with the new ones")
        except ConfigurationError as error:
            log.warning("%s", error)
    stored = read_weights(checkpoint, config.init_from.weights, is_checked=True)
    before, named = load_config_of(checkpoint).model, {one.path for one in config.model.ingredients}
    unnamed = [one.path for one in before.ingredients if one.path not in named]
    before = replace(before, ingredients=[one for one in before.ingredients if one.path in named])
    if unnamed:
        log.info("leaving out %s of %s, which model.ingredients does not name", ", ".join(unnamed), checkpoint)
        parts = {*NETWORKS, *(one.part for one in (*find_ingredients(before), *model.ingredients))}
        stored = {name: value for name, value in stored.items() if name.partition(".")[0] in parts}
    _check_meaning(before, config.model, model, str(checkpoint))
    return used_weights(merged(stored, before), before, model)


def _compare_text_encoder(folder: Path, config: ModelConfig, model: LatentDiffusion) -> None:
    """Warn of a CLIP text encoder in a folder, which may hold a trained adapter, that is not the model's."""
    if local_rank() != 0 or not isinstance(model.text_encoder, CLIPTextModel):
        return
    with suppress(UserError):  # There may be none.
        there = load_pretrained(CLIPTextModel, str(folder), "text_encoder", local_files_only=True)
        if module_identity(there) != module_identity(model.text_encoder):
            log.warning(
                "%s has another text encoder than model.pretrained=%s, and the network was trained with it. Set "
                "model.pretrained to this folder",
                folder,
                config.pretrained or "null",
            )


def _check_meaning(before: ModelConfig, now: ModelConfig, model: LatentDiffusion, source: str) -> None:
    """Reject settings that change what weights of the same shapes mean."""
    with torch.device("meta"):
        there = build_network(replace(now, architecture=before.architecture, network=before.network))
    if type(there) is type(model.network):  # Else names differ.
        check_config(there, model.network, source, "model.network")
    sections = before.ingredient_sections
    for key, section in now.ingredient_sections.items():
        if key in sections and sections[key].inputs != section.inputs:
            raise ConfigurationError(
                f"{source}: model.{key} takes {sections[key].inputs} there and {section.inputs} here. Set it as the "
                "weights were trained"
            )


def used_weights(weights: dict[str, Tensor], config: ModelConfig, model: LatentDiffusion) -> dict[str, Tensor]:
    """Return the weights of a configuration without those of ingredients that only training with them needs."""
    unused = {one.part for one in find_ingredients(config) if one.serves_training_only}
    unused -= {one.part for one in model.ingredients}
    return {name: value for name, value in weights.items() if name.partition(".")[0] not in unused}


def check_objective(config: Config) -> None:
    """Reject initial weights that were trained with another prediction type or noise schedule.

    Weights that are not on this machine, or do not say how they were trained, are not checked. The shift of a flow may
    change: what the network predicts at a noise level stays the same.

    Raises:
        ConfigurationError: the objectives differ, and `init_from.new_objective` is false.
        DataError: the weights cannot be read.
    """
    start = config.init_from
    if config.task is Task.autoencoder or start is None or start.new_objective:
        return
    here, path = config.objective, Path(start.checkpoint).expanduser()
    if is_url(start.checkpoint) or not path.exists():
        return
    if is_pipeline(path) or is_single_file(path):
        stored = read_noise_schedule(path)
        if stored is None:
            return
        prediction, zero_snr = stored["prediction_type"], bool(stored.get("rescale_betas_zero_snr"))
        if others := schedule_differences(stored):
            raise ConfigurationError(
                f"init_from.checkpoint: {start.checkpoint}: {'; '.join(others)}. Set init_from.new_objective=true if "
                "this is intended"
            )
    else:
        trained = load_config_of(resolve_checkpoint(start.checkpoint)).objective
        prediction, zero_snr = trained.prediction_type.value, trained.zero_terminal_snr
    values = {"prediction_type": (prediction, here.prediction_type.value)}
    values["zero_terminal_snr"] = (str(zero_snr).lower(), str(here.zero_terminal_snr).lower())
    differing = {f"objective.{key}": pair for key, pair in values.items() if pair[0] != pair[1]}
    if differing:
        found = "; ".join(f"{key} is {now}, but {was} for these weights" for key, (was, now) in differing.items())
        remedy = " ".join(f"{key}={was}" for key, (was, _) in differing.items())
        raise ConfigurationError(
            f"init_from.checkpoint: {start.checkpoint}: {found}. Set {remedy}, or init_from.new_objective=true if this "
            "is intended"
        )


def absent_weights(config: Config) -> dict[str, str]:
    """Weights that a run reads and that are not there, on this machine or in a store: by key, a sentence.

    Nothing is downloaded, and a store is asked once. A run that has begun does not read its initial weights again.
    """
    absent, unread = {}, set[str]()
    if _has_begun(config):
        unread.add("init_from.checkpoint")
    if config.autoencoder.perceptual_weight == 0:
        unread.add("autoencoder.vgg_weights")
    if (config.model.vae or config.model.architecture.is_pixel) and config.model.text_encoder.path:
        unread.add("model.pretrained")
    for key, source in weight_locations(config).items():
        if not is_used(key, config.task) or key in unread:
            continue
        try:
            is_initial = key == "init_from.checkpoint" and config.task is Task.diffusion
            if key == "autoencoder.vgg_weights" or (is_initial and is_single_file(source)):
                if not Path(source).expanduser().is_file():
                    absent[key] = f"there is no file {source}"
            elif is_initial and not is_pipeline(source):
                locate_checkpoint(source, timeout=0)
            else:
                from_hub = key in ("model.pretrained", "model.vae") and not config.model.local_files_only
                check_exists(source, local_files_only=not from_hub)
        except UserError as error:
            absent[key] = str(error)
    return absent


def _has_begun(config: Config) -> bool:
    """Return whether a run has started before, on this machine or with checkpoints in a store."""
    if (Path(config.output_folder).expanduser() / STARTS).is_file():
        return True
    location = config.trainer.checkpoint_folder
    with suppress(UserError):  # Checks of the store say why it does not answer.
        return location is not None and is_url(location) and bool(RemoteCheckpoints(location, timeout=0).present())
    return False


def _config_beside(file: Path) -> Path:
    """Find the configuration beside a file, or one folder above."""
    found = [folder / CONFIG for folder in (file.parent, file.parent.parent)]
    if (path := next((path for path in found if path.is_file()), None)) is None:
        raise ConfigurationError(f"{file}: there is no config.yaml beside it or one folder above: copy the run's there")
    return path
