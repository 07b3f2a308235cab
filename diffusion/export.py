"""Export of a trained model: a diffusers folder with a model card, one safetensors file, or LoRA's matrices alone.

No GPU is needed. The output appears under its name when it is complete.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from huggingface_hub import ModelCardData
from safetensors.torch import save_file
from transformers import CLIPTextModel

from diffusion.checkpointing.layout import batch_of
from diffusion.config.schema import Config, Task
from diffusion.config.secrets import to_public_yaml
from diffusion.datasets.manifest import PreparedManifest
from diffusion.errors import ConfigurationError, DataError, MachineError
from diffusion.evaluation.protocol import Result, table
from diffusion.files import atomic_path
from diffusion.loading import Trained, read_trained
from diffusion.models.architectures import ARCHITECTURES, build_network
from diffusion.models.lora import has_lora, write_lora
from diffusion.models.pretrained import load_frozen_parts, write_pipeline
from diffusion.models.sampling import build_noise_scheduler, inference_scheduler
from diffusion.models.text_adapter import TextAdapter, with_adapter
from diffusion.reports.run import find_results


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
    lora_only: bool = False,
    licences: Licences | None = None,
    prepared: Path | None = None,
) -> None:
    """Export the model that a run has trained.

    Args:
        path: a checkpoint, a run folder, its `checkpoints` folder (for the newest complete one), or a file of averaged
            weights.
        out: a new folder; or, with the ending `.safetensors`, one file with the network and its metadata.
        weights: "raw" for the training weights, "ema" for their average, or the label of one of several averages.
        lora_only: LoRA's matrices alone, of a U-Net; otherwise they are merged into the network.
        licences: for the model card.
        prepared: prepared data whose sources the card lists; None: that of `data.local`, if it is prepared data.

    Raises:
        ConfigurationError: there is no such checkpoint, or `out` exists.
        DataError: an input is damaged.
        MachineError: `out` cannot be written.
    """
    if out.exists():
        raise ConfigurationError(f"{out} exists: remove it, or choose another path")
    trained = read_trained(path, weights=weights)
    config = trained.config
    component = ARCHITECTURES[config.model.architecture].component
    if config.task is not Task.diffusion:
        raise ConfigurationError(f"{path} is a run of {config.task.value}, whose result is exported already: RUN/vae")
    if lora_only and not has_lora(trained.weights):
        raise ConfigurationError(f"{path} was trained without model.lora: export it as a whole")
    if lora_only and component == "transformer":
        raise ConfigurationError(f"{path} is a transformer, for which diffusers loads no LoRA: export it as a whole")
    licences = licences or Licences()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(out) as partial:
            if out.suffix == ".safetensors":
                metadata = _metadata(trained, weights, licences)
                weights_of = {name: tensor.contiguous() for name, tensor in trained.part(component).items()}
                save_file(weights_of, partial, metadata)
                return
            partial.mkdir(parents=True)
            card = model_card(trained, weights, is_lora=lora_only, licences=licences, prepared=prepared)
            (partial / "README.md").write_text(card, encoding="utf-8")
            if lora_only:
                assert config.model.lora is not None
                write_lora(partial, trained.part(component, with_lora=True), config.model.lora)
            else:
                _write_pipeline(partial, trained)
    except OSError as error:
        raise MachineError(f"{out} cannot be written: {error.strerror or error}. Choose another folder") from error


def _write_pipeline(folder: Path, trained: Trained) -> None:
    """Write the diffusers layout; the default size of images is that of training."""
    config = trained.config
    with torch.device("meta"):
        network = build_network(config.model)
    spec = ARCHITECTURES[config.model.architecture]
    network.load_state_dict(trained.part(spec.component), assign=True)
    if spec.component == "unet":
        network.register_to_config(sample_size=config.data.resolution // spec.vae_factor)
    frozen = load_frozen_parts(config.model)
    if config.model.text_adapter is not None:
        assert isinstance(frozen.text_encoder, CLIPTextModel)
        adapter = TextAdapter(frozen.text_encoder, config.model.text_adapter.layers)
        adapter.load_state_dict(trained.part("text_adapter"))
        frozen = replace(frozen, text_encoder=with_adapter(frozen.text_encoder, adapter))
    write_pipeline(
        folder,
        network=network,
        frozen=frozen,
        resolution=config.data.resolution,
        scheduler=inference_scheduler(build_noise_scheduler(config.objective)),
    )


def _metadata(trained: Trained, weights: str, licences: Licences) -> dict[str, str]:
    config = trained.config
    return {
        "format": "pt",
        "title": config.run_name,
        "checkpoint": trained.path.name,
        "weights": weights,
        "architecture": config.model.architecture.value,
        "prediction_type": config.objective.prediction_type.value,
        "resolution": str(config.data.resolution),
        "license": licences.model,
        "data_license": licences.data,
        "config": to_public_yaml(config),
    }


# The model card


def model_card(trained: Trained, weights: str, *, is_lora: bool, licences: Licences, prepared: Path | None) -> str:
    """Write a model card: Markdown with the header of the Hugging Face hub.

    Raises:
        DataError: `prepared` is not a prepared data set, or an evaluation beside the run is damaged.
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
        _origin(trained, weights),
        USE_OF_LORA if is_lora else USE,
        f"## Licences\n\n- model: {licences.model}\n- data: {licences.data}\n",
        _data(config, prepared),
        _evaluations(trained.path, weights),
        f"## Recipe\n\n```yaml\n{to_public_yaml(config)}```\n",
    ]
    return "\n".join(section for section in sections if section)


USE = """## Use

```python
from diffusers import DiffusionPipeline
pipeline = DiffusionPipeline.from_pretrained("FOLDER")
image = pipeline("a prompt", guidance_scale=3.0).images[0]
```

Where the run's VAE had a mean and standard deviation for each channel of its latents, they are folded into
the `quant_conv` and `post_quant_conv` of this VAE, since the pipeline would ignore them.
"""

USE_OF_LORA = """## Use

```python
from diffusers import DiffusionPipeline
pipeline = DiffusionPipeline.from_pretrained("FOLDER of the initial weights")
pipeline.load_lora_weights("FOLDER", weight_name="pytorch_lora_weights.safetensors")
image = pipeline("a prompt", guidance_scale=3.0).images[0]
```
"""


def _origin(trained: Trained, weights: str) -> str:
    config, objective, steps = trained.config, trained.config.objective, batch_of(trained.path)
    which = {"raw": "the training weights", "ema": "the average of the weights"}.get(weights, weights)
    images = f"{config.data.global_batch_size} images"
    length = f"after {steps:,} steps of {images}" if steps >= 0 else f"from {trained.path.name}"
    begun = f", initialised from `{config.init_from.checkpoint}`" if config.init_from is not None else ""
    zero = " with zero-terminal SNR" if objective.zero_terminal_snr else ""
    return (
        f"A text-to-image model of the family `{config.model.architecture.value}` at {config.data.resolution} px, "
        f"prediction type `{objective.prediction_type.value}`{zero}: {which} {length}{begun}.\n"
    )


def _data(config: Config, prepared: Path | None) -> str:
    data, own = config.data, config.plugins.train_dataset
    what = f"`{own.path}`" if own else f"`{data.remote or data.local}`: {', '.join(s.name for s in data.streams)}"
    lines = [f"## Data\n\n{what}\n"]
    try:
        manifest = PreparedManifest.read(prepared or Path(data.local or "").parent)
    except DataError:
        if prepared is not None:
            raise
        return lines[0]
    lines.append(f"\n{manifest.kept:,} of {manifest.seen:,} images were kept.\n\n| source | kind | images |\n")
    lines.append("|---|---|---:|\n")
    lines += [f"| {source.name} | {source.kind} | {source.kept:,} |\n" for source in manifest.sources]
    return "".join(lines)


def _evaluations(path: Path, weights: str) -> str:
    """Write a table for each evaluation of these weights, with the protocols of its numbers."""
    checkpoint = path.resolve()
    by_folder: dict[Path, list[Result]] = {}
    for file in find_results(checkpoint.parent.parent.parent):
        result = Result.read(file)
        if Path(result.path).parts[-3:] == checkpoint.parts[-3:] and result.weights == weights:
            by_folder.setdefault(file.parent, []).append(result)
    text = ""
    for results in by_folder.values():
        text += f"\n{table(results)}"
        protocols = {name: number.protocol for result in results for name, number in result.numbers.items()}
        for name, protocol in protocols.items():
            if "/" not in name:
                text += f"\n`{name}` by: `{json.dumps(protocol, sort_keys=True)}`\n"
    return f"## Evaluation\n{text}" if text else ""
