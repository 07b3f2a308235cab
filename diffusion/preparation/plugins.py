"""Captioners and scorers: models that look at decoded images, named by import path.

A plug-in is called with a batch: a sequence of images (decoded, upright, mode RGB, of any sizes) and the list of
captions of each. Results must not depend on the other images of the batch.

A captioner gets the captions of the source, which may be none, and returns a caption for each image, or a list of them;
a blank one counts as none. A scorer gets the generated captions, too, and returns a number, a text or None for each
image, in one data set either numbers or texts. A plug-in with the attribute `reads_images = False` gets None in place
of each image, and no image is read.
"""

import contextlib
import functools
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from diffusion.errors import ConfigurationError, DataError, MachineError, error_context
from diffusion.plugins import import_plugin
from diffusion.preparation.config import CaptionerConfig, CaptionMode, PrepareConfig, ScorerConfig
from diffusion.preparation.layout import RESERVED
from diffusion.preparation.records import clean_text

if TYPE_CHECKING:
    import torch

Config = ScorerConfig | CaptionerConfig


def named_plugins(config: PrepareConfig) -> list[tuple[str, Config]]:
    """List the captioner and the scorers with their keys, in the order in which they run."""
    captioner = [] if config.captioner is None else [("captioner", config.captioner)]
    return [*captioner, *((f"scorers.{i}", scorer) for i, scorer in enumerate(config.scorers))]


def check_plugins(config: PrepareConfig) -> None:
    """Import captioner and scorers, without loading their models, and check the columns.

    Raises:
        ConfigurationError: one cannot be imported or refuses its arguments, or a column is reserved or given twice.
    """
    seen = {name.lower(): "that name is reserved" for name in RESERVED}
    for key, plugin in named_plugins(config):
        if isinstance(plugin, ScorerConfig):
            name = plugin.column.lower()
            if not name.isidentifier() or name.startswith("_") or name in seen:
                reason = seen.get(name, "it must consist of letters, digits and underscores, and begin with a letter")
                raise ConfigurationError(f"{key}.column={plugin.column}: {reason}. Choose another name")
            seen[name] = f"{key} has it, too"
        _import(plugin, key)


def reads_images(plugin: Config, key: str) -> bool:
    """Return whether a plug-in reads images; one that says otherwise only when it is loaded counts as one that does."""
    return getattr(_import(plugin, key).func, "reads_images", True)


def _import(plugin: Config, key: str) -> functools.partial[Any]:
    """Import a plug-in; return what loads it."""
    arguments = plugin.arguments
    if isinstance(plugin, CaptionerConfig) and plugin.chat is not None:
        arguments = {**arguments, "chat": plugin.chat}
    return functools.partial(import_plugin(replace(plugin, arguments=arguments), key), **arguments)


def determining(plugin: dict[str, Any]) -> dict[str, Any]:
    """Leave out the settings of a plug-in, as `to_dict` gives them, that do not determine its results."""
    values = {name: value for name, value in plugin.items() if name != "num_gpus" and (name, value) != ("chat", None)}
    if "chat" in values:
        values["chat"] = {name: value for name, value in values["chat"].items() if name != "server"}
        values.pop("batch_size", None)
    return values


def load_plugin(plugin: Config, key: str) -> Any:
    """Load a captioner or scorer in a worker; `key` is that of the configuration.

    Raises:
        ConfigurationError: it cannot be imported or called, or refuses its arguments.
        DataError: weights are not where they should be.
        MachineError: it is to have a GPU, and the worker has none.
    """
    if plugin.num_gpus and not sees_gpu():
        raise MachineError(
            f"{key}.num_gpus is {plugin.num_gpus:g}, but a worker has no GPU. Check the driver with nvidia-smi and the "
            "resources of the cluster with `ray status`, or set num_gpus to 0 to compute on the CPU"
        )
    with contextlib.nullcontext() if plugin.num_gpus else _hidden_gpus():
        loaded = _import(plugin, key)()
    if not callable(loaded):
        raise ConfigurationError(f"{key}.path={plugin.path} makes an object that cannot be called with images")
    return loaded


def sees_gpu() -> bool:
    """Return whether this process was given a GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return visible not in ("", "-1", "NoDevFiles")
    import torch

    return torch.cuda.is_available()


@contextlib.contextmanager
def _hidden_gpus() -> Iterator[None]:
    """Hide the GPUs from a plug-in that has none: its values must not depend on the process that runs it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible


def call_plugin(
    plugin: Any, config: Config, images: Sequence[Image.Image | None], captions: Sequence[list[str]]
) -> list[Any]:
    """Call a plug-in with a batch; a ConfigurationError if it does not return one result for each image."""
    results = list(plugin(images, captions))
    if len(results) != len(captions):
        raise ConfigurationError(
            f"{config.path} returned {len(results)} results for {len(captions)} images; it must return one for each"
        )
    return results


def merge_captions(text: Any, captions: Sequence[str], config: CaptionerConfig) -> tuple[list[str], list[int]]:
    """Add generated captions to those of an image; return all, and the indices of the generated ones among them."""
    texts = text if isinstance(text, list) else [text]
    if not all(one is None or isinstance(one, str) for one in texts):
        raise ConfigurationError(f"captioner.path={config.path} returned {text!r}; it must return texts")
    texts = [cleaned for one in texts if (cleaned := clean_text(one or "").strip())]
    kept = [] if texts and config.mode is CaptionMode.instead else list(captions)
    return [*kept, *texts], list(range(len(kept), len(kept) + len(texts)))


def clean_score(value: Any) -> float | str | None:
    """Convert a result of a scorer: numbers of any library to float, NaN and infinity to None."""
    if isinstance(value, str):
        return clean_text(value)
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return clean_text(str(value))
    return number if math.isfinite(number) else None


# What the plug-ins of this package have in common: models from local folders, never downloaded, never run as code.


def load_model(
    folder: str,
    key: str,
    what: str,
    classes: tuple[type[Any], type[Any]],
    *,
    device: str | None,
    precision: str,
    processor_file: str = "preprocessor_config.json",
) -> tuple[Any, Any]:
    """Load processor and model from a folder in the layout of transformers, with safetensors.

    Args:
        folder: the folder.
        key: argument of the plug-in, for messages.
        what: content of the folder, for messages.
        classes: of the processor and of the model, in transformers.
        device: as for `choose_device`.
        precision: of the weights: `fp32`, `bf16` or `fp16`.
        processor_file: file of the processor.

    Raises:
        DataError: a file is missing, or a configuration cannot be read.
        ConfigurationError: there is no such device or precision, or the folder is refused.
        MachineError: the worker has no such device.
    """
    import torch

    from diffusion.models.model_folders import load_pretrained  # Here: the package `models` takes seconds.

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if precision not in dtypes:
        raise ConfigurationError(f"precision: {precision!r} is not one of {', '.join(dtypes)}")
    chosen = choose_device(device)
    missing = [name for name in ("config.json", processor_file) if not Path(folder, name).is_file()]
    if not any(Path(folder).glob("*.safetensors")):
        missing.append("model.safetensors")
    if missing:
        raise DataError(
            f"{key}: {folder} has no {' and no '.join(missing)}; put {what} there as `save_pretrained` writes it "
            "(weights as safetensors; nothing is downloaded)"
        )
    options: dict[str, Any] = {"local_files_only": True, "remedy": "Put a model there as `save_pretrained` writes it"}
    with error_context(key):
        processor = load_pretrained(classes[0], folder, **options)
        model = load_pretrained(classes[1], folder, dtype=dtypes[precision], **options)
    return processor, model.eval().to(chosen)


def choose_device(device: str | None) -> "torch.device":
    """Return the device of a name; None is the GPU that the worker was given, else the CPU.

    Raises:
        ConfigurationError: it is not the name of a device.
        MachineError: the worker has no GPU, or not that one, or one that PyTorch cannot use.
    """
    import torch

    try:
        chosen = torch.device(device or ("cuda" if sees_gpu() else "cpu"))
    except RuntimeError as error:
        raise ConfigurationError(f"device: {device!r} is not a device; write cpu, cuda or cuda:1") from error
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise MachineError(
            f"device: {chosen}: PyTorch finds {torch.cuda.device_count()} GPUs in this worker; correct the driver or "
            "num_gpus, or give `device: cpu`"
        )
    return chosen
