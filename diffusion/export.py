"""Export of a trained model: a diffusers folder with a model card, one safetensors file, or LoRA's matrices alone.

No GPU is needed. The output appears under its name when it is complete. `push_to_hub` uploads it.
"""

import json
import logging
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from huggingface_hub import HfApi, ModelCardData, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from safetensors.torch import save_file
from torch import Tensor

from diffusion import storage
from diffusion.checkpointing.layout import batch_of
from diffusion.config.frozen import FrozenPaths
from diffusion.config.loading import to_public_yaml
from diffusion.config.model import ModelConfig
from diffusion.config.schema import Config
from diffusion.errors import (
    ConfigurationError,
    DataError,
    MachineError,
    UserError,
    error_context,
    explained_writes,
    first_line,
)
from diffusion.evaluation.protocol import Result, table
from diffusion.files import atomic_path
from diffusion.formats.data_set import PreparedManifest
from diffusion.formats.marks import Mark
from diffusion.formats.run_folder import CHECKPOINTS
from diffusion.loading import OTHER_PATHS, Trained, read_trained
from diffusion.models.architectures import ARCHITECTURES, build_network
from diffusion.models.ingredients import Ingredient, find_ingredients
from diffusion.models.ingredients.lora import has_lora, kohya_layout, write_lora
from diffusion.models.latents import LatentScaling, fold_scaling, latent_space
from diffusion.models.ldm_layout import single_file, unet_names
from diffusion.models.model_folders import hub_unavailable_reason
from diffusion.models.networks import Network
from diffusion.models.pretrained import (
    SCHEDULER_KEY,
    FrozenParts,
    load_frozen_parts,
    weights_identity,
    write_pipeline,
)
from diffusion.models.prompt_encoder import has_own_encoding, write_prompt_encoder
from diffusion.models.sampling import build_noise_scheduler, exported_scheduler
from diffusion.models.text_encoders import LanguageModel
from diffusion.reports.run import find_results
from diffusion.reports.tables import markdown_table

logger = logging.getLogger(__name__)


class ExportLayout(str, Enum):
    """Names and files of weights."""

    diffusers = "diffusers"
    """A folder for `from_pretrained` with a card; or one file with the network alone, without a text adapter."""

    ldm = "ldm"
    """One file with U-Net, VAE and text encoder, by the names of the original Stable Diffusion code."""

    kohya = "kohya"
    """One file with LoRA's matrices alone, by the names of kohya's sd-scripts."""


@dataclass(frozen=True, kw_only=True)
class Licences:
    """Terms of use of a model and its data; `unknown` permits nothing."""

    model: str = "unknown"
    """Identifier of the Hugging Face hub, such as `apache-2.0`."""

    data: str = "unknown"
    """Licence of the images and captions, in words."""


def export(
    path: str,
    out: Path,
    *,
    weights: str = "raw",
    layout: ExportLayout = ExportLayout.diffusers,
    lora_only: bool = False,
    scores: Mapping[str, float] | None = None,
    paths: FrozenPaths | None = None,
    licences: Licences | None = None,
    prepared: Path | None = None,
    repository: str | None = None,
) -> None:
    """Export the model that a run has trained.

    Args:
        path: a checkpoint, a run folder, its `checkpoints` folder (for the newest complete one), or a file of averaged
            weights.
        out: a new folder; or, with the ending `.safetensors`, one file with the network and its metadata.
        weights: "raw" for the training weights, "ema" for their average, or the label of one of several averages.
        layout: names and files of the weights.
        lora_only: LoRA's matrices alone, of a U-Net; otherwise they are merged into the network.
        scores: scores that the network asks for from now on, by name; the others are "none".
        paths: other paths of VAE and text encoder than those of the training.
        licences: for the model card.
        prepared: prepared data whose sources the card lists; None: that of `data.local`, if it is prepared data.
        repository: name on the hub, for the model card; created when the arguments are checked, unless it exists.

    Raises:
        ConfigurationError: there is no such checkpoint, `out` exists, the layout is not for this model, or the hub
            rejects the repository.
        DataError: an input is damaged.
        MachineError: `out` cannot be written, or the hub is not available.
    """
    is_file, is_lora, scores = out.suffix == ".safetensors", lora_only or layout is ExportLayout.kohya, scores or {}
    if out.exists():
        raise ConfigurationError(f"{out} exists: remove it, or choose another path")
    if layout is not ExportLayout.diffusers and not is_file:
        raise ConfigurationError(f"{out}: the layout {layout.value} is one file, called FILE.safetensors")
    if lora_only and (layout is ExportLayout.ldm or (layout is ExportLayout.diffusers and is_file)):
        raise ConfigurationError(f"{out}: LoRA alone is a folder, or one file in the layout kohya")
    if prepared is not None:
        PreparedManifest.read(prepared)  # Before the weights, which take minutes.
    trained = read_trained(path, weights=weights, paths=paths)
    config = trained.config
    component, ingredients = ARCHITECTURES[config.model.architecture].component, find_ingredients(config.model)
    unnamed = [one.name_in_exports for one in ingredients if one.name_in_exports]
    if layout is not ExportLayout.diffusers:
        unnamed += ["a transformer"] if component != "unet" else []
        unnamed += ["a language model"] if config.model.text_encoder.path is not None else []
    if is_file and unnamed:
        raise ConfigurationError(
            f"{path} has {unnamed[0]}, for which one file in the layout {layout.value} has no names: export a folder"
        )
    if is_lora and not has_lora(trained.weights):
        raise ConfigurationError(f"{path} was trained without model.lora: export it as a whole")
    if lora_only and component == "transformer":
        raise ConfigurationError(f"{path} is a transformer, for which diffusers loads no LoRA: export it as a whole")
    ways = ("merged", "exported") if is_file else ("merged", "exported", "write")
    for one in () if is_lora else map(type, ingredients):
        is_used = not one.serves_training_only and (one.part or one.condition is not Ingredient.condition)
        if is_used and all(getattr(one, way) is getattr(Ingredient, way) for way in ways):
            raise ConfigurationError(
                f"{path}: the export would leave out {one.__name__}: define {' or '.join(ways)} in it, or set "
                "serves_training_only if images do not need it"
            )
    if is_lora and scores:
        raise ConfigurationError(f"{out}: LoRA alone has no place for scores: export {path} as a whole")
    if unknown := sorted(scores.keys() - {*config.model.score_names}):
        raise ConfigurationError(f"{path} was not trained with the score {unknown[0]}: leave it out")
    for problem in config.model.score_conditioning.out_of_range(scores) if config.model.score_conditioning else ():
        raise ConfigurationError(f"{path}: score {problem}")
    if repository:
        create_repository(repository)
    run = trained
    if not is_lora:  # The network needs no ingredients in sampling then.
        network, merged = _meta_network(config.model), trained.merged
        for ingredient in ingredients:
            merged = ingredient.exported(merged, network, scores)
        trained = replace(trained, weights=merged)
    licences = licences or Licences()
    with explained_writes(out, "Choose another folder"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(out) as partial:
            if is_file:
                save_file(_single_file(trained, layout), partial, _metadata(trained, licences))
                return
            partial.mkdir(parents=True)
            parts = None if lora_only else _parts(trained)
            version = ""
            with suppress(UserError):  # LoRA alone is exported without frozen parts too.
                version = _identity(run, _frozen_parts(run) if parts is None else parts[1])
            card = model_card(
                trained,
                is_lora=lora_only,
                licences=licences,
                prepared=prepared,
                scores=scores,
                mark=Mark(model=trained.name, version=version),
            )
            if repository:
                download = f'from huggingface_hub import snapshot_download\nfolder = snapshot_download("{repository}")'
                card = card.replace(f"folder = {OWN_FOLDER}", download).replace(OWN_FOLDER, f'"{repository}"')
            (partial / "README.md").write_text(card, encoding="utf-8")
            if parts is not None:
                _write_pipeline(partial, trained, *parts)
            else:
                assert config.model.lora is not None
                write_lora(partial, trained.part(component), config.model.lora)


def _meta_network(config: ModelConfig) -> Network:
    with torch.device("meta"):
        return build_network(config)


def _single_file(trained: Trained, layout: ExportLayout) -> dict[str, Tensor]:
    config = trained.config
    spec = ARCHITECTURES[config.model.architecture]
    if layout is ExportLayout.kohya:
        network = _meta_network(config.model)
        assert config.model.lora is not None and isinstance(network, UNet2DConditionModel)
        names = unet_names(network) if spec.text_encoder_2 is not None else {}
        return kohya_layout(trained.part(spec.component), config.model.lora, names)
    if layout is ExportLayout.diffusers:
        return {name: tensor.contiguous() for name, tensor in trained.part(spec.component).items()}
    network, frozen = _parts(trained)
    assert isinstance(network, UNet2DConditionModel)
    # Its readers know no factor but that of the architecture.
    vae = frozen.vae
    assert isinstance(vae, AutoencoderKL) and spec.vae is not None
    factor = spec.vae["scaling_factor"]
    if frozen.latent_scaling != LatentScaling.of_factor(factor):
        vae = fold_scaling(vae, frozen.latent_scaling, factor)
    text_encoder = frozen.text_encoder
    assert not isinstance(text_encoder, LanguageModel)  # Refused above.
    return single_file(network, vae, text_encoder)


def _parts(trained: Trained) -> tuple[Network, FrozenParts]:
    """Network and frozen parts; the default size of images is that of training."""
    config, network = trained.config, _meta_network(trained.config.model)
    spec = ARCHITECTURES[config.model.architecture]
    network.load_state_dict(trained.part(spec.component), assign=True)
    frozen = _frozen_parts(trained)
    if spec.component == "unet":
        network.register_to_config(sample_size=config.data.resolution // latent_space(frozen.vae).factor)
    return network, frozen


def _frozen_parts(trained: Trained) -> FrozenParts:
    with error_context(f"{trained.path} {OTHER_PATHS}"):
        frozen = load_frozen_parts(trained.config.model)
    trained.check_parts(frozen.identities())
    return frozen


def _identity(trained: Trained, frozen: FrozenParts) -> str:
    """Hash of a run's model, as in the marks of its images and in its evaluations (`LatentDiffusion.mark`)."""
    model, merged = trained.config.model, replace(trained, weights=trained.merged)
    others = [one.part for one in find_ingredients(model) if one.part and not one.serves_training_only]
    parts = [merged.part(name) for name in (ARCHITECTURES[model.architecture].component, *others)]
    return weights_identity(parts[0], frozen.vae, frozen.text_encoder, *filter(None, parts[1:]))


def _write_pipeline(folder: Path, trained: Trained, network: Network, frozen: FrozenParts) -> None:
    config = trained.config
    if has_own_encoding(config.model):
        write_prompt_encoder(folder, config.model)
    for ingredient in find_ingredients(config.model):
        frozen = ingredient.write(folder, frozen, trained.part(ingredient.part))
    write_pipeline(
        folder,
        network=network,
        frozen=frozen,
        resolution=config.data.resolution,
        scheduler=exported_scheduler(build_noise_scheduler(config.objective)),
        scaling_factor=(ARCHITECTURES[config.model.architecture].vae or {}).get("scaling_factor", 1.0),
    )


def _metadata(trained: Trained, licences: Licences) -> dict[str, str]:
    config = trained.config
    return {
        "format": "pt",
        "title": config.run_name,
        "checkpoint": trained.path.name,
        "weights": trained.label or "average",
        "architecture": config.model.architecture.value,
        "prediction_type": config.objective.prediction_type.value,
        SCHEDULER_KEY: exported_scheduler(build_noise_scheduler(config.objective)).to_json_string(),
        "resolution": str(config.data.resolution),
        "license": licences.model,
        "data_license": licences.data,
        "config": to_public_yaml(config),
    }


# The model card


def model_card(
    trained: Trained,
    *,
    is_lora: bool,
    licences: Licences,
    prepared: Path | None,
    scores: Mapping[str, float],
    mark: Mark,
) -> str:
    """Write a model card: Markdown with the header of the Hugging Face hub.

    Raises:
        DataError: `prepared` is not a prepared data set.
    """
    config = trained.config
    header = ModelCardData(
        license=licences.model,
        library_name="diffusers",
        pipeline_tag="text-to-image",
        tags=["text-to-image", *(["lora"] if is_lora else [])],
    )
    sections = [
        f"---\n{header.to_yaml()}\n---\n\n# {config.run_name}\n",
        _origin(trained, scores),
        _use(config.model, is_lora),
        MARKING.format(mark.xmp) if mark.version else "",
        f"## Licences\n\n- model: {licences.model}\n- data: {licences.data}\n",
        _data(config, prepared),
        _evaluations(trained, mark.version),
        f"## Recipe\n\n```yaml\n{to_public_yaml(config)}```\n",
    ]
    return "\n".join(section for section in sections if section)


OWN_FOLDER = '"FOLDER"'
"""In the examples of a card."""

AS_TRAINED = ", use_resolution_binning=False, skip_text_cleaning=True"
"""Arguments of PRXPipeline for other sizes than its tables have, and for prompts as captions were in training."""

USE = """## Use

```python
from diffusers import DiffusionPipeline
pipeline = DiffusionPipeline.from_pretrained("FOLDER")
image = pipeline("a prompt", guidance_scale=3.0).images[0]
```

These are the images of `scripts/generate.py`, with DDIM for numbers of steps below 1000 that divide it. Prompts with
typographic quotes, full-width letters, ligatures or `&amp;` need `repair(prompt)` of `diffusion.models.tokenizers`.
"""

FOLDED = """
Where the run's VAE had a mean and standard deviation for each channel of its latents, they are folded into
the `quant_conv` and `post_quant_conv` of this VAE, since the pipeline would ignore them.
"""

USE_OF_OWN_ENCODING = """## Use

```python
from diffusers import DiffusionPipeline
from diffusion.models.prompt_encoder import PromptEncoder
folder = "FOLDER"
pipeline = DiffusionPipeline.from_pretrained(folder)
encode = PromptEncoder(folder).to(pipeline.device, pipeline.dtype)
image = pipeline(**encode("a prompt"), guidance_scale=3.0).images[0]
```

The encoding of prompts is that of `text_adapter/config.json`, and not the pipeline's own, which cuts long prompts.
"""

LOAD_LORA = 'pipeline.load_lora_weights("FOLDER", weight_name="pytorch_lora_weights.safetensors")\n'

MARKING = """## Mark of the images

A pipeline returns images without a mark. This one says that an image is generated, and by which model, in PNG, JPEG and
WebP (DigitalSourceType of IPTC, as XMP):

```python
from PIL.PngImagePlugin import PngInfo
xmp = {0!a}
info = PngInfo()
info.add_itxt("XML:com.adobe.xmp", xmp)
image.save("image.png", pnginfo=info)
image.save("image.jpg", xmp=xmp.encode())
```
"""


def _use(config: ModelConfig, is_lora: bool) -> str:
    use = USE_OF_OWN_ENCODING if has_own_encoding(config) else USE + FOLDED
    if is_lora:
        use = (
            use.removesuffix(FOLDED)
            .replace(OWN_FOLDER, '"FOLDER of the initial weights"')
            .replace("image =", f"{LOAD_LORA}image =")
        )
    if not config.architecture.is_transformer:
        return use
    arguments = AS_TRAINED.partition(", skip")[0] if config.architecture.is_pixel else AS_TRAINED
    return use.replace("=3.0)", f"=3.0{arguments})")


def _origin(trained: Trained, scores: Mapping[str, float]) -> str:
    config, objective, steps = trained.config, trained.config.objective, batch_of(trained.path)
    average = "the average of the weights"
    which = {"raw": "the training weights", "ema": average, "": average}.get(trained.label, trained.label)
    images = f"{config.data.global_batch_size} images"
    length = f"after {steps:,} steps of {images}" if steps >= 0 else f"from {trained.path.name}"
    begun = f", initialised from `{config.init_from.checkpoint}`" if config.init_from is not None else ""
    zero = " with zero-terminal SNR" if objective.zero_terminal_snr else ""
    asked = f" It asks for the scores {', '.join(f'{k} {v:g}' for k, v in scores.items())}." if scores else ""
    return (
        f"A text-to-image model of the family `{config.model.architecture.value}` at {config.data.resolution} px, "
        f"prediction type `{objective.prediction_type.value}`{zero}: {which} {length}{begun}.{asked}\n"
    )


def _data(config: Config, prepared: Path | None) -> str:
    data, own = config.data, config.plugins.train_dataset
    what = f"`{own.path}`" if own else f"`{data.remote or data.local}`: {', '.join(s.name for s in data.streams)}"
    text = f"## Data\n\n{what}\n"
    try:
        manifest = PreparedManifest.read(prepared or Path(data.local or "").parent)
    except DataError:
        if prepared is not None:
            raise
        return text
    rows = [(source.name, source.kind, f"{source.kept:,}") for source in manifest.sources]
    sources = markdown_table(["source", "kind", "images"], rows)
    return f"{text}\n{manifest.kept:,} of {manifest.seen:,} images were kept.\n\n{sources}\n"


def _evaluations(trained: Trained, identity: str) -> str:
    """Write a table for each evaluation of these weights, by their hash, with the protocols of its numbers."""
    checkpoint = trained.path.resolve()
    is_in_run = checkpoint.parent.name == CHECKPOINTS
    run = checkpoint.parent.parent if is_in_run else Path(trained.config.output_folder).expanduser().resolve()
    by_folder: dict[Path, list[Result]] = {}
    for file in find_results(run.parent):
        try:
            result = Result.read(file)
        except DataError as error:
            logger.warning("left out of the model card: %s", error)
            continue
        if Path(result.path).parts[-3:] == checkpoint.parts[-3:] and result.weights == trained.label:
            if result.identity == identity:
                by_folder.setdefault(file.parent, []).append(result)
            else:
                logger.warning("left out of the model card: %s is not known to be of these weights", file)
    sections: dict[str, None] = {}
    for results in by_folder.values():
        text = f"\n{table(results)}"
        protocols = {name: number.protocol for result in results for name, number in result.numbers.items()}
        for name, protocol in protocols.items():
            if "/" not in name:
                text += f"\n`{name}` by: `{json.dumps(protocol, sort_keys=True)}`\n"
        sections[text] = None  # A copy of an evaluation is no other one.
    return f"## Evaluation\n{''.join(sections)}" if sections else ""


# The hub


def create_repository(repository: str) -> None:
    """Create a private repository of the Hugging Face hub; one that exists stays as it is.

    Raises:
        ConfigurationError: the name is no repository's, or the token (HF_TOKEN, or the login) may not write it.
        MachineError: the hub is not available.
    """
    if reason := hub_unavailable_reason():
        raise MachineError(f"{reason} Export without the hub, and upload later")
    with _hub_errors(repository, "repeat the command"):
        HfApi().create_repo(repository, private=True, exist_ok=True)


def push_to_hub(path: Path, repository: str) -> str:
    """Upload an export to a repository in one commit: a folder's files, or one file.

    Returns:
        The address of the commit.

    Raises:
        ConfigurationError: the hub rejects it.
        MachineError: the hub is not available.
    """
    message = f"Upload {path.name}"
    with _hub_errors(repository, f"upload the export by `hf upload {repository} {shlex.quote(str(path))}`"):
        if path.is_dir():
            return HfApi().upload_folder(repo_id=repository, folder_path=path, commit_message=message).commit_url
        upload = HfApi().upload_file
        options = {"path_or_fileobj": path, "path_in_repo": path.name, "commit_message": message}
        return upload(repo_id=repository, **options).commit_url


@contextmanager
def _hub_errors(repository: str, remedy: str) -> Iterator[None]:
    """Errors of huggingface_hub in one message; it puts no token into its messages."""
    try:
        yield
    except (HfHubHTTPError, LocalTokenNotFoundError, HFValidationError) as error:
        reason = first_line(error).rstrip(".")
        raise ConfigurationError(
            f"{storage.shown(constants.ENDPOINT)} rejects {repository}: {reason}. Give USER/NAME, and a token that "
            f"may write it, as HF_TOKEN or by `hf auth login`, and {remedy}"
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        reason = first_line(error.__cause__ or error).rstrip(".")
        raise MachineError(f"{repository} was not uploaded: {reason}. Later {remedy}") from error
