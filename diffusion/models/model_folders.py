"""Parts of models from folders of strangers: in the layouts of diffusers and transformers, or from the hub.

Weights are safetensors, and no code of a folder is run. But some keys of a configuration select kernels, which the
libraries would download and run, or lead to other files and models: a folder with one of them is refused.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import requests
import torch
from huggingface_hub import HfApi, constants, resolve_revision, snapshot_download
from omegaconf import MISSING
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from diffusion import storage
from diffusion.errors import ConfigurationError, UserError, first_line
from diffusion.files import read_json

Loaded = TypeVar("Loaded")

HUB_TIMEOUT = 10.0
"""Seconds for the connection to the hub, and for its answer."""

PIPELINE_INDEX = "model_index.json"

_ADAPTER = "adapter_config.json"
_REFUSED = {
    "_?(attn|experts)_implementation(_internal)?": "it selects functions, or kernels of the hub that would be run. "
    "Remove it",
    "quantization_config": "quantized weights are not read, and their kernels would be downloaded. Give the weights as "
    "they were before",
    "fusion_config": "it replaces classes of transformers. Remove it",
    "configuration_files": "it leads to another configuration. Remove it",
    "audio_tokenizer_name_or_path": "it leads to another model. Remove the audio tokenizer",
    "transformers_weights": "weights are read from safetensors only. Convert them, and remove it",
}
"""Keys of configurations (regular expressions): reason and remedy. `auto_map` is none of them, since released folders
have it, and transformers takes a class of its own or has none."""


def check_configurations(folder: Path) -> None:
    """Refuse a folder, and the parts of a pipeline in it, if a configuration has one of the refused keys.

    Raises:
        ConfigurationError: it has, or an adapter lies beside the weights.
        DataError: a configuration cannot be read.
    """
    if (adapter := folder / _ADAPTER).is_file():  # It can name another model, and its weights may be a pickle.
        raise ConfigurationError(f"{adapter}: adapters are not read. Merge it into the weights, and remove the file")
    for path in sorted(folder.glob("*config*.json")):
        for key, value in _entries(read_json(path)):
            reason = next((reason for name, reason in _REFUSED.items() if re.fullmatch(name, key)), None)
            if reason and value and not (key == "transformers_weights" and ".safetensors" in str(value)):
                raise ConfigurationError(f"{path}: {key} is {str(value)[:80]}: {reason}")
    if (index := folder / PIPELINE_INDEX).is_file():
        for part in dict(_entries(read_json(index))):
            if (folder / part).is_dir():
                check_configurations(folder / part)


def _entries(content: Any) -> Iterator[tuple[str, Any]]:
    """Keys and values of all objects in a JSON file."""
    waiting = [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield from value.items()
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)


def local_folder(source: str) -> Path | None:
    """Path of a local folder; None for a hub name."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise ConfigurationError(f"there is no folder {source}: give a folder in the diffusers layout, or a hub name")
    return None


def check_exists(source: str, *, local_files_only: bool) -> None:
    """Check that a folder, or the model of a hub name, can be read; where the hub does not answer, from its cache.

    Nothing is downloaded or written.

    Raises:
        ConfigurationError: it cannot.
    """
    if local_folder(source) is not None:
        return
    is_local = local_files_only or constants.HF_HUB_OFFLINE or hub_unavailable_reason() is not None
    where = "in the cache of the hub" if is_local else "on the hub to which this machine has access"
    try:
        if not is_local:
            HfApi().auth_check(source)
        elif not any(Path(snapshot_download(source, local_files_only=True)).rglob("*.safetensors")):
            raise FileNotFoundError(source)
    except Exception as error:  # The library raises anything for what it does not expect
        raise ConfigurationError(f"there is no folder {source}, and no such model {where}") from error


def hub_unavailable_reason() -> str | None:
    """Reason why the hub is not available, or None.

    One attempt is made, because huggingface_hub repeats its own for more than a minute per file.
    """
    if constants.HF_HUB_OFFLINE:
        return None  # huggingface_hub reports this itself.
    try:
        requests.head(constants.ENDPOINT, timeout=HUB_TIMEOUT)
    except requests.RequestException as error:
        return f"{storage.shown(constants.ENDPOINT)} does not answer ({type(error).__name__})."
    return None


@contextmanager
def _without_hub() -> Iterator[None]:
    """Switch huggingface_hub off: for some models the libraries ask it for more, whatever `local_files_only` says."""
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def load_pretrained(
    kind: type[Loaded],
    source: str | Path,
    subfolder: str | None = None,
    *,
    others: Mapping[str, type[Loaded]] | None = None,
    local_files_only: bool,
    remedy: str = "Give a folder in the diffusers layout with safetensors (vae/, text_encoder/, with SDXL "
    "text_encoder_2/), or a hub name that this machine can reach",
    **options: Any,
) -> Loaded:
    """Load one part of a model from a folder, from the hub, or from the local cache of the hub.

    Only safetensors are read, because other formats can run code.

    Args:
        kind: class of diffusers or transformers with `from_pretrained`.
        source: folder or hub name.
        subfolder: folder of the part in it.
        others: classes of diffusers by the name that the configuration gives in place of that of `kind`.
        local_files_only: read the cache instead of the hub.
        remedy: advice to a user whose folder cannot be loaded.
        options: for `from_pretrained`. Models are float32 unless these have a `dtype`.

    Raises:
        ConfigurationError: the part is missing, incomplete, refused or in another layout, or the source is `???`.
        DataError: a configuration cannot be read.
    """
    source = str(source)
    if source == MISSING:  # In a plan, whose paths may be open.
        raise ConfigurationError(f"a plan reads its config.json, too. {remedy}")
    where = f"{source}/{subfolder}" if subfolder else source
    folder = local_folder(source)
    unavailable = None if folder is not None or local_files_only else hub_unavailable_reason()
    is_local = folder is not None or local_files_only or unavailable is not None or constants.HF_HUB_OFFLINE
    if issubclass(kind, (nn.Module, _BaseAutoModelClass)):
        options = {"dtype": torch.float32, "use_safetensors": True, "low_cpu_mem_usage": False} | options
    if issubclass(kind, nn.Module):
        options["output_loading_info"] = True
    if kind.__module__.startswith("transformers."):
        options["trust_remote_code"] = False
    if subfolder:
        options["subfolder"] = subfolder
    try:
        with _without_hub() if is_local else nullcontext():
            if folder is None:
                options["revision"] = resolve_revision(source, local_files_only=is_local)
                wanted = [f"{subfolder}/{name}" if subfolder else name for name in ("config.json", _ADAPTER)]
                downloaded = snapshot_download(
                    source, revision=options["revision"], allow_patterns=wanted, local_files_only=is_local
                )
            part = Path(folder or downloaded, subfolder or "")
            check_configurations(part)
            if others and (part / "config.json").is_file():
                kind = others.get(read_json(part / "config.json").get("_class_name"), kind)
            loaded: Any = kind.from_pretrained(  # pyright: ignore[reportAttributeAccessIssue]
                str(folder or source), local_files_only=is_local, **options
            )
    except UserError:
        raise
    except Exception as error:  # The libraries raise anything for what they do not expect
        reason = " ".join(filter(None, [unavailable, first_line(error)]))
        raise ConfigurationError(f"{kind.__name__} could not be loaded from {where}: {reason} {remedy}") from error
    tokenizer = getattr(loaded, "tokenizer", loaded)
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        # Without files, transformers makes one of special tokens and the mark of a space.
        words = set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)
        if len(words) < 2:
            raise ConfigurationError(f"{where} has no vocabulary of a tokenizer. {remedy}")
    if not issubclass(kind, nn.Module):
        return loaded
    module, info = loaded
    if info["missing_keys"]:  # The libraries would initialise them at random, with a warning only.
        raise ConfigurationError(
            f"{where} lacks {len(info['missing_keys'])} weights of {kind.__name__}, {min(info['missing_keys'])} among "
            f"them: if a newer version of transformers wrote it, export it with `scripts/export.py` or load it there"
        )
    return module
