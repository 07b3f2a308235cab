"""The model card of exported weights: origin, use, licences, data, evaluations and recipe."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import ModelCardData

from diffusion.checkpointing.layout import batch_of
from diffusion.config.schema import Config
from diffusion.config.secrets import to_public_yaml
from diffusion.datasets.manifest import PreparedManifest
from diffusion.errors import DataError
from diffusion.evaluation.protocol import Result, table
from diffusion.reports.run import find_results

FOLDED = """Where the run's VAE had a mean and standard deviation for each channel of its latents, they are folded into
the `quant_conv` and `post_quant_conv` of this VAE, since the pipeline would ignore them.
"""


@dataclass(frozen=True, kw_only=True)
class Licences:
    """Terms of use of a model and its data; `unknown` permits nothing."""

    model: str = "unknown"
    """Identifier of the Hugging Face hub, such as `apache-2.0`."""

    data: str = "unknown"
    """Licence of the images and captions, in words."""


def write_card(
    config: Config, *, path: Path, weights: str, is_lora: bool, licences: Licences, prepared: Path | None
) -> str:
    """Write a model card: Markdown with the header of the Hugging Face hub.

    Args:
        config: the configuration of the run.
        path: checkpoint, or file of averaged weights.
        weights: `raw`, `ema` or another average of the checkpoint.
        is_lora: for LoRA's matrices alone.
        licences: of model and data.
        prepared: prepared data set whose sources are listed; None: that of `data.local`, if it is prepared data.

    Raises:
        DataError: `prepared` is not a prepared data set, or an evaluation beside the run is damaged.
    """
    header = ModelCardData(
        license=licences.model,
        library_name="diffusers",
        pipeline_tag="text-to-image",
        tags=["text-to-image", *(["lora"] if is_lora else [])],
    )
    sections = [
        f"---\n{header.to_yaml()}\n---\n\n# {config.run_name}\n",
        _origin(config, path, weights),
        _use(config, is_lora),
        f"## Licences\n\n- model: {licences.model}\n- data: {licences.data}\n",
        _data(config, prepared),
        _evaluations(path, weights),
        f"## Recipe\n\n```yaml\n{to_public_yaml(config)}```\n",
    ]
    return "\n".join(section for section in sections if section)


def _origin(config: Config, path: Path, weights: str) -> str:
    which = {"raw": "the training weights", "ema": "the average of the weights"}.get(weights, weights)
    steps = batch_of(path)
    length = f"after {steps:,} steps of {config.data.global_batch_size} images" if steps >= 0 else f"from {path.name}"
    begun = f", initialised from `{config.init_from.checkpoint}`" if config.init_from is not None else ""
    objective = config.objective
    zero = " with zero-terminal SNR" if objective.zero_terminal_snr else ""
    return (
        f"A text-to-image model of the family `{config.model.architecture.value}` at {config.data.resolution} px, "
        f"prediction type `{objective.prediction_type.value}`{zero}: {which} {length}{begun}.\n"
    )


def _use(config: Config, is_lora: bool) -> str:
    load = 'pipeline = DiffusionPipeline.from_pretrained("FOLDER")'
    if is_lora:
        load = """pipeline = DiffusionPipeline.from_pretrained("FOLDER of the initial weights")
pipeline.load_lora_weights("FOLDER", weight_name="pytorch_lora_weights.safetensors")"""
    return f"""## Use

```python
from diffusers import DiffusionPipeline
{load}
image = pipeline("a prompt", guidance_scale=3.0).images[0]
```

{"" if is_lora else FOLDED}"""


def _data(config: Config, prepared: Path | None) -> str:
    data, own = config.data, config.plugins.train_dataset
    what = f"`{own.path}`" if own else f"`{data.remote or data.local}`: {', '.join(s.name for s in data.streams)}"
    lines = [f"## Data\n\n{what}\n"]
    if manifest := _manifest(config, prepared):
        lines.append(f"\n{manifest.kept:,} of {manifest.seen:,} images were kept.\n\n| source | kind | images |\n")
        lines.append("|---|---|---:|\n")
        lines += [f"| {source.name} | {source.kind} | {source.kept:,} |\n" for source in manifest.sources]
    return "".join(lines)


def _manifest(config: Config, prepared: Path | None) -> PreparedManifest | None:
    if prepared is not None:
        return PreparedManifest.read(prepared)
    try:
        return PreparedManifest.read(Path(config.data.local or "").parent)
    except DataError:
        return None


def _evaluations(path: Path, weights: str) -> str:
    """Write a table for each evaluation of these weights, with the protocols of its numbers."""
    run = path.resolve().parent.parent
    by_folder: dict[Path, list[Result]] = {}
    for file in find_results(run.parent):
        result = Result.read(file)
        if Path(result.path).parts[-3:] == path.resolve().parts[-3:] and result.weights == weights:
            by_folder.setdefault(file.parent, []).append(result)
    if not by_folder:
        return ""
    return "## Evaluation\n" + "".join(part for results in by_folder.values() for part in _numbers(results))


def _numbers(results: list[Result]) -> Iterator[str]:
    yield f"\n{table(results)}"
    for name, protocol in {n: number.protocol for result in results for n, number in result.numbers.items()}.items():
        if "/" not in name:
            yield f"\n`{name}` by: `{json.dumps(protocol, sort_keys=True)}`\n"
